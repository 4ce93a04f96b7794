"""Runs a command and fails if any process that it started, however detached, is still there afterwards.

usage: leave_nothing.py COMMAND [ARGUMENT…]

This process becomes the reaper of all orphans below it, so a daemon that its starter left behind turns up
here. What is found is named, ended, and makes the exit status 1 (else it is the command's).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0  # seconds for what is on its way out anyway


def descendants() -> dict[int, str]:
    """Living processes below this one: pid to command line. Zombies are reaped on the way."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                parents[int(name)] = int(fields[1])
    found: dict[int, str] = {}
    for pid in parents:
        ancestor = pid
        while ancestor := parents.get(ancestor, 0):
            if ancestor == os.getpid():
                try:
                    with open(f"/proc/{pid}/cmdline", "rb") as file:
                        found[pid] = file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
                except OSError:
                    pass
                break
    return found


def reap() -> None:
    """Collect children that have ended, so that they do not count."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def run(command: list[str]) -> int:
    """The command's exit status. Orphans are reaped at once, as any init does: tests look for the dead."""
    child = subprocess.Popen(command)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def main(command: list[str]) -> int:
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    status = run(command)
    patience = time.monotonic() + PATIENCE
    while (left := descendants()) and time.monotonic() < patience:
        reap()
        time.sleep(0.05)
    reap()
    for pid, text in left.items():
        print(f"left behind by {command[0]}: process {pid}: {text}", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return status or int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
