"""The tests of the walls once more, as a normal user: all that root can do for itself is gone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
USER = 23_456  # in no /etc/passwd, so that nothing depends on being known


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are for one user."""
    folder = Path(tempfile.mkdtemp(prefix="ringfence-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="the whole run is a normal user's already")
def test_the_walls_hold_for_a_normal_user(public: Path) -> None:
    copy = public
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(__file__).parent, copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "home").mkdir()
    os.chown(copy / "home", USER, USER)
    result = subprocess.run(
        ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs",
         sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={copy}/home/t",
         "tests/test_launched_walls.py"],
        cwd=copy,
        env={"PATH": os.environ["PATH"], "HOME": str(copy / "home"), "PYTHONPATH": str(copy / "src"),
             "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(copy / "home")},
        capture_output=True,
        text=True,
        timeout=100,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    found = re.search(r"(\d+) passed, (\d+) skipped", result.stdout)
    assert found is not None, result.stdout[-500:]
    assert int(found[1]) >= 40
    assert int(found[2]) == 5, "what only root can do: a disk image, cgroups, children made ahead"
