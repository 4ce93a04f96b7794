"""The rules that all drivers share, once: which call is legal when, deadlines, and that nothing is left.

A :class:`Guarded` runtime is what everybody outside of this package gets. It knows the walls that passed
through it; one that it has not seen (its handle comes from a journal, or another process started it) counts
as running until the driver says otherwise, since the truth of what exists is in the kernel and not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, cast

from ringfence.model.errors import (
    DeadlineExceeded,
    HostLimit,
    LinkLost,
    RingfenceError,
    StartFailed,
    Unsupported,
    WrongState,
)
from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import (
    Capabilities,
    Exit,
    Handle,
    Health,
    Layered,
    Pausable,
    Probe,
    Runtime,
    Snapshotting,
    StartSpec,
    WallStats,
)

START_DEADLINE = 30.0  # seconds; a real start takes milliseconds, a VM a few seconds
PROBE_DEADLINE = 20.0  # the contract's own figure
CONNECT_DEADLINE = 30.0
STOP_MARGIN = 5.0  # seconds beyond the grace after which stopping becomes killing
DESTROY_DEADLINE = 40.0
PAUSE_DEADLINE = 30.0  # what waits for a disk is not still before the disk has answered
MEASURE_DEADLINE = 10.0
SNAPSHOT_DEADLINE = 120.0  # a wall's memory is written to a disk
_Result = TypeVar("_Result")
_MOST_GONE = 4096  # walls that are gone and still known by id, for clear errors


class _Wall:
    """What is known of one sandbox."""

    __slots__ = ("destroying", "exit", "handle", "state", "waiting")

    def __init__(self, handle: Handle, state: str) -> None:
        self.handle = handle
        self.state = state  # starting, running, ended, destroyed
        self.waiting: asyncio.Task[Exit] | None = None
        self.destroying: asyncio.Future[None] | None = None
        self.exit: Exit | None = None


class Guarded:
    """A runtime that keeps the contract whatever its driver does. See the module, and the contract."""

    def __init__(self, driver: Runtime) -> None:
        self.driver = driver
        self._walls: dict[str, _Wall] = {}
        self._gone: OrderedDict[str, _Wall] = OrderedDict()  # destroyed, oldest first

    @property
    def name(self) -> str:
        """The driver's name."""
        return self.driver.name

    @property
    def level(self) -> Level:
        """The driver's level."""
        return self.driver.level

    @property
    def boundary(self) -> Boundary:
        """The driver's mechanism."""
        return self.driver.boundary

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return self.driver.capabilities()

    async def probe(self) -> Probe:
        """See the contract. A driver that raises or hangs is reported as unavailable."""
        seconds = float(getattr(self.driver, "probe_deadline", PROBE_DEADLINE))
        try:
            async with asyncio.timeout(seconds):
                return await self.driver.probe()
        except TimeoutError:
            reason, remedy = f"its probe did not end within {seconds:g} s", ""
        except RingfenceError as error:
            reason, remedy = error.message, error.hint
        except Exception as error:
            reason, remedy = f"its probe failed: {type(error).__name__}: {error}", ""
        return Probe(self.name, Health.UNAVAILABLE, self.level, self.boundary, reason=reason, remedy=remedy)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract.

        Raises:
            WrongState: a sandbox of this id was started before.
            DeadlineExceeded: the driver hung; what it had begun is gone.
        """
        return await self._started(spec, self.driver.start)

    def forget(self, sandbox: str) -> None:
        """A wall of that id that is destroyed does not keep another one from being started."""
        self._gone.pop(sandbox, None)

    async def _started(self, spec: StartSpec, start: Callable[[StartSpec], Awaitable[Handle]]) -> Handle:
        known = self._walls.get(spec.id) or self._gone.get(spec.id)
        if known is not None:
            raise WrongState(f"sandbox {spec.id} was started before; it is {known.state}", id=spec.id)
        self._check_wishes(spec)
        # What the driver has begun when it fails has no handle yet: this names it by id and folder.
        partial = Handle(self.name, 0, spec.id, spec.folder, 0, 0, "")
        wall = self._walls[spec.id] = _Wall(partial, "starting")
        seconds = float(getattr(self.driver, "start_deadline", START_DEADLINE))
        try:
            async with asyncio.timeout(seconds):
                partial = handle = await start(spec)
                if spec.network != "none":
                    partial = handle = await self._connected(spec, handle)
        except BaseException as error:
            left = await _to_the_end(self._undo(partial))
            self._walls.pop(spec.id, None)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{self.name} did not start sandbox {spec.id} within {seconds:g} s" + left,
                    hint=f"see what `ringfence doctor` says of {self.name}",
                    id=spec.id,
                ) from error
            if isinstance(error, RingfenceError) or not isinstance(error, Exception):
                if left and isinstance(error, RingfenceError):
                    error.details["left"] = left.removeprefix("; ")
                raise
            raise StartFailed(
                f"{self.name} could not start sandbox {spec.id}: {type(error).__name__}: {error}" + left,
                step="driver",
                id=spec.id,
            ) from error
        wall.handle, wall.state = handle, "running"
        return handle

    async def _connected(self, spec: StartSpec, handle: Handle) -> Handle:
        """The wall with its network; nothing of the workload runs yet."""
        from ringfence.runtimes import networking

        able, driver = self.driver.capabilities(), cast(Any, self.driver)
        if spec.network == "open" and able.transparent:
            return await networking.open_up(driver, handle, spec.open_to, not spec.ephemeral)
        if spec.network == "egress" and able.transparent:
            return await networking.catch(driver, handle)
        return handle

    async def recover(self, handle: Handle) -> bool:
        """See the contract. A handle of another runtime is an error, not a wall that has ended."""
        wall = self._wall(handle, "recover", "running", "ended")
        async with self._deadline("recover", handle, CONNECT_DEADLINE):
            alive = await self.driver.recover(handle)
        if wall.state != "destroyed":
            wall.state = "running" if alive else "ended"
        return alive

    async def connect(self, handle: Handle) -> socket.socket:
        """See the contract."""
        wall = self._wall(handle, "connect", "running", "ended")
        if wall.state == "ended":
            raise LinkLost(f"sandbox {handle.id} has ended", hint="start another one", id=handle.id)
        deadline = self._deadline("connect", handle, CONNECT_DEADLINE)
        sock = await _Within(deadline, self.driver.connect(handle))
        if sock.gettimeout() != 0.0:
            sock.setblocking(False)
        return sock

    async def wait(self, handle: Handle) -> Exit:
        """See the contract. The driver is asked once, however many callers wait."""
        wall = self._wall(handle, "wait", "running", "ended")
        if wall.exit is not None:
            return wall.exit
        # Shielded: a caller that is cancelled must not take the others' answer away.
        return await asyncio.shield(self._waiting(wall))

    def waiting(self, handle: Handle) -> asyncio.Task[Exit]:
        """What :meth:`wait` waits for, to be called back by; not to be cancelled."""
        return self._waiting(self._wall(handle, "wait", "running", "ended"))

    def _waiting(self, wall: _Wall) -> asyncio.Task[Exit]:
        if wall.waiting is None or wall.waiting.cancelled():
            wall.waiting = asyncio.ensure_future(self._ended(wall))
            wall.waiting.add_done_callback(_heard)
        return wall.waiting

    async def _ended(self, wall: _Wall) -> Exit:
        wall.exit = await self.driver.wait(wall.handle)
        if wall.state == "running":
            wall.state = "ended"
        _disconnect(wall.handle)
        return wall.exit

    async def stop(self, handle: Handle, grace: float) -> None:
        """See the contract. A driver that takes too long is overruled: the wall is killed."""
        wall = self._wall(handle, "stop", "running", "ended", "destroyed")
        if wall.state != "running":
            return
        try:
            async with asyncio.timeout(max(grace, 0) + STOP_MARGIN):
                await self.driver.stop(handle, max(grace, 0))
        except TimeoutError:
            await self.destroy(handle)
            return
        if wall.state == "running":
            wall.state = "ended"

    async def destroy(self, handle: Handle) -> None:
        """See the contract. Callers at once share one run; cancelling one does not stop it.

        Raises:
            HostLimit: something is left, or the driver does not come back; call it again.
        """
        wall = self._wall(handle, "destroy", "running", "ended", "destroyed")
        if wall.state == "destroyed":
            return
        if wall.destroying is None or wall.destroying.done():
            wall.destroying = asyncio.ensure_future(self._destroy(wall))
        await asyncio.shield(wall.destroying)

    async def destroy_here(self, handle: Handle) -> None:
        """:meth:`destroy` for a caller whom nobody cancels: without a task of its own.

        Raises:
            HostLimit: see :meth:`destroy`.
        """
        wall = self._wall(handle, "destroy", "running", "ended", "destroyed")
        if wall.state == "destroyed" or (wall.destroying is not None and not wall.destroying.done()):
            await self.destroy(handle)
            return
        done = wall.destroying = asyncio.get_running_loop().create_future()
        try:
            await self._destroy(wall)
        except asyncio.CancelledError:
            done.cancel()  # the event loop ends; whoever shares this run is cancelled, too
            raise
        except BaseException as error:
            done.set_exception(error)
            done.exception()  # it is raised here; others need not have waited
            raise
        done.set_result(None)

    async def _destroy(self, wall: _Wall) -> None:
        try:
            async with asyncio.timeout(DESTROY_DEADLINE):
                await self.driver.destroy(wall.handle)
        except TimeoutError:
            raise HostLimit(
                f"{self.name} did not destroy sandbox {wall.handle.id} within {DESTROY_DEADLINE:g} s",
                hint="try again; if it stays, look at the processes below it",
                id=wall.handle.id,
            ) from None
        _disconnect(wall.handle)
        wall.state = "destroyed"
        self._walls.pop(wall.handle.id, None)
        self._gone[wall.handle.id] = wall
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)

    async def stats(self, handle: Handle) -> WallStats:
        """See the contract."""
        self._wall(handle, "stats", "running")
        async with self._deadline("stats", handle, MEASURE_DEADLINE):
            return await self.driver.stats(handle)

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """See the contract."""
        self._wall(handle, "measure", "running")
        async with self._deadline("measure", handle, MEASURE_DEADLINE):
            return await self.driver.measure(handle)

    # -- the rules

    def _wall(self, handle: Handle, call: str, *states: str) -> _Wall:
        if handle.runtime != self.name:
            raise WrongState(f"a handle of {handle.runtime} was given to {self.name}", id=handle.id)
        wall = self._walls.get(handle.id) or self._gone.get(handle.id)
        if wall is None:
            wall = self._walls[handle.id] = _Wall(handle, "running")
        if wall.state not in states:
            raise WrongState(
                f"can't {call} sandbox {handle.id}: it is {wall.state}", id=handle.id, state=wall.state
            )
        return wall

    def _check_wishes(self, spec: StartSpec) -> None:
        able = self.driver.capabilities()
        if not able.rootless and os.geteuid() != 0:
            raise self._unable("rootless", "can be started by root only")
        if spec.identity.uid == 0 and not able.user_zero:
            raise self._unable("user_zero", "has no process.user 0")
        if spec.network not in able.network:
            choices = ", ".join(able.network)
            raise self._unable("network", f"has no network mode {spec.network!r} (it has {choices})")

    def _unable(self, capability: str, text: str) -> Unsupported:
        hint = "use another runtime, or change the policy"
        return Unsupported(f"{self.name} {text}", hint=hint, capability=capability, runtime=self.name)

    def _deadline(self, call: str, handle: Handle, seconds: float) -> _Deadline:
        return _Deadline(f"{self.name} did not {call} sandbox {handle.id} within {seconds:g} s", seconds)

    async def _undo(self, partial: Handle) -> str:
        """Take back what a failed start left; what could not be is returned as the end of a message."""
        try:
            async with asyncio.timeout(DESTROY_DEADLINE):
                await self.driver.destroy(partial)
        except TimeoutError:
            return f"; undoing it took more than {DESTROY_DEADLINE:g} s, look into {partial.folder}"
        except Exception as error:
            return f"; undoing it failed: {error}"
        _disconnect(partial)
        return ""


def _disconnect(handle: Handle) -> None:
    if handle.data.get("network") == "open":
        from ringfence.runtimes import networking

        networking.close_down(handle)


class _Deadline:
    """``asyncio.timeout`` with a message."""

    def __init__(self, message: str, seconds: float) -> None:
        self._message = message
        self._seconds = seconds

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(self._seconds)
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError:
            raise DeadlineExceeded(
                self._message, hint="the host or the sandbox is overloaded; try again"
            ) from None


class _Within(Generic[_Result]):
    """A coroutine under a deadline that begins only when it has to wait: most need not, and timers cost."""

    __slots__ = ("_deadline", "_first", "_steps")

    def __init__(self, deadline: _Deadline, coroutine: Coroutine[Any, Any, _Result]) -> None:
        self._deadline = deadline
        self._steps = coroutine.__await__()
        self._first: Any = None

    def __await__(self) -> Generator[Any, Any, _Result]:
        try:
            self._first = next(self._steps)
        except StopIteration as end:
            return cast(_Result, end.value)
        return (yield from self._rest().__await__())

    async def _rest(self) -> _Result:
        async with self._deadline:
            return await _Resumed(self._steps, self._first)


class _Resumed(Generic[_Result]):
    """The rest of a coroutine that has already asked to wait for something."""

    __slots__ = ("_first", "_steps")

    def __init__(self, steps: Generator[Any, Any, _Result], first: Any) -> None:
        self._steps = steps
        self._first = first

    def __await__(self) -> Generator[Any, Any, _Result]:
        asked = self._first
        while True:
            try:
                try:
                    answer = yield asked
                except BaseException as error:
                    asked = self._steps.throw(error)
                else:
                    asked = self._steps.send(answer)
            except StopIteration as end:
                return cast(_Result, end.value)


class _GuardedPausable(Guarded):
    async def pause(self, handle: Handle) -> None:
        """See the contract."""
        self._wall(handle, "pause", "running")
        assert isinstance(self.driver, Pausable)
        async with self._deadline("pause", handle, PAUSE_DEADLINE):
            await self.driver.pause(handle)

    async def resume(self, handle: Handle) -> None:
        """See the contract."""
        self._wall(handle, "resume", "running")
        assert isinstance(self.driver, Pausable)
        async with self._deadline("resume", handle, PAUSE_DEADLINE):
            await self.driver.resume(handle)


class _GuardedLayered(Guarded):
    def open_upper(self, handle: Handle) -> int:
        """See the contract."""
        self._wall(handle, "open_upper", "running", "ended")
        assert isinstance(self.driver, Layered)
        return self.driver.open_upper(handle)


class _GuardedSnapshotting(Guarded):
    async def snapshot(self, handle: Handle, folder: str, *, memory: bool = True) -> dict[str, Any]:
        """See the contract."""
        self._wall(handle, "snapshot", "running")
        assert isinstance(self.driver, Snapshotting)
        async with self._deadline("snapshot", handle, SNAPSHOT_DEADLINE):
            return await self.driver.snapshot(handle, folder, memory=memory)

    async def restore(self, spec: StartSpec, folder: str, data: Mapping[str, Any]) -> Handle:
        """See the contract: under the rules of ``start``."""
        driver = self.driver
        assert isinstance(driver, Snapshotting)
        return await self._started(spec, lambda found: driver.restore(found, folder, data))


_POWERS: tuple[tuple[Any, type[Guarded]], ...] = (
    (Pausable, _GuardedPausable),
    (Layered, _GuardedLayered),
    (Snapshotting, _GuardedSnapshotting),
)


def guard(driver: Runtime) -> Guarded:
    """Wrap a driver; the wrapper has the optional powers that the driver has."""
    return _wrapper(tuple(kind for power, kind in _POWERS if isinstance(driver, power)))(driver)


@cache
def _wrapper(powers: tuple[type[Guarded], ...]) -> type[Guarded]:
    return type("Guarded", powers, {}) if powers else Guarded


def _heard(task: asyncio.Task[Exit]) -> None:
    """Whoever waits gets its exception; that nobody waits is no error."""
    if not task.cancelled():
        task.exception()


async def _to_the_end(undoing: Coroutine[None, None, str]) -> str:
    """Run a coroutine to its end even if the caller is cancelled (again) meanwhile."""
    task = asyncio.ensure_future(undoing)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()
