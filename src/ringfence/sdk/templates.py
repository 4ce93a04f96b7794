"""Templates and snapshots: what sandboxes start from."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ringfence.sdk import service as services
from ringfence.sdk import wire
from ringfence.sdk.results import SnapshotInfo
from ringfence.sdk.service import AsyncService
from ringfence.sdk.transport import closing


class AsyncTemplate:
    """A root file system that sandboxes start from, by name and digest.

    >>> print("host" in [template.name async for template in AsyncTemplate.list()])
    True
    """

    def __init__(self, service: AsyncService | None, value: Mapping[str, Any]) -> None:
        self._service = service
        self._value = value

    @classmethod
    async def list(cls, *, service: AsyncService | None = None) -> AsyncIterator[AsyncTemplate]:
        """Those that there are."""
        async with closing(services.items(service, "/v1/templates")) as values:
            async for value in values:
                yield cls(service, value)

    @classmethod
    async def get(cls, name: str, *, service: AsyncService | None = None) -> AsyncTemplate:
        """One, by name or digest. Raises NotFound."""
        return cls(
            service, await services.ask(service, "GET", f"/v1/templates/{wire.segment(name, 'template')}")
        )

    @classmethod
    async def add(
        cls,
        name: str,
        source: str,
        *,
        options: Mapping[str, Any] | None = None,
        service: AsyncService | None = None,
    ) -> AsyncTemplate:
        """Import one, for operators; ``source`` is what ``ringfence template add`` takes, on the node."""
        body = {"name": name, "source": source, "options": dict(options or {})}
        value = await services.ask(
            service, "POST", "/v1/templates", json=body, key=str(uuid.uuid4()), timeout=3600
        )
        return cls(service, value)

    @property
    def name(self) -> str:
        """Its name."""
        return str(self._value.get("name", ""))

    @property
    def digest(self) -> str:
        """What it is, whatever it is called."""
        return str(self._value.get("digest", ""))

    @property
    def info(self) -> Mapping[str, Any]:
        """All that is known of it."""
        return self._value

    async def remove(self) -> None:
        """Forget its name; sandboxes that use it live on. For operators."""
        await services.ask(self._service, "DELETE", f"/v1/templates/{wire.segment(self.name, 'template')}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class AsyncSnapshot:
    """A saved sandbox: ``AsyncSandbox.create(snapshot=snapshot.id)`` goes on from it, any number of times."""

    def __init__(self, service: AsyncService | None, value: Mapping[str, Any]) -> None:
        self._service = service
        self._value = value

    @classmethod
    async def list(cls, *, service: AsyncService | None = None) -> AsyncIterator[AsyncSnapshot]:
        """Those of the project."""
        async with closing(services.items(service, "/v1/snapshots")) as values:
            async for value in values:
                yield cls(service, value)

    @classmethod
    async def get(cls, name: str, *, service: AsyncService | None = None) -> AsyncSnapshot:
        """One, by id or name. Raises NotFound."""
        return cls(
            service, await services.ask(service, "GET", f"/v1/snapshots/{wire.segment(name, 'snapshot')}")
        )

    @property
    def id(self) -> str:
        """Its id."""
        return str(self._value["id"])

    @property
    def info(self) -> SnapshotInfo:
        """What is known of it."""
        return wire.snapshot(self._value)

    async def delete(self) -> None:
        """Remove it; sandboxes that were started from it live on."""
        await services.ask(self._service, "DELETE", f"/v1/snapshots/{wire.segment(self.id)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"
