"""Volumes: named storage of a project. Rows say whose they are and who may attach them; files are the
placement's.

A counter says how a volume is in use: one for every sandbox that reads it, :data:`WRITER` for the one that
writes. It changes in the same commit as the sandbox's row, so no two processes can let a second writer in.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

from ringfence.control.core import Core, log
from ringfence.model.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    ProtocolViolation,
    QuotaExceeded,
    RingfenceError,
    WrongState,
)
from ringfence.model.ids import new_id
from ringfence.model.quantities import format_size
from ringfence.model.values import dataclass
from ringfence.placement.contract import VolumeMount
from ringfence.store.contract import Add, Change, Event, Put, Remove, Row

if TYPE_CHECKING:
    from ringfence.control.principals import Principal

KIND: Final = "volume"
MAKING, READY, REMOVING = "making", "ready", "removing"
WRITER: Final = 1_000_000  # more than there are readers
DEFAULT_QUOTA: Final = 1024**3
MOST_QUOTA: Final = 2**50
STUCK: Final = 60.0  # seconds after which what a dead process began is finished by another
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_PREFIX: Final = "use of volume "
List = list  # the class has a method of that name


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume. ``quota`` in bytes; ``keep``: False: removed when the last sandbox that had it has ended.

    ``readers`` and ``writer``: who has it attached now, where that was asked for.
    """

    id: str
    name: str
    project: str
    state: str
    quota: int
    keep: bool = True
    created: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    readers: int = 0
    writer: bool = False

    @classmethod
    def from_row(cls, row: Row, uses: int = 0) -> Volume:
        """The value of a row."""
        return cls(
            row.id,
            row.key,
            row.project,
            row.state,
            int(row.document["quota"]),
            bool(row.document.get("keep", True)),
            row.created,
            row.labels,
            uses % WRITER,
            WRITER <= uses < 2 * WRITER,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "id": self.id,
            "name": self.name,
            "project": self.project,
            "state": self.state,
            "quota": self.quota,
            "keep": self.keep,
            "created_at": self.created,
            "labels": dict(self.labels),
            "readers": self.readers,
            "writer": self.writer,
        }


class Volumes:
    """Volumes of the service. Every call is within the principal's project."""

    def __init__(self, core: Core) -> None:
        self.core = core

    async def create(
        self,
        principal: Principal,
        name: str,
        *,
        quota: int = DEFAULT_QUOTA,
        keep: bool = True,
        labels: Mapping[str, str] | None = None,
    ) -> Volume:
        """Make one; returns when it can be attached. A call that is cancelled or killed is finished later.

        Raises:
            InvalidRequest: no name, or an impossible quota. Conflict: the name is taken.
            QuotaExceeded: the project has no room. Unsupported, HostLimit: the machine can't.
        """
        if not _NAME.match(name) or name.startswith("vol-"):
            raise InvalidRequest(
                f"{name[:80]!r} is no name of a volume",
                hint="1 to 63 letters, digits, . _ and -, not beginning with vol-",
            )
        if not 1 <= quota <= MOST_QUOTA:
            raise InvalidRequest(f"a quota of {quota} bytes", hint=f"1 to {format_size(MOST_QUOTA)}")
        core = self.core
        now = core.now()
        row = Row(
            KIND, new_id("vol"), principal.project, MAKING, key=name, due=now + STUCK, created=now,
            labels=dict(labels or {}), document={"quota": quota, "keep": keep, "by": principal.user},
        )  # fmt: skip
        storage = await core.admission.storage(principal.project, quota)
        try:
            (row,) = await core.commit(
                Put(row, unique=True), *storage, self._told(row, "created", quota=quota)
            )
        except Conflict:
            raise Conflict(f"there is a volume {name}", hint="use it, or take another name") from None
        return Volume.from_row(await core.whole(self._make(row)))

    async def _make(self, row: Row) -> Row:
        """Have the placement make it; what can't be is forgotten again."""
        try:
            await self.core.placement.make_volume(row.id, int(row.document["quota"]))
        except RingfenceError:
            await self._forget(row)
            raise
        (row,) = await self.core.commit(Put(replace(row, state=READY, due=None)), self._told(row, "ready"))
        return row

    async def _forget(self, row: Row) -> None:
        storage = await self.core.admission.storage(row.project, -int(row.document["quota"]))
        await self.core.commit(Remove(KIND, row.id, row.revision), *storage, self._told(row, "removed"))

    async def list(self, principal: Principal, after: str = "", limit: int = 100) -> List[Volume]:
        """The project's, by id."""
        rows = await self.core.store.find(KIND, project=principal.project, after=after, limit=limit)
        return [Volume.from_row(row) for row in rows]

    async def get(self, principal: Principal, name: str) -> Volume:
        """One, by name or id, and how it is in use. Raises NotFound."""
        row = await self._row(principal.project, name)
        return Volume.from_row(row, await self.core.store.counter(_counter(row.id)))

    async def size(self, principal: Principal, name: str) -> int:
        """Bytes that its files take."""
        return await self.core.placement.volume_size((await self._ready(principal, name)).id)

    async def remove(self, principal: Principal, name: str) -> None:
        """Remove it and its files.

        Raises:
            NotFound. WrongState: a sandbox has it.
        """
        row = await self._row(principal.project, name)
        if row.state == REMOVING:
            return
        await self._removing(row)

    async def _removing(self, row: Row) -> None:
        core = self.core
        try:
            (row,) = await core.commit(
                Put(replace(row, state=REMOVING, due=core.now() + STUCK)),
                Add(_counter(row.id), 2 * WRITER, 2 * WRITER),  # nobody else, from here on
                self._told(row, "removing"),
            )
        except QuotaExceeded:
            raise WrongState(
                f"volume {row.key} is attached to a sandbox",
                hint="end the sandboxes that have it first; `ringfence sandbox ls` shows them",
                volume=row.id,
            ) from None
        await core.whole(self._remove(row))

    async def _remove(self, row: Row) -> None:
        await self.core.placement.remove_volume(row.id)
        storage = await self.core.admission.storage(row.project, -int(row.document["quota"]))
        await self.core.commit(
            Remove(KIND, row.id, row.revision),
            Add(_counter(row.id), -2 * WRITER),
            *storage,
            self._told(row, "removed"),
        )

    async def export(self, principal: Principal, name: str) -> AsyncIterator[bytes]:
        """Its files as a tar stream: hostile bytes, as whoever wrote it liked them."""
        row = await self._ready(principal, name)
        async for piece in self.core.placement.export_volume(row.id):
            yield piece

    async def load(self, principal: Principal, name: str, tar: AsyncIterator[bytes]) -> None:
        """Unpack a tar stream into it; what came before a fault in it stays.

        Raises:
            InvalidRequest: no tar, or one that is hostile or too large for the volume.
        """
        row = await self._ready(principal, name)
        try:
            await self.core.placement.import_volume(row.id, tar)
        except ProtocolViolation as error:  # an archive is the caller's, not a guest's
            raise InvalidRequest(error.message, hint="send a tar that is whole") from None

    async def sweep(self) -> None:
        """Finish what dead processes began, and remove what was to go with its last sandbox."""
        core = self.core
        for row in await core.store.due(KIND, core.now()):
            with contextlib.suppress(Conflict, NotFound):
                try:
                    if row.state == MAKING:
                        await self._make(await self._mine(row))
                    elif row.state == REMOVING:
                        await self._remove(await self._mine(row))
                    elif row.state == READY:
                        await self._unused(row)
                except RingfenceError as error:
                    log.warning("volume %s: %s", row.id, error.message)

    async def _mine(self, row: Row) -> Row:
        """This process is at it for a while."""
        (row,) = await self.core.commit(Put(replace(row, due=self.core.now() + STUCK)))
        return row

    async def _unused(self, row: Row) -> None:
        """One that goes with its last sandbox, and was in use."""
        try:
            await self._removing(row)
        except WrongState:
            await self.core.commit(Put(replace(row, due=self.core.now() + self.core.settings.reconcile)))

    async def _row(self, project: str, name: str) -> Row:
        return await find(self.core, project, name)

    async def _ready(self, principal: Principal, name: str) -> Row:
        row = await self._row(principal.project, name)
        if row.state != READY:
            raise WrongState(f"volume {name} is {row.state}", hint="wait until it is ready")
        return row

    def _told(self, row: Row, what: str, **data: Any) -> Event:
        return Event(KIND, row.id, row.project, f"volume.{what}", self.core.now(), {"name": row.key, **data})


