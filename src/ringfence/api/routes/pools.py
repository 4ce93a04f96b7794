"""Pools: sandboxes started ahead."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ringfence.api import requesting, shown
from ringfence.api.calls import Call
from ringfence.api.paging import page
from ringfence.api.routing import Routes
from ringfence.api.types import Body, CreateSandbox, Labels, Page, Paging, Shown, Text
from ringfence.control.pools import Pool

routes = Routes("pools")
Count = Annotated[int, Field(ge=0, le=10_000)]


class Numbers(Body):
    """How many members; what is left out has its default, or stays."""

    min: Count | None = Field(None, description="Members ready at least.")
    max: Count | None = Field(None, description="Members ready at most.")
    most: Count | None = Field(None, description="Claimed sandboxes alive at once.")
    overflow: Count | None = Field(None, description="Of these, started on demand because none was ready.")
    queue: Count | None = Field(None, description="Requests that may wait beyond that.")
    queue_seconds: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] | None = None
    labels: Labels | None = None

    def numbers(self) -> dict[str, float]:
        """Those that were given."""
        names = ("min", "max", "most", "overflow", "queue", "queue_seconds")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class _Walled(Numbers):
    template: Text | None = None
    policy: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None
    runtime: Text | None = None
    level: Annotated[str, Field(pattern="^L[1-4]$")] | None = None
    size: Annotated[str, Field(pattern="^(small|medium|large)$")] | None = None
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = None
    memory: Annotated[int, Field(gt=0, lt=2**63)] | Text | None = None
    disk: Annotated[int, Field(gt=0, lt=2**63)] | Text | None = None
    timeout: Annotated[float, Field(gt=0, le=366 * 24 * 3600, allow_inf_nan=False)] | Text | None = None

    def wall(self) -> Any:
        """The policy of the members; ``None`` if nothing was said about it."""
        single = {
            name: getattr(self, name)
            for name in ("runtime", "level", "size", "cpus", "memory", "disk", "timeout")
        }
        if self.policy is None and all(value is None for value in single.values()):
            return None
        return requesting.policy(self.policy, **single)


class CreatePool(_Walled):
    """A pool, please."""

    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")


class UpdatePool(_Walled):
    """Changes of a pool. Another template or wall replaces its members."""


class PoolShown(Shown):
    """A pool."""

    id: str
    name: str
    template: str
    min: int
    max: int


class PoolPage(Page):
    """One page of pools."""

    items: list[PoolShown]  # type: ignore[assignment]


class Queue(Shown):
    """How busy a pool is; autoscalers read it."""

    pool: str
    waiting: int
    oldest_waiting_seconds: float
    warm: int
    running: int


def _pool(pool: Pool) -> dict[str, Any]:
    told = pool.as_dict()
    told["created_at"] = told.pop("created")
    return told


@routes.post("/v1/pools", body=CreatePool, answer=PoolShown, status=201, creates=True)
async def create(call: Call, body: CreatePool) -> dict[str, Any]:
    """Make a pool; its members are started in the background."""
    made = await call.control.pools.create(
        call.principal,
        body.name,
        template=body.template or "host",
        policy=body.wall(),
        labels=dict(body.labels or {}),
        **body.numbers(),
    )
    return _pool(made)


@routes.get("/v1/pools", query=Paging, answer=PoolPage)
async def list_pools(call: Call, query: Paging) -> dict[str, Any]:
    """The project's pools."""

    async def find(after: str, limit: int) -> list[Pool]:
        return await call.control.pools.list(call.principal, after, limit)

    return await page(call, "pools", query.limit, query.cursor, find, lambda each: each.id, _pool)


@routes.get("/v1/pools/{pool}", answer=PoolShown)
async def show(call: Call) -> dict[str, Any]:
    """One pool, by name or id."""
    return _pool(await call.control.pools.get(call.principal, call.params["pool"]))


@routes.patch("/v1/pools/{pool}", body=UpdatePool, answer=PoolShown)
async def update(call: Call, body: UpdatePool) -> dict[str, Any]:
    """Change a pool."""
    changed = await call.control.pools.update(
        call.principal,
        call.params["pool"],
        template=body.template,
        policy=body.wall(),
        labels=None if body.labels is None else dict(body.labels),
        **body.numbers(),
    )
    return _pool(changed)


@routes.delete("/v1/pools/{pool}", status=204)
async def delete(call: Call) -> None:
    """Remove a pool and its members; sandboxes claimed from it live on."""
    await call.control.pools.delete(call.principal, call.params["pool"])


@routes.get("/v1/pools/{pool}/queue", answer=Queue)
async def queue(call: Call) -> dict[str, Any]:
    """How busy it is."""
    return await call.control.pools.queue(call.principal, call.params["pool"])


__all__ = ["CreateSandbox", "routes", "shown"]
