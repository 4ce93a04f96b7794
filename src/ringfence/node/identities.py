"""Who the workload is, inside and on the host. Never user 0 of the host.

As root every sandbox gets 65,536 host ids of its own. They are taken from 0x7000_0000 (1,879,048,192)
up to 0x7FFF_FFFF: above what systemd hands to containers and users (524,288 to 1,879,048,191), far
above what useradd writes into /etc/subuid, below 2³¹, where old programs begin to see negative numbers.
Ranges that /etc/subuid or /etc/subgid give to somebody, or in which /etc/passwd has a user, are left out.

A range is leased by a symlink in ``<state>/ranges`` whose target names the leaseholder: making it is
atomic, between processes too. A node keeps its leases and hands the one last freed out first (the
launcher has that range's user namespace ready); they are free again when the node closes, or, if it
died, when everything it left was swept. The lease of a kept sandbox is in that sandbox's own name.

As a normal user a sandbox has the caller's own id, seen as the workload's inside, and, where newuidmap
is there and /etc/subuid has a range for the caller, other ids from that range.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from ringfence.model.errors import HostLimit
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import AGENT_UID, MAP_SIZE, Identity, IdMap

FIRST_RANGE = 0x7000_0000
RANGES = 0x1000_0000 // MAP_SIZE  # 4,096

# What root of the sandbox may do inside its own user namespace: own files of any of its ids, become any of
# them, signal them, listen below 1024, chroot. No SYS_ADMIN, NET_ADMIN, SYS_PTRACE, MKNOD, SETFCAP: each
# opens kernel code that the default wall keeps shut, and none is needed to install software.
ROOT_CAPABILITIES = functools.reduce(
    lambda mask, bit: mask | 1 << bit,
    (
        0,
        1,
        3,
        4,
        5,
        6,
        7,
        10,
        18,
    ),  # CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID NET_BIND_SERVICE SYS_CHROOT
    0,
)


def subordinate_ranges(file: str, user: int, name: str) -> list[tuple[int, int]]:
    """(first, count) of every line of /etc/subuid or /etc/subgid for a user, by number or by name."""
    found = []
    for owner, first, count in _lines(file):
        if owner in (str(user), name):
            found.append((first, count))
    return found


def _lines(file: str) -> list[tuple[str, int, int]]:
    lines = []
    try:
        text = Path(file).read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        parts = line.strip().split(":")
        if len(parts) != 3 or not (parts[1].isascii() and parts[1].isdigit() and parts[2].isdigit()):
            continue
        lines.append((parts[0], int(parts[1]), int(parts[2])))
    return lines


@functools.cache
def taken_ranges(
    subuid: str = "/etc/subuid", subgid: str = "/etc/subgid", users: str = "/etc/passwd"
) -> frozenset[int]:
    """Numbers of our ranges that somebody else on this host has ids in."""
    taken: set[int] = set()
    spans = [(first, count) for file in (subuid, subgid) for _, first, count in _lines(file)]
    try:
        known = Path(users).read_text(errors="replace").splitlines()
    except OSError:
        known = []
    for line in known:
        fields = line.split(":")
        if len(fields) > 3:
            spans += [(int(text), 1) for text in fields[2:4] if text.isascii() and text.isdigit()]
    for first, count in spans:
        low = max(0, (first - FIRST_RANGE) // MAP_SIZE)
        high = min(RANGES - 1, (first + max(count, 1) - 1 - FIRST_RANGE) // MAP_SIZE)
        taken.update(range(low, high + 1))
    return frozenset(taken)


class Ranges:
    """Leases of host uid ranges, for a node that is root."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._free: list[int] = []
        self._held: set[int] = set()

    def take(self) -> int:
        """The number of a range that no living sandbox has.

        Raises:
            HostLimit: all are in use, or the lease can't be written.
        """
        if self._free:
            return self._free.pop()
        taken = taken_ranges()
        # Start where other node processes probably don't, so that a lease is one system call.
        start = os.getpid() * 61 % RANGES
        for step in range(RANGES):
            number = (start + step) % RANGES
            if number in taken or number in self._held:
                continue
            try:
                os.symlink(self._owner, self._folder / str(number))
            except FileExistsError:
                continue
            except OSError as error:
                raise host_limit(error, f"lease host user ids in {self._folder}") from error
            self._held.add(number)
            return number
        raise HostLimit(
            f"all {RANGES - len(taken)} ranges of host user ids are in use",
            hint="destroy some sandboxes first",
        )

    def give_back(self, number: int) -> None:
        """The range's wall is gone."""
        if number in self._held:
            self._free.append(number)

    def assign(self, number: int, sandbox: str) -> None:
        """From now on the lease is the sandbox's own: it outlives this node."""
        temporary = self._folder / f".{number}.{self._owner}"
        os.symlink(sandbox, temporary)
        os.rename(temporary, self._folder / str(number))
        self._held.discard(number)

    def release(self, number: int, holder: str) -> None:
        """Remove a lease if it is that holder's: by now it may be somebody else's."""
        if holder != self._owner and number in self._held:
            return  # it is ours, so it is not the holder's
        path = self._folder / str(number)
        with contextlib.suppress(OSError):
            if os.readlink(path) == holder:
                os.unlink(path)

    def close(self) -> None:
        """Give back every lease that no sandbox was assigned."""
        for number in self._held:
            self.release(number, self._owner)
        self._held.clear()
        self._free.clear()

    def sweep(self, dead: str) -> None:
        """Remove the leases of a dead node, after everything it left was taken down."""
        for name in os.listdir(self._folder):
            path = self._folder / name
            try:
                target = os.readlink(path)
            except OSError:
                continue
            if target == dead or name.endswith("." + dead):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def identity_as_root(number: int, user: int) -> Identity:
    """The identity of a sandbox in a range of its own."""
    first = FIRST_RANGE + number * MAP_SIZE
    return Identity(
        uid=user,
        gid=user,
        maps=(IdMap(0, first, MAP_SIZE),),
        agent_uid=AGENT_UID,
        capabilities=ROOT_CAPABILITIES if user == 0 else 0,
    )


