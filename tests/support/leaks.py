"""Proof that nothing is left behind: processes, mounts, cgroups, network namespaces, loop devices, files.

Use the ``no_leaks`` fixture, or :class:`Leaks` as a context manager::

    def test_something(no_leaks):
        subprocess.run(["ringfence", "run", "--", "true"], env=no_leaks.env)
        # at the end of the test everything is looked at again; what is left fails the test

Several people and test runs share one machine, so nothing here counts globally: each :class:`Leaks` has a
state folder (``RINGFENCE_HOME``) and a ``TMPDIR`` of its own, learns the ids of the sandboxes made there
(inotify), and holds only what belongs to them against the test. Orphans can't hide: the test process is
their subreaper, so whatever a command left running becomes a child of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PR_SET_CHILD_SUBREAPER = 36
IN_CREATE, IN_MOVED_TO, IN_ONLYDIR = 0x100, 0x80, 0x01000000
IN_NONBLOCK, IN_CLOEXEC = 0o4000, 0o2000000

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    state: str
    birth: int  # clock ticks since boot: with the pid, the process's name for ever
    name: str
    command: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.state}) {self.command or self.name}"


def process(pid: int) -> Process | None:
    """The process, or None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    text = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return Process(pid, int(fields[1]), fields[0], int(fields[19]), name, text)


def descendants(root: int | None = None) -> dict[tuple[int, int], Process]:
    """Every living or dead-but-unreaped process below ``root`` (default: this process)."""
    table = [p for p in (process(int(name)) for name in os.listdir("/proc") if name.isdigit()) if p]
    found: dict[tuple[int, int], Process] = {}
    level = {root if root is not None else os.getpid()}
    while level:
        below = [p for p in table if p.parent in level and (p.pid, p.birth) not in found]
        found.update({(p.pid, p.birth): p for p in below})
        level = {p.pid for p in below}
    return found


def mounts() -> list[str]:
    """Lines of this mount namespace's table."""
    return Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()


def cgroup_folders() -> set[str]:
    """Folders below every ``ringfence`` cgroup of this process's hierarchies, wherever they are mounted."""
    found: set[str] = set()
    roots = {line.split()[4] for line in mounts() if " - cgroup " in line or " - cgroup2 " in line}
    for root in roots:
        for base, names, _ in os.walk(root):
            if os.path.basename(base) == "ringfence":
                found.update(os.path.join(base, name) for name in names)
                names.clear()
    return found


def loop_devices() -> dict[str, str]:
    """Loop devices in use: name to backing file."""
    found = {}
    for entry in Path("/sys/block").glob("loop*"):
        try:
            found[entry.name] = (entry / "loop/backing_file").read_text().strip()
        except OSError:
            continue
    return found


def named_network_namespaces() -> set[str]:
    """Names that ``ip netns`` knows."""
    try:
        return set(os.listdir("/run/netns"))
    except OSError:
        return set()


