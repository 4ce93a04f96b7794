"""Projects and keys, as they are told to whoever may know."""

from __future__ import annotations

import time

from ringfence.model.values import dataclass
from ringfence.store.contract import Row


@dataclass(frozen=True, slots=True)
class Project:
    """A project of an organisation. ``id`` is what rows and principals carry."""

    id: str
    name: str
    organisation: str
    created: float


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key; never the key itself. Times are seconds since the epoch.

    ``state``: ``active``, ``expired`` or ``revoked``. ``used``: last, to a minute; ``None`` for never.
    """

    id: str
    name: str
    project: str
    organisation: str
    user: str
    scopes: tuple[str, ...]
    state: str
    created: float
    expires: float | None = None
    used: float | None = None
    operator: bool = False
    replaced_by: str = ""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. ``secret`` is shown once: nobody can find it out again."""

    key: Key
    secret: str


def key_of(row: Row) -> Key:
    """What a row says of a key, now."""
    document = row.document
    expires = document["expires"]
    state = row.state
    if state == "active" and expires is not None and expires <= time.time():
        state = "expired"
    return Key(
        id=row.id,
        name=document["name"],
        project=row.project,
        organisation=document["organisation"],
        user=document["user"],
        scopes=tuple(document["scopes"]),
        state=state,
        created=row.created,
        expires=expires,
        operator=bool(document.get("operator")),
        replaced_by=document.get("replaced_by", ""),
    )


def project_of(row: Row) -> Project:
    """What a row says of a project."""
    return Project(row.id, row.key, row.project, row.created)
