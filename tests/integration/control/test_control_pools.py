from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ringfence.control.pools import Pool
from ringfence.control.records import KIND
from ringfence.control.service import Control
from ringfence.guest.processes import ProcessSpec
from ringfence.model.states import State
from support.services import ALICE, asked, small


async def until(check: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.02)


async def warm(control: Control, pool: Pool, count: int) -> None:
    async def there() -> bool:
        return int((await control.pools.queue(ALICE, pool.name))["warm"]) >= count

    await until(there)


async def run(control: Control, id: str, command: str) -> bytes:
    process = await (await control.link(ALICE, id)).start(ProcessSpec(("/bin/sh", "-c", command)))
    output = b"".join([piece.data async for piece in process])
    await process.wait()
    return output


async def test_a_claim_binds_the_door_of_a_member_that_was_ready(control: Control) -> None:
    pool = await control.pools.create(ALICE, "jails", policy=small(), min=1, max=2)
    await warm(control, pool, 1)
    members = await control.store.find(KIND, states=[State.WARM.value])
    made = await control.sandboxes.create(
        ALICE,
        asked(
            env={"NAME": "value"}, labels={"a": "b"}, secrets={"token": b"hush"}, files={"/workspace/f": b"x"}
        ),
    )
    assert made.id in [row.id for row in members]
    assert (made.state, made.pool, made.project) == (State.RUNNING, pool.id, "default")
    assert dict(made.labels) == {"a": "b"}
    assert made.boundary["runtime"] == "jail"
    assert await run(control, made.id, "echo $NAME; cat /run/secrets/token /workspace/f") == b"value\nhushx"
    assert [each.id for each in await control.sandboxes.list(ALICE, labels={"a": "b"})] == [made.id]
    await warm(control, pool, 1)  # single use: another member takes its place
    await control.sandboxes.delete(ALICE, made.id)
    await control.pools.delete(ALICE, "jails")

    async def gone() -> bool:
        return not await control.placement.list()

    await until(gone)
