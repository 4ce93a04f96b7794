"""What a node does when the host fails it in the middle, and when callers change their mind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.conformance.suites.placements import spec, until
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import HostLimit, NotFound, RingfenceError
from ringfence.node.cgroups import Group
from ringfence.node.sandboxes import NodeSandbox
from ringfence.placement.contract import VolumeMount
from ringfence.placement.hosting import Hosting
from support.leaks import Leaks, mounts


@pytest.fixture
async def node(no_leaks: Leaks) -> AsyncIterator[Hosting]:
    made = await Hosting.open(no_leaks.home, "test", lambda *_: None)
    yield made
    if made._lock >= 0:
        for each in made.all():
            await made.destroy(each.id, 0.0)
        await made.close()


async def test_a_full_disk_undoes_a_start(node: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(self: NodeSandbox, at: float) -> None:
        raise HostLimit("no space left on device")

    wanted = spec(deadline=4e9)
    with monkeypatch.context() as patch:
        patch.setattr(NodeSandbox, "set_deadline", full)
        with pytest.raises(HostLimit):
            await node.start(wanted)
        assert node.all() == []
        assert list(node.node.state.sandboxes.iterdir()) == []
    assert (await node.start(wanted)).state == "running"  # the same id, when there is room again
    await node.destroy(wanted.id, 0.0)


async def test_an_end_that_cannot_be_written_down_is_known_while_the_node_lives(
    node: Hosting, tmp_path: Path
) -> None:
    node.graves._folder = tmp_path / "full" / "disk"
    wanted = spec()
    await node.start(wanted)
    node.node.get(wanted.id).set_deadline(0.0)

    async def removed() -> bool:
        return not (node.node.state.sandboxes / wanted.id).exists()

    await until(removed, "the removal")
    end = node.get(wanted.id).end
    assert end is not None
    assert end["cause"] == "deadline"
    assert (await node.destroy(wanted.id, 0.0))["cause"] == "deadline"


async def test_destroying_ends_a_start_under_way(node: Hosting) -> None:
    for pause in range(12):
        wanted = spec()
        starting = asyncio.create_task(node.start(wanted))
        for _ in range(1 + pause * 3):  # it has begun, at least
            await asyncio.sleep(0)
        await node.destroy(wanted.id, 0.0)
        await asyncio.gather(starting, return_exceptions=True)
        with pytest.raises(NotFound):
            node.get(wanted.id)


async def test_a_caller_that_is_cancelled_leaves_the_start_to_the_next(node: Hosting) -> None:
    wanted = spec()
    first = asyncio.create_task(node.start(wanted))
    second = asyncio.create_task(node.start(wanted))
    await asyncio.sleep(0)
    first.cancel()
    placed = await second
    assert placed.state == "running"
    assert [each.id for each in node.all()] == [wanted.id]
    await node.destroy(wanted.id, 0.0)


async def test_closing_undoes_what_is_half_made(node: Hosting) -> None:
    starting = asyncio.create_task(node.start(spec()))
    for _ in range(5):
        await asyncio.sleep(0)
    await node.close()
    (result,) = await asyncio.gather(starting, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError | RingfenceError)


async def test_grace_is_the_workloads(node: Hosting) -> None:
    wanted = spec()
    await node.start(wanted)
    async with await GuestLink.open(await node.connect(wanted.id), timeout=60) as link:
        script = "trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
        process = await link.start(ProcessSpec(("sh", "-c", script)))
        said = b""
        async for piece in process:
            said += piece.data
            if said == b"ready\n":
                ending = asyncio.create_task(node.destroy(wanted.id, 60.0))
            if said == b"ready\nasked\n":
                break
    assert (await ending)["cause"] == "killed"


async def test_an_id_is_free_though_processes_of_the_one_before_still_die(
    node: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, looks = spec(), 0
    await node.start(wanted)
    remove = Group.remove

    def busy(group: Group) -> bool:
        nonlocal looks
        looks += 1
        return looks > 3 and remove(group)

    with monkeypatch.context() as patch:
        patch.setattr(node.node.groups, "give_back", lambda _: False)
        patch.setattr(Group, "remove", busy)
        await node.destroy(wanted.id, 0.0)
        assert (node.node.state.sandboxes / wanted.id).exists()
        assert (await node.start(wanted)).state == "running"
    await node.destroy(wanted.id, 0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="volumes need root")
async def test_the_first_volume_leaves_sandboxes_that_run_alone(node: Hosting) -> None:
    home = str(node.node.state.path)
    before, after = spec(), spec(volumes=(VolumeMount("vo-first", "/data", read_only=False),))
    await node.start(before)
    assert not [line for line in mounts() if home in line]  # a service without volumes mounts nothing
    launcher = await node.node.launcher()
    await node.volumes.make("vo-first", 32 << 20)
    await node.start(after)
    assert await node.node.launcher() != launcher
    for wanted, script in ((before, "echo on"), (after, "echo on > /data/x; cat /data/x")):
        async with await GuestLink.open(await node.connect(wanted.id), timeout=60) as link:
            process = await link.start(ProcessSpec(("sh", "-c", script)))
            assert b"".join([piece.data async for piece in process]) == b"on\n"
        assert (await node.destroy(wanted.id, 0.0))["cause"] == "killed"
    await node.volumes.remove("vo-first")
    await node.close()
    assert not [line for line in mounts() if home in line]
