"""Pausing a wall through the freezer of its cgroup, version 1 or 2."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from ringfence.model.errors import DeadlineExceeded, Unsupported
from ringfence.runtimes.contract import Handle

if TYPE_CHECKING:
    from ringfence.runtimes.launching.launcher import Child

TIMEOUT = 20.0  # seconds until every process must be frozen


def _switch(procs: Iterable[str]) -> tuple[str, str, str] | None:
    """(file, word to freeze, word to let go) of a sandbox's cgroups."""
    for path in procs:
        folder = os.path.dirname(path)
        if os.path.exists(f"{folder}/freezer.state"):
            return f"{folder}/freezer.state", "FROZEN", "THAWED"
        # Version 2: agent and workload are siblings, so their parent is frozen.
        parent = os.path.dirname(folder) if os.path.basename(folder) in ("agent", "work") else folder
        if os.path.exists(f"{parent}/cgroup.freeze"):
            return f"{parent}/cgroup.freeze", "1", "0"
    return None


def _write(path: str, word: str) -> None:
    with open(path, "w") as file:
        file.write(word)


def _reached(path: str, frozen: bool) -> bool:
    if path.endswith("freezer.state"):
        with open(path) as file:
            return file.read().strip() == ("FROZEN" if frozen else "THAWED")
    with open(path.removesuffix("cgroup.freeze") + "cgroup.events") as file:
        return f"frozen {int(frozen)}" in file.read()


async def freeze(procs: Iterable[str], *, frozen: bool) -> None:
    """Freeze or let go; return when the kernel says it is done.

    Raises:
        Unsupported: there is no freezer.
        DeadlineExceeded: some process can't be frozen (it waits for a disk); all run again.
    """
    switch = _switch(procs)
    if switch is None:
        raise Unsupported(
            "the sandbox has no cgroup that can be frozen",
            hint="run as root, or delegate a cgroup to this user",
            capability="pause",
        )
    path, on, off = switch
    try:
        _write(path, on if frozen else off)
        deadline, pause = time.monotonic() + TIMEOUT, 0.0005
        while not _reached(path, frozen):
            if time.monotonic() > deadline:
                _write(path, off)
                raise DeadlineExceeded("a process of the sandbox can't be frozen", hint="try again later")
            await asyncio.sleep(pause)
            # Version 1 asks each task once: one that was about to wait for its vfork'ed child misses it,
            # and the child, frozen, never lets it go. Asked again while it waits, it counts as frozen.
            _write(path, on if frozen else off)
            pause = min(pause * 2, 0.05)
    except OSError as error:
        raise Unsupported(
            f"the freezer can't be used: {error.strerror}", hint="run as root", capability="pause"
        ) from error


def thaw(procs: Iterable[str]) -> None:
    """Let go if it is frozen; does nothing where there is no freezer."""
    switch = _switch(procs)
    if switch is not None:
        with contextlib.suppress(OSError):
            _write(switch[0], switch[2])


class FrozenByCgroup:
    """The power to pause, for drivers whose handles name the agent's cgroups in ``data["cgroups"]``."""

    _children: dict[tuple[int, int], Child]  # of LaunchedRuntime: the walls that this driver started

    async def pause(self, handle: Handle) -> None:
        """See the contract.

        Raises:
            Unsupported: the sandbox has no cgroup that can be frozen.
        """
        self._paused.add(handle.id)
        await freeze(handle.data["cgroups"], frozen=True)

    async def resume(self, handle: Handle) -> None:
        """See the contract."""
        await freeze(handle.data["cgroups"], frozen=False)
        self._paused.discard(handle.id)

    def frozen(self, handle: Handle) -> bool:
        """What this driver started is frozen only if this driver froze it; of others it can't know."""
        return handle.id in self._paused or (handle.pid, handle.birth) not in self._children

    async def thaw(self, handle: Handle) -> None:
        """Frozen tasks of a version 1 freezer don't even die."""
        self._paused.discard(handle.id)
        thaw(handle.data["cgroups"])

    @cached_property
    def _paused(self) -> set[str]:
        """Ids of walls that may be frozen."""
        return set()
