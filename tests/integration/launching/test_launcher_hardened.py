"""The launcher with sanitizers, through its own tests; and its fuzz harness, for a moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence import _native

ROOT = Path(__file__).parents[3]
FUZZ_SECONDS = 3


def make(tmp_path: Path, target: str) -> Path:
    build = tmp_path / "build"
    subprocess.run(
        ["make", "-s", "-C", str(ROOT / "native"), f"BUILD={build}", f"{build}/{target}"],
        check=True,
        capture_output=True,
        timeout=100,
    )
    return build / target


@pytest.mark.timeout(1200)
def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    built = make(tmp_path, "sanitize/ringfence-launcher")
    native, logs = tmp_path / "native", tmp_path / "logs"
    native.mkdir()
    logs.mkdir()
    shutil.copy(built, native)
    shutil.copy(_native.agent(), native)
    names = ["test_launcher_client.py"]
    if os.geteuid() == 0:
        names.append("test_launched_walls.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not bubblewrap",
         *[f"tests/integration/launching/{name}" for name in names]],
        cwd=ROOT,
        env=os.environ | {
            "RINGFENCE_NATIVE": str(native),
            "ASAN_OPTIONS": f"log_path={logs}/asan:detect_leaks=1",
            "UBSAN_OPTIONS": f"log_path={logs}/ubsan:print_stacktrace=1",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    reports = [path.read_text(errors="replace") for path in logs.iterdir()]
    assert not reports, reports[0][:4000]
    assert result.returncode == 0, result.stdout[-6000:]


@pytest.mark.skipif(shutil.which("clang") is None, reason="libFuzzer needs clang")
def test_the_plan_parser_survives_a_moment_of_fuzzing(tmp_path: Path) -> None:
    harness = make(tmp_path, "fuzz/launcher/fuzz_plan")
    found = tmp_path / "found"
    found.mkdir()
    seeds = ROOT / "native/launcher/fuzz/corpus/plan"
    result = subprocess.run(
        [str(harness), f"-max_total_time={FUZZ_SECONDS}", "-timeout=5", "-rss_limit_mb=1024",
         "-max_len=70000", f"-artifact_prefix={found}/", str(found), str(seeds)],
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Done " in result.stderr
