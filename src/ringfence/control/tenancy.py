"""Organisations, projects, users and their API keys.

A key is ``rf_<id>_<secret>``. The store has a hash of it only, the id finds it, and comparing takes the same
time however much of it is right. What a key may do is looked up with every request, from a cache that lasts
seconds and forgets a key the moment any process changes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringfence.control.caching import LIFE, RowCache
from ringfence.control.principals import SCOPES, Principal
from ringfence.control.quotas import Quotas
from ringfence.control.tenancy_values import Key, NewKey, Project, key_of, project_of
from ringfence.model.errors import (
    Conflict,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    RingfenceError,
)
from ringfence.model.ids import new_id
from ringfence.store.contract import Change, Event, Put, Remove, Row, Store

__all__ = ["Key", "NewKey", "Principal", "Project", "Tenancy"]

ORGANISATION, PROJECT, USER, KEY, USED = "organisation", "project", "user", "key", "key_used"
DEFAULT = "default"
_FORM = re.compile(r"rf_([0-9a-hjkmnp-tv-z]{20})_([0-9a-f]{64})", re.ASCII)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?", re.ASCII)
_ANOTHER = (
    "`ringfence login` takes another; who has one with the scope admin makes it: `ringfence key create`"
)
_USED_EVERY = 60.0  # seconds between two writes of when a key was last used
_TRIES = 10
_NO_KEY = b"\0" * 32


class Tenancy:
    """Who may ask for what. ``quotas``: for the limit of requests."""

    def __init__(self, store: Store, quotas: Quotas | None = None, *, cache_life: float = LIFE) -> None:
        self.store = store
        self.quotas = quotas or Quotas(store)
        # Ids that do not exist are not kept: whoever guesses must not fill the memory.
        self._keys = RowCache(store, KEY, life=cache_life, absent=False)
        self._used: dict[str, float] = {}
        self._writing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Write what is to be written, and let go. Idempotent."""
        await asyncio.gather(*self._writing)
        await self._keys.close()
        await self.quotas.close()

    # --- who asks -------------------------------------------------------------------------------------------

    async def authenticate(self, secret: str | None) -> Principal:
        """Whose key this is.

        Raises:
            NotAuthenticated: no key, or none that is valid; nobody learns which of its parts is wrong.
            StoreUnavailable: it could not be looked up.
        """
        if not secret:
            raise NotAuthenticated("a key is needed", hint="send it as `Authorization: Bearer rf_…`")
        match = _FORM.fullmatch(secret)
        row: Row | None = None
        if match is not None:
            try:
                row = await self._keys.get(match[1])
            except NotFound:
                row = None
        hashed = bytes.fromhex(row.document["hash"]) if row is not None else _NO_KEY
        same = hmac.compare_digest(_hash(secret), hashed)
        if row is None or not same:
            raise NotAuthenticated("the key is unknown", hint=_ANOTHER)
        key = key_of(row)
        if key.state != "active":
            raise NotAuthenticated(f"the key is {key.state}", hint=_ANOTHER)
        self._note_use(key)
        return Principal(key.organisation, key.project, key.user, key.id, key.scopes, key.operator)

    async def admit_request(self, principal: Principal) -> None:
        """Count one request of the principal's project. Raises RateLimited."""
        await self.quotas.admit_request(principal.project)

    # --- organisations and projects -------------------------------------------------------------------------

    async def first_start(self) -> NewKey | None:
        """The operator's key, if the service has none yet: of several processes that ask, one gets it."""
        now = time.time()
        organisation = Row(ORGANISATION, DEFAULT, key=DEFAULT, created=now)
        project = Row(PROJECT, DEFAULT, DEFAULT, key=DEFAULT, created=now)
        user = Row(USER, f"{DEFAULT}.operator", DEFAULT, key="operator", created=now)
        row, secret = _new_key(
            "first key", Project(DEFAULT, DEFAULT, DEFAULT, now), "operator", SCOPES[-1:], None, operator=True
        )
        try:
            await self.store.commit(
                Put(organisation), Put(project), Put(user), Put(row), _event(row, "made"), durable=True
            )
        except Conflict:
            return None
        return NewKey(key_of(row), secret)

    async def make_organisation(self, name: str) -> str:
        """A new organisation; returns its id. Raises Conflict (the name is taken), InvalidRequest."""
        row = Row(ORGANISATION, new_id("org"), key=_name(name), created=time.time())
        await self.store.commit(Put(row, unique=True), durable=True)
        return row.id

    async def make_project(self, organisation: str, name: str) -> Project:
        """A new project.

        Raises:
            Conflict: the organisation has one of this name.
            NotFound: there is no such organisation.
        """
        await self.store.get(ORGANISATION, organisation)
        row = Row(PROJECT, new_id("pr"), organisation, key=_name(name), created=time.time())
        await self.store.commit(Put(row, unique=True), durable=True)
        return project_of(row)

    async def project(self, id: str) -> Project:
        """One project. Raises NotFound."""
        return project_of(await self.store.get(PROJECT, id))

    async def projects(
        self, organisation: str | None = None, *, after: str = "", limit: int = 100
    ) -> list[Project]:
        """Projects, of all organisations or one, by id."""
        rows = await self.store.find(PROJECT, project=organisation, after=after, limit=limit)
        return [project_of(row) for row in rows]

    # --- keys -----------------------------------------------------------------------------------------------

    async def make_key(
        self,
        project: str,
        *,
        name: str = "",
        user: str = "",
        scopes: Sequence[str] = ("run",),
        expires: float | None = None,
        by: Principal | None = None,
    ) -> NewKey:
        """A new key of a project, until ``expires`` (seconds since the epoch).

        Raises:
            NotFound: there is no such project.
            InvalidRequest: a scope that does not exist, a time that is over.
            NotAllowed: ``by`` may not give away what he has not.
        """
        wanted = _scopes(scopes)
        if by is not None:
            for scope in wanted:
                by.require(scope)
        if expires is not None and expires <= time.time():
            raise InvalidRequest("a key can't expire in the past")
        owner = await self.project(project)
        row, secret = _new_key(name, owner, user, wanted, expires)
        changes: list[Change] = [Put(row), _event(row, "made", by)]
        if user and not await self.store.count(USER, project=owner.organisation, key=user):
            changes.append(Put(Row(USER, new_id("us"), owner.organisation, key=user, created=time.time())))
        await self.store.commit(*changes, durable=True)
        return NewKey(key_of(row), secret)

    async def keys(self, project: str, *, after: str = "", limit: int = 100) -> list[Key]:
        """The keys of a project, by id."""
        rows = await self.store.find(KEY, project=project, after=after, limit=limit)
        used = [await self._last_used(row.id) for row in rows]
        return [replace(key_of(row), used=at) for row, at in zip(rows, used, strict=True)]

    async def key(self, project: str, id: str) -> Key:
        """One key. Raises NotFound, also for another project's."""
        return replace(key_of(await self._row(project, id)), used=await self._last_used(id))

    async def rotate_key(
        self, project: str, id: str, *, overlap: float = 0.0, by: Principal | None = None
    ) -> NewKey:
        """Another key that may do the same; the old one is good for ``overlap`` seconds more.

        Raises:
            NotFound: there is no such key.
            InvalidRequest: it is not active, or was rotated before.
            NotAllowed: it may do more than ``by``.
        """
        if not 0 <= overlap < 2**31:
            raise InvalidRequest(f"{overlap!r} s is no overlap")
        for _ in range(_TRIES):
            row = await self._row(project, id)
            key = key_of(row)
            if key.state != "active" or key.replaced_by:
                raise InvalidRequest(
                    f"the key {id} is {key.state if key.state != 'active' else 'replaced already'}",
                    hint="`ringfence key create` makes another",
                )
            owner = Project(key.project, "", key.organisation, 0)
            made, secret = _new_key(key.name, owner, key.user, key.scopes, key.expires, operator=key.operator)
            until = min(time.time() + overlap, key.expires or float("inf"))
            old = replace(
                row,
                due=until,
                state="active" if overlap else "revoked",
                document={**row.document, "expires": until, "replaced_by": made.id},
            )
            _may_change(key, by)
            try:
                await self.store.commit(
                    Put(old), Put(made), _event(old, "rotated", by, to=made.id), durable=True
                )
            except Conflict:
                continue
            finally:
                self._keys.forget(id)
            return NewKey(key_of(made), secret)
        raise Conflict(f"the key {id} is changed by others all the time")

    async def revoke_key(self, project: str, id: str, *, by: Principal | None = None) -> Key:
        """From now on it is good for nothing, in every process. Idempotent. Raises NotFound."""
        for _ in range(_TRIES):
            row = await self._row(project, id)
            if row.state == "revoked":
                self._keys.forget(id)
                return key_of(row)
            _may_change(key_of(row), by)
            gone = replace(row, state="revoked")
            try:
                (stored,) = await self.store.commit(Put(gone), _event(gone, "revoked", by), durable=True)
            except Conflict:
                continue
            finally:
                self._keys.forget(id)
            return key_of(stored)
        raise Conflict(f"the key {id} is changed by others all the time")

    async def forget_keys(self, before: float) -> int:
        """Remove keys that expired before a time (seconds since the epoch); how many."""
        rows = await self.store.due(KEY, before)
        for row in rows:
            await self.store.commit(Remove(KEY, row.id), Remove(USED, row.id), _event(row, "removed"))
        return len(rows)

    async def _row(self, project: str, id: str) -> Row:
        row = await self.store.get(KEY, id)
        if row.project != project:
            raise NotFound(f"there is no key {id}", kind=KEY, id=id)
        return row

    async def _last_used(self, id: str) -> float | None:
        try:
            return float((await self.store.get(USED, id)).document["at"])
        except NotFound:
            return None

    def _note_use(self, key: Key) -> None:
        now = time.monotonic()
        if now - self._used.get(key.id, -_USED_EVERY) < _USED_EVERY:
            return
        if len(self._used) > 10_000:
            self._used.clear()
        self._used[key.id] = now
        # A row of its own, so that using a key never stands in the way of changing it.
        task = asyncio.create_task(self._write_use(key))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write_use(self, key: Key) -> None:
        # Another process may have written the same minute, or the store may be away: nothing to fail for.
        try:
            try:
                row = await self.store.get(USED, key.id)
            except NotFound:
                row = Row(USED, key.id, key.project, created=time.time())
            await self.store.commit(Put(replace(row, document={"at": time.time()})))
        except RingfenceError:
            self._used.pop(key.id, None)


