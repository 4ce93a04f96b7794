"""A node that dies while the agent inside belongs to somebody else: no container outlives the node."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import ringfence
from ringfence.conformance.harness import Kit, eventually, request_for
from ringfence.node.service import Node
from ringfence.runtimes.launching.processes import birth_of
from support.commands import Ringfence
from support.engines import docker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of these tests is root's")

HOST = """
import asyncio, sys
from ringfence.conformance.harness import request_for
from ringfence.node.service import Node
from ringfence.runtimes.engines import containers, driver, mourning

state, kind, watched = sys.argv[1:]
real = containers.arguments
if kind == "hostile":  # an agent that does not care that its stream has ended
    containers.arguments = lambda spec, facts: [word for word in real(spec, facts) if word != "leave=1"]
if kind == "half":
    async def attach(self, container):
        print("half", container, flush=True)
        await asyncio.sleep(600)
    driver.EngineRuntime._attach = attach
if watched == "alone":
    mourning.Mourning.begin = lambda self, name, endpoint: None

async def main():
    node = await Node.open(state, adopt=False)
    sandbox = await node.create(request_for("docker"))
    print(sandbox.id, sandbox.handle.data["link"][0], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@asynccontextmanager
async def host(kit: Kit, kind: str, watched: str) -> AsyncIterator[tuple[str, str]]:
    """What the process with the node says of its only sandbox; that process is killed before it is told."""
    source = str(Path(ringfence.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, str(kit.state), kind, watched],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert process.stdout is not None
    try:
        first, second = (await asyncio.to_thread(process.stdout.readline)).split()
        assert docker("ps", "--all", "--quiet") != ""
        process.kill()
        process.wait()
        yield first, second
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        if left := docker("ps", "--all", "--quiet").split():
            docker("rm", "--force", "--volumes", *left)  # of a test that failed


def nothing_there() -> bool:
    """The engine has no container."""
    return docker("ps", "--all", "--quiet") == ""


async def swept(kit: Kit) -> None:
    """The next node clears up what the dead one left, and nothing of it stays in the state root."""
    node = await Node.open(kit.state)
    await node.close()
    assert list((kit.state / "sandboxes").iterdir()) == []


async def test_an_agent_that_ignores_the_end_of_its_stream_dies_with_the_node(kit: Kit) -> None:
    async with host(kit, "hostile", "watched"):
        # Nobody has opened a node since.
        await eventually(nothing_there, "the container outlives its node")
    await swept(kit)


async def test_without_the_watcher_it_would_live_on_until_the_next_node_s_sweep(kit: Kit) -> None:
    async with host(kit, "hostile", "alone") as (name, link):
        await eventually(lambda: birth_of(int(link)) is None, "the link outlives its node")
        for _ in range(5):  # the attack works: this container is there because nobody removed it
            assert docker("inspect", "--format", "{{.State.Running}}", f"ringfence-{name}") == "true"
        done = Ringfence({**os.environ, "RINGFENCE_HOME": str(kit.state)})("list")
        assert done.returncode == 0, done.stderr
        await eventually(nothing_there, "the sweep left the container")
    assert list((kit.state / "sandboxes").iterdir()) == []


@pytest.mark.parametrize("watched", ["watched", "alone"])
async def test_a_node_that_dies_in_the_middle_of_a_start_leaves_no_container(kit: Kit, watched: str) -> None:
    async with host(kit, "half", watched):
        if watched == "alone":
            assert not nothing_there()
            await swept(kit)
        await eventually(nothing_there, "the container that was being made stays")
    await swept(kit)


async def test_the_watcher_is_there_as_long_as_somebody_is_to_be_watched(kit: Kit) -> None:
    mourning = kit.runtime.driver._mourning  # type: ignore[attr-defined]
    assert mourning.pid == 0
    one, two = await kit.sandbox(), await kit.sandbox()
    pid = mourning.pid
    assert pid
    assert os.getsid(pid) == pid, "a Ctrl-C would reach it"
    await one.destroy()
    assert mourning.pid == pid
    await two.destroy()
    assert mourning.pid == 0
    assert not Path(f"/proc/{pid}").exists()
    kept = await kit.node.create(request_for("docker", keep=True))
    kit.sandboxes.append(kept)
    kit.ids.add(kept.id)
    assert mourning.pid == 0, "it outlives its node on purpose"


async def test_a_watcher_that_was_killed_is_replaced(kit: Kit) -> None:
    mourning = kit.runtime.driver._mourning  # type: ignore[attr-defined]
    first = await kit.sandbox()
    os.kill(mourning.pid, 9)
    gone = mourning.pid
    mourning._process.wait()
    second = await kit.sandbox()
    assert mourning.pid not in (0, gone)
    assert mourning.watched == {f"ringfence-{first.id}", f"ringfence-{second.id}"}
    await first.destroy()
    await second.destroy()
