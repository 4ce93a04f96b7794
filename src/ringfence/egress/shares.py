"""How several processes divide a project's limits among them: the arithmetic. No I/O.

A store has one document for a project: who has how much of each limit, and who wants how much. Each process
changes only its own entry, under the document's revision, and takes no more than the others leave. So the sum
is never above the limit, in whatever order they come. All amounts are whole numbers.

There is no clock that two of them have to agree on. An entry has a beat, which its owner raises. What is not
renewed within ``VALID`` seconds of the beginning of the last write is void for its owner; others take it back
when they have seen the same beat for ``RECLAIM`` seconds, which is later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

CONNECTIONS, OUT, IN, RATE = "connections", "out", "in", "rate"
BUDGET = "budget"  # nothing to divide: what each has used is told to all
VALID, RECLAIM = 10.0, 14.0
EVERY = 1.0  # seconds between two looks at the document
BEAT = 3.0  # seconds after which an entry is written anew though nothing changed
Amounts = dict[str, int]
Counts = list[float]  # requests, bytes out, bytes in, money


def units(rate: float) -> int:
    """Into how many parts a rate of requests is divided: none so small that no request fits in."""
    return max(1, int(rate))


def burst(rate: float) -> float:
    """Requests at once, of the whole rate."""
    return max(1.0, rate)


def fair(limit: int, wants: Mapping[str, int]) -> Amounts:
    """A limit, divided: small wishes first and whole, the others evenly; what is left over, evenly too."""
    left, count, found = limit, len(wants), {}
    for number, (owner, want) in enumerate(sorted(wants.items(), key=lambda each: (each[1], each[0]))):
        found[owner] = min(max(want, 0), left // (count - number))
        left -= found[owner]
    # Whole numbers leave a rest: to those who still want something, the hungriest first, else to all.
    order = sorted(wants, key=lambda owner: (found[owner] - wants[owner], owner))
    for owner in order:
        more = min(max(wants[owner] - found[owner], 0), left)
        found[owner] += more
        left -= more
    for number, owner in enumerate(order):
        more = -(-left // (count - number))
        found[owner] += more
        left -= more
    return found


def target(
    document: Mapping[str, Any],
    me: str,
    limits: Mapping[str, int],
    wants: Mapping[str, int],
    dead: Collection[str] = (),
) -> Amounts:
    """What one process should have now: its fair part, and no more than the others leave."""
    others = {
        owner: entry
        for owner, entry in document.get("holders", {}).items()
        if owner != me and owner not in dead
    }
    found = {}
    for name, limit in limits.items():
        wanted = {owner: int(entry["want"].get(name, 0)) for owner, entry in others.items()}
        mine = fair(limit, wanted | {me: wants.get(name, 0)})[me]
        theirs = sum(int(entry["have"].get(name, 0)) for entry in others.values())
        found[name] = max(0, min(mine, limit - theirs))
    return found


def entered(
    document: Mapping[str, Any],
    me: str,
    beat: int,
    have: Mapping[str, int],
    wants: Mapping[str, int],
    dead: Collection[str] = (),
    used: Counts | None = None,
) -> dict[str, Any]:
    """The document with one process's entry; those of dead ones are gone, and what they used is not.

    ``beat`` is never given twice, also not by one that was taken for dead meanwhile: others remember the old.
    ``used``: as it says in the entry, and since then.
    """
    found = _without(document, dead)
    found["holders"][me] = {"beat": beat, "have": dict(have), "want": dict(wants)}
    if used is not None:
        found["holders"][me]["used"] = used
    return found


def left(document: Mapping[str, Any], me: str) -> dict[str, Any]:
    """The document without one process's entry; what it used stays."""
    return _without(document, (me,))


def _without(document: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    holders = dict(document.get("holders", {}))
    spent = document.get("spent", [])
    for owner in gone:
        spent = added(spent, holders.pop(owner, {}).get("used", []))
    return {**document, "holders": holders} | ({"spent": spent} if spent else {})


def used_by_all(document: Mapping[str, Any]) -> Counts:
    """What was used since there is a budget, by all that ever had an entry."""
    found: Counts = document.get("spent", [])
    for entry in document.get("holders", {}).values():
        found = added(found, entry.get("used", []))
    return added(found, [0.0] * 4)


def added(one: Counts, other: Counts) -> Counts:
    """The sum; empty is nothing."""
    if not one or not other:
        return list(one or other)
    return [mine + theirs for mine, theirs in zip(one, other, strict=True)]


def passed_on(
    document: Mapping[str, Any], rate: float, have: int, level: float, given_back: float
) -> tuple[dict[str, Any], float]:
    """Requests that may be made at once, as they go from who gives up a part of the rate to who gets it.

    Returns the document, and what comes to whoever has ``have`` units and ``level`` requests left. A document
    that never had any begins with the whole burst; what a dead process had is not given again.
    """
    spare = min(float(document.get("spare", burst(rate))) + given_back, burst(rate))
    gain = max(0.0, min(spare, have * burst(rate) / units(rate) - level))
    return {**document, "spare": spare - gain}, gain