def _hash(secret: str) -> bytes:
    # The secret has 256 random bits: a slow hash would add nothing but time.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _new_key(
    name: str,
    project: Project,
    user: str,
    scopes: Sequence[str],
    expires: float | None,
    *,
    operator: bool = False,
) -> tuple[Row, str]:
    id = new_id("k").partition("-")[2]
    secret = f"rf_{id}_{secrets.token_hex(32)}"
    if len(name) > 200 or len(user) > 200:
        raise InvalidRequest("a name has at most 200 characters")
    document: dict[str, Any] = {
        "hash": _hash(secret).hex(),
        "name": name,
        "organisation": project.organisation,
        "user": user,
        "scopes": list(scopes),
        "expires": expires,
        "operator": operator,
    }
    return Row(KEY, id, project.id, "active", due=expires, created=time.time(), document=document), secret


def _event(row: Row, name: str, by: Principal | None = None, **data: Any) -> Event:
    told = {"by": by.key_id, "user": by.user, **data} if by is not None else data
    return Event(KEY, row.id, row.project, f"key.{name}", time.time(), told)


def _may_change(key: Key, by: Principal | None) -> None:
    """Nobody gets or ends more than his own key may do."""
    if by is not None:
        for scope in key.scopes:
            by.require(scope)
        if key.operator:
            by.require_operator()


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:80]!r} is no name", hint="1 to 63 of a-z 0-9 . _ -, a letter or digit at both ends"
        )
    return name


def _scopes(scopes: Sequence[str]) -> tuple[str, ...]:
    if not scopes or any(scope not in SCOPES for scope in scopes):
        raise InvalidRequest(f"{list(scopes)!r} are no scopes", hint=f"some of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in scopes)
