"""One page of anything that is listed by id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ringfence.api.calls import Call

Item = TypeVar("Item")


async def page(
    call: Call,
    what: str,
    limit: int,
    cursor: str,
    find: Callable[[str, int], Awaitable[Sequence[Item]]],
    id_of: Callable[[Item], str],
    shown: Callable[[Item], Any],
) -> dict[str, Any]:
    """``items`` and ``next_cursor``. ``find(after, limit)`` gives items beyond an id.

    Raises:
        InvalidRequest: the cursor is of another list or project.
    """
    signer, project = call.service.signer, call.principal.project
    after = signer.after(what, project, cursor) if cursor else ""
    found = list(await find(after, limit + 1))
    more = len(found) > limit
    found = found[:limit]
    return {
        "items": [shown(each) for each in found],
        "next_cursor": signer.cursor(what, project, id_of(found[-1])) if more else None,
    }
