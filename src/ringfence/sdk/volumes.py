"""Volumes: named storage of a project that outlives sandboxes."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

from ringfence.sdk import archives, wire
from ringfence.sdk import service as services
from ringfence.sdk.service import AsyncService
from ringfence.sdk.transport import CHUNK, closing


class AsyncVolume:
    """A volume. Writable for one sandbox at a time, or read-only for many.

    >>> volume = await AsyncVolume.create("notes", quota="16MiB")
    >>> async with AsyncSandbox.create(volumes={"/notes": volume}) as sandbox:
    ...     _ = await sandbox.run("echo kept > /notes/one", check=True)
    >>> async with AsyncSandbox.create(volumes={"/notes": volume}) as sandbox:
    ...     print((await sandbox.run("cat /notes/one")).stdout, end="")
    kept
    >>> await volume.delete()
    """

    def __init__(self, service: AsyncService | None, value: Mapping[str, Any]) -> None:
        self._service = service
        self._value = value

    @classmethod
    async def create(
        cls,
        name: str,
        *,
        quota: int | str | None = None,
        labels: Mapping[str, str] | None = None,
        service: AsyncService | None = None,
    ) -> AsyncVolume:
        """Make one; ``quota``: bytes, or ``"1GiB"``, that it may hold.

        Raises:
            Conflict: the name is taken. QuotaExceeded: the project has no room.
        """
        body = wire.filled(name=name, quota=quota, labels=dict(labels) if labels else None)
        return cls(
            service, await services.ask(service, "POST", "/v1/volumes", json=body, key=str(uuid.uuid4()))
        )

    @classmethod
    async def get(cls, name: str, *, service: AsyncService | None = None) -> AsyncVolume:
        """One, by its name or id. Raises NotFound."""
        return cls(service, await services.ask(service, "GET", f"/v1/volumes/{wire.segment(name, 'volume')}"))

    @classmethod
    async def list(cls, *, service: AsyncService | None = None) -> AsyncIterator[AsyncVolume]:
        """Those of the project."""
        async with closing(services.items(service, "/v1/volumes")) as values:
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

    async def export(self) -> AsyncIterator[bytes]:
        """Its files as a tar, piece by piece. Hostile bytes: unpack them with care."""
        held = services.of(self._service)
        try:
            async with (await held.transport()).stream("GET", f"{self._path}/export") as response:
                async for piece in response.aiter_raw(CHUNK):
                    yield piece
        finally:
            await held.release()

    async def load(self, tar: bytes | AsyncIterable[bytes]) -> None:
        """Unpack a tar into it."""
        await services.ask(
            self._service, "PUT", f"{self._path}/import", content=tar, timeout=3600,
            headers={"content-type": "application/x-tar"},
        )  # fmt: skip

    async def upload_folder(self, local: str | os.PathLike[str]) -> None:
        """Copy a folder's contents into it."""
        await self.load(archives.pack(local))

    async def download_folder(self, local: str | os.PathLike[str]) -> int:
        """Copy its contents into a folder that is new or empty; the number of files."""
        return await archives.unpack(self.export(), local)

    async def delete(self) -> None:
        """Remove it and all that is in it. Raises WrongState: a sandbox has it."""
        await services.ask(self._service, "DELETE", self._path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def _path(self) -> str:
        return f"/v1/volumes/{wire.segment(self.id)}"
