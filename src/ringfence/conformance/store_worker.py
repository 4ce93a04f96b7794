"""A process of the store's suites: OPENER, ADDRESS, COMMAND …; begins when its stdin says so."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ringfence.model.errors import Conflict, QuotaExceeded
from ringfence.store.contract import Add, Event, Held, Put, Row, Store


def opener(name: str) -> Callable[[str], Awaitable[Store]]:
    """The coroutine function of ``module:function``."""
    module, _, function = name.partition(":")
    found: Callable[[str], Awaitable[Store]] = getattr(importlib.import_module(module), function)
    return found


async def takes(store: Store, who: str) -> list[str]:
    """Take rows until there is none."""
    taken: list[str] = []
    while True:
        counted = (Add("taken", 1), Event("thing", "", "p", "thing.taken", 0.0, {"by": who}))
        row = await store.take(
            "thing", key="pool", state="ready", into="taken", document={"by": who}, changes=counted
        )
        if row is None:
            return taken
        taken.append(row.id)


async def adds(store: Store, id: str, times: str) -> int:
    """Add one to a row's number so often, each time on what was read last; returns how often it was late."""
    late = 0
    for _ in range(int(times)):
        while True:
            row = await store.get("thing", id)
            number = int(row.document["number"]) + 1
            try:
                await store.commit(Put(replace(row, document={"number": number})), Add("added", 1))
                break
            except Conflict:
                late += 1
    return late


async def counts(store: Store, most: str) -> int:
    """Count one up until the limit is reached; returns how often it was let."""
    done = 0
    while True:
        try:
            await store.commit(Add("limited", 1, int(most)))
        except QuotaExceeded:
            return done
        done += 1


async def names(store: Store, who: str, times: str) -> list[str]:
    """Try to make rows of common names; returns the names that it got."""
    got = []
    for number in range(int(times)):
        try:
            await store.commit(Put(Row("thing", f"{who}-{number}", "p", key=f"name-{number}"), unique=True))
        except Conflict:
            continue
        got.append(f"name-{number}")
    return got


async def fences(store: Store, who: str, times: str) -> int:
    """Add one to a row's number without comparing, but only under a lease; returns how often."""
    done = 0
    while done < int(times):
        if not await store.lease("fence", who, 300):
            await asyncio.sleep(0.001)
            continue
        row = await store.get("thing", "fenced")
        number = int(row.document["number"]) + 1
        await store.commit(Held("fence", who), Put(replace(row, document={"number": number})))
        done += 1
        await store.release("fence", who)
    return done


async def events(store: Store, who: str, times: str) -> None:
    """Tell of so many things, two at a time."""
    for number in range(int(times)):
        one = Event("thing", who, "p", "thing.first", 0.0, {"number": number})
        await store.commit(one, replace(one, name="thing.second"))


async def writes(store: Store, who: str, durable: str) -> None:
    """Write rows for ever, each with a counter, a label and an event; print each number that returned."""
    number = 0
    while True:
        await store.commit(
            Put(Row("thing", f"{who}-{number:08}", "p", labels={"by": who}, document={"number": number})),
            Add("written", 1),
            Event("thing", f"{who}-{number:08}", "p", "thing.written", 0.0),
            durable=durable == "durable",
        )
        print(number, flush=True)
        number += 1


COMMANDS = {call.__name__: call for call in (takes, adds, counts, names, fences, events, writes)}


async def _main() -> None:
    open_store, address, command, *arguments = sys.argv[1:]
    store = await opener(open_store)(address)
    try:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        result = await COMMANDS[command](store, *arguments)
    finally:
        await store.close()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
