"""Pools: sandboxes started ahead, each claimed once by one conditional write.

A member's key names pool, template digest, wall digest and network mode: a request that differs in any of
them is started on demand, never served by a member that is close enough. What a request may differ in (its
door: environment, secrets, files, labels, network rules, timeouts) is bound at the claim.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from ringfence.control.core import Core
from ringfence.control.records import ALIVE, KIND, CreateSandbox
from ringfence.model.errors import Conflict, InvalidRequest, NotFound
from ringfence.model.ids import new_id
from ringfence.model.policies import from_dict
from ringfence.model.policy import Policy
from ringfence.model.states import State
from ringfence.model.values import dataclass
from ringfence.store.contract import Event, Put, Remove, Row

if TYPE_CHECKING:
    from ringfence.control.principals import Principal

POOL = "pool"
TICKET = "ticket"  # somebody waits in a pool's queue
RATE = "pool-rate"  # a pool's arrivals, as the process that refills it has measured them
TURNS = "pool-turns"  # when each project was served from the queue last
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_MOST = 10_000
HOST = "host"  # the host's own files; whatever they are, it is this template
BELIEVED = 1.0  # seconds for which what was read of pools and templates is believed


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool. ``min`` and ``max``: members ready, between which their number follows the arrivals.

    ``most``: claimed sandboxes alive at once; ``overflow``: of these, started on demand because no member was
    ready. ``queue``: requests that may wait beyond that, ``queue_seconds`` long each. ``error``: why the last
    start of a member failed, with ``retry``, when the next is tried.
    """

    id: str
    project: str
    name: str
    template: str
    policy: Mapping[str, Any]
    row: Row
    created: float = 0.0
    min: int = 1
    max: int = 10
    most: int = 100
    overflow: int = 20
    queue: int = 100
    queue_seconds: float = 30.0
    error: str = ""
    retry: float = 0.0
    failures: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_row(cls, row: Row) -> Pool:
        """The value of a row."""
        known = {name: row.document[name] for name in _STORED if name in row.document}
        return cls(
            id=row.id,
            project=row.project,
            name=row.key,
            row=row,
            created=row.created,
            labels=row.labels,
            **known,
        )

    def as_dict(self) -> dict[str, Any]:
        """What its owner may see; JSON-able."""
        shown = {name: getattr(self, name) for name in _STORED}
        shown["policy"] = dict(self.policy)
        return {
            "id": self.id,
            "project": self.project,
            "name": self.name,
            "created": self.created,
            "labels": dict(self.labels),
            **shown,
        }

    def counter(self, name: str) -> str:
        """The store's counter of that name: claims, running, overflow, waiting."""
        return f"pool/{self.id}/{name}"


_NUMBERS = ("min", "max", "most", "overflow", "queue", "queue_seconds")
_STORED = ("template", "policy", *_NUMBERS, "error", "retry", "failures")


