"""Cgroups used again: of version 1 a sandbox needs seven, and making and removing them costs a millisecond.

A node keeps the groups of ephemeral sandboxes that ended and gives them to later ones with the same limits.
Only empty ones to which next to nothing is charged: what is not clean is removed. Their names are the node's
own (``<owner>.<n>``), so that a sweeper knows whose they are and that all in them may be killed. A kept
sandbox's group has the sandbox's name and is never used again; but where a service makes many, they are used
again as well, under names (``keep.<owner>.<n>``) that tell a sweeper to look at who is inside.

Version 2 has three folders a sandbox, and a peak of memory that can't be set back: there they are made anew.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from ringfence.node.cgroups import Cgroups, Group, GroupLimits

MOST_IDLE = 64  # groups kept in all
MOST_HELD = 32  # of them with their files kept open
CLEAN = 4 << 20  # bytes that may still be charged to a group when it is used again: caches of the dead

KEPT = "keep."  # begins the names of groups of kept sandboxes that are used again


def noted(group: Group) -> dict[str, Any]:
    """What a kept sandbox's journal says of a group that was used before."""
    return {"group": group.name, "group_used": [group.name, group.oom_before, group.cpu_before]}


def of_record(cgroups: Cgroups, record: Mapping[str, Any]) -> Group:
    """The group of a sandbox from its journal; what others took in it before does not count."""
    group = cgroups.group(str(record.get("group") or record.get("id", "")))
    with contextlib.suppress(KeyError, TypeError, ValueError):
        name, kills, seconds = record["group_used"]
        if name == group.name:
            group.oom_before, group.cpu_before = int(kills), float(seconds)
    return group


class GroupPool:
    """The cgroups of one node's sandboxes."""

    def __init__(self, cgroups: Cgroups, owner: str) -> None:
        self._cgroups = cgroups
        self._owner = owner
        self._numbers = itertools.count()
        self._idle: dict[tuple[str, GroupLimits], deque[Group]] = {}
        self._count = 0
        self._holding: list[Group] = []  # groups whose files are kept open
        self._most = min(MOST_HELD, max(0, os.sysconf("SC_OPEN_MAX")) // 64)

    def take(self, sandbox: str, limits: GroupLimits, *, keep: bool, shared: bool = False) -> Group:
        """A group for a sandbox. ``shared``: a kept one's too may be one that was used (see :func:`noted`).

        Raises:
            HostLimit: it can't be made.
        """
        if (keep and not shared) or self._cgroups.mode in ("v2", "none"):
            return self._cgroups.create(sandbox, limits)
        prefix = KEPT if keep else ""
        idle = self._idle.get((prefix, limits))
        while idle:
            group = idle.popleft()
            self._count -= 1
            if group.renew(CLEAN):
                self._hold(group)
                return group
            group.remove()
        return self._cgroups.create(f"{prefix}{self._owner}.{next(self._numbers)}", limits)

    def _hold(self, group: Group) -> None:
        """Keep its files open. Not at its first use, for most nodes start one sandbox; and of a few only."""
        if group.held:
            return
        if len(self._holding) >= self._most:
            self._holding = [each for each in self._holding if each.held]
        if len(self._holding) < self._most:
            try:
                _open_files(group)
            except OSError:  # too many open files, perhaps: each is opened when it is needed
                group.let_go()
            else:
                self._holding.append(group)

    def give_back(self, group: Group) -> bool:
        """A sandbox is gone. False: its group is still busy; call again later."""
        prefix = KEPT if group.name.startswith(KEPT) else ""
        recyclable = group.limits is not None and group.name.startswith(f"{prefix}{self._owner}.")
        if not recyclable or self._count >= MOST_IDLE or not group.is_empty():
            return group.remove()
        assert group.limits is not None
        self._idle.setdefault((prefix, group.limits), deque()).append(group)
        self._count += 1
        return True

    def close(self) -> None:
        """Remove the idle groups."""
        for idle in self._idle.values():
            for group in idle:
                group.remove()
        self._idle.clear()
        self._count = 0


def _open_files(group: Group) -> None:
    """Those that every use of a group of version 1 needs: a dozen."""
    for path in (*group.place().agent, *group.place().work):
        # A thread that names itself in `tasks` is moved without the lock over all threads.
        tasks = path.removesuffix("cgroup.procs") + "tasks"
        group.held[path] = os.open(tasks, os.O_WRONLY | os.O_CLOEXEC)
    for controller, name, flags in (
        ("memory", "memory.max_usage_in_bytes", os.O_RDWR),
        ("cpuacct", "cpuacct.usage", os.O_RDONLY),
        ("pids", "pids.current", os.O_RDONLY),
    ):
        base = group.base(controller)
        if base is not None:
            group.held[f"{base}/{name}"] = os.open(f"{base}/{name}", flags | os.O_CLOEXEC)


def is_of(group: str, owner: str) -> bool:
    """Whether a group's name says that it was made by that node."""
    return group.startswith(owner + ".")
