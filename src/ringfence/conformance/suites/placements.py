"""What every placement must do. The author gives fixtures and picks parts::

    class TestMine(PlacementSuite):
        @pytest.fixture
        async def placement(self): ...        # a ringfence.placement.contract.Placement
        links = True                          # connect() reaches a guest agent

Walls are small, and everything that a test starts it destroys.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import (
    InvalidRequest,
    LinkLost,
    NotFound,
    RingfenceError,
    RuntimeUnavailable,
    Unsupported,
    WrongState,
)
from ringfence.model.ids import new_id
from ringfence.model.policy import Limits, Policy, Process, Resources, Wall
from ringfence.placement.contract import Happened, Placed, PlacedSpec, Placement, VolumeMount

MIB = 1 << 20
PATIENCE = 60.0  # seconds for what comes by itself, on a busy machine
SMALL = Wall(process=Process(max_processes=64), resources=Resources(cpus=0.5, memory=64 * MIB, disk=16 * MIB))


def spec(policy: Policy | None = None, **parts: Any) -> PlacedSpec:
    """A small sandbox of its own."""
    wanted = policy if policy is not None else Policy(wall=SMALL)
    return PlacedSpec(id=parts.pop("id", None) or new_id("sb"), policy=wanted.to_dict(), **parts)


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    """Return when it is so."""
    end = time.monotonic() + PATIENCE
    while not await condition():
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} s: {what}"
        await asyncio.sleep(0.02)


async def run(placement: Placement, id: str, *argv: str) -> tuple[int, bytes]:
    """A command's exit code and output, over a link of its own."""
    async with await GuestLink.open(await placement.connect(id), timeout=PATIENCE) as link:
        process = await link.start(ProcessSpec(argv))
        output = b"".join([piece.data async for piece in process])
        return (await process.wait()).status, output


