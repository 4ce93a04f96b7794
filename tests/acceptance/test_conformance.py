"""``ringfence conformance`` on a small selection of its tests."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import COMMAND, environment

# A session imports pytest and starts a node for every test: seconds here, many on a busy machine.
PATIENCE = 100


def test_matrix_of_two_runtimes(ringfence):
    selected = ("--runtime", "jail", "--runtime", "fake", "-k", "Lifecycle and (twice or once or idempotent)")
    done = ringfence("conformance", *selected, timeout=PATIENCE)
    text, notes = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, text + notes
    assert "lifecycle" in text
    assert "pause" in text
    for runtime in ("jail", "fake"):
        assert f"ringfence: {runtime}: " in notes
        (row,) = (line for line in text.splitlines() if line.split()[:1] == [runtime] and "passed" in line)
        assert int(row.split()[1].split("/")[0]) > 0


def test_json(ringfence):
    arguments = ("conformance", "--runtime", "fake", "-k", "Lifecycle and (pause or capabilities)", "--json")
    document = ringfence.json(*arguments, timeout=PATIENCE)
    (found,) = document["runtimes"]
    assert document["ok"]
    assert found["ran"]
    counts = found["areas"]["lifecycle"]
    assert counts["passed"] > 0
    assert counts["skipped"] == sum(found["skipped"].values()) > 0
    assert all("fake has no pause" in reason for reason in found["skipped"])
    assert found["expected"]["pause"] is False
    assert found["expected"] == found["capabilities"] | {"network": ["none"]}


FAULTY = """
from ringfence.runtimes.contract import WallStats
from ringfence.runtimes.fake import FakeRuntime

class Faulty(FakeRuntime):
    name = "faulty"

    async def stats(self, handle):
        return WallStats(processes=0, resident_bytes=0)
"""


def test_a_failure_is_shown_and_counts(ringfence, tmp_path: Path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    info = tmp_path / "faulty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ringfence.runtimes]\nfaulty = faulty:Faulty\n")
    env = environment(ringfence.env)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    options = ("--runtime", "faulty", "-k", "stats_count")
    done = ringfence("conformance", *options, env=env, timeout=PATIENCE)
    text = done.stdout.decode()
    assert done.returncode == 1, text + done.stderr.decode()
    assert "FAILED" in text
    assert "faulty: boundary: test_stats_count_the_wall_only[faulty] failed:" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runtime", "nope"), "no runtime is called 'nope'"),
        (("--runtime", "fake", "-k", "nosuchtest"), "no test matches -k 'nosuchtest'"),
        (("--runtime", "fake", "-k", "a b and"), "is no expression"),
    ],
)
def test_bad_requests(ringfence, arguments, message):
    done = ringfence("conformance", *arguments, timeout=PATIENCE)
    assert done.returncode == 125
    assert message in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_a_missing_pytest_is_named(ringfence, tmp_path: Path):
    # An interpreter that has nothing but Ringfence: no site packages.
    env = environment(ringfence.env)
    argv = [sys.executable, "-S", "-m", "ringfence", "conformance", "--runtime", "fake"]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    assert done.returncode == 125
    assert b"needs pytest" in done.stderr
    assert b"pip install 'ringfence[conformance]'" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(ringfence, number):
    """On a terminal, which shows what is under way; the fixture looks at what is left."""
    master, slave = pty.openpty()
    try:
        env = dict(ringfence.env)
        env.pop("NO_COLOR", None)
        process = subprocess.Popen(
            [*COMMAND, "conformance", "--runtime", "jail", "-k", "Recovery or Lifecycle"],
            env=env | {"TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        seen = _read_until(master, b"jail: 1/")
        assert b"lifecycle: test_" in seen or b"recovery: test_" in seen
        process.send_signal(number)
        # What it says to the end has to be read, or it waits.
        _read_until(master, b"ringfence: interrupted")
        assert process.wait(PATIENCE) == 128 + number
    finally:
        os.close(master)


def _read_until(descriptor: int, wanted: bytes) -> bytes:
    seen, end = b"", time.monotonic() + PATIENCE
    while wanted not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        assert ready, seen
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            data = b""
        assert data, seen
        seen += data
    return seen


def test_a_killed_command_leaves_no_sandbox(ringfence):
    process = ringfence.start("conformance", "--runtime", "fake", "-k", "Lifecycle")
    folders = Path(ringfence.env["TMPDIR"])
    end = time.monotonic() + PATIENCE
    while not list(folders.glob("rf-suite-*/rf-conformance-*/sandboxes/*")):
        assert time.monotonic() < end, "no sandbox was started"
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    # The session notices and takes down what it made; its folder is all that stays.
    while list(folders.glob("rf-suite-*/rf-conformance-*")):
        assert time.monotonic() < end, "the session goes on"
        time.sleep(0.05)
    for path in folders.glob("rf-suite-*"):
        (path / "pytest.ini").unlink()
        (path / "log").unlink()
        for left in path.glob("pt*"):
            left.rmdir()
        path.rmdir()
