"""What a project may have, and what the machines can carry: counters of the store, changed in the very
transaction that makes or ends what they count.

So a counter is the sum of what lives, whoever is killed when: there is nothing to repair.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from ringfence.control.caching import RowCache
from ringfence.model.errors import InvalidRequest, NotFound, RateLimited
from ringfence.model.policy import Policy, Resources
from ringfence.model.values import dataclass
from ringfence.store.contract import Add, Event, Put, Row, Store

if TYPE_CHECKING:
    from ringfence.placement.contract import Capacity

KIND = "quota"
GIB = 1024**3
_MINUTE = 60.0
_CAPACITY_LIFE = 10.0  # seconds that the machines' size is believed
_MOST_BUCKETS = 10_000


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one project; ``None``: no limit.

    ``alive``: sandboxes that have not ended. ``cpus`` and ``memory`` (bytes): the sum of what those may use.
    ``storage``: bytes of their disks, of volumes and snapshots. ``creates``: sandboxes a minute. ``pool``:
    members of all pools together, at most. ``requests``: a second, and ``burst`` at once, per API process.

    At the egress doors, all sandboxes together: ``connections`` at once and ``bandwidth`` (bits a second,
    each way), and ``egress_rate``, requests a second, for all API processes of the store together;
    ``egress_requests``, ``egress_bytes``, ``egress_spend`` since the project is.
    """

    alive: int | None = 1000
    cpus: float | None = None
    memory: int | None = None
    storage: int | None = 1024 * GIB
    creates: int | None = 6000
    pool: int | None = 200
    requests: float | None = 2000.0
    burst: int = 4000
    connections: int | None = None
    bandwidth: int | None = None
    egress_requests: int | None = None
    egress_bytes: int | None = None
    egress_rate: float | None = None
    egress_spend: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], base: Quota | None = None) -> Quota:
        """Limits by name over those of ``base``.

        Raises:
            InvalidRequest: an unknown name, or a value that is no limit.
        """
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise InvalidRequest(
                    f"{name[:80]!r} is no quota", hint=f"there are {', '.join(sorted(known))}"
                )
            if value is None and name != "burst":
                continue
            whole = name not in ("cpus", "requests", "egress_rate", "egress_spend")
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < 2**53:
                raise InvalidRequest(
                    f"{name}: {value!r} is no limit", hint="a number from 0 on, or null for none"
                )
            if name in ("bandwidth", "egress_rate") and not value:
                raise InvalidRequest(f"{name}: 0 is no limit", hint="more than 0, or null for none")
        return replace(base or cls(), **given)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a project has now, in the units of :class:`Quota`."""

    alive: int
    cpus: float
    memory: int
    storage: int
    creates: int
    pool: int


@dataclass(frozen=True, slots=True)
class Oversell:
    """How often the machines' CPUs and memory may be promised. Most sandboxes idle most of the time."""

    cpus: float = 32.0
    memory: float = 4.0


