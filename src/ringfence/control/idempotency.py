"""The same create twice is one create: keys of idempotency, per principal, written with what they made."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.control.core import Core, passed
from ringfence.control.records import KIND, Sandbox
from ringfence.model import errors
from ringfence.model.errors import DeadlineExceeded, IdempotencyConflict, NotFound, RingfenceError
from ringfence.model.states import State
from ringfence.store.contract import Put, Remove, Row

if TYPE_CHECKING:
    from ringfence.control.principals import Principal

KEYS = "idempotency"
CLAIMING = "claiming"  # the key's sandbox is a pool's member whose id nobody knew when the key was written
_PATIENCE = 150.0  # seconds; a queue is shorter
MADE = "made"


def key_id(principal: Principal, key: str) -> str:
    """The row's id: a key means something to one principal only."""
    text = "\0".join((principal.project, principal.user, key))
    return "ik-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def key_row(core: Core, principal: Principal, key: str, digest: str, sandbox: str = "") -> Row:
    """A key as it is written with what it made; ``sandbox`` is empty while that has no id."""
    now = core.now()
    return Row(
        KEYS,
        key_id(principal, key),
        principal.project,
        MADE if sandbox else CLAIMING,
        due=now + core.settings.keep_keys,
        created=now,
        document={"digest": digest, "sandbox": sandbox},
    )


async def replay(core: Core, principal: Principal, key: str, digest: str) -> str | None:
    """The id of the sandbox that this key made; ``None``: it is new.

    Waits while the first request is in a queue.

    Raises:
        IdempotencyConflict: it came with another request.
    """
    id = key_id(principal, key)
    end = time.monotonic() + _PATIENCE
    with core.changes_of(id) as changed:
        while True:
            if time.monotonic() > end:
                raise DeadlineExceeded("the first request with this key has no answer yet", hint="try again")
            changed.clear()
            try:
                row = await core.store.get(KEYS, id)
            except NotFound:
                return None
            if row.due is not None and row.due <= core.now():
                await core.store.commit(Remove(KEYS, id))
                return None
            if row.document["digest"] != digest:
                raise IdempotencyConflict(
                    "this idempotency key came with another request before",
                    hint="use a new key for a new request",
                )
            if row.document["sandbox"]:
                return str(row.document["sandbox"])
            if row.state == CLAIMING and (found := await _claimed(core, row)) is not None:
                return found
            await passed(changed, 0.2)


async def _claimed(core: Core, key: Row) -> str | None:
    """The member that was claimed under this key and whose door is being bound."""
    states = [State.STARTING.value, State.STOPPING.value]
    after = ""
    while rows := await core.store.find(KIND, project=key.project, states=states, after=after):
        for row in rows:
            if row.document.get("key") == key.id:
                return row.id
        after = rows[-1].id
    return None


async def settled(core: Core, sandbox: Sandbox) -> tuple[Put, ...]:
    """What the commit that ends a claim says of its key: its sandbox has an id now."""
    id = sandbox.document.get("key")
    if not id:
        return ()
    try:
        row = await core.store.get(KEYS, str(id))
    except NotFound:
        return ()
    if row.document["sandbox"]:
        return ()
    document = {**row.document, "sandbox": sandbox.id}
    return (Put(replace(row, state=MADE, document=document)),)


async def lost(core: Core, sandbox: Sandbox) -> tuple[Remove, ...]:
    """What the removal of a claimed member says of its key: it has made nothing."""
    id = sandbox.document.get("key")
    if not id:
        return ()
    with contextlib.suppress(NotFound):
        row = await core.store.get(KEYS, str(id))
        if not row.document["sandbox"]:
            return (Remove(KEYS, row.id, row.revision),)
    return ()


def failure(error: Mapping[str, Any], id: str) -> RingfenceError:
    """The error that a start ended with, as it was raised first."""
    code = str(error.get("code", ""))
    kind = _BY_CODE.get(code, errors.StartFailed)
    details = {**dict(error.get("details") or {}), "sandbox": id}
    made = kind.__new__(kind)
    RingfenceError.__init__(
        made, str(error.get("message", "the start failed")), hint=str(error.get("hint", ""))
    )
    made.details = details
    return made


def _tree(kind: type[RingfenceError]) -> dict[str, type[RingfenceError]]:
    found = {kind.code: kind} if "code" in vars(kind) else {}
    for each in kind.__subclasses__():
        found |= _tree(each)
    return found


_BY_CODE = {code: kind for code, kind in _tree(RingfenceError).items() if kind is not errors.GuestRefused}
