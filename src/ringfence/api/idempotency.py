"""Idempotency-Key: the same request again gets the same answer, in whichever process it arrives.

Before the work an *open* row is written, with the digest of the request; after it, the answer. Whoever comes
with the same key meanwhile waits for the answer; one whose process died is taken over after a while.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ringfence.api.calls import check_key
from ringfence.model.errors import Conflict, IdempotencyConflict, NotFound, RingfenceError
from ringfence.store.contract import Put, Remove, Row, Store

KIND = "idempotency"
KEPT = 24 * 3600.0  # seconds that an answer is remembered
ABANDONED = 180.0  # seconds after which an open one belongs to a dead process: more than any create takes
_MOST_KEPT = 256 * 1024

Stored = tuple[int, bytes]


async def once(
    store: Store, project: str, name: str, key: str, request: bytes, work: Callable[[], Awaitable[Stored]]
) -> tuple[Stored, bool]:
    """Do ``work`` unless it was done for this key; status and JSON, and whether it is from before.

    Raises:
        IdempotencyConflict: the key came with another request. InvalidRequest: no key that can be.
        What ``work`` raises; then the key is free again.
    """
    check_key(key)
    digest = hashlib.sha256(request).hexdigest()
    id = "idem-" + hashlib.sha256(f"{project}\0{name}\0{key}".encode()).hexdigest()[:40]
    row = await _begin(store, id, project, digest)
    if row.state == "done":
        return (int(row.document["status"]), base64.b64decode(row.document["body"])), True
    try:
        status, body = await work()
    except BaseException:
        # Nothing was made, as far as anybody knows: the same key may try again. A fault of ours says nothing
        # about what happened, but then a retry is all that a client can do.
        with contextlib.suppress(RingfenceError):  # somebody took over, or it is taken over later
            await asyncio.shield(store.commit(Remove(KIND, id, row.revision)))
        raise
    if len(body) <= _MOST_KEPT:
        kept: dict[str, Any] = {
            "digest": digest,
            "status": status,
            "body": base64.b64encode(body).decode(),
        }
        # In conflict we took so long that somebody took over; both made their own.
        with contextlib.suppress(Conflict):
            await store.commit(Put(replace(row, state="done", document=kept)))
    return (status, body), False


async def _begin(store: Store, id: str, project: str, digest: str) -> Row:
    delay = 0.01
    while True:
        now = time.time()
        fresh = Row(KIND, id, project, "open", due=now + KEPT, created=now, document={"digest": digest})
        try:
            (row,) = await store.commit(Put(fresh))
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
