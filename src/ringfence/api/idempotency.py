"""Idempotency-Key: the same request again gets the same answer, in whichever process it arrives.

Before the work an *open* row is written, with the digest of the request; after it, the answer. Whoever comes
with the same key meanwhile waits for the answer; one whose process died is taken over after a while. A store
that does not answer in between changes none of that: what it was to be told, it is told when it is back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from ringfence.api.calls import check_key
from ringfence.model.errors import Conflict, IdempotencyConflict, NotFound, RingfenceError, StoreUnavailable
from ringfence.store.contract import ANSWERS, Change, Put, Remove, Row, Store

KIND = "idempotency"
KEPT = 24 * 3600.0  # seconds that an answer is remembered
ABANDONED = 180.0  # seconds after which an open one belongs to a dead process: more than any create takes
_MOST_KEPT = 256 * 1024

_PAUSES = 0.1, 2.0  # seconds between two tries to tell a store that is away: first, most

Stored = tuple[int, bytes]
Later = Callable[[Coroutine[Any, Any, None]], Any]


async def once(
    store: Store,
    project: str,
    name: str,
    key: str,
    request: bytes,
    work: Callable[[], Awaitable[Stored]],
    later: Later = asyncio.ensure_future,
) -> tuple[Stored, bool]:
    """Do ``work`` unless it was done for this key; status and JSON, and whether it is from before.

    ``later``: takes what goes on when the caller has its answer.

    Raises:
        IdempotencyConflict: the key came with another request. InvalidRequest: no key that can be.
        What ``work`` raises; then the key is free again.
    """
    check_key(key)
    digest = hashlib.sha256(request).hexdigest()
    id = "idem-" + hashlib.sha256(f"{project}\0{name}\0{key}".encode()).hexdigest()[:40]
    row = await _begin(store, id, project, digest, later)
    if row.state == "done":
        return (int(row.document["status"]), base64.b64decode(row.document["body"])), True
    try:
        status, body = await work()
    except BaseException:
        # Nothing was made, as far as anybody knows: the same key may try again. A fault of ours says nothing
        # about what happened, but then a retry is all that a client can do.
        with contextlib.suppress(RingfenceError):  # somebody took over
            await asyncio.shield(_tell(store, Remove(KIND, id, row.revision), later))
        raise
    if len(body) <= _MOST_KEPT:
        kept: dict[str, Any] = {
            "digest": digest,
            "status": status,
            "body": base64.b64encode(body).decode(),
        }
        # In conflict we took so long that somebody took over; both made their own.
        with contextlib.suppress(Conflict):
            await _tell(store, Put(replace(row, state="done", document=kept)), later)
    return (status, body), False


async def _tell(store: Store, change: Change, later: Later) -> None:
    """Commit; if the store does not answer, in the background as soon as it does: the work was done."""
    try:
        await store.commit(change)
    except StoreUnavailable:
        later(_when_back(lambda: store.commit(change)))


async def _when_back(do: Callable[[], Awaitable[Any]]) -> None:
    """Do it as soon as the store answers; given up when somebody else may have taken over."""
    pause, most = _PAUSES
    end = time.monotonic() + ABANDONED
    while time.monotonic() < end:
        await asyncio.sleep(pause)
        pause = min(2 * pause, most)
        try:
            await do()
        except StoreUnavailable:
            continue
        except RingfenceError:
            pass  # it is as it should be, or somebody else's
        return


async def _undo(store: Store, id: str, token: str) -> None:
    """Remove what was written perhaps, and is nobody's: whoever comes with the key need not wait for it."""
    end = time.monotonic() + 2 * ANSWERS  # until then a server may still be at it

    async def look() -> None:
        try:
            row = await store.get(KIND, id)
        except NotFound:
            if time.monotonic() < end:
                raise StoreUnavailable("not yet known") from None
            return
        if row.state == "open" and row.document.get("token") == token:
            await store.commit(Remove(KIND, id, row.revision))

    await _when_back(look)


async def _begin(store: Store, id: str, project: str, digest: str, later: Later) -> Row:
    delay = 0.01
    token = secrets.token_hex(8)
    while True:
        now = time.time()
        known = {"digest": digest, "token": token}
        fresh = Row(KIND, id, project, "open", due=now + KEPT, created=now, document=known)
        try:
            (row,) = await store.commit(Put(fresh))
        except StoreUnavailable:
            later(_undo(store, id, token))
            raise
        except Conflict:
            try:
                found = await store.get(KIND, id)
            except NotFound:
                continue
            if found.document.get("digest") != digest:
                raise IdempotencyConflict(
                    "this Idempotency-Key came with another request before",
                    hint="use a new key for a new request",
                ) from None
            if found.state == "done":
                return found
            if now - found.created > ABANDONED:
                try:
                    (row,) = await store.commit(Put(replace(found, created=now)))
                except Conflict:
                    continue
                return row
            await asyncio.sleep(delay)
            delay = min(delay * 2, 0.5)
            continue
        return row


async def forget(store: Store) -> None:
    """Remove what has been remembered long enough."""
    rows = await store.due(KIND, time.time(), limit=500)
    if rows:
        await store.commit(*(Remove(KIND, row.id) for row in rows))
