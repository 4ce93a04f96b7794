"""The wheel carries both native programs, and what is installed from it works without the checkout."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def call(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("gcc") is None, reason="no compiler here")
def test_a_wheel_is_built_and_its_installation_runs_a_command(tmp_path: Path) -> None:
    source, wheels, target = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    junk = shutil.ignore_patterns(
        "__pycache__", "build", "*.egg-info", "ringfence-launcher", "ringfence-agent", "ringfence-link"
    )
    shutil.copytree(ROOT / "src", source / "src", ignore=junk)
    shutil.copytree(ROOT / "native", source / "native", ignore=junk)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), ".", cwd=source)
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    call(*pip, "install", "--no-deps", "--target", str(target), str(wheel), cwd=tmp_path)
    for part in ("launcher", "agent", "link"):
        assert os.access(target / "ringfence" / "_native" / f"ringfence-{part}", os.X_OK)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(target),
        "RINGFENCE_HOME": str(tmp_path / "state"),
    }
    where = call(
        sys.executable, "-c", "import ringfence; print(ringfence.__file__)", cwd=tmp_path, env=environment
    )
    assert where.startswith(str(target)), where
    said = call(
        sys.executable, "-m", "ringfence", "run", "--", "echo", "hello", cwd=tmp_path, env=environment
    )
    assert said == "hello\n"
    # The suite of the installed package, from a place that has no checkout.
    selected = ("--runtime", "fake", "-k", "Lifecycle and once")
    said = call(sys.executable, "-m", "ringfence", "conformance", *selected, cwd=tmp_path, env=environment)
    assert "lifecycle" in said, said
