"""``ringfence.sdk.volumes`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade, _flowing, _plain
from ringfence.sdk.blocking.service import Service
from ringfence.sdk.volumes import AsyncVolume


class Volume(Facade):
    """A volume. Writable for one sandbox at a time, or read-only for many.

    >>> volume = Volume.create("notes", quota="16MiB")
    >>> with Sandbox.create(volumes={"/notes": volume}) as sandbox:
    ...     _ = sandbox.run("echo kept > /notes/one", check=True)
    >>> with Sandbox.create(volumes={"/notes": volume}) as sandbox:
    ...     print(sandbox.run("cat /notes/one").stdout, end="")
    kept
    >>> volume.delete()
    """

    _async: AsyncVolume

    @classmethod
    def create(
        cls,
        name: str,
        *,
        quota: int | str | None = None,
        labels: Mapping[str, str] | None = None,
        service: Service | None = None,
    ) -> Volume:
        """Make one; ``quota``: bytes, or ``"1GiB"``, that it may hold.

        Raises:
            Conflict: the name is taken. QuotaExceeded: the project has no room.
        """
        return Volume._of(
            BACKGROUND.run(AsyncVolume.create(name, quota=quota, labels=labels, service=_plain(service)))
        )

    @classmethod
    def get(cls, name: str, *, service: Service | None = None) -> Volume:
        """One, by its name or id. Raises NotFound."""
        return Volume._of(BACKGROUND.run(AsyncVolume.get(name, service=_plain(service))))

    @classmethod
    def list(cls, *, service: Service | None = None) -> Iterator[Volume]:
        """Those of the project."""
        return (Volume._of(each) for each in BACKGROUND.iterate(AsyncVolume.list(service=_plain(service))))

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

    def export(self) -> Iterator[bytes]:
        """Its files as a tar, piece by piece. Hostile bytes: unpack them with care."""
        return BACKGROUND.iterate(self._async.export())

    def load(self, tar: bytes | Iterable[bytes]) -> None:
        """Unpack a tar into it."""
        BACKGROUND.run(self._async.load(_flowing(tar)))

    def upload_folder(self, local: str | os.PathLike[str]) -> None:
        """Copy a folder's contents into it."""
        BACKGROUND.run(self._async.upload_folder(local))

    def download_folder(self, local: str | os.PathLike[str]) -> int:
        """Copy its contents into a folder that is new or empty; the number of files."""
        return BACKGROUND.run(self._async.download_folder(local))

    def delete(self) -> None:
        """Remove it and all that is in it. Raises WrongState: a sandbox has it."""
        BACKGROUND.run(self._async.delete())

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")
