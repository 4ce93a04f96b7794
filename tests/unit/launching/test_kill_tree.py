"""Killing a foreign program with what it has forked, which would outlive it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from ringfence.runtimes.launching.processes import birth_of, kill_tree
from ringfence.runtimes.measuring import children

# As bwrap does before it has mapped its users: a child that waits for its parent, and holds both ends.
SCRIPT = "import os\nr, w = os.pipe()\nif os.fork():\n    os.waitpid(-1, 0)\nelse:\n    os.read(r, 1)\n"


def _until(check: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not check():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def parent() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["/usr/bin/python3", "-ISc", SCRIPT])
    _until(lambda: children(process.pid))
    return process


def test_the_whole_tree_dies(parent: subprocess.Popen[bytes]) -> None:
    child = children(parent.pid)[0]
    pidfd = os.pidfd_open(parent.pid)
    kill_tree(parent.pid, pidfd)
    os.close(pidfd)
    assert parent.wait(60) == -9
    _until(lambda: birth_of(child) is None)


def test_control_the_child_outlives_its_parent(parent: subprocess.Popen[bytes]) -> None:
    child = children(parent.pid)[0]
    parent.kill()
    parent.wait(60)
    assert birth_of(child) is not None
    os.kill(child, 9)


def test_who_is_gone_already_is_no_error() -> None:
    process = subprocess.Popen(["/bin/true"])
    pidfd = os.pidfd_open(process.pid)
    process.wait(60)
    kill_tree(process.pid, pidfd)
    os.close(pidfd)