class Pools:
    """Pools of the service, by the name that they have in their project."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._pools: tuple[float, list[Pool]] = (0.0, [])
        self._digests: dict[str, tuple[float, str]] = {}
        self._policies: dict[tuple[str, int], Policy] = {}
        self._keys: dict[tuple[str, int], tuple[str, str]] = {}
        self.roomier: Callable[[str], None] = _nobody  # told the id of a pool that may have more now
        self.urge: Callable[[str], None] = _nobody  # told the id of a pool that needs looking after

    # -- by their owners

    async def create(
        self,
        principal: Principal,
        name: str,
        *,
        template: str = "host",
        policy: Policy | None = None,
        labels: Mapping[str, str] | None = None,
        **numbers: float,
    ) -> Pool:
        """Make one; its members are started in the background.

        Raises:
            InvalidRequest: a value can't be. Conflict: the project has a pool of that name. QuotaExceeded.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} is no name of a pool", hint="small letters, digits, . _ -")
        document = {"template": template, "policy": (policy or Policy()).to_dict(), **_checked(numbers)}
        now = self.core.now()
        row = Row(
            POOL,
            new_id("pl"),
            principal.project,
            "active",
            key=name,
            created=now,
            labels=dict(labels or {}),
            document=document,
        )
        _check_sizes(Pool.from_row(row))
        await self.digest(template)
        told = Event(POOL, row.id, row.project, "pool.created", now, {"name": name})
        admitted = await self.core.admission.pool(principal.project, Pool.from_row(row).max)
        try:
            (row,) = await self.core.commit(Put(row, unique=True), *admitted, told)
        except Conflict:
            raise Conflict(f"there is a pool {name} already", hint="choose another name") from None
        self.forget()
        self.urge(row.id)
        return Pool.from_row(row)

    async def get(self, principal: Principal, name: str) -> Pool:
        """One of the project's, by name or id.

        Raises:
            NotFound: the project has none of that name.
        """
        for row in await self.core.store.find(POOL, project=principal.project, key=name, limit=1):
            return Pool.from_row(row)
        with contextlib.suppress(NotFound):
            row = await self.core.store.get(POOL, name)
            if row.project == principal.project:
                return Pool.from_row(row)
        raise NotFound(f"there is no pool {name}", hint="`ringfence pool ls` shows those there are")

    async def list(self, principal: Principal, after: str = "", limit: int = 100) -> list[Pool]:
        """The project's, by id."""
        rows = await self.core.store.find(POOL, project=principal.project, after=after, limit=limit)
        return [Pool.from_row(row) for row in rows]

    async def update(
        self,
        principal: Principal,
        name: str,
        *,
        template: str | None = None,
        policy: Policy | None = None,
        labels: Mapping[str, str] | None = None,
        **numbers: float,
    ) -> Pool:
        """Change one. Another template or wall replaces its members."""
        changes: dict[str, Any] = _checked(numbers)
        if template is not None:
            await self.digest(template)
            changes["template"] = template
        if policy is not None:
            changes["policy"] = policy.to_dict()
        for _ in range(10):
            pool = await self.get(principal, name)
            document = {**pool.row.document, **changes, "error": "", "retry": 0.0, "failures": 0}
            row = replace(pool.row, document=document, labels=pool.labels if labels is None else dict(labels))
            _check_sizes(Pool.from_row(row))
            told = Event(
                POOL, row.id, row.project, "pool.updated", self.core.now(), {"fields": sorted(changes)}
            )
            more = await self.core.admission.pool(pool.project, Pool.from_row(row).max - pool.max)
            try:
                (row,) = await self.core.commit(Put(row), *more, told)
            except Conflict:
                continue
            self.forget()
            self.urge(row.id)
            self.roomier(row.id)
            return Pool.from_row(row)
        raise Conflict(f"pool {name} is changed all the time", hint="try again")

    async def delete(self, principal: Principal, name: str) -> None:
        """Remove one; its members are ended in the background, sandboxes claimed from it live on."""
        pool = await self.get(principal, name)
        told = Event(POOL, pool.id, pool.project, "pool.removed", self.core.now(), {"name": pool.name})
        less = await self.core.admission.pool(pool.project, -pool.max)
        removed = Remove(POOL, pool.id, pool.row.revision)
        try:
            await self.core.commit(removed, Remove(RATE, pool.id), Remove(TURNS, pool.id), *less, told)
        except Conflict:  # changed meanwhile, or gone
            await self.delete(principal, name)
            return
        self.forget()
        self.urge(pool.id)

    async def queue(self, principal: Principal, name: str) -> dict[str, Any]:
        """How busy it is: pool, waiting, oldest_waiting_seconds, warm, running."""
        pool = await self.get(principal, name)
        key, _ = await self.key(pool)
        store = self.core.store
        waiting = await store.find(TICKET, key=pool.id, limit=_MOST)
        oldest = min((row.created for row in waiting), default=None)
        running = 0
        states = [state.value for state in ALIVE]
        running = await store.count(KIND, states=states, key=key)
        return {
            "pool": pool.name,
            "waiting": len(waiting),
            "oldest_waiting_seconds": 0.0 if oldest is None else max(0.0, self.core.now() - oldest),
            "warm": await store.count(KIND, states=[State.WARM.value], key=key),
            "running": running,
        }

    # -- which one serves a request

    def forget(self) -> None:
        """Read pools again at the next request."""
        self._pools = (0.0, [])

    def changed(self, id: str) -> None:
        """A row changed in some process."""
        if not id or id.startswith("pl-"):
            self.forget()

    def templates_changed(self) -> None:
        """Names of templates may mean others now."""
        self._digests.clear()
        self.urge("")

    async def all(self) -> Sequence[Pool]:
        """Every project's, as they were at most a second ago."""
        read, pools = self._pools
        if time.monotonic() - read < BELIEVED:
            return pools
        pools = []
        after = ""
        while rows := await self.core.store.find(POOL, after=after, limit=500):
            pools += [Pool.from_row(row) for row in rows]
            after = rows[-1].id
        self._pools = (time.monotonic(), pools)
        return pools

    async def digest(self, template: str) -> str:
        """What a template's name means now.

        Raises:
            NotFound: there is none of that name.
        """
        if template == HOST:
            return HOST
        known = self._digests.get(template)
        if known is not None and time.monotonic() - known[0] < BELIEVED:
            return known[1]
        now = time.monotonic()
        names: dict[str, str] = {}
        for each in await self.core.placement.templates():
            digest = str(each.get("digest") or each.get("name"))
            names[digest] = digest
            for name in (each.get("name"), *(each.get("names") or ())):
                if name:
                    names[str(name)] = digest
        self._digests = {name: (now, digest) for name, digest in names.items()}
        if template not in names:
            raise NotFound(f"there is no template {template}", hint="`ringfence template ls` shows them")
        return names[template]

    async def key(self, pool: Pool) -> tuple[str, str]:
        """The key of its members, and the digest of their template."""
        digest = await self.digest(pool.template)
        known = self._keys.get((pool.id, pool.row.revision))
        if known is None or known[1] != digest:
            policy = self.policy(pool)
            known = (member_key(pool.id, digest, policy.wall.digest(), policy.door.network.mode), digest)
            if len(self._keys) > _MOST:
                self._keys.clear()
            self._keys[pool.id, pool.row.revision] = known
        return known

    def policy(self, pool: Pool) -> Policy:
        """Its policy, read once."""
        known = self._policies.get((pool.id, pool.row.revision))
        if known is None:
            if len(self._policies) > _MOST:
                self._policies.clear()
            known = self._policies[pool.id, pool.row.revision] = from_dict(dict(pool.policy))
        return known

    async def choose(
        self, principal: Principal, request: CreateSandbox
    ) -> tuple[Pool, str, str, CreateSandbox] | None:
        """The pool that serves a request: it, its members' key, their template's digest, and the request as
        it has to be made there. ``None``: it is started on demand.

        Raises:
            NotFound: the project has no pool of the name that it asks for.
        """
        pools = [pool for pool in await self.all() if pool.project == principal.project]
        if request.pool:
            named = [pool for pool in pools if request.pool in (pool.name, pool.id)]
            pools = named or [await self.get(principal, request.pool)]
            request = _taken_over(pools[0], self.policy(pools[0]), request)
        if not pools or request.snapshot or request.volumes:
            return None
        if request.policy.door.limits.max_template_age is not None:
            return None  # the node looks at the template's age at the start
        try:
            digest = await self.digest(request.template)
        except NotFound:
            return None  # the start says so
        wall, mode = request.policy.wall, request.policy.door.network.mode
        wall_digest = ""
        for pool in pools:
            key, of = await self.key(pool)
            theirs = self.policy(pool)
            if of != digest or mode != theirs.door.network.mode:
                continue
            if wall == theirs.wall:
                return pool, key, digest, request
            wall_digest = wall_digest or wall.digest()  # what is equal may be written otherwise
            if key == member_key(pool.id, digest, wall_digest, mode):
                return pool, key, digest, request
        return None