@functools.lru_cache(maxsize=16)
def identity_as_user(user: int, *, single: bool = False) -> Identity:
    """The identity of a sandbox that a normal user starts: with subordinate ids if newuidmap is there.

    ``single``: with the caller's own id only; a version 1 cgroup of the caller's takes no other's processes.
    """
    uid, gid = os.geteuid(), os.getegid()
    capabilities = ROOT_CAPABILITIES if user == 0 else 0
    import shutil

    if not single and shutil.which("newuidmap") and shutil.which("newgidmap"):
        name = _user_name(uid)
        uids = _around(user, uid, subordinate_ranges("/etc/subuid", uid, name))
        gids = _around(user, gid, subordinate_ranges("/etc/subgid", uid, name))
        if uids and gids:
            return Identity(
                uid=user,
                gid=user,
                maps=uids,
                agent_uid=AGENT_UID,
                helper=True,
                capabilities=capabilities,
                gid_maps=() if gids == uids else gids,
            )
    own = (IdMap(user, uid, 1),)
    return Identity(
        uid=user,
        gid=user,
        maps=own,
        agent_uid=user,
        capabilities=capabilities,
        gid_maps=() if gid == uid else (IdMap(user, gid, 1),),
    )


def _user_name(uid: int) -> str:
    import pwd  # not on root's path

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _around(user: int, caller: int, ranges: list[tuple[int, int]]) -> tuple[IdMap, ...] | None:
    """``user`` inside is the caller, all other ids come from one subordinate range; None if too small."""
    for first, count in ranges:
        # AGENT_UID has to fit, and the caller's own id must not be mapped twice.
        if count + 1 <= AGENT_UID or first <= caller < first + count:
            continue
        size = min(count, MAP_SIZE - 1)
        lines = [
            IdMap(0, first, user),
            IdMap(user, caller, 1),
            IdMap(user + 1, first + user, size - user),
        ]
        return tuple(line for line in lines if line.count > 0)
    return None
