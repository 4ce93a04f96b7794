"""Pools: sandboxes that are started ahead, so that a create takes one instead of starting it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ringfence.sdk import service as services
from ringfence.sdk import wire
from ringfence.sdk.policy import Policy
from ringfence.sdk.results import QueueInfo
from ringfence.sdk.service import AsyncService
from ringfence.sdk.transport import closing


class AsyncPool:
    """A pool of the project.

    >>> pool = await AsyncPool.create("small-ones", min=1, size="small")
    >>> async with AsyncSandbox.create(pool="small-ones") as sandbox:
    ...     print((await sandbox.run("echo from a pool")).stdout, end="")
    from a pool
    >>> await pool.delete()
    """

    def __init__(self, service: AsyncService | None, value: Mapping[str, Any]) -> None:
        self._service = service
        self._value = value

    @classmethod
    async def create(
        cls,
        name: str,
        *,
        template: str | None = None,
        policy: Policy | Mapping[str, Any] | str | None = None,
        runtime: str | None = None,
        level: str | None = None,
        size: str | None = None,
        cpus: float | None = None,
        memory: int | str | None = None,
        disk: int | str | None = None,
        timeout: float | str | None = None,
        min: int | None = None,
        max: int | None = None,
        most: int | None = None,
        overflow: int | None = None,
        queue: int | None = None,
        queue_seconds: float | None = None,
        labels: Mapping[str, str] | None = None,
        service: AsyncService | None = None,
    ) -> AsyncPool:
        """Make a pool; its members are started in the background.

        Args:
            name: how a create names it.
            template, policy, runtime, level, size, cpus, memory, disk, timeout: of its members, as for
                ``AsyncSandbox.create``. A request for another wall is never served by the pool.
            min, max: members that are ready; their number follows the demand between the two.
            most: claimed sandboxes alive at once; ``overflow``: of them, how many may be started on demand.
            queue, queue_seconds: requests that may wait beyond that, and for how long.

        Raises:
            Conflict: the name is taken. QuotaExceeded: the project may not have so many.
        """
        body = wire.filled(
            name=name, template=template, policy=wire.policy(policy), runtime=runtime, level=level, size=size,
            cpus=cpus, memory=memory, disk=disk, timeout=timeout, min=min, max=max, most=most,
            overflow=overflow, queue=queue, queue_seconds=queue_seconds,
            labels=dict(labels) if labels else None,
        )  # fmt: skip
        return cls(
            service, await services.ask(service, "POST", "/v1/pools", json=body, key=str(uuid.uuid4()))
        )

    @classmethod
    async def get(cls, name: str, *, service: AsyncService | None = None) -> AsyncPool:
        """One, by its name or id. Raises NotFound."""
        return cls(service, await services.ask(service, "GET", f"/v1/pools/{wire.segment(name, 'pool')}"))

    @classmethod
    async def list(cls, *, service: AsyncService | None = None) -> AsyncIterator[AsyncPool]:
        """Those of the project."""
        async with closing(services.items(service, "/v1/pools")) as values:
            async for value in values:
                yield cls(service, value)

    @property
    def id(self) -> str:
        """Its id."""
        return str(self._value["id"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self._value["name"])

    @property
    def info(self) -> Mapping[str, Any]:
        """Its record as it was last seen."""
        return self._value

    async def refresh(self) -> Mapping[str, Any]:
        """Its record as it is now."""
        self._value = await services.ask(self._service, "GET", self._path)
        return self._value

    async def update(
        self,
        *,
        template: str | None = None,
        policy: Policy | Mapping[str, Any] | str | None = None,
        min: int | None = None,
        max: int | None = None,
        most: int | None = None,
        overflow: int | None = None,
        queue: int | None = None,
        queue_seconds: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """Change it; another template or wall replaces its members."""
        body = wire.filled(
            template=template, policy=wire.policy(policy), min=min, max=max, most=most, overflow=overflow,
            queue=queue, queue_seconds=queue_seconds, labels=dict(labels) if labels else None,
        )  # fmt: skip
        self._value = await services.ask(self._service, "PATCH", self._path, json=body, safe=True)
        return self._value

    async def queue(self) -> QueueInfo:
        """How busy it is."""
        return wire.queue(await services.ask(self._service, "GET", f"{self._path}/queue"))

    async def delete(self) -> None:
        """Remove it and its members; sandboxes that were taken from it live on."""
        await services.ask(self._service, "DELETE", self._path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def _path(self) -> str:
        return f"/v1/pools/{wire.segment(self.id)}"
