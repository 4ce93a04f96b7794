"""The leak check must find what it is there for, or it proves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.leaks import Leaks, cgroup_folders

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make what is to be found")


def test_clean_run_leaves_nothing():
    with Leaks() as leaks:
        subprocess.run(["true"], check=True, env=leaks.env)


def test_an_orphan_is_found():
    with Leaks() as leaks:
        # The shell ends at once; its child would be init's but for the subreaper.
        subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"], check=True)
        end = time.monotonic() + 60
        while not any(p.command == "sleep 60" for p in leaks.processes()):
            assert time.monotonic() < end  # the shell has ended before its child is what it is to be
            time.sleep(0.005)
        left = leaks.settle(0.2)
        assert any("sleep 60" in line for line in left), left
        with pytest.raises(AssertionError, match="sleep 60"):
            leaks.check(0.1)
        for found in leaks.processes():
            os.kill(found.pid, signal.SIGKILL)


def test_sandbox_folders_and_temporary_files_are_found():
    with Leaks() as leaks:
        assert leaks.home is not None
        assert leaks.tmp is not None
        folder = leaks.home / "sandboxes" / "sb-0123456789abcdefghjk"
        folder.mkdir(parents=True)
        (leaks.tmp / "rest").touch()
        left = leaks.left()
        assert f"folder {folder}" in left
        assert f"temporary file {leaks.tmp / 'rest'}" in left
        folder.rmdir()
        (leaks.tmp / "rest").unlink()


def test_ids_are_known_after_the_folder_is_gone():
    with Leaks() as leaks:
        assert leaks.home is not None
        for _ in range(2):  # the second time the parent folder is being watched already
            folder = leaks.home / "sandboxes" / f"sb-0123456789abcdefghj{_}"
            folder.mkdir(parents=True)
            assert folder.name in leaks.ids
            folder.rmdir()
        assert len(leaks.ids) == 2


@root_only
def test_a_cgroup_and_a_mount_are_found():
    with Leaks() as leaks:
        assert leaks.home is not None
        folder = leaks.home / "sandboxes" / "sb-zzzzzzzzzzzzzzzzzzzz"
        folder.mkdir(parents=True)
        assert leaks.ids
        group = next(
            Path(base)
            for base in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/sys/fs/cgroup")
            if os.path.isdir(base) and os.access(base, os.W_OK)
        )
        group = group / "ringfence" / folder.name
        group.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
        left = leaks.left()
        subprocess.run(["umount", str(folder)], check=True)
        group.rmdir()
        folder.rmdir()
        assert str(group) not in cgroup_folders()
        assert any(line.startswith("cgroup ") for line in left), left
        assert any(line.startswith("mount ") for line in left), left


def test_an_open_file_is_found_when_asked_for():
    with Leaks(descriptors=True) as leaks:
        reader, writer = os.pipe()
        left = leaks.left()
        ours = {f"open file {end} {os.readlink(f'/proc/self/fd/{end}')}" for end in (reader, writer)}
        os.close(reader)
        os.close(writer)
        assert ours <= set(left), left


def test_a_child_of_a_dead_python_is_found():
    code = "import subprocess,os; subprocess.Popen(['sleep','61']); os._exit(0)"
    with Leaks() as leaks:
        subprocess.run([sys.executable, "-c", code], check=True)
        end = time.monotonic() + 60
        while not (found := [p for p in leaks.processes() if "sleep 61" in p.command]):
            assert time.monotonic() < end  # it has a command line a moment after it has begun
            time.sleep(0.005)
        os.kill(found[0].pid, 9)