def tar_of(files: Mapping[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    """A tar of files, and of entries as they are."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
        for info in extra:
            tar.addfile(info)
    return data.getvalue()


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    """A stream of it."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


class Events:
    """What a placement says that happened, collected."""

    def __init__(self, placement: Placement) -> None:
        self.seen: list[Happened] = []
        self._task = asyncio.get_running_loop().create_task(self._collect(placement))

    async def _collect(self, placement: Placement) -> None:
        async for event in placement.happened():
            self.seen.append(event)

    async def has(self, name: str, id: str = "") -> Happened:
        """Wait for one."""

        async def there() -> bool:
            return any((event.name, event.id) == (name, id) for event in self.seen)

        await until(there, f"{name} of {id or 'the node'}, saw {self.seen}")
        return next(event for event in self.seen if (event.name, event.id) == (name, id))

    async def __aenter__(self) -> Events:
        await self.has("back")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class PlacementSuite:
    """See the module. ``links``: :meth:`connect` reaches a guest agent. ``volumes``: there are some."""

    links = True
    volumes = True
    wall = SMALL  # of what is started; its isolation may name a runtime

    def spec(self, policy: Policy | None = None, **parts: Any) -> PlacedSpec:
        """A small sandbox of its own."""
        return spec(policy if policy is not None else Policy(wall=self.wall), **parts)

    def need_links(self) -> None:
        """Only where there is an agent."""
        if not self.links:
            pytest.skip("listed: this placement has no guest agents")

    @contextlib.asynccontextmanager
    async def started(self, placement: Placement, wanted: PlacedSpec) -> AsyncIterator[Placed]:
        """A sandbox for a while."""
        try:
            yield await placement.start(wanted)
        finally:
            await placement.destroy(wanted.id)

    # -- life and death

    async def test_what_is_started_is_found_by_its_id(self, placement: Placement) -> None:
        wanted = self.spec(labels={"a": "b"})
        async with self.started(placement, wanted) as placed:
            assert placed.id == wanted.id
            assert placed.state == "running"
            assert placed.end is None
            assert placed.runtime
            assert placed.deadline == pytest.approx(placed.started_at + 1800, abs=60)
            assert await placement.get(wanted.id) == placed
            assert placed in await placement.list()

    async def test_starting_an_id_again_is_the_same_sandbox(self, placement: Placement) -> None:
        wanted = self.spec()
        async with self.started(placement, wanted) as first:
            again = await asyncio.gather(*(placement.start(wanted) for _ in range(4)))
            assert all(each == first for each in again)
            assert [each.id for each in await placement.list()].count(wanted.id) == 1

    async def test_one_id_at_once_is_one_sandbox(self, placement: Placement) -> None:
        wanted = self.spec()
        try:
            all_of_them = await asyncio.gather(*(placement.start(wanted) for _ in range(5)))
            assert len({each.started_at for each in all_of_them}) == 1
        finally:
            await placement.destroy(wanted.id)
        assert wanted.id not in [each.id for each in await placement.list()]

    async def test_destroying_succeeds_whatever_there_is(self, placement: Placement) -> None:
        wanted = self.spec()
        assert await placement.destroy(wanted.id) == {}
        await placement.start(wanted)
        end = await placement.destroy(wanted.id)
        assert end["cause"] == "killed"
        assert await placement.destroy(wanted.id) == {}
        with pytest.raises(NotFound):
            await placement.get(wanted.id)
        with pytest.raises(NotFound):
            await placement.pause(wanted.id)

    async def test_an_id_can_be_used_again_after_its_end(self, placement: Placement) -> None:
        wanted = self.spec()
        first = await placement.start(wanted)
        await placement.destroy(wanted.id)
        async with self.started(placement, wanted) as second:
            assert second.started_at > first.started_at

    async def test_requests_that_cannot_be_right_leave_nothing(self, placement: Placement) -> None:
        tiny = Policy(wall=replace(self.wall, resources=Resources(memory=1 << 60)))
        cases: list[tuple[PlacedSpec, type[RingfenceError] | tuple[type[RingfenceError], ...]]] = [
            (self.spec(template="no-such-template:1"), NotFound),
            (self.spec(snapshot="sn-none"), NotFound),
            (self.spec(owner={"nobody": "x"}), InvalidRequest),
            (PlacedSpec(id="../escape", policy={}), InvalidRequest),
            (replace(self.spec(), policy={"apiVersion": "ringfence/v1", "kind": "Policy", "nonsense": 1}),
             InvalidRequest),
        ]  # fmt: skip
        if self.links:
            cases.append((self.spec(tiny), (InvalidRequest, RuntimeUnavailable)))
        for wanted, error in cases:
            with pytest.raises(error):
                await placement.start(wanted)
            assert wanted.id not in [each.id for each in await placement.list()]

    async def test_a_cancelled_start_can_be_repeated(self, placement: Placement) -> None:
        wanted = self.spec()
        task = asyncio.create_task(placement.start(wanted))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with self.started(placement, wanted) as placed:
            assert placed.state == "running"

    async def test_many_at_once(self, placement: Placement) -> None:
        wanted = [self.spec() for _ in range(8)]
        placed = await asyncio.gather(*(placement.start(each) for each in wanted))
        assert {each.id for each in placed} == {each.id for each in wanted}
        ends = await asyncio.gather(*(placement.destroy(each.id) for each in wanted))
        assert all(end["cause"] == "killed" for end in ends)
        ids = {each.id for each in await placement.list()}
        assert not ids & {each.id for each in wanted}

    # -- ends

    async def test_a_deadline_ends_it_and_the_end_stays_known(self, placement: Placement) -> None:
        wanted = self.spec(deadline=time.time() + 0.3)
        async with Events(placement) as events, self.started(placement, wanted):
            event = await events.has("ended", wanted.id)
            assert event.data["end"]["cause"] == "deadline"
            placed = await placement.get(wanted.id)
            assert placed.state == "ended"
            assert placed.end is not None
            assert placed.end["cause"] == "deadline"
            assert wanted.id in [each.id for each in await placement.list()]
            assert (await placement.judge(wanted.id, 137))["cause"] == "deadline"
            assert (await placement.start(wanted)).state == "ended"  # never a second one
            for call in (placement.pause, placement.reset, placement.bring_up, placement.connect):
                with pytest.raises(WrongState):
                    await call(wanted.id)
            assert (await placement.usage(wanted.id))["wall_seconds"] > 0
            assert (await placement.destroy(wanted.id))["cause"] == "deadline"
            with pytest.raises(NotFound):
                await placement.get(wanted.id)

    async def test_a_deadline_can_be_moved(self, placement: Placement) -> None:
        wanted = self.spec(deadline=time.time() + 3600)
        async with Events(placement) as events, self.started(placement, wanted):
            later = time.time() + 7200
            assert (await placement.bind(wanted.id, deadline=later)).deadline == pytest.approx(later, abs=1)
            assert (await placement.get(wanted.id)).deadline == pytest.approx(later, abs=1)
            await placement.bind(wanted.id, deadline=time.time() + 0.1)
            await events.has("ended", wanted.id)

    async def test_output_is_counted_and_ends_it(self, placement: Placement) -> None:
        policy = Policy(wall=self.wall).with_door(limits=Limits(output=1000))
        wanted = self.spec(policy)
        async with Events(placement) as events, self.started(placement, wanted):
            assert await placement.spent(wanted.id, 400) == 600
            assert await placement.spent(wanted.id, 600) == 0
            with pytest.raises(InvalidRequest):
                await placement.spent(wanted.id, -1000)
            assert await placement.spent(wanted.id, 1) == 0
            await events.has("ended", wanted.id)
            end = (await placement.get(wanted.id)).end
            assert end is not None
            assert end["cause"] == "output_limit"

    async def test_causes_are_the_hosts(self, placement: Placement) -> None:
        async with self.started(placement, self.spec()) as placed:
            good = await placement.judge(placed.id, 0)
            assert (good["cause"], good["exit_code"], good["reported"]) == ("exited", 0, True)
            assert (await placement.judge(placed.id, 3))["cause"] == "exited"
            assert (await placement.judge(placed.id, 143))["cause"] == "signaled"
            assert (await placement.judge(placed.id, 143, sent=True))["cause"] == "killed"

    async def test_memory_kills_are_told_from_others(self, placement: Placement) -> None:
        self.need_links()
        async with self.started(placement, self.spec()) as placed:
            eat = "import os; b = bytearray(); [b.extend(b'x' * 1048576) for _ in range(4096)]"
            try:
                code, _ = await run(placement, placed.id, "python3", "-c", eat)
            except LinkLost:  # of some walls everything dies at once

                async def ended() -> bool:
                    return (await placement.get(placed.id)).state == "ended"

                await until(ended, "the end")
                end = await placement.judge(placed.id, 137)
                assert (end["cause"], end["exit_code"]) == ("out_of_memory", 137)
                return
            assert code == 137
            end = await placement.judge(placed.id, code)
            assert (end["cause"], end["exit_code"]) == ("out_of_memory", 137)
            code, _ = await run(placement, placed.id, "sh", "-c", "kill -9 $$")
            assert code == 137
            assert (await placement.judge(placed.id, code))["cause"] == "signaled"

    # -- links and the door

    async def test_links_are_independent(self, placement: Placement) -> None:
        self.need_links()
        async with self.started(placement, self.spec()) as placed:
            first = await GuestLink.open(await placement.connect(placed.id), timeout=PATIENCE)
            second = await GuestLink.open(await placement.connect(placed.id), timeout=PATIENCE)
            await first.close()
            await second.ping(PATIENCE)
            await second.close()
            assert await run(placement, placed.id, "echo", "hello") == (0, b"hello\n")

    async def test_the_door_is_bound(self, placement: Placement) -> None:
        self.need_links()
        async with self.started(placement, self.spec(env={"FIRST": "1"})) as placed:
            script = 'echo "$FIRST $SECOND"; [ -e /run/secrets/token ] && cat /run/secrets/token'
            assert await run(placement, placed.id, "sh", "-c", script) == (1, b"1 \n")
            await placement.bind(
                placed.id,
                env={"SECOND": "2"},
                secrets={"token": b"\x00secret"},
                owner={"project": "p", "user": "u"},
                labels={"x": "y"},
            )
            assert await run(placement, placed.id, "sh", "-c", script) == (0, b"1 2\n\x00secret")

    async def test_another_wall_is_refused(self, placement: Placement) -> None:
        policy = Policy(wall=self.wall)
        async with self.started(placement, self.spec(policy)) as placed:
            door = policy.with_door(limits=Limits(output=12345))
            await placement.bind(placed.id, policy=door.to_dict())
            assert await placement.spent(placed.id, 345) == 12000
            other = policy.with_wall(process=Process(max_processes=65))
            with pytest.raises(InvalidRequest):
                await placement.bind(placed.id, policy=other.to_dict())
            with pytest.raises(NotFound):
                await placement.bind(new_id("sb"), labels={})

    # -- powers

    async def test_pause_and_resume_are_idempotent(self, placement: Placement) -> None:
        async with self.started(placement, self.spec()) as placed:
            if not placed.capabilities["pause"]:
                with pytest.raises(Unsupported):
                    await placement.pause(placed.id)
                return
            async with Events(placement) as events:
                for _ in range(2):
                    await placement.pause(placed.id)
                assert (await placement.get(placed.id)).state == "paused"
                await events.has("paused", placed.id)
                for _ in range(2):
                    await placement.resume(placed.id)
                assert (await placement.get(placed.id)).state == "running"
                await events.has("resumed", placed.id)
            await placement.pause(placed.id)  # and it can be destroyed so

    async def test_snapshots_are_idempotent_by_name(self, placement: Placement) -> None:
        name = new_id("sn")
        async with self.started(placement, self.spec()) as placed:
            if not placed.capabilities["disk_snapshot"]:
                with pytest.raises(Unsupported):
                    await placement.snapshot(placed.id, name, "disk")
                return
            if self.links:
                await run(placement, placed.id, "sh", "-c", "echo kept > /workspace/file")
            try:
                facts = await placement.snapshot(placed.id, name, "disk")
                assert facts["name"] == name
                assert (await placement.snapshot(placed.id, name, "disk"))["made_at"] == facts["made_at"]
                async with self.started(placement, self.spec()) as other:
                    with pytest.raises(RingfenceError):
                        await placement.snapshot(other.id, name, "disk")
                async with self.started(placement, self.spec(snapshot=name)) as copy:
                    assert copy.id != placed.id
                    if self.links:
                        assert await run(placement, copy.id, "cat", "/workspace/file") == (0, b"kept\n")
            finally:
                for _ in range(2):
                    await placement.remove_snapshot(name)
        with pytest.raises(NotFound):
            await placement.start(self.spec(snapshot=name))

    async def test_a_snapshot_that_is_removed_while_it_is_made_is_gone(self, placement: Placement) -> None:
        """Whoever asked for it died; the next one removes what nobody owns, while it comes about."""
        name = new_id("sn")
        async with self.started(placement, self.spec()) as placed:
            if not placed.capabilities["disk_snapshot"]:
                return
            if self.links:
                command = "for i in $(seq 300); do echo $i > /workspace/$i; done; sync"
                assert (await run(placement, placed.id, "sh", "-c", command))[0] == 0
            making = asyncio.ensure_future(placement.snapshot(placed.id, name, "disk"))
            await asyncio.sleep(0)  # it is asked for before the removal is
            await placement.remove_snapshot(name)
            await asyncio.gather(making, return_exceptions=True)
            with pytest.raises(NotFound):
                await placement.start(self.spec(snapshot=name))

    async def test_reset_begins_anew_under_the_same_id(self, placement: Placement) -> None:
        async with self.started(placement, self.spec()) as placed:
            if self.links:
                await run(placement, placed.id, "sh", "-c", "echo x > /workspace/file")
            again = await placement.reset(placed.id)
            assert (again.id, again.state) == (placed.id, "running")
            if self.links:
                code, _ = await run(placement, placed.id, "cat", "/workspace/file")
                assert code == 1

    async def test_what_the_template_starts_may_wait(self, placement: Placement) -> None:
        """A template that starts nothing has nothing that waits."""
        async with self.started(placement, self.spec(hold=True)) as placed:
            assert not placed.held
            for again in (await placement.bring_up(placed.id), await placement.reset(placed.id, hold=True)):
                assert (again.id, again.state, again.held) == (placed.id, "running", False)
        with pytest.raises(NotFound):
            await placement.bring_up(placed.id)

    async def test_changes_usage_and_boundary(self, placement: Placement) -> None:
        async with self.started(placement, self.spec()) as placed:
            if self.links:
                await run(placement, placed.id, "sh", "-c", "echo x > /workspace/new")
                paths = {each["path"]: each["kind"] for each in await placement.changes(placed.id)}
                assert paths.get("/workspace/new") == "added"
            usage = await placement.usage(placed.id)
            assert usage["wall_seconds"] > 0
            assert {"cpu_seconds", "memory_peak", "output_bytes", "processes", "memory", "disk"} <= set(usage)
            measured = await placement.measure(placed.id)
            assert measured["runtime"] == placed.runtime
            assert isinstance(measured["limits"], dict)
        capacity = await placement.capacity()
        assert capacity.cpus > 0
        assert capacity.memory > 0
        assert capacity.disk > 0

    # -- volumes

    async def test_volumes_are_made_filled_and_read_back(self, placement: Placement) -> None:
        name = new_id("vo")
        with pytest.raises(NotFound):
            await placement.volume_size(name)
        if not await self._made(placement, name):
            return
        try:
            files = {"a.txt": b"hello", "folder/b.bin": b"\x00" * 300_000}
            await placement.import_volume(name, pieces(tar_of(files)))
            assert await placement.volume_size(name) >= 300_000
            data = b"".join([piece async for piece in placement.export_volume(name)])
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                found = {
                    member.name.removeprefix("./"): tar.extractfile(member).read()  # type: ignore[union-attr]
                    for member in tar
                    if member.isfile()
                }
            assert found == files
        finally:
            for _ in range(2):
                await placement.remove_volume(name)
        with pytest.raises(NotFound):
            await placement.volume_size(name)

    async def test_volumes_are_attached(self, placement: Placement) -> None:
        name = new_id("vo")
        if not await self._made(placement, name):
            return
        try:
            writer = self.spec(volumes=(VolumeMount(name, "/data", read_only=False),))
            reader = [self.spec(volumes=(VolumeMount(name, "/data"),)) for _ in range(2)]
            async with self.started(placement, writer) as placed:
                with pytest.raises(WrongState):
                    await placement.start(self.spec(volumes=(VolumeMount(name, "/data", read_only=False),)))
                with pytest.raises(WrongState):
                    await placement.remove_volume(name)
                if self.links:
                    script = "umask 077; echo mine > /data/file"
                    assert await run(placement, placed.id, "sh", "-c", script) == (0, b"")
            async with self.started(placement, reader[0]) as one, self.started(placement, reader[1]) as two:
                if self.links:
                    for each in (one, two):
                        assert await run(placement, each.id, "cat", "/data/file") == (0, b"mine\n")
                        code, _ = await run(placement, each.id, "sh", "-c", "echo x > /data/file")
                        assert code != 0
        finally:
            await placement.remove_volume(name)

    async def _made(self, placement: Placement, name: str) -> bool:
        if not self.volumes:
            with pytest.raises(Unsupported):
                await placement.make_volume(name, 32 * MIB)
            return False
        for _ in range(2):
            await placement.make_volume(name, 32 * MIB)
        return True
