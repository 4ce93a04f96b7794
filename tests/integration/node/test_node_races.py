"""Moments that come once in thousands of times: of the kernel's, of another node's, of whoever gives up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ringfence.conformance.harness import eventually
from ringfence.guest.processes import ProcessSpec
from ringfence.model.ids import new_id
from ringfence.model.levels import Cause
from ringfence.node import resetting, sweeping
from ringfence.node.cgroups import GroupLimits
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.node.state import StateRoot
from support.leaks import Leaks
from support.nodes import ask, run

Make = Callable[..., Awaitable[NodeSandbox]]


async def test_a_folder_of_a_node_that_opened_just_now_is_left_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: list[StateRoot] = []
    name = new_id("sb")

    def meanwhile(*_: object) -> list[Any]:
        if not other:
            other.append(StateRoot.open(node.state.path))
            other[0].take_folder(name)  # its journal comes in a moment
        return []

    monkeypatch.setattr(sweeping, "_groups_of", meanwhile)
    await sweeping.sweep(node, {}, adopt=False)
    try:
        assert node.state.folder(name).is_dir()
    finally:
        other[0].give_folder(node.state.folder(name))
        other[0].close()


async def test_a_group_that_was_made_just_now_for_an_old_sandbox_is_left_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox of another state root that is reset, or woken, whose new wall is not in it yet."""
    if not node.cgroups.roots:
        pytest.skip("no cgroups")
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda real=time.time_ns: real() - 300 * 10**9)
        patch.setattr(time, "time", lambda real=time.time: real() - 300)
        name = f"{new_id('sb')}-1"
    assert sweeping._old_group(name)
    group = node.cgroups.create(name, GroupLimits(64 << 20, 1.0, 64))
    try:
        sweeping._sweep_groups(node)
        assert name in node.cgroups.names()
    finally:
        assert group.remove()


async def test_an_exit_that_the_launcher_records_late_is_known_all_the_same(no_leaks: Leaks) -> None:
    async with await Node.open() as node:
        sandbox = await node.create(ask(keep=True))
    async with await Node.open() as node:
        (sandbox,) = node.sandboxes()
        launcher = sandbox.journal.record["launcher"][0]
        os.kill(launcher, signal.SIGSTOP)
        try:
            os.kill(sandbox.handle.pid, signal.SIGKILL)
            await asyncio.sleep(2)
        finally:
            os.kill(launcher, signal.SIGCONT)
        assert "SIGKILL" in (await sandbox.ended).detail
        await sandbox.destroy()


async def test_a_wall_whose_death_is_told_late_has_ended_all_the_same(node: Node, one: Make) -> None:
    """The link breaks when the agent dies; on a busy host it takes seconds until its parent has reaped it."""
    sandbox = await one()
    launcher = (await node.context()).launcher.pid
    started = asyncio.Event()
    running = asyncio.ensure_future(
        sandbox.run(ProcessSpec(("sleep", "600")), on_start=lambda _: started.set())
    )
    await started.wait()
    os.kill(launcher, signal.SIGSTOP)
    try:
        os.kill(sandbox.handle.pid, signal.SIGKILL)
        await asyncio.sleep(2)
    finally:
        os.kill(launcher, signal.SIGCONT)
    assert (await running).end.cause is Cause.RUNTIME_CRASH


async def test_a_reset_that_is_given_up_while_it_waits_for_its_wall_leaves_no_wall(
    one: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await one()
    build, go_on = resetting._build, asyncio.Event()
    await sandbox.reset(standby=False)

    async def slowly(*arguments: Any) -> resetting.Wall:
        await go_on.wait()
        return await build(*arguments)

    monkeypatch.setattr(resetting, "_build", slowly)
    sandbox.standby = asyncio.ensure_future(resetting._stand_by(sandbox.node, sandbox))
    given_up = asyncio.ensure_future(sandbox.reset())
    await eventually(lambda: sandbox.standby is None, what="it waits for the wall that stands by")
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    go_on.set()
    await sandbox.reset(standby=False)  # takes that wall; another one would be left over
    assert sandbox.journal.record["numbered"] == 2
    assert (await run(sandbox, "echo", "on"))[1] == "on\n"
    await sandbox.destroy()
    await eventually(lambda: not any(sandbox.node.state.sandboxes.iterdir()), "a folder is left")
