"""The queue of a pool: tickets in the store, served in turns between projects, each with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.control import idempotency
from ringfence.control.core import Core, log, passed
from ringfence.control.pools import RATE, TICKET, TURNS, Pool
from ringfence.control.records import CreateSandbox, Sandbox
from ringfence.model.errors import Conflict, NotFound, QuotaExceeded, RingfenceError
from ringfence.model.ids import new_id
from ringfence.store.contract import Add, Change, Event, Put, Remove, Row

if TYPE_CHECKING:
    from ringfence.control.principals import Principal
    from ringfence.control.sandboxes import Sandboxes

LOOK = 0.1  # seconds between two looks while others, maybe of other processes, are first
_MOST = 10_000
# Tries with these changes in its commit, and calls when that is done; the rest may take longer.
Attempt = Callable[[Sequence[Change], Callable[[], None]], Awaitable[Sandbox]]


class Waiter:
    """Somebody of this process who waits."""

    __slots__ = ("attempt", "pool", "result", "ticket", "trying")

    def __init__(self, pool: Pool, ticket: Row, attempt: Attempt) -> None:
        self.pool = pool
        self.ticket = ticket
        self.attempt = attempt
        self.trying = False
        self.result: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()


class Queues:
    """The queues of all pools, as far as this process has somebody in them.

    The order is the store's: whoever is first there may try; all others wait, in whatever process they are.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.sandboxes: Sandboxes | None = None
        self.abandoned: Callable[[str], Awaitable[bool]] | None = None
        self._waiters: dict[str, dict[str, Waiter]] = {}
        self._dispatching: dict[str, asyncio.Task[None]] = {}
        self._signals: dict[str, asyncio.Event] = {}

    def somebody_waits(self, pool: str) -> bool:
        """Whether somebody is before whoever comes now, as far as this process knows."""
        return bool(self._waiters.get(pool))

    def signal(self, pool: str) -> None:
        """There may be room in a pool; ``""``: in any."""
        for id, event in self._signals.items():
            if pool in ("", id):
                event.set()

    async def wait(
        self, principal: Principal, request: CreateSandbox, pool: Pool, attempt: Attempt
    ) -> Sandbox:
        """Wait for one's turn and take it.

        Raises:
            QuotaExceeded: the queue is full, or the time is over; ``details``: position, waiting,
                retry_after.
        """
        core = self.core
        key = ""
        puts: tuple[Change, ...] = ()
        if request.idempotency_key and self.sandboxes is not None:
            made = idempotency.key_row(core, principal, request.idempotency_key, request.digest)
            puts, key = (await self.sandboxes.key_put(made),), made.id
        seconds = min(pool.queue_seconds, request.start_timeout)
        ticket = self.ticket(pool, principal.project, seconds, user=principal.user, key=key)
        return await self.stand(await self.enter(pool, ticket, attempt, *puts), seconds)

    def ticket(self, pool: Pool, project: str, seconds: float, **document: Any) -> Row:
        """A place in a pool's queue, not written yet."""
        now = self.core.now()
        document["actor"] = self.core.token()
        return Row(
            TICKET,
            new_id("tk"),
            project,
            "waiting",
            key=pool.id,
            due=now + seconds,
            created=now,
            document=document,
        )

    async def enter(self, pool: Pool, ticket: Row, attempt: Attempt, *changes: Change) -> Waiter:
        """Get in line, with these changes in the same commit.

        Raises:
            QuotaExceeded: the queue is full.
        """
        core = self.core
        told = Event(TICKET, ticket.id, ticket.project, "pool.queued", core.now(), {"pool": pool.id})
        full = Add(pool.counter("waiting"), 1, pool.queue)
        try:
            rows = await core.commit(full, Put(ticket), *changes, told)
        except BaseException as error:
            core.done(str(ticket.document["actor"]))
            if isinstance(error, QuotaExceeded) and error.details.get("counter") == full.counter:
                raise await self._refusal(pool, f"the queue of pool {pool.name} is full") from None
            raise
        waiter = Waiter(pool, next(row for row in rows if row.kind == TICKET), attempt)
        self._waiters.setdefault(pool.id, {})[ticket.id] = waiter
        self._dispatch(pool.id)
        return waiter

    async def stand(self, waiter: Waiter, seconds: float) -> Sandbox:
        """Wait until it is one's turn, and for what it brings."""
        pool, ticket = waiter.pool, waiter.ticket
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(waiter.result)
        except TimeoutError:
            if waiter.result.done():  # what it brought failed so
                return waiter.result.result()
            return await self._late(waiter)
        except asyncio.CancelledError:
            with contextlib.suppress(RingfenceError):  # else its time ends it, and nobody waits for it
                await self.core.whole(self._leave(waiter))
            raise
        finally:
            self.core.done(str(ticket.document["actor"]))
            mine = self._waiters.get(pool.id, {})
            mine.pop(ticket.id, None)
            if not mine:
                self._waiters.pop(pool.id, None)

    async def _late(self, waiter: Waiter) -> Sandbox:
        """The time is over: leave the queue, unless it is being served right now."""
        orders = await self.order(waiter.pool.id)
        ids = [row.id for row in orders]
        position = ids.index(waiter.ticket.id) + 1 if waiter.ticket.id in ids else 1
        if not await self._leave(waiter):
            return await waiter.result
        refusal = await self._refusal(
            waiter.pool, f"pool {waiter.pool.name} had nothing free in time", position=position
        )
        raise refusal

    async def _leave(self, waiter: Waiter) -> bool:
        """Take the ticket back; False: it is used already."""
        return await self.remove(waiter.ticket)

    async def remove(self, ticket: Row) -> bool:
        """Take a ticket out of its queue, with the idempotency key that came with it."""
        core = self.core
        changes: list[Change] = [Remove(TICKET, ticket.id, ticket.revision), left(ticket)]
        if ticket.document.get("key"):
            with contextlib.suppress(NotFound):
                key = await core.store.get(idempotency.KEYS, str(ticket.document["key"]))
                if not key.document["sandbox"]:
                    changes.append(Remove(idempotency.KEYS, key.id, key.revision))
        told = Event(TICKET, ticket.id, ticket.project, "pool.left_queue", core.now(), {"pool": ticket.key})
        try:
            await core.commit(*changes, told)
        except Conflict:
            return False
        return True

    async def _refusal(self, pool: Pool, message: str, *, position: int | None = None) -> QuotaExceeded:
        """429: how many wait, and when to try again: as long as those before take at the pace of late."""
        core = self.core
        waiting = await core.store.count(TICKET, key=pool.id)
        rate = 0.0
        with contextlib.suppress(NotFound):
            rate = float((await core.store.get(RATE, pool.id)).document.get("rate", 0.0))
        ahead = waiting if position is None else position
        seconds = ahead / rate if rate > 0.01 else pool.queue_seconds
        return QuotaExceeded(
            message,
            hint="try again after retry_after seconds, or let the pool have more",
            counter=pool.counter("waiting"),
            most=pool.queue,
            waiting=waiting,
            position=waiting + 1 if position is None else position,
            retry_after=max(1, math.ceil(min(seconds, pool.queue_seconds or 1.0))),
        )

    # -- turns

    async def order(self, pool: str) -> list[Row]:
        """Tickets of a pool as they are served: projects in turns, each in its own order."""
        tickets = await self.core.store.find(TICKET, key=pool, limit=_MOST)
        served: dict[str, Any] = {}
        if len({row.project for row in tickets}) > 1:
            with contextlib.suppress(NotFound):
                served = dict((await self.core.store.get(TURNS, pool)).document)
        return in_turns(tickets, served)

    def _dispatch(self, pool: str) -> None:
        task = self._dispatching.get(pool)
        if task is None or task.done():
            self._dispatching[pool] = self.core.task(self._serve(pool))
        else:
            self.signal(pool)

    async def _serve(self, pool: str) -> None:
        """Serve those of this process whose turn it is, while there are any."""
        signal = self._signals.setdefault(pool, asyncio.Event())
        while waiters := self._waiters.get(pool):
            signal.clear()
            try:
                served = await self._first(pool, waiters)
            except RingfenceError as error:
                log.warning("queue of %s: %s", pool, error)
                served = False
            if not served:
                await passed(signal, LOOK)
        self._signals.pop(pool, None)

    async def _first(self, pool: str, waiters: dict[str, Waiter]) -> bool:
        """Let the first one try, if he is ours. True: look again at once."""
        order = await self.order(pool)
        ids = {row.id for row in order}
        for waiter in list(waiters.values()):
            if waiter.ticket.id not in ids and not waiter.trying and not waiter.result.done():
                refusal = await self._refusal(waiter.pool, "the place in the queue is gone")
                if not waiter.result.done():
                    waiter.result.set_exception(refusal)
                    waiter.result.exception()  # whoever waited may be gone
        if not order:
            return False
        first = order[0]
        mine = waiters.get(first.id)
        if mine is None:
            return await self._gone(first)
        if mine.trying or mine.result.done():
            return False
        return await self._try(mine, first)

    async def _gone(self, ticket: Row) -> bool:
        """Whether the first one's time is over, or its process dead: then it goes."""
        actor = str(ticket.document.get("actor", ""))
        late = ticket.due is not None and ticket.due + 2.0 < self.core.now()
        if late or (self.abandoned is not None and await self.abandoned(actor)):
            return await self.remove(ticket)
        return False

    async def _try(self, waiter: Waiter, ticket: Row) -> bool:
        """Let one try. False: there is no room for him yet."""
        changes = (Remove(TICKET, ticket.id, ticket.revision), left(ticket), *await self._turn(ticket))
        decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter.trying = True

        def committed() -> None:
            if not decided.done():
                decided.set_result(True)

        async def attempt() -> None:
            try:
                sandbox = await waiter.attempt(changes, committed)
            except BaseException as error:
                again = isinstance(error, Conflict) or _full(waiter.pool, error)
                if again and not decided.done():  # nothing happened: the ticket is in the queue still
                    waiter.trying = False
                    decided.set_result(False)
                    return
                if not decided.done():
                    with contextlib.suppress(RingfenceError):
                        await self.remove(ticket)
                if not waiter.result.done():
                    waiter.result.set_exception(error)
                    waiter.result.exception()  # whoever waited may be gone
                if not isinstance(error, Exception):
                    raise
            else:
                if not waiter.result.done():
                    waiter.result.set_result(sandbox)
            finally:
                committed()

        self.core.task(attempt())
        return await decided

    async def _turn(self, ticket: Row) -> tuple[Change, ...]:
        """Note that this project was served."""
        now = self.core.now()
        try:
            row = await self.core.store.get(TURNS, ticket.key)
        except NotFound:
            row = Row(TURNS, ticket.key, created=now)
        times = {**row.document, ticket.project: now}
        if len(times) > 1000:
            times = dict(sorted(times.items(), key=lambda each: -float(each[1]))[:500])
        return (Put(replace(row, document=times)),)

    async def tidy(self) -> None:
        """Remove tickets whose time is over and whose process is dead."""
        for ticket in await self.core.store.find(TICKET, limit=_MOST):
            if ticket.id not in self._waiters.get(ticket.key, {}):
                await self._gone(ticket)


def left(ticket: Row) -> Add:
    """One less waits."""
    return Add(f"pool/{ticket.key}/waiting", -1)


def in_turns(tickets: Sequence[Row], served: dict[str, Any]) -> list[Row]:
    """One of each project, then the next of each …; first the project whose last turn is longest ago."""
    by_project: dict[str, list[Row]] = {}
    for row in sorted(tickets, key=lambda row: (row.created, row.id)):
        by_project.setdefault(row.project, []).append(row)
    lines = sorted(by_project, key=lambda name: (float(served.get(name, 0.0)), by_project[name][0].id))
    order: list[Row] = []
    for place in range(max((len(line) for line in by_project.values()), default=0)):
        order += [by_project[name][place] for name in lines if place < len(by_project[name])]
    return order


def _full(pool: Pool, error: BaseException) -> bool:
    return isinstance(error, QuotaExceeded) and str(error.details.get("counter", "")).startswith(
        f"pool/{pool.id}/"
    )