class Quotas:
    """Admission: what a change of the store has to carry so that limits hold. See docs/store.md.

    ``capacity``: asks the placement how big the machines are; without it they are not looked at.
    """

    def __init__(
        self,
        store: Store,
        *,
        default: Quota | None = None,
        capacity: Callable[[], Awaitable[Capacity]] | None = None,
        oversell: Oversell | None = None,
    ) -> None:
        self.store = store
        self.default = default or Quota()
        self.oversell = oversell or Oversell()
        self._ask = capacity
        self._capacity: Capacity | None = None
        self._asked = 0.0
        self._rows = RowCache(store, KIND)
        self._buckets: dict[str, _Bucket] = {}

    async def close(self) -> None:
        """Let go. Idempotent."""
        await self._rows.close()

    # --- limits ---------------------------------------------------------------------------------------------

    async def of(self, project: str) -> Quota:
        """The limits of a project."""
        try:
            row = await self._rows.get(project)
        except NotFound:
            return self.default
        return Quota.from_dict(row.document["limits"], self.default)

    async def set(self, project: str, limits: Mapping[str, Any], *, by: str = "") -> Quota:
        """Change some of a project's limits; what is not named stays. What lives already lives on.

        Raises:
            InvalidRequest: as :meth:`Quota.from_dict`.
            Conflict: somebody else changes them at the same time.
        """
        Quota.from_dict(limits)
        try:
            row = await self.store.get(KIND, project)
        except NotFound:
            row = Row(KIND, project, project=project, created=time.time(), document={"limits": {}})
        had = {**row.document["limits"], **limits}
        made = Quota.from_dict(had, self.default)
        event = Event(
            KIND, project, project, "quota.changed", time.time(), {"limits": dict(limits), "by": by}
        )
        await self.store.commit(Put(replace(row, document={"limits": had})), event, durable=True)
        self._rows.forget(project)
        return made

    async def usage(self, project: str) -> Usage:
        """What a project has now."""
        names = _Names(project)
        return Usage(
            alive=await self.store.counter(names.alive),
            cpus=await self.store.counter(names.cpus) / 1000,
            memory=await self.store.counter(names.memory),
            storage=await self.store.counter(names.storage),
            creates=await self.store.counter(names.creates),
            pool=await self.store.counter(names.pool),
        )

    # --- sandboxes ------------------------------------------------------------------------------------------

    async def admission(self, project: str, policy: Policy | Resources) -> tuple[Add, ...]:
        """For one sandbox more, of this project and on the machines; the commit of its row carries it.

        ``project`` ``""``: a member of a pool that is nobody's yet; only the machines carry it.
        """
        ours = await self._of_project(project, _resources(policy)) if project else ()
        return (*ours, *await self._of_machines(_resources(policy)))

    async def claim(self, project: str, policy: Policy | Resources) -> tuple[Add, ...]:
        """For a member of a pool that becomes this project's: the machines carry it already."""
        return await self._of_project(project, _resources(policy))

    async def release(self, project: str, policy: Policy | Resources) -> tuple[Add, ...]:
        """For one sandbox less: exactly what :meth:`admission` (or before a claim, with ``""``) has added."""
        need = _resources(policy)
        changes = []
        if project:
            names = _Names(project)
            changes += [
                Add(names.alive, -1),
                Add(names.cpus, -_thousandths(need.cpus)),
                Add(names.memory, -need.memory),
                Add(names.storage, -need.disk),
            ]
        changes += [Add(HOST_CPUS, -_thousandths(need.cpus)), Add(HOST_MEMORY, -need.memory)]
        return tuple(changes)

    async def _of_project(self, project: str, need: Resources) -> tuple[Add, ...]:
        quota, names = await self.of(project), _Names(project)
        cpus = None if quota.cpus is None else _thousandths(quota.cpus)
        changes = [
            Add(names.alive, 1, quota.alive),
            Add(names.cpus, _thousandths(need.cpus), cpus),
            Add(names.memory, need.memory, quota.memory),
            Add(names.storage, need.disk, quota.storage),
        ]
        if quota.creates is not None:
            changes.append(Add(names.creates, 1, quota.creates, every=_MINUTE))
        return tuple(changes)

    async def _of_machines(self, need: Resources) -> tuple[Add, ...]:
        # Counted without a limit too: the limit may come with the next start of the service.
        most_cpus = most_memory = None
        if self._ask is not None:
            now = time.monotonic()
            if self._capacity is None or now - self._asked > _CAPACITY_LIFE:
                self._capacity, self._asked = await self._ask(), now
            most_cpus = _thousandths(self._capacity.cpus * self.oversell.cpus)
            most_memory = int(self._capacity.memory * self.oversell.memory)
        return (
            Add(HOST_CPUS, _thousandths(need.cpus), most_cpus),
            Add(HOST_MEMORY, need.memory, most_memory),
        )

    # --- storage and pools ----------------------------------------------------------------------------------

    async def storage(self, project: str, more: int) -> tuple[Add, ...]:
        """For a volume or snapshot of so many bytes, or (negative) without it."""
        quota = await self.of(project)
        return (Add(_Names(project).storage, more, quota.storage),)

    async def pool(self, project: str, more: int) -> tuple[Add, ...]:
        """For a pool that may have so many members more at most, or (negative) less."""
        quota = await self.of(project)
        return (Add(_Names(project).pool, more, quota.pool),)

    # --- requests -------------------------------------------------------------------------------------------

    async def admit_request(self, project: str) -> None:
        """Count one request.

        Raises:
            RateLimited: too many a second; ``details['retry_after']`` says when to try again.
        """
        quota = await self.of(project)
        if quota.requests is None:
            return
        bucket = self._buckets.get(project)
        if bucket is None:
            if len(self._buckets) >= _MOST_BUCKETS:
                self._buckets.clear()  # full buckets for everyone: generous for an instant, bounded for ever
            bucket = self._buckets[project] = _Bucket(float(quota.burst), time.monotonic())
        wait = bucket.take(quota.requests, max(quota.burst, 1), time.monotonic())
        if wait > 0:
            raise RateLimited(
                f"more than {quota.requests:g} requests a second",
                hint=f"try again in {wait:.2g} s",
                counter=f"requests a second of {project}",
                most=quota.requests,
                retry_after=wait,
            )


class _Bucket:
    """Tokens that come back at a rate; what it can't give costs nothing."""

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at

    def take(self, rate: float, most: float, now: float) -> float:
        """0 and one token less, or the seconds until there will be one."""
        self.tokens = min(most, self.tokens + (now - self.at) * rate)
        self.at = now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) / rate if rate > 0 else _MINUTE


# Names of counters: they stand in the error that a client reads.
HOST_CPUS = "CPUs of the machines (1/1000)"
HOST_MEMORY = "memory of the machines (bytes)"


class _Names:
    def __init__(self, project: str) -> None:
        self.alive = f"sandboxes of {project}"
        self.cpus = f"CPUs of {project} (1/1000)"
        self.memory = f"memory of {project} (bytes)"
        self.storage = f"storage of {project} (bytes)"
        self.creates = f"creates a minute of {project}"
        self.pool = f"pool members of {project}"


def _resources(policy: Policy | Resources) -> Resources:
    return policy if isinstance(policy, Resources) else policy.wall.resources


def _thousandths(cpus: float) -> int:
    """Whole numbers add up without a rest."""
    return -(-int(cpus * 1_000_000) // 1000)