class _Births:
    """Names that appear in a folder, from now on, even if they are gone again when we look."""

    def __init__(self, home: Path) -> None:
        self._fd = _libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._home = home
        self._names: set[str] = set()
        self._folders: dict[int, Path] = {}
        self._watch(home)
        self._watch(home / "sandboxes")

    def _watch(self, folder: Path) -> None:
        mask = IN_CREATE | IN_MOVED_TO | IN_ONLYDIR
        number = _libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)
        if number >= 0:
            self._folders[number] = folder
            if folder != self._home:
                self._names.update(os.listdir(folder))

    def names(self) -> set[str]:
        """All so far."""
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return self._names
            at = 0
            while at < len(data):
                number, _, _, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16 : at + 16 + length].split(b"\0")[0].decode(errors="replace")
                at += 16 + length
                if self._folders.get(number) != self._home:
                    self._names.add(name)
                elif name == "sandboxes":
                    self._watch(self._home / name)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Leaks:
    """Watches one state folder. ``home`` and ``tmp`` are made if not given, and removed at the end.

    ``templates`` and locks below ``home`` may stay (they are shared by all sandboxes); sandbox folders,
    and anything in ``tmp``, may not. ``descriptors``: this process may not have more open files than before.
    """

    home: Path | None = None
    tmp: Path | None = None
    descriptors: bool = False
    allowed: set[int] = field(default_factory=set)  # pids that may live on

    def __enter__(self) -> Leaks:
        become_subreaper()
        self._own = Path(tempfile.mkdtemp(prefix="rf-leaks-"))
        self._own.chmod(0o711)  # the workload's host uid may have to pass through
        self.home = self.home or self._own / "home"
        self.tmp = self.tmp or self._own / "tmp"
        for folder in (self.home, self.tmp):
            folder.mkdir(exist_ok=True)
        self.home.chmod(0o711)
        self.tmp.chmod(0o1777)
        self._births = _Births(self.home)
        self._before = descendants()
        self._files = self._open_files()
        self._netns = named_network_namespaces()
        return self

    @property
    def env(self) -> dict[str, str]:
        """The environment of commands under watch."""
        return os.environ | {"RINGFENCE_HOME": str(self.home), "TMPDIR": str(self.tmp)}

    @property
    def ids(self) -> set[str]:
        """Ids of all sandboxes that were made here so far."""
        return {name for name in self._births.names() if name.startswith("sb-")}

    def processes(self) -> list[Process]:
        """New living descendants; zombies that were adopted from dead commands are reaped."""
        left = []
        for key, found in descendants().items():
            if key in self._before or found.pid in self.allowed:
                continue
            if found.state == "Z" and found.parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(found.pid, os.WNOHANG)
            elif found.state not in "ZX":
                left.append(found)
        return left

    def left(self) -> list[str]:
        """What is left right now, a sentence each. Empty is good."""
        assert self.home is not None
        assert self.tmp is not None
        ids = self.ids
        marks = [str(self.home), *ids]
        found = [f"process {p}" for p in self.processes()]
        found += [f"mount {line}" for line in mounts() if any(mark in line for mark in marks)]
        found += [f"cgroup {path}" for path in sorted(cgroup_folders()) if os.path.basename(path) in ids]
        found += [
            f"loop device {n} on {file}" for n, file in loop_devices().items() if str(self.home) in file
        ]
        found += [
            f"network namespace {name}"
            for name in sorted(named_network_namespaces() - self._netns)
            if "ringfence" in name or any(i in name for i in ids)
        ]
        sandboxes = self.home / "sandboxes"
        if sandboxes.is_dir():
            found += [f"folder {path}" for path in sorted(sandboxes.iterdir())]
        found += [f"temporary file {path}" for path in sorted(self.tmp.iterdir())]
        if self.descriptors:
            found += [f"open file {name}" for name in sorted(self._open_files() - self._files)]
        return found

    def settle(self, grace: float = 60.0) -> list[str]:
        """Wait until nothing is left (the kernel tears walls down in its own time); returns what still is."""
        end = time.monotonic() + grace
        pause = 0.005
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(pause * 2, 0.1)
        return left

    def check(self, grace: float = 60.0) -> None:
        """Fail the test if something is left."""
        left = self.settle(grace)
        assert not left, "left behind:\n  " + "\n  ".join(left)

    def close(self) -> None:
        """Kill and remove what is ours, so that one failing test does not spoil the next."""
        for found in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
        self._births.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def _open_files(self) -> set[str]:
        found = set()
        for number in os.listdir("/proc/self/fd"):
            try:
                found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
            except OSError:
                continue
        return found


@pytest.fixture
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leaks]:
    """A private ``RINGFENCE_HOME`` (set here too); the test fails if anything is left at its end."""
    with Leaks() as leaks:
        monkeypatch.setenv("RINGFENCE_HOME", str(leaks.home))
        yield leaks
