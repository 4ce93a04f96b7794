"""What a transaction of the state store costs: alone, and from twenty tasks at once.

    python benchmarks/store.py /var/tmp/bench.db          # SQLite; the file is made and removed
    python benchmarks/store.py 'postgresql://…'           # an empty schema

A transaction is what a transition of a sandbox is: its row, a counter, an event. Milliseconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ringfence.store.contract import Add, Event, Put, Row
from ringfence.store.opening import open_store

COUNT = 2000


async def timed(name: str, do: Callable[[], Awaitable[object]], tasks: int = 1) -> None:
    """Print the median and the tail of COUNT calls by so many tasks."""
    took: list[float] = []

    async def one() -> None:
        for _ in range(COUNT // tasks):
            began = time.perf_counter()
            await do()
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(tasks)))
    rate = len(took) / (time.perf_counter() - began)
    took.sort()
    p50, p95, p99 = (took[int(len(took) * part)] * 1e3 for part in (0.5, 0.95, 0.99))
    print(f"{name:32} p50 {p50:7.3f}  p95 {p95:7.3f}  p99 {p99:7.3f}  {rate:7.0f} a second")


async def main(url: str) -> None:
    """Everything."""
    store = await open_store(url)
    document = {"policy": "x" * 800}
    (row,) = await store.commit(Put(Row("sandbox", "sb-0", "p", "running", document=document)))
    number = 0

    async def transition() -> None:
        nonlocal row
        event = Event("sandbox", "sb-0", "p", "sandbox.running", time.time())
        (row,) = await store.commit(Put(row), Add("alive", 1), event)

    async def create(durable: bool = False) -> None:
        nonlocal number
        number += 1
        made = Row(
            "sandbox", f"sb-{number:08}", "p", "pending", "k", 1e9, labels={"a": "b"}, document=document
        )
        await store.commit(
            Put(made), Add("alive", 1), Event("sandbox", made.id, "p", "made", 0.0), durable=durable
        )

    async def take() -> None:
        await store.take("sandbox", key="k", state="pending", into="running", document={"token": "x"})

    await timed("row changed + counter + event", transition)
    await timed("row made + label, counter, event", create)
    await timed("the same, durable", lambda: create(True))
    await timed("the same, 20 tasks", create, 20)
    await timed("take", take)
    await timed("take, 20 tasks", take, 20)
    await timed("get", lambda: store.get("sandbox", "sb-0"))
    await store.close()
    if "://" not in url:
        for path in Path(url).parent.glob(Path(url).name + "*"):
            path.unlink()


asyncio.run(main(sys.argv[1]))
