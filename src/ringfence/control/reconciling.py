"""The reconciler: makes the store and the placement agree, at the start and every few seconds.

Every process keeps durable deadlines (the conditional commit decides who acts); one at a time, by lease,
compares everything that exists with everything that is owned.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ringfence.control.core import Core, log
from ringfence.control.ending import ENDABLE, Ending
from ringfence.control.idempotency import KEYS
from ringfence.control.links import Links
from ringfence.control.powers import MAKING, READY, REMOVING, SNAPSHOT, Powers
from ringfence.control.records import ALIVE, KIND, MEMBERS, Sandbox
from ringfence.control.starting import Starting
from ringfence.model.errors import (
    LeaseLost,
    NotFound,
    RingfenceError,
    Unsupported,
    WrongState,
)
from ringfence.model.levels import Cause
from ringfence.model.states import FINAL, State
from ringfence.placement.contract import Placed
from ringfence.store.contract import Remove, Row

if TYPE_CHECKING:
    from ringfence.control.claiming import Claims

LEASE = "reconciler"
BELIEVED = 0.5  # seconds
STUCK = 5.0  # seconds that whoever starts something may be late to give up
_TIMED = (State.RUNNING, State.PAUSED, State.PENDING, State.STARTING, State.STOPPING)


class Reconciler:
    """Background work of one process. See :meth:`pass_once` and :meth:`due_once` for what it does."""

    def __init__(self, core: Core, links: Links, ending: Ending, starting: Starting, powers: Powers) -> None:
        self.core = core
        self.links = links
        self.ending = ending
        self.starting = starting
        self.powers = powers
        self.also: list[Callable[[], Awaitable[None]]] = []  # of jobs, volumes …: every pass
        self.claims: Claims | None = None
        self._alive: dict[str, float] = {}  # other processes, and until when that is believed
        self._doing: set[str] = set()
        self.passes = 0

    # -- loops

    async def run(self) -> None:
        """Heartbeats, deadlines and passes, until cancelled."""
        await asyncio.gather(
            self._every(self.core.settings.heartbeat, self.heartbeat),
            self._every(self.core.settings.due, self.due_once),
            self._every(self.core.settings.reconcile, self._pass_if_mine),
            self._happenings(),
        )

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        told = ""
        while True:
            try:
                await work()
                told = ""
            except RingfenceError as error:
                if error.message != told:  # once, not every time
                    told = error.message
                    log.warning("%s: %s", work.__name__.strip("_"), error)
            except Exception:
                log.exception("%s failed", work.__name__.strip("_"))
            await asyncio.sleep(seconds)

    async def heartbeat(self) -> None:
        """Say that this process lives."""
        await self.core.store.lease(
            process_lease(self.core.owner), self.core.owner, self.core.settings.process_time
        )
        await self.links.keep_awake()
        self.links.prune()

    async def _pass_if_mine(self) -> None:
        if await self.core.store.lease(LEASE, self.core.owner, self.core.settings.process_time):
            await self.pass_once()
        for work in self.also:
            await work()

    async def _happenings(self) -> None:
        """What the placement tells by itself: ends are dealt with at once."""
        while True:
            try:
                async with contextlib.aclosing(self.core.placement.happened()) as told:  # type: ignore[type-var]
                    async for happened in told:
                        if happened.name == "ended":
                            self.soon(happened.id, self._ended_by_itself(happened.id))
                        elif happened.name == "back":
                            await self._pass_if_mine()
            except RingfenceError as error:
                log.debug("no news from the placement: %s", error)
            await asyncio.sleep(0.5)

    async def _ended_by_itself(self, id: str) -> None:
        with contextlib.suppress(NotFound, WrongState):
            sandbox = Sandbox.from_row(await self.core.store.get(KIND, id))
            placed = await self.core.placement.get(id)
            await self._compare(sandbox, placed)

    def soon(self, id: str, work: Any) -> None:
        """Do something about a sandbox in the background, unless this process is at it."""
        if id in self._doing:
            work.close()
            return
        self._doing.add(id)

        async def doing() -> None:
            try:
                await work
            except (LeaseLost, WrongState, NotFound):
                pass  # somebody else did it
            except RingfenceError as error:
                log.warning("%s: %s", id, error)
            except Exception:
                log.exception("%s", id)
            finally:
                self._doing.discard(id)

        self.core.task(doing())

    # -- everything

    async def pass_once(self) -> None:
        """Compare all that exists with all that is owned. First what exists: its row was there before it."""
        core = self.core
        exist = {placed.id: placed for placed in await core.placement.list()}
        owned: dict[str, Sandbox] = {}
        states = [state.value for state in (*ALIVE, *MEMBERS)]
        after = ""
        while rows := await core.store.find(KIND, states=states, after=after, limit=500):
            owned |= {row.id: Sandbox.from_row(row) for row in rows}
            after = rows[-1].id
        for number, sandbox in enumerate(owned.values()):
            placed = exist.get(sandbox.id)
            if not _as_it_should_be(sandbox, placed):
                self.soon(sandbox.id, self._compare(sandbox, placed))
            if number % 100 == 99:
                await asyncio.sleep(0)  # others are served meanwhile
        for id in exist.keys() - owned.keys():
            self.soon(id, self._orphan(id))
        await self._snapshots()
        self.passes += 1

    async def _orphan(self, id: str) -> None:
        with contextlib.suppress(NotFound):
            row = await self.core.store.get(KIND, id)
            if State(row.state) not in FINAL:
                return
        await self.ending.remove_orphan(id)

    async def _compare(self, sandbox: Sandbox, placed: Placed | None) -> None:
        state = sandbox.state
        if state in (State.PENDING, State.STARTING, State.WARMING, State.STOPPING) or state in (
            State.PAUSING,
            State.RESUMING,
        ):
            await self._finish(sandbox)
            return
        if placed is None:
            try:
                placed = await self.core.placement.get(sandbox.id)
            except NotFound:
                await self._missing(sandbox)
                return
        if sandbox.document.get("missing"):
            sandbox = await self.core.change(
                sandbox, expect={sandbox.state}, event="found", drop=("missing",)
            )
        if placed.state == "ended":
            end = dict(placed.end or {})
            cause = end.get("cause") or Cause.RUNTIME_CRASH.value
            await self.ending.end(sandbox, cause, end={"cause": cause, **end}, expect=(state,))
        elif (placed.state, state) in (("paused", State.RUNNING), ("running", State.PAUSED)):
            await self._stilled(sandbox.id)
        elif placed.node != sandbox.node and state not in (State.WARM, State.WARMING):
            await self.core.change(
                sandbox, expect={state}, event="adopted", node=placed.node, address=placed.address
            )

    async def _stilled(self, id: str) -> None:
        """Let it stand still or go on, as its row says: both are read anew, with nobody else at it."""
        core = self.core
        async with core.alone(id):
            placed, sandbox = await core.placement.get(id), await core.get(id)
            if placed.state == "paused" and sandbox.state is State.RUNNING:
                await core.placement.resume(id)
            elif placed.state == "running" and sandbox.state is State.PAUSED:
                await core.placement.pause(id)

    async def _missing(self, sandbox: Sandbox) -> None:
        """It should exist and does not: lost, if that stays so."""
        core = self.core
        since = sandbox.document.get("missing")
        if sandbox.state is State.WARM:
            await self.ending.end(sandbox, Cause.NODE_LOST, expect=(State.WARM,))
        elif since is None:
            await core.change(sandbox, expect={sandbox.state}, event="missing", missing=core.now())
        elif core.now() - float(since) >= core.settings.lost_grace:
            await self.ending.end(
                sandbox, Cause.NODE_LOST, detail="its node does not have it any more", expect=(sandbox.state,)
            )

    # -- half done

    async def abandoned(self, actor: str) -> bool:
        """Whether nobody acts under this token any more."""
        core = self.core
        if not actor:
            return True
        owner = actor.rsplit("/", 1)[0]
        if owner == core.owner:
            return not core.acts(actor)
        now = time.monotonic()
        if self._alive.get(owner, 0.0) > now:
            return False
        name = process_lease(owner)
        if not await core.store.lease(name, core.owner, 0.5):
            self._alive[owner] = now + BELIEVED
            return False
        await core.store.release(name, core.owner)
        self._alive.pop(owner, None)
        return True

    async def _finish(self, sandbox: Sandbox) -> None:
        """Go on with a transition whose process is gone."""
        core = self.core
        actor = str(sandbox.document.get("actor", ""))
        if not await self.abandoned(actor):
            return
        if sandbox.state is State.STOPPING and float(sandbox.document.get("retry") or 0.0) > core.now():
            return
        token = core.token()
        try:
            sandbox = await core.change(
                sandbox, expect={sandbox.state}, token=actor or None, event="taken_over", actor=token
            )
            await self._go_on(sandbox, token)
        finally:
            core.done(token)

    async def _go_on(self, sandbox: Sandbox, token: str) -> None:
        state = sandbox.state
        if state is State.STOPPING:
            await self.ending.finish(sandbox, token)
        elif state is State.WARMING:
            await self.ending.end(sandbox, Cause.NODE_LOST, expect=(State.WARMING,), token=token)
        elif state is State.PAUSING:
            await self.powers.finish_pause(sandbox, token)
        elif state is State.RESUMING:
            await self.powers.finish_resume(sandbox, token)
        elif sandbox.document.get("member") and self.claims is not None:
            await self.claims.resume(sandbox, token)
        elif sandbox.document.get("queued") and self.claims is not None:
            await self.claims.requeue(sandbox, token)
        else:
            await self.starting.resume(sandbox, token)

    async def _snapshots(self) -> None:
        core = self.core
        for row in await core.store.find(SNAPSHOT, states=[MAKING], limit=500):
            # Nobody waits for what was being made: whoever asked got an error.
            if await self.abandoned(str(row.document.get("actor", ""))):
                self.soon(row.id, self.powers.remove_snapshot(row))
        for row in await core.store.due(SNAPSHOT, core.now(), states=[READY, REMOVING]):
            self.soon(row.id, self.powers.remove_snapshot(row))

    # -- due

    async def due_once(self) -> None:
        """What has to be done by now: deadlines, idleness, removals tried again, what is forgotten."""
        core = self.core
        now = core.now()
        for row in await core.store.due(KIND, now, states=[state.value for state in _TIMED], limit=500):
            self.soon(row.id, self._due(Sandbox.from_row(row)))
        for row in await core.store.due(KIND, now, states=[state.value for state in FINAL]):
            await self._forget(row)
        for row in await core.store.due(KEYS, now):
            await self._forget(row)

    async def _forget(self, row: Row) -> None:
        with contextlib.suppress(RingfenceError):
            await self.core.store.commit(Remove(row.kind, row.id, row.revision))

    async def _due(self, sandbox: Sandbox) -> None:
        core = self.core
        now = core.now()
        if sandbox.state is State.STOPPING:
            await self._finish(sandbox)
            return
        if sandbox.state in (State.PENDING, State.STARTING):
            await self._start_overdue(sandbox)
            return
        if sandbox.deadline and sandbox.deadline <= now:
            detail = f"it was to end {sandbox.deadline - sandbox.started:.0f} s after its start"
            await self.ending.end(
                sandbox,
                Cause.DEADLINE,
                detail=detail,
                expect=ENDABLE,
                still=lambda each: bool(each.deadline and each.deadline <= now),
            )
            return
        if sandbox.state is not State.RUNNING or sandbox.idle is None:
            return
        used = self.links.last_used(sandbox)
        if used + sandbox.idle > now:
            await core.change(sandbox, expect={State.RUNNING}, active=used)
            return

        def still(each: Sandbox) -> bool:
            return each.idle is not None and self.links.last_used(each) + each.idle <= now

        if sandbox.on_idle == "pause":
            try:
                paused = await self.powers.pause(sandbox, asleep=True, still=still)
                if not still(paused):  # used in the moment in which it fell asleep
                    await self.powers.resume(paused)
                return
            except WrongState:
                return
            except Unsupported:
                pass  # what can't be paused is stopped: the policy bounds what an idle sandbox costs
        await self.ending.end(
            sandbox,
            Cause.IDLE,
            detail=f"nothing asked for it for {sandbox.idle:g} s",
            expect=(State.RUNNING,),
            still=still,
        )

    async def _start_overdue(self, sandbox: Sandbox) -> None:
        """Its start's time is over; whoever was at it is stuck or gone."""
        actor = str(sandbox.document.get("actor", ""))
        stuck = self.core.now() >= float(sandbox.document["start_by"]) + STUCK
        if not stuck and not await self.abandoned(actor):
            return
        await self.ending.end(
            sandbox,
            Cause.DEADLINE,
            detail="it did not start in time",
            expect=(State.PENDING, State.STARTING),
        )


def _as_it_should_be(sandbox: Sandbox, placed: Placed | None) -> bool:
    """Whether there is nothing to do: nearly always, so that a look at thousands costs little."""
    if placed is None or sandbox.document.get("missing"):
        return False
    wanted = {State.RUNNING: "running", State.WARM: "running", State.PAUSED: "paused"}.get(sandbox.state)
    return placed.state == wanted and placed.node == sandbox.node


def process_lease(owner: str) -> str:
    """Held by each living process."""
    return f"process/{owner}"
