"""What only real walls can show: ends that the host sets, sleep and waking, snapshots, a killed node."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.control.service import Control
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import LinkLost, RingfenceError
from ringfence.model.states import State
from support.services import ALICE, NodeProcess, asked, control_on

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="without root no wall here can be frozen")


async def until(check: Callable[[], Awaitable[Any]], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.05)


async def run(control: Control, id: str, command: str) -> bytes:
    async with control.using(id, ALICE.project):  # or it may fall asleep over it, where it is idle early
        process = await (await control.link(ALICE, id)).start(ProcessSpec(("/bin/sh", "-c", command)))
        output = b"".join([piece.data async for piece in process])
        await process.wait()
    return output


@ROOT
async def test_sleep_and_waking_keep_what_runs(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(idle=3.0))
    assert await run(control, made.id, "echo kept > /workspace/file; cat /workspace/file") == b"kept\n"
    await control.sandboxes.wait_for(ALICE, made.id, {State.PAUSED}, 90)
    assert await run(control, made.id, "cat /workspace/file") == b"kept\n"
    told = [event.name for event in await control.sandboxes.events(ALICE, made.id)]
    assert "sandbox.running" in told[told.index("sandbox.paused") :]  # by now it may sleep again


async def test_the_end_of_the_wall_ends_the_sandbox(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(timeout=8.0))

    async def sleep() -> None:
        link = await control.new_link(ALICE, made.id)
        try:
            await (await link.start(ProcessSpec(("/bin/sleep", "600")))).wait()
        finally:
            await link.close()

    with pytest.raises(RingfenceError):  # also where its time is over before the command begins
        await sleep()
    ended = await control.sandboxes.wait_for(ALICE, made.id, {State.STOPPED}, 90)
    assert ended.cause == "deadline"


@ROOT
async def test_snapshots_and_forks_carry_files(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    await run(control, made.id, "echo one > /workspace/file")
    await control.sandboxes.snapshot(ALICE, made.id, "saved", "disk")
    await run(control, made.id, "echo two > /workspace/file")
    again = await control.sandboxes.create(ALICE, asked(snapshot="saved"))
    assert await run(control, again.id, "cat /workspace/file") == b"one\n"
    (fork,) = await control.sandboxes.fork(ALICE, made.id, kind="disk")
    assert await run(control, fork.id, "cat /workspace/file") == b"two\n"
    await control.sandboxes.reset(ALICE, fork.id)
    assert await run(control, fork.id, "ls /workspace") == b""
    await control.powers.remove_snapshot(await control.powers.find_snapshot("default", "saved"))
    with pytest.raises(RingfenceError):
        await control.sandboxes.create(ALICE, asked(snapshot="saved"))
    assert await run(control, again.id, "cat /workspace/file") == b"one\n"  # it lives on


@ROOT
async def test_a_killed_node_costs_no_sandbox(node: NodeProcess, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    await run(control, made.id, "echo kept > /workspace/file")
    await asyncio.to_thread(node.kill)
    assert await run(control, made.id, "cat /workspace/file") == b"kept\n"  # streams don't go through it
    await asyncio.to_thread(node.start)
    await control.sandboxes.pause(ALICE, made.id)
    await control.sandboxes.resume(ALICE, made.id)
    assert await run(control, made.id, "cat /workspace/file") == b"kept\n"


async def test_what_died_while_the_service_was_away_is_known_after(node: NodeProcess, tmp_path: Path) -> None:
    url = str(tmp_path / "store.db")
    async with control_on(node, url) as control:
        dies = await control.sandboxes.create(ALICE, asked())
        lives = await control.sandboxes.create(ALICE, asked())
    from ringfence.placement.local import LocalPlacement

    placement = LocalPlacement(node.socket)
    await placement.destroy(dies.id)
    await placement.close()
    async with control_on(node, url, owner="api-2") as control:
        ended = await control.sandboxes.wait_for(ALICE, dies.id, {State.STOPPED}, 90)
        assert ended.cause == "node_lost"
        assert await run(control, lives.id, "echo alive") == b"alive\n"
        await control.sandboxes.delete(ALICE, lives.id)
        with pytest.raises(RingfenceError):
            await control.link(ALICE, lives.id)


async def test_a_link_that_was_lost_is_dialled_anew(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    link = await control.link(ALICE, made.id)
    assert await control.link(ALICE, made.id) is link
    link.abort()
    with pytest.raises(LinkLost):
        await link.ping()
    assert await run(control, made.id, "echo again") == b"again\n"
