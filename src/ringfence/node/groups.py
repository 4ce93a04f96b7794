"""Cgroups used again: of version 1 a sandbox needs seven, and making and removing them costs a millisecond.

A node keeps the groups of ephemeral sandboxes that ended and gives them to later ones with the same limits.
Only empty ones to which next to nothing is charged: what is not clean is removed. Their names are the node's
own (``<owner>.<n>``), so that a sweeper knows whose they are; a kept sandbox's group has the sandbox's name
and is never used again.

Version 2 has three folders a sandbox, and a peak of memory that can't be set back: there they are made anew.
"""

from __future__ import annotations

import itertools
from collections import deque

from ringfence.node.cgroups import Cgroups, Group, GroupLimits

MOST_IDLE = 64  # groups kept in all
CLEAN = 4 << 20  # bytes that may still be charged to a group when it is used again: caches of the dead


class GroupPool:
    """The cgroups of one node's sandboxes."""

    def __init__(self, cgroups: Cgroups, owner: str) -> None:
        self._cgroups = cgroups
        self._owner = owner
        self._numbers = itertools.count()
        self._idle: dict[GroupLimits, deque[Group]] = {}
        self._count = 0

    def take(self, sandbox: str, limits: GroupLimits, *, keep: bool) -> Group:
        """A group for a sandbox.

        Raises:
            HostLimit: it can't be made.
        """
        if keep or self._cgroups.mode in ("v2", "none"):
            return self._cgroups.create(sandbox, limits)
        idle = self._idle.get(limits)
        while idle:
            group = idle.popleft()
            self._count -= 1
            if group.renew(CLEAN):
                return group
            group.remove()
        return self._cgroups.create(f"{self._owner}.{next(self._numbers)}", limits)

    def give_back(self, group: Group) -> bool:
        """A sandbox is gone. False: its group is still busy; call again later."""
        recyclable = group.limits is not None and group.name.startswith(self._owner + ".")
        if not recyclable or self._count >= MOST_IDLE or not group.is_empty():
            return group.remove()
        assert group.limits is not None
        self._idle.setdefault(group.limits, deque()).append(group)
        self._count += 1
        return True

    def close(self) -> None:
        """Remove the idle groups."""
        for idle in self._idle.values():
            for group in idle:
                group.remove()
        self._idle.clear()
        self._count = 0


def is_of(group: str, owner: str) -> bool:
    """Whether a group's name says that it was made by that node."""
    return group.startswith(owner + ".")
