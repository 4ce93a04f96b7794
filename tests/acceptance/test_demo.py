"""`make demo`'s script: it succeeds in the jail, and it would notice if the wall were not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import demo  # noqa: E402

# Those that a normal user's own files, processes and sockets answer: harmless where there is no wall.
HARMLESS = [
    "read a secret of the host",
    "… through /proc and a symlink",
    "read a file that everybody may read",
    "find and kill a process of the host",
    "connect to a server on the host",
    "… by its abstract unix socket",
    "fill the disk",
]


def test_without_a_wall_the_attempts_succeed_and_the_host_notices(tmp_path: Path) -> None:
    host = demo.Host(tmp_path)
    with host.ready() as config:
        config_path = tmp_path / "config.json"
        config_path.write_text(json.dumps({**config, "only": HARMLESS, "fill": 1024**2}))
        out = tmp_path / "out"
        done = subprocess.run(
            [sys.executable, str(demo.JOB), "attack", str(config_path), str(out)],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        text = (out / "attempts.json").read_text()
        assert host.victim is not None
        host.victim.wait(60)
        damage = host.damage([text])
    results = json.loads(text)
    assert [result["attempt"] for result in results] == HARMLESS
    assert all(result["succeeded"] for result in results), results
    assert not any(demo.judge(result, {})[2] for result in results)
    assert [word for word in ("secret", "server", "process") if any(word in line for line in damage)] == [
        "secret",
        "server",
        "process",
    ]


@pytest.mark.parametrize(
    ("number", "stopped"), [("EPERM", True), ("ENOSYS", True), ("EFAULT", False), ("EINVAL", False)]
)
def test_an_answer_of_the_kernel_behind_the_filter_counts_as_not_stopped(number: str, stopped: bool) -> None:
    result = {"attempt": "load BPF", "errno": number, "detail": "", "succeeded": False}
    assert demo.judge(result, {})[2] is stopped


def test_the_demo_runs_in_the_jail(tmp_path: Path) -> None:
    environment = {**os.environ, "RINGFENCE_HOME": str(tmp_path / "state"), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT STOPPED" not in done.stdout
    assert "The host noticed: nothing" in done.stdout
    for name in (*demo.LAYERS, "fill the memory", "flood the output", "never end"):
        assert name in done.stdout
    assert "chemistry 1980" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "chart.svg").read_text().startswith("<svg ")