async def find(core: Core, project: str, name: str) -> Row:
    """A project's volume by name or id. Raises NotFound."""
    if name.startswith("vol-"):
        with contextlib.suppress(NotFound):
            row = await core.store.get(KIND, name)
            if row.project == project:
                return row
    elif name:
        rows = await core.store.find(KIND, project=project, key=name, limit=1)
        if rows:
            return rows[0]
    raise NotFound(f"no volume {name[:80]!r}", hint="`ringfence volume ls` shows those there are")


async def attached(
    core: Core, project: str, mounts: Sequence[VolumeMount]
) -> tuple[tuple[VolumeMount, ...], list[Change]]:
    """Mounts by the ids of the project's own volumes, and what the commit of the sandbox's row carries.

    Raises:
        NotFound: no such volume in this project. WrongState: it is not ready. InvalidRequest: one twice.
    """
    made: list[VolumeMount] = []
    changes: list[Change] = []
    for mount in mounts:
        row = await find(core, project, mount.volume)
        if row.state != READY:
            raise WrongState(f"volume {row.key} is {row.state}", hint="wait until it is ready")
        if any(other.volume == row.id for other in made):
            raise InvalidRequest(f"volume {row.key} twice in one sandbox", hint="attach it once")
        made.append(replace(mount, volume=row.id))
        amount, most = (1, WRITER - 1) if mount.read_only else (WRITER, WRITER)
        changes.append(Add(_counter(row.id), amount, most))
        if not row.document.get("keep", True) and row.due is None:
            changes.append(Put(replace(row, due=core.now() + core.settings.reconcile)))
    return tuple(made), changes


def detached(mounts: Sequence[VolumeMount]) -> list[Change]:
    """What the commit of a sandbox's end carries."""
    return [Add(_counter(mount.volume), -1 if mount.read_only else -WRITER) for mount in mounts]


def explained(error: QuotaExceeded) -> RingfenceError:
    """The error of a commit that :func:`attached` had a part in."""
    counter = str(error.details.get("counter", ""))
    if not counter.startswith(_PREFIX):
        return error
    id = counter.removeprefix(_PREFIX)
    return WrongState(
        f"volume {id} is in use in a way that excludes this one",
        hint="one sandbox may write, or many may read: end the others, or attach it read-only",
        volume=id,
    )


def _counter(id: str) -> str:
    return _PREFIX + id
