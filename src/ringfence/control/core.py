"""What all parts of the orchestrator stand on: the clock, one transition, waiting, who acts on what."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ringfence.control.courtesy import Courtesy
from ringfence.control.records import KIND, Sandbox
from ringfence.model.errors import (
    Conflict,
    DeadlineExceeded,
    IdempotencyConflict,
    LeaseLost,
    NotFound,
    StoreUnavailable,
    WrongState,
)
from ringfence.model.policy import Policy, Resources
from ringfence.model.states import FINAL, State, may_follow
from ringfence.model.values import dataclass
from ringfence.placement.contract import Placement
from ringfence.store.contract import Change, Event, Put, Row, Store

log = logging.getLogger("ringfence.control")
_Result = TypeVar("_Result")
CLOSINGS, CLOSING_TIME = 10, 5.0  # rounds, seconds each: work that is stopped when a process ends
CONFLICTS = 20  # changes by others that one change of a row gives way to


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds, unless said otherwise.

    ``process_time``: how long a process that is not heard of counts as alive. ``lost_grace``: how long a
    sandbox may be missing at its placement before it is lost. ``parallel_starts`` and ``parallel_warming``:
    starts of one process at once, on demand and ahead.
    """

    heartbeat: float = 1.0
    process_time: float = 5.0
    reconcile: float = 2.0
    due: float = 0.5
    lost_grace: float = 10.0
    keep_ended: float = 24 * 3600.0
    keep_keys: float = 24 * 3600.0
    start_attempts: int = 5
    retry_first: float = 0.1
    retry_most: float = 5.0
    parallel_starts: int = 16
    parallel_warming: int = 2


class Admission(Protocol):
    """What a project may have, as changes of counters that the commits of what it makes carry. See
    :class:`ringfence.control.quotas.Quotas`.
    """

    async def admission(self, project: str, policy: Policy) -> Sequence[Change]:
        """For one more sandbox; without a project: for a pool's member."""

    async def claim(self, project: str, policy: Policy) -> Sequence[Change]:
        """For a member that becomes a project's."""

    async def release(self, project: str, policy: Resources) -> Sequence[Change]:
        """For one less."""

    async def storage(self, project: str, more: int) -> Sequence[Change]:
        """For so many bytes more, or less."""

    async def pool(self, project: str, more: int) -> Sequence[Change]:
        """For a pool of so many members more, or less."""