def member_key(pool: str, digest: str, wall: str, mode: str) -> str:
    """What a request must have in common with a pool's members, and whose they are."""
    text = "\0".join((digest, wall, mode))
    return f"{pool}/{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _taken_over(pool: Pool, theirs: Policy, request: CreateSandbox) -> CreateSandbox:
    """A request that names a pool and says nothing of wall and template means the pool's."""
    usual = Policy()
    policy = request.policy
    if policy.wall == usual.wall:
        policy = replace(policy, wall=theirs.wall)
        if policy.door == usual.door:
            policy = replace(policy, door=theirs.door)
    template = pool.template if request.template == "host" else request.template
    return replace(request, policy=policy, template=template)


def _checked(numbers: Mapping[str, float]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in numbers.items():
        if name not in _NUMBERS:
            raise InvalidRequest(f"a pool has no {name}", hint=f"it has {', '.join(_NUMBERS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
            raise InvalidRequest(f"{name} is 0 to {_MOST}, not {value!r}", field=name)
        checked[name] = float(value) if name == "queue_seconds" else int(value)
    return checked


def _check_sizes(pool: Pool) -> None:
    if pool.min > pool.max:
        raise InvalidRequest(f"min ({pool.min}) is more than max ({pool.max})", field="min")
    if pool.overflow > pool.most:
        raise InvalidRequest(f"overflow ({pool.overflow}) is more than most ({pool.most})", field="overflow")


def _nobody(_: str) -> None:
    pass
