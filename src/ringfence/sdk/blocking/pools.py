"""``ringfence.sdk.pools`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade, _plain
from ringfence.sdk.blocking.service import Service
from ringfence.sdk.policy import Policy
from ringfence.sdk.pools import AsyncPool
from ringfence.sdk.results import QueueInfo


class Pool(Facade):
    """A pool of the project.

    >>> pool = Pool.create("small-ones", min=1, size="small")
    >>> with Sandbox.create(pool="small-ones") as sandbox:
    ...     print(sandbox.run("echo from a pool").stdout, end="")
    from a pool
    >>> pool.delete()
    """

    _async: AsyncPool

    @classmethod
    def create(
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
        service: Service | None = None,
    ) -> Pool:
        """Make a pool; its members are started in the background.

        Args:
            name: how a create names it.
            template, policy, runtime, level, size, cpus, memory, disk, timeout: of its members, as for
                ``Sandbox.create``. A request for another wall is never served by the pool.
            min, max: members that are ready; their number follows the demand between the two.
            most: claimed sandboxes alive at once; ``overflow``: of them, how many may be started on demand.
            queue, queue_seconds: requests that may wait beyond that, and for how long.

        Raises:
            Conflict: the name is taken. QuotaExceeded: the project may not have so many.
        """
        return Pool._of(
            BACKGROUND.run(
                AsyncPool.create(
                    name,
                    template=template,
                    policy=policy,
                    runtime=runtime,
                    level=level,
                    size=size,
                    cpus=cpus,
                    memory=memory,
                    disk=disk,
                    timeout=timeout,
                    min=min,
                    max=max,
                    most=most,
                    overflow=overflow,
                    queue=queue,
                    queue_seconds=queue_seconds,
                    labels=labels,
                    service=_plain(service),
                )
            )
        )

    @classmethod
    def get(cls, name: str, *, service: Service | None = None) -> Pool:
        """One, by its name or id. Raises NotFound."""
        return Pool._of(BACKGROUND.run(AsyncPool.get(name, service=_plain(service))))

    @classmethod
    def list(cls, *, service: Service | None = None) -> Iterator[Pool]:
        """Those of the project."""
        return (Pool._of(each) for each in BACKGROUND.iterate(AsyncPool.list(service=_plain(service))))

    @property
    def id(self) -> str:
        """Its id."""
        return self._async.id

    @property
    def name(self) -> str:
        """Its name."""
        return self._async.name

    @property
    def info(self) -> Mapping[str, Any]:
        """Its record as it was last seen."""
        return self._async.info

    def refresh(self) -> Mapping[str, Any]:
        """Its record as it is now."""
        return BACKGROUND.run(self._async.refresh())

    def update(
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
        return BACKGROUND.run(
            self._async.update(
                template=template,
                policy=policy,
                min=min,
                max=max,
                most=most,
                overflow=overflow,
                queue=queue,
                queue_seconds=queue_seconds,
                labels=labels,
            )
        )

    def queue(self) -> QueueInfo:
        """How busy it is."""
        return BACKGROUND.run(self._async.queue())

    def delete(self) -> None:
        """Remove it and its members; sandboxes that were taken from it live on."""
        BACKGROUND.run(self._async.delete())

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")