class Clock:
    """Seconds since the epoch that nobody can set while the process lives: durable deadlines are compared
    with it. A new process starts from what the machine's clock says then.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def now(self) -> float:
        """Now."""
        return self._offset + time.clock_gettime(time.CLOCK_BOOTTIME)


class Core:
    """Shared by the parts of one :class:`~ringfence.control.service.Control`."""

    def __init__(
        self,
        store: Store,
        placement: Placement,
        owner: str,
        *,
        admission: Admission,
        settings: Settings | None = None,
    ) -> None:
        self.store = store
        self.placement = placement
        self.owner = owner
        self.admission = admission
        self.settings = settings or Settings()
        self.now = Clock().now
        self.courtesy = Courtesy()
        self.starts = asyncio.Semaphore(self.settings.parallel_starts)
        self.acting: dict[str, asyncio.Task[Any]] = {}  # starts of this process, for deletes to stop
        self._tokens: set[str] = set()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._locks: dict[str, list[Any]] = {}
        self.saw: Callable[[Row], None] = _nothing  # told of every row committed here
        self.released: Callable[[str], None] = _nothing  # told the pool of each sandbox that ended
        self.stale: Callable[[str], None] = _nothing  # told of every row changed anywhere
        self.closing = False

    # -- who acts

    def token(self) -> str:
        """A new right to finish one transition: written into the row that begins it, compared at its end."""
        token = f"{self.owner}/{next(self._numbers)}.{time.time_ns():x}"
        self._tokens.add(token)
        return token

    def done(self, token: str) -> None:
        """Nobody here acts under it any more."""
        self._tokens.discard(token)

    def acts(self, token: str) -> bool:
        """Whether somebody in this process is at it."""
        return token in self._tokens

    @contextlib.asynccontextmanager
    async def alone(self, id: str) -> AsyncIterator[None]:
        """One operation on a sandbox after the other, in this process; the store orders the processes."""
        entry = self._locks.setdefault(id, [asyncio.Lock(), 0])
        entry[1] += 1
        try:
            async with entry[0]:
                yield
        finally:
            entry[1] -= 1
            if not entry[1]:
                self._locks.pop(id, None)

    def task(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Work that goes on when whoever asked is gone; :meth:`close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("background work: %s", error)

    async def whole(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of work that is finished even if the caller is cancelled."""
        return await self.result(self.task(work))

    async def result(self, task: asyncio.Task[_Result]) -> _Result:
        """The result of a task that others may stop; the caller can be cancelled without stopping it.

        Raises:
            WrongState: somebody stopped it, e.g. a start by a delete.
        """
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if not task.cancelled() or (asker is not None and asker.cancelling()):
                raise
            if self.closing:
                raise StoreUnavailable("the service is stopping", hint="try again") from None
            raise WrongState("it was stopped meanwhile", hint="see what became of it") from None

    async def close(self) -> None:
        """Stop what is under way: the store says what the next process has to finish."""
        self.closing = True
        for _ in range(CLOSINGS):  # what is cancelled may begin something; the next process finishes that
            await stopped(self._tasks)

    # -- rows

    async def get(self, id: str, project: str | None = None) -> Sandbox:
        """One sandbox.

        Raises:
            NotFound: there is none, or it is not this project's; nobody learns which.
        """
        try:
            row = await self.store.get(KIND, id)
        except NotFound:
            row = None
        if row is None or row.state in (State.WARMING, State.WARM) or project not in (None, row.project):
            raise NotFound(f"there is no sandbox {id}", hint="`ringfence sandbox ls` shows those there are")
        return Sandbox.from_row(row)

    def event(self, name: str, id: str, project: str, **data: Any) -> Event:
        """What is told of a sandbox."""
        return Event(KIND, id, project, f"sandbox.{name}", self.now(), data)

    async def commit(self, *changes: Change) -> list[Row]:
        """A transaction of the store; whoever waits for one of its rows is woken."""
        rows = await self.store.commit(*changes)
        for row in rows:
            self.saw(row)
            self.wake(row.id)
        return rows

    async def change(
        self,
        sandbox: Sandbox,
        to: State | None = None,
        *,
        expect: Iterable[State],
        token: str | None = None,
        still: Callable[[Sandbox], bool] | None = None,
        labels: Mapping[str, str] | None = None,
        changes: Sequence[Change] = (),
        event: str = "",
        data: Mapping[str, Any] | None = None,
        drop: Sequence[str] = (),
        more: Mapping[str, Sequence[str]] | None = None,
        **document: Any,
    ) -> Sandbox:
        """One transition: one commit of the row with its event. Gives way to changes by others meanwhile.

        Args:
            sandbox: as read last; read again after a conflict.
            to: the new state; ``None``: it stays.
            expect: states that it may be in.
            token: of the transition that this ends; somebody who took over makes it void.
            still: whether the reason holds, asked again of what others have made of it meanwhile.
            labels: in place of those there are.
            changes: of other rows and counters, in the same commit.
            event: its name; by default the new state.
            data: of the event.
            drop: keys of the document to remove.
            more: keys that are lists, which get these too: also what others put there meanwhile stays.
            document: keys to set.

        Raises:
            WrongState: it is in none of the expected states, or the reason holds no more.
            LeaseLost: somebody else took over.
            NotFound: it is gone.
            Conflict: one of ``changes`` does not fit.
        """
        expected = frozenset(expect)
        for attempt in range(CONFLICTS):
            if sandbox.state not in expected or not (still is None or still(sandbox)):
                raise wrong_state(sandbox)
            if token is not None and sandbox.document.get("actor") != token:
                raise LeaseLost(f"another process acts on {sandbox.id}")
            try:
                return await self._write(
                    sandbox, to, labels, changes, event, data or {}, drop, document, more or {}
                )
            except (LeaseLost, IdempotencyConflict):
                raise
            except Conflict:
                fresh = await self.store.get(KIND, sandbox.id)
                if fresh.revision == sandbox.revision:
                    raise
                sandbox = Sandbox.from_row(fresh)
                if attempt > 2:
                    await asyncio.sleep(0.002 * attempt)
        raise Conflict(f"{sandbox.id} is changed all the time", hint="try again")

    async def _write(
        self,
        sandbox: Sandbox,
        to: State | None,
        labels: Mapping[str, str] | None,
        changes: Sequence[Change],
        event: str,
        data: Mapping[str, Any],
        drop: Sequence[str],
        document: Mapping[str, Any],
        more: Mapping[str, Sequence[str]],
    ) -> Sandbox:
        state = sandbox.state if to is None else to
        if state is not sandbox.state and not may_follow(sandbox.state, state):
            raise wrong_state(sandbox, state)
        merged = {**sandbox.document, **document}
        for key, values in more.items():
            merged[key] = list(dict.fromkeys((*sandbox.document.get(key, ()), *values)))
        for key in drop:
            merged.pop(key, None)
        row = replace(
            sandbox.row,
            state=state.value,
            labels=sandbox.labels if labels is None else dict(labels),
            document=merged,
            due=self.due_of(state, merged),
        )
        told: tuple[Event, ...] = ()
        if event or state is not sandbox.state:
            facts = {"state": state.value, "from": sandbox.state.value, **data}
            told = (self.event(event or state.value, sandbox.id, sandbox.project, **facts),)
        rows = await self.commit(Put(row), *told, *changes)
        return Sandbox.from_row(next(each for each in rows if each.id == sandbox.id and each.kind == KIND))

    def due_of(self, state: State, document: Mapping[str, Any]) -> float | None:
        """When something has to be done about a sandbox at the latest."""
        if state in FINAL:
            return float(document.get("ended", 0.0)) + self.settings.keep_ended
        if state is State.RUNNING:
            times = [float(document["deadline"])] if document.get("deadline") else []
            if document.get("idle") is not None:
                times.append(float(document["active"]) + float(document["idle"]))
            return min(times, default=None)
        if state is State.PAUSED:
            return float(document["deadline"]) if document.get("deadline") else None
        if state is State.STOPPING:
            retry = document.get("retry")
            return None if retry is None else float(retry)
        if state is State.WARM:
            return float(document["expires"]) if document.get("expires") else None
        if state in (State.PENDING, State.STARTING):
            return float(document["start_by"]) if document.get("start_by") else None
        return None

    # -- waiting

    def wake(self, id: str) -> None:
        """A row changed; ``""``: any may have."""
        if id:
            for event in self._waiting.get(id, ()):
                event.set()
        else:
            for events in self._waiting.values():
                for event in events:
                    event.set()

    @contextlib.contextmanager
    def changes_of(self, id: str) -> Any:
        """An event that is set whenever the row of that id changes."""
        event = asyncio.Event()
        self._waiting.setdefault(id, set()).add(event)
        try:
            yield event
        finally:
            waiting = self._waiting[id]
            waiting.discard(event)
            if not waiting:
                del self._waiting[id]

    async def until(self, id: str, states: Iterable[State], timeout: float | None) -> Sandbox:  # noqa: ASYNC109
        """The sandbox as soon as it is in one of these states, or final.

        Raises:
            DeadlineExceeded: not within so many seconds.
            NotFound: it is gone.
        """
        wanted = frozenset(states) | FINAL
        end = None if timeout is None else time.monotonic() + timeout
        with self.changes_of(id) as changed:
            while True:
                changed.clear()
                sandbox = await self.get(id)
                if sandbox.state in wanted:
                    return sandbox
                left = 0.5 if end is None else min(0.5, end - time.monotonic())
                if left <= 0:
                    raise DeadlineExceeded(
                        f"{id} is {sandbox.state.value} still", hint="wait longer", state=sandbox.state.value
                    )
                await passed(changed, left)

    async def watch(self) -> None:
        """Wake whoever waits for what other processes change, until cancelled."""
        while True:
            try:
                async with contextlib.aclosing(self.store.watch()) as changes:  # type: ignore[type-var]
                    async for _, id in changes:
                        self.stale(id)
                        self.wake(id)
            except StoreUnavailable:
                self.stale("")
                self.wake("")
            await asyncio.sleep(0.5)


async def passed(event: asyncio.Event, seconds: float) -> None:
    """Return when it is set, or after so many seconds. (``wait_for`` may lose a cancellation.)"""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def stopped(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended."""
    left = {task for task in tasks if task is not asyncio.current_task()}
    for _ in range(CLOSINGS):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CLOSING_TIME)
    log.warning("still at work: %s", [str(task.get_coro()) for task in left])


def _nothing(_: Any) -> None:
    pass


def wrong_state(sandbox: Sandbox, to: State | None = None) -> WrongState:
    """It can't do this now."""
    ended = f": {sandbox.cause}" if sandbox.final and sandbox.cause else ""
    what = f"sandbox {sandbox.id} is {sandbox.state.value}{ended}"
    if to is not None:
        what += f" and can't go to {to.value}"
    if sandbox.final:
        hint = "make another one"
    elif sandbox.state is State.PAUSED:
        hint = f"let it go on: `ringfence sandbox resume {sandbox.id}`"
    else:
        hint = "wait for it: `ringfence sandbox wait`"
    return WrongState(what, hint=hint, state=sandbox.state.value, cause=sandbox.cause)
