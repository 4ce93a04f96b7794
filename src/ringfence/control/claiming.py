"""Serving a request from a pool: a member, else a start on demand up to a cap, else a place in the queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.control import idempotency
from ringfence.control.core import Core, log
from ringfence.control.ending import Ending
from ringfence.control.pools import TICKET, Pool, Pools
from ringfence.control.queueing import Attempt, Queues, Waiter
from ringfence.control.records import KIND, CreateSandbox, Sandbox
from ringfence.control.starting import Starting, Unstored, owner_of
from ringfence.model.errors import (
    GuestError,
    LeaseLost,
    NodeUnavailable,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    StartFailed,
    WrongState,
)
from ringfence.model.levels import Cause
from ringfence.model.states import State
from ringfence.placement.contract import Placed
from ringfence.store.contract import Add, Change, Event

if TYPE_CHECKING:
    from ringfence.control.principals import Principal
    from ringfence.control.sandboxes import Sandboxes

ATTEMPTS = 3  # members that may turn out broken before a request is served on demand
# A member that answers so is broken, whatever the request.
_BROKEN = (NotFound, WrongState, GuestError, NodeUnavailable, StartFailed)


class Claims:
    """Hands out members of pools."""

    def __init__(
        self,
        core: Core,
        pools: Pools,
        queues: Queues,
        sandboxes: Sandboxes,
        ending: Ending,
        starting: Starting,
    ) -> None:
        self.core = core
        self.pools = pools
        self.queues = queues
        self.sandboxes = sandboxes
        self.ending = ending
        self.starting = starting

    async def serve(self, principal: Principal, request: CreateSandbox) -> Sandbox | None:
        """A sandbox from the pool that fits; ``None``: no pool does.

        Raises:
            NotFound: no pool of that name. QuotaExceeded: the project's; or the pool is full and so is its
            queue, or the request waited there too long (``details``: position, waiting, retry_after).
        """
        chosen = await self.pools.choose(principal, request)
        if chosen is None:
            return None
        pool, key, _, request = chosen
        if not self.queues.somebody_waits(pool.id):
            try:
                return await self._served(principal, request, pool, key)
            except QuotaExceeded as error:
                if not of_pool(pool, error):
                    raise
        if not request.wait:
            return await self._later(principal, request, pool, key)
        return await self.queues.wait(
            principal,
            request,
            pool,
            lambda changes, committed: self._served(principal, request, pool, key, changes, committed),
        )

    async def _served(
        self,
        principal: Principal,
        request: CreateSandbox,
        pool: Pool,
        key: str,
        changes: Sequence[Change] = (),
        committed: Callable[[], None] = lambda: None,
    ) -> Sandbox:
        """From a member, else on demand. ``changes`` go with the commit that decides, ``committed`` is called
        after it.

        Raises:
            QuotaExceeded: of the project; of the pool (:func:`of_pool`): all it may have are in use.
        """
        core = self.core
        with core.courtesy.claim():
            admitted = await core.admission.claim(principal.project, request.policy)
            counted = (
                Add(pool.counter("claims"), 1),
                Add(pool.counter("running"), 1, pool.most),
            )
            for _ in range(ATTEMPTS):
                taken = await self._take(principal, request, pool, key, (*admitted, *counted, *changes))
                if taken is None:
                    break
                sandbox, token = taken
                changes = ()  # done with the take
                committed()
                self.pools.urge(pool.id)
                unstored = Unstored(request.secrets, request.files)
                try:
                    return await core.whole(self._bound(sandbox, token, unstored))
                except _BROKEN as error:
                    log.warning("member %s of pool %s is broken: %s", sandbox.id, pool.name, error)
            self.pools.urge(pool.id)
            used = (pool.counter("running"), pool.counter("overflow"))
            return await self.sandboxes.on_demand(
                principal,
                request,
                pool=pool.id,
                key=key,
                counters=used,
                committed=committed,
                changes=(*counted, Add(pool.counter("overflow"), 1, pool.overflow), *changes),
            )

    # -- nobody waits for it

    async def _later(self, principal: Principal, request: CreateSandbox, pool: Pool, key: str) -> Sandbox:
        """Accept it as ``pending``: it is started on demand, under the id it has now, when it is its turn."""
        core = self.core
        token = core.token()
        ticket = self.queues.ticket(pool, principal.project, pool.queue_seconds, user=principal.user)
        try:
            row, changes = await self.sandboxes.accepted(
                principal, request, token, pool=pool.id, key=key, queued=ticket.id, wait=pool.queue_seconds
            )
            sandbox = Sandbox.from_row(row)
            waiter = await self.queues.enter(
                pool, ticket, self._starter(sandbox, token, pool, _unstored(request)), *changes
            )
        except BaseException:
            core.done(token)
            raise
        core.task(self._stand(waiter, row.id, token, pool.queue_seconds))
        return await core.get(row.id)

    def _starter(self, sandbox: Sandbox, token: str, pool: Pool, unstored: Unstored | None) -> Attempt:
        counters = (pool.counter("running"), pool.counter("overflow"))

        async def attempt(changes: Sequence[Change], committed: Callable[[], None]) -> Sandbox:
            begun = await self.core.change(
                await self.core.get(sandbox.id),
                State.STARTING,
                expect={State.PENDING},
                token=token,
                changes=(
                    Add(pool.counter("claims"), 1),
                    Add(counters[0], 1, pool.most),
                    Add(counters[1], 1, pool.overflow),
                    *changes,
                ),
                drop=("queued",),
                counters=list(counters),
            )
            committed()
            return await self.core.result(self.starting.begin(begun, token, unstored))

        return attempt

    async def _stand(self, waiter: Waiter, id: str, token: str, seconds: float) -> None:
        try:
            await self.queues.stand(waiter, seconds)
        except QuotaExceeded as error:
            with contextlib.suppress(WrongState, LeaseLost, NotFound):
                await self.starting.fail(await self.core.get(id), token, error)
        finally:
            self.core.done(token)

    async def requeue(self, sandbox: Sandbox, token: str) -> None:
        """Get in line again for one whose process is gone."""
        core = self.core
        pools = [pool for pool in await self.pools.all() if pool.id == sandbox.pool]
        left = float(sandbox.document["start_by"]) - core.now()
        if not pools or left <= 0 or sandbox.document.get("unstored"):
            error = StartFailed("the service was restarted while it waited in a queue", step="queue")
            await self.starting.fail(sandbox, token, error)
            return
        left = min(left, max(1.0, sandbox.created + pools[0].queue_seconds - core.now()))
        with contextlib.suppress(NotFound):
            await self.queues.remove(await core.store.get(TICKET, str(sandbox.document["queued"])))
        ticket = self.queues.ticket(pools[0], sandbox.project, left)
        waiter = await self.queues.enter(pools[0], ticket, self._starter(sandbox, token, pools[0], None))
        await self._stand(waiter, sandbox.id, token, left)

    # -- members

    async def _take(
        self,
        principal: Principal,
        request: CreateSandbox,
        pool: Pool,
        key: str,
        changes: Sequence[Change],
    ) -> tuple[Sandbox, str] | None:
        core = self.core
        now = core.now()
        token = core.token()
        document = self.sandboxes.document(principal, request) | {
            "actor": token,
            "labels": dict(request.labels),
            "start_by": now + request.start_timeout,
            "counters": [pool.counter("running")],
        }
        try:
            puts: tuple[Change, ...] = ()
            if request.idempotency_key:
                document["key"] = idempotency.key_id(principal, request.idempotency_key)
                made = idempotency.key_row(core, principal, request.idempotency_key, request.digest)
                puts = (await self.sandboxes.key_put(made),)
            told = Event(
                KIND, "", principal.project, "sandbox.starting", now, {"from": "warm", "pool": pool.id}
            )
            row = await core.store.take(
                KIND,
                key=key,
                state=State.WARM.value,
                into=State.STARTING.value,
                document=document,
                project=principal.project,
                due=now + request.start_timeout,
                changes=(*changes, *puts, told),
            )
        except BaseException:
            core.done(token)
            raise
        if row is None:
            core.done(token)
            return None
        core.saw(row)
        return Sandbox.from_row(row), token

    async def _bound(self, sandbox: Sandbox, token: str, unstored: Unstored | None) -> Sandbox:
        """Bind the door of a member that was taken. If that can't be, the member goes and the error stays."""
        core = self.core
        try:
            deadline = core.now() + float(sandbox.document["timeout"])
            placed = await core.placement.bind(
                sandbox.id,
                env={**sandbox.env, **await self.starting.variables(sandbox)} or None,
                secrets=(unstored.secrets or None) if unstored is not None else None,
                owner=owner_of(sandbox),
                labels=sandbox.document.get("labels") or {},
                policy=sandbox.policy,
                deadline=deadline,
            )
            placed = _measured(sandbox, placed)
            facts = await self.starting.bound(sandbox, placed, unstored, claim=True)
            return await self.starting.running(sandbox, token, placed, deadline, facts)
        except LeaseLost:
            raise  # somebody else goes on with it
        except BaseException as error:
            with contextlib.suppress(RingfenceError):  # the reconciler finishes what is begun
                await core.whole(self._broken(sandbox, token, error))
            raise
        finally:
            core.done(token)

    async def _broken(self, sandbox: Sandbox, token: str, error: BaseException) -> None:
        with contextlib.suppress(WrongState, LeaseLost):
            cause = Cause.KILLED if isinstance(error, asyncio.CancelledError) else Cause.RUNTIME_CRASH
            sandbox, mine = await self.ending.begin(
                sandbox, cause, detail=str(error), expect=(State.STARTING,), token=token
            )
            await self.ending.finish(sandbox, mine)

    async def resume(self, sandbox: Sandbox, token: str) -> None:
        """Finish a claim whose process is gone; its secrets and files are gone with it, and then so is it."""
        try:
            if sandbox.document.get("unstored"):
                error = StartFailed("the service was restarted before its secrets were bound", step="restart")
                await self._broken(sandbox, token, error)
                return
            await self._bound(sandbox, token, None)
        except RingfenceError as error:
            log.warning("the claim of %s can't be finished: %s", sandbox.id, error)


def _unstored(request: CreateSandbox) -> Unstored | None:
    return Unstored(request.secrets, request.files) if request.secrets or request.files else None


def of_pool(pool: Pool, error: QuotaExceeded) -> bool:
    """Whether the pool itself is full, so that waiting helps."""
    return str(error.details.get("counter", "")).startswith(f"pool/{pool.id}/")


def _measured(sandbox: Sandbox, placed: Placed) -> Placed:
    """With the wall as it was measured when the member became ready: the same wall stands."""
    known: Mapping[str, Any] = sandbox.boundary
    return replace(placed, boundary=known) if known else placed
