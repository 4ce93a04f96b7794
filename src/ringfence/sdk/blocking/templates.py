"""``ringfence.sdk.templates`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade, _plain
from ringfence.sdk.blocking.service import Service
from ringfence.sdk.results import SnapshotInfo
from ringfence.sdk.templates import AsyncSnapshot, AsyncTemplate


class Template(Facade):
    """A root file system that sandboxes start from, by name and digest.

    >>> print("host" in [template.name for template in Template.list()])
    True
    """

    _async: AsyncTemplate

    @classmethod
    def list(cls, *, service: Service | None = None) -> Iterator[Template]:
        """Those that there are."""
        return (
            Template._of(each) for each in BACKGROUND.iterate(AsyncTemplate.list(service=_plain(service)))
        )

    @classmethod
    def get(cls, name: str, *, service: Service | None = None) -> Template:
        """One, by name or digest. Raises NotFound."""
        return Template._of(BACKGROUND.run(AsyncTemplate.get(name, service=_plain(service))))

    @classmethod
    def add(
        cls,
        name: str,
        source: str,
        *,
        options: Mapping[str, Any] | None = None,
        service: Service | None = None,
    ) -> Template:
        """Import one, for operators; ``source`` is what ``ringfence template add`` takes, on the node."""
        return Template._of(
            BACKGROUND.run(AsyncTemplate.add(name, source, options=options, service=_plain(service)))
        )

    @property
    def name(self) -> str:
        """Its name."""
        return self._async.name

    @property
    def digest(self) -> str:
        """What it is, whatever it is called."""
        return self._async.digest

    @property
    def info(self) -> Mapping[str, Any]:
        """All that is known of it."""
        return self._async.info

    def remove(self) -> None:
        """Forget its name; sandboxes that use it live on. For operators."""
        BACKGROUND.run(self._async.remove())

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")


class Snapshot(Facade):
    """A saved sandbox: ``Sandbox.create(snapshot=snapshot.id)`` goes on from it, any number of times."""

    _async: AsyncSnapshot

    @classmethod
    def list(cls, *, service: Service | None = None) -> Iterator[Snapshot]:
        """Those of the project."""
        return (
            Snapshot._of(each) for each in BACKGROUND.iterate(AsyncSnapshot.list(service=_plain(service)))
        )

    @classmethod
    def get(cls, name: str, *, service: Service | None = None) -> Snapshot:
        """One, by id or name. Raises NotFound."""
        return Snapshot._of(BACKGROUND.run(AsyncSnapshot.get(name, service=_plain(service))))

    @property
    def id(self) -> str:
        """Its id."""
        return self._async.id

    @property
    def info(self) -> SnapshotInfo:
        """What is known of it."""
        return self._async.info

    def delete(self) -> None:
        """Remove it; sandboxes that were started from it live on."""
        BACKGROUND.run(self._async.delete())

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")
