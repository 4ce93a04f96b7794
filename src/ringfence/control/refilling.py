"""Keeping pools filled: how many members, started by whom, replaced when.

One process at a time looks after a pool, by lease, and says so in each commit that makes a member: several
processes never fill one twice. Members are started a few at once, so that claims are not slowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringfence.control.caching import RowCache
from ringfence.control.core import Core, log, passed
from ringfence.control.ending import Ending
from ringfence.control.pools import BELIEVED, POOL, RATE, Pool, Pools
from ringfence.control.queueing import Queues
from ringfence.control.records import KIND, MEMBERS, Sandbox
from ringfence.control.sandboxes import charge
from ringfence.control.starting import ended_at_once
from ringfence.model.errors import (
    Conflict,
    LeaseLost,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    StartFailed,
    StoreUnavailable,
    WrongState,
)
from ringfence.model.ids import new_id
from ringfence.model.levels import Cause
from ringfence.model.states import State
from ringfence.placement.contract import PlacedSpec
from ringfence.store.contract import Event, Held, Put, Row

LEASE_TIME = 5.0
LOOK = 0.5  # seconds between two looks at pools that nobody urged to be looked at
SEEN = 0.02  # at most so often at those that somebody did
MEMBER_LIFE = 3600.0  # seconds that a member may wait before it is replaced
COVER = 10.0  # seconds of arrivals that the members should last for
HALF_LIFE = 30.0  # seconds after which an arrival counts half
COUNTED = 0.25  # seconds that the number of claims is believed: a rate over half a minute has the time
RETRY_FIRST, RETRY_MOST = 0.5, 60.0
START_TIME = 120.0
SPARE = 1.5  # more than so many times what is wanted is too many
_MOST = 10_000


class Refilling:
    """The background work for pools in one process."""

    def __init__(self, core: Core, pools: Pools, queues: Queues, ending: Ending) -> None:
        self.core = core
        self.pools = pools
        self.queues = queues
        self.ending = ending
        self._urged = asyncio.Event()
        self._warming = asyncio.Semaphore(core.settings.parallel_warming)
        self._started: dict[str, set[asyncio.Task[None]]] = {}
        self._unwritten: dict[str, set[str]] = {}  # members decided on that have no row yet, by pool
        self._mine: dict[str, float] = {}  # leases, with when to renew them
        self._rates = RowCache(core.store, RATE)
        # By pool: when its claims were counted, and how many there were.
        self._claims: dict[str, tuple[float, int]] = {}
        self._lapsed = 0.0

    async def close(self) -> None:
        """Let go of what is watched. Idempotent."""
        await self._rates.close()

    def urge(self, pool: str) -> None:
        """A pool needs looking after now."""
        self._urged.set()

    async def run(self) -> None:
        """Look after pools until cancelled."""
        while True:
            self._urged.clear()
            try:
                await self.look()
            except (RingfenceError, StoreUnavailable) as error:
                log.warning("pools: %s", error)
            except Exception:
                log.exception("pools")
            await asyncio.sleep(SEEN)
            await passed(self._urged, LOOK)

    async def look(self) -> None:
        """One look at every pool that is this process's to fill."""
        pools = await self.pools.all()
        now = self.core.now()
        for pool in pools:
            if await self._held(pool, now):
                try:
                    await self._fill(pool)
                except LeaseLost:
                    self._mine.pop(pool.id, None)
        if now - self._lapsed >= BELIEVED:
            self._lapsed = now
            there = {pool.id for pool in pools}
            self._claims = {id: known for id, known in self._claims.items() if id in there}
            await self._retire(pools)
            await self.queues.tidy()

    async def _held(self, pool: Pool, now: float) -> bool:
        if self._mine.get(pool.id, 0.0) > now:
            return True
        if await self.core.store.lease(lease_of(pool.id), self.core.owner, LEASE_TIME):
            self._mine[pool.id] = now + LEASE_TIME / 3
            return True
        self._mine.pop(pool.id, None)
        return False

    # -- how many

    async def _fill(self, pool: Pool) -> None:
        core = self.core
        try:
            key, digest = await self.pools.key(pool)
        except NotFound as error:
            await self._failed(pool, error)
            return
        started = self._started.setdefault(pool.id, set())
        # In this order, and the rows in one look: what is on its way may count twice, never not at all. What
        # another process has begun counts until it is warm, or found to be dead.
        unwritten = len(self._unwritten.get(pool.id, ()))
        there = await core.store.count(KIND, states=[state.value for state in MEMBERS], key=key)
        wanted = await self.wanted(pool)
        if pool.retry > core.now():
            return
        # After a failure one at a time, until one succeeds.
        limit = 1 if pool.failures else _MOST
        missing = min(wanted - there - unwritten, limit - len(started))
        room = 2 * core.settings.parallel_warming - len(started)
        # Who has got all that he wanted looks again when somebody takes one, or at the usual time.
        more = (lambda _: self._urged.set()) if missing > room or pool.failures else None
        for _ in range(min(missing, room)):
            id = new_id("sb")
            self._unwritten.setdefault(pool.id, set()).add(id)
            task = core.task(self._member(pool, key, digest, id))
            started.add(task)
            task.add_done_callback(started.discard)
            if more is not None:
                task.add_done_callback(more)
        enough = min(pool.max, math.ceil(wanted * SPARE) + 1)
        if there > enough and await core.store.count(KIND, states=[State.WARM.value], key=key) > enough:
            await self._surplus(key)

    async def wanted(self, pool: Pool) -> int:
        """Members that should be ready: what arrives in :data:`COVER` seconds, between ``min`` and ``max``.

        The rate is in the store, so that it survives a restart and goes on in another process.
        """
        core = self.core
        now = core.now()
        counted, claims = self._claims.get(pool.id, (-math.inf, 0))
        if not 0 <= now - counted < COUNTED:
            claims = await core.store.counter(pool.counter("claims"))
            self._claims[pool.id] = (now, claims)
        try:
            row = await self._rates.get(pool.id)
        except NotFound:
            row = Row(
                RATE, pool.id, pool.project, created=now, document={"rate": 0.0, "at": now, "claims": 0}
            )
        rate = arrivals(row.document, claims, now)
        past = now - float(row.document["at"])
        if row.revision == 0 or (past >= 1.0 and (claims != row.document["claims"] or rate > 0.001)):
            document = {"rate": rate, "at": now, "claims": claims}
            with contextlib.suppress(Conflict):
                await core.store.commit(Put(replace(row, document=document)))
        return max(pool.min, min(pool.max, math.ceil(rate * COVER - 0.01)))

    async def _surplus(self, key: str) -> None:
        """One less: the oldest, and only one a look, because arrivals come in waves."""
        rows = await self.core.store.find(KIND, states=[State.WARM.value], key=key, limit=1)
        for row in rows:
            self.core.task(self._end(Sandbox.from_row(row), "the pool has more than it needs"))

    # -- one member

    async def _member(self, pool: Pool, key: str, digest: str, id: str) -> None:
        try:
            async with self._warming:
                await self._made(pool, key, digest, id)
        finally:
            self._unwritten[pool.id].discard(id)

    async def _made(self, pool: Pool, key: str, digest: str, id: str) -> None:
        core = self.core
        token = core.token()
        try:
            now = core.now()
            policy = self.pools.policy(pool)
            limits = replace(policy.door.limits, timeout=2 * MEMBER_LIFE, idle=None)
            policy = policy.with_door(limits=limits)
            row = Row(
                KIND,
                id,
                "",
                State.WARMING.value,
                key=key,
                created=now,
                document={
                    "member": True,
                    "pool": pool.id,
                    "template": pool.template,
                    "digest": digest,
                    "policy": policy.to_dict(),
                    "actor": token,
                    "charged": charge(policy),
                },
            )
            told = core.event("warming", row.id, "", pool=pool.id)
            admitted = await core.admission.admission("", policy)
            (row,) = await core.commit(Held(lease_of(pool.id), core.owner), Put(row), *admitted, told)
            self._unwritten[pool.id].discard(id)
            try:
                await self._start(pool, Sandbox.from_row(row), token, digest)
            except BaseException as error:
                await core.whole(self._undo(row.id))
                if isinstance(error, RingfenceError):
                    await self._failed(pool, error)
                    return
                raise
            if pool.failures:
                await self._note(pool, failures=0, error="", retry=0.0)
            self.queues.signal(pool.id)
        except QuotaExceeded as error:
            await self._failed(pool, error)
        except (LeaseLost, StoreUnavailable):
            self._mine.pop(pool.id, None)
        finally:
            core.done(token)

    async def _start(self, pool: Pool, sandbox: Sandbox, token: str, digest: str) -> None:
        core = self.core
        expires = core.now() + MEMBER_LIFE
        spec = PlacedSpec(
            id=sandbox.id,
            policy=sandbox.policy,
            template=digest,
            owner={"project": "", "user": ""},
            deadline=core.now() + 2 * MEMBER_LIFE,
        )
        try:
            async with asyncio.timeout(START_TIME):
                placed = await core.placement.start(spec)
                boundary = placed.boundary or await core.placement.measure(sandbox.id)
        except TimeoutError:
            raise StartFailed(f"a member did not start within {START_TIME:g} s", step="start") from None
        if placed.state == "ended":
            raise ended_at_once(placed)
        if placed.template != digest:
            raise StartFailed(f"template {pool.template} is another one meanwhile", step="template")
        await core.change(
            sandbox,
            State.WARM,
            expect={State.WARMING},
            token=token,
            data={"pool": pool.id},
            drop=("actor",),
            boundary=dict(boundary),
            capabilities=dict(placed.capabilities),
            runtime=placed.runtime,
            node=placed.node,
            placement=core.placement.name,
            address=placed.address,
            started=placed.started_at,
            expires=expires,
        )

    async def _undo(self, id: str) -> None:
        with contextlib.suppress(RingfenceError):
            row = await self.core.store.get(KIND, id)
            await self.ending.end(
                Sandbox.from_row(row), Cause.START_FAILED, expect=(State.WARMING, State.WARM)
            )

    async def _failed(self, pool: Pool, error: RingfenceError) -> None:
        """Wait longer after each failure in a row; the pool says why."""
        failures = pool.failures + 1
        delay = min(RETRY_MOST, RETRY_FIRST * 2 ** min(failures - 1, 10))
        log.warning("pool %s: no member could be started: %s", pool.name, error)
        await self._note(pool, failures=failures, error=error.message, retry=self.core.now() + delay)

    async def _note(self, pool: Pool, **facts: Any) -> None:
        with contextlib.suppress(RingfenceError):
            row = await self.core.store.get(POOL, pool.id)
            if (row.document["template"], row.document["policy"]) != (pool.template, pool.policy):
                return  # its owner has changed what members are made of: this was one of the old ones
            event = Event(
                POOL,
                pool.id,
                pool.project,
                "pool.failing" if facts["error"] else "pool.recovered",
                self.core.now(),
                {"error": facts["error"]},
            )
            await self.core.commit(Put(replace(row, document={**row.document, **facts})), event)
            self.pools.forget()

    # -- members that nobody wants

    async def _retire(self, pools: Any) -> None:
        """End members of pools that are gone, of templates and walls that were replaced, and old ones."""
        core = self.core
        keys = set()
        for pool in pools:
            with contextlib.suppress(RingfenceError):
                keys.add((await self.pools.key(pool))[0])
        now = core.now()
        after = ""
        while rows := await core.store.find(
            KIND, states=[state.value for state in MEMBERS], after=after, limit=500
        ):
            for row in rows:
                old = row.state == State.WARM and float(row.document.get("expires", now + 1)) <= now
                if row.state == State.WARM and (row.key not in keys or old):
                    known = any(pool.id == row.document.get("pool") for pool in pools)
                    why = "it waited too long" if old else "its template or wall was replaced"
                    self.core.task(self._end(Sandbox.from_row(row), why if known else "its pool was removed"))
            after = rows[-1].id

    async def _end(self, sandbox: Sandbox, why: str) -> None:
        with contextlib.suppress(WrongState, NotFound):
            await self.ending.end(sandbox, Cause.KILLED, detail=why, expect=(State.WARM,))


def arrivals(known: Mapping[str, Any], claims: int, now: float) -> float:
    """Requests a second: a mean in which a request counts half after :data:`HALF_LIFE` seconds.

    ``known``: ``rate`` at the time ``at`` with so many ``claims`` ever.
    """
    past = max(0.0, now - float(known["at"]))
    came = max(0, claims - int(known["claims"]))
    if past <= 0:
        return float(known["rate"])
    keep: float = 0.5 ** (past / HALF_LIFE)
    return float(known["rate"]) * keep + (1 - keep) * came / past


def lease_of(pool: str) -> str:
    """Held by the process that fills a pool."""
    return f"refill/{pool}"
