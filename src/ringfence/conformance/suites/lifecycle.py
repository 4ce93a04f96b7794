"""The life of a wall: the state table of ``runtimes/contract.py``, and starts that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ringfence.conformance.harness import (
    Kit,
    RuntimeSuite,
    alive,
    eventually,
    gone,
    nothing_left,
    request_for,
    run,
)
from ringfence.conformance.plugin import needs, who
from ringfence.conformance.tables.capabilities import expected
from ringfence.conformance.tables.selected import at_once
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import LinkLost, RingfenceError, StartFailed, Unsupported, WrongState
from ringfence.model.levels import Cause
from ringfence.runtimes.contract import Bind, Exit, Handle, Health


class LifecycleSuite(RuntimeSuite):
    """probe, capabilities, start, connect, wait, stop, destroy, pause."""

    async def test_the_probe_proves_that_it_works(self, kit: Kit) -> None:
        began = time.monotonic()
        probe = await kit.runtime.probe()
        assert probe.health in (Health.HEALTHY, Health.DEGRADED), probe
        assert probe.health == Health.HEALTHY or (probe.reason and probe.remedy)
        assert (probe.runtime, probe.level, probe.boundary) == (
            kit.name,
            kit.runtime.level,
            kit.runtime.boundary,
        )
        assert probe.version
        # The contract's own bound, but for a machine that boots; and this one may stand still for a while.
        assert time.monotonic() - began < getattr(kit.runtime.driver, "probe_deadline", 20) + 30  # type: ignore[attr-defined]

    async def test_capabilities_are_those_of_the_committed_table(self, kit: Kit) -> None:
        row = expected(kit.name, who())
        if row is None:
            assert asdict(kit.capabilities)  # a driver from elsewhere: its own word
        else:
            assert asdict(kit.capabilities) == row

    async def test_a_handle_is_plain_data(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        data = json.loads(json.dumps(asdict(sandbox.handle)))
        copy = Handle(**data)
        assert copy == sandbox.handle
        link = await GuestLink.open(await kit.runtime.connect(copy))
        assert (await run(link, "echo", "same")).text == "same"
        await link.close()

    async def test_the_handle_names_one_process(self, kit: Kit) -> None:
        handle = (await kit.sandbox()).handle
        assert alive(handle)
        assert handle.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert handle.runtime == kit.name
        assert handle.version >= 1

    async def test_running(self, kit: Kit) -> None:
        handle = await kit.start(await kit.spec())
        assert await kit.runtime.recover(handle) is True
        assert (await kit.runtime.stats(handle)).processes >= 1
        assert (await kit.runtime.measure(handle)).runtime == kit.name
        waiting = asyncio.create_task(kit.runtime.wait(handle))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        await kit.runtime.destroy(handle)
        assert isinstance(await waiting, Exit)

    async def test_ended(self, kit: Kit) -> None:
        handle = await kit.start(await kit.spec())
        os.kill(handle.pid, 9)
        ended = await kit.runtime.wait(handle)
        assert ended.signal in (9, None)
        assert await kit.runtime.recover(handle) is False
        for call in (kit.runtime.connect, kit.runtime.stats, kit.runtime.measure):
            with pytest.raises((LinkLost, WrongState)):
                await call(handle)
        await kit.runtime.stop(handle, 0)
        assert await kit.runtime.wait(handle) == ended
        await kit.runtime.destroy(handle)

    async def test_destroyed(self, kit: Kit) -> None:
        handle = await kit.start(await kit.spec())
        await kit.runtime.destroy(handle)
        await gone(handle)
        await kit.runtime.destroy(handle)
        await kit.runtime.stop(handle, 0)
        for call in (kit.runtime.connect, kit.runtime.stats, kit.runtime.measure):
            with pytest.raises((LinkLost, WrongState)):
                await call(handle)

    async def test_several_wait_at_once(self, kit: Kit) -> None:
        handle = await kit.start(await kit.spec())
        waiting = [asyncio.create_task(kit.runtime.wait(handle)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one who gives up disturbs nobody
        await kit.runtime.stop(handle, 0)
        results = await asyncio.gather(*waiting[1:])
        assert len(set(results)) == 1

    @needs("programs")
    async def test_stop_asks_first(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        script = "trap 'echo asked; sleep 0.5; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
        process = await link.start(ProcessSpec(("/bin/sh", "-c", script)))
        seen = bytearray()
        stopping = None
        try:
            async for piece in process:
                seen += piece.data if piece.stream == 1 else b""
                if stopping is None:
                    stopping = asyncio.create_task(kit.runtime.stop(sandbox.handle, 30))
        except LinkLost:
            pass  # the wall may be gone before the last bytes were read
        assert stopping is not None
        await stopping
        # The shell may say beforehand that what it waited for was terminated too.
        assert seen.startswith(b"ready\n"), seen
        assert b"asked\n" in seen, seen
        assert (await sandbox.ended).cause in (Cause.KILLED, Cause.RUNTIME_CRASH, Cause.EXITED)

    @needs("programs")
    async def test_stop_kills_who_does_not_listen(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        await link.start(
            ProcessSpec(("/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done"), detached=True)
        )
        end = await asyncio.wait_for(sandbox.stop(0.2), 60)
        assert end.cause is Cause.KILLED
        await gone(sandbox.handle)

    @needs("programs")
    async def test_destroy_whatever_it_does(self, kit: Kit) -> None:
        for script in ("while :; do :; done", "kill -STOP $$", "sleep 1000", "dd if=/dev/zero of=/dev/null"):
            sandbox = await kit.sandbox()
            link = await kit.link(sandbox)
            await link.start(ProcessSpec(("/bin/sh", "-c", script), detached=True))
            await asyncio.wait_for(sandbox.destroy(), 60)
            await gone(sandbox.handle)

    async def test_two_walls_are_strangers(self, kit: Kit) -> None:
        one, two = await kit.sandbox(), await kit.sandbox()
        first, second = await kit.link(one), await kit.link(two)
        await first.files.write("mine", b"1")
        assert [info.path for info in await second.files.list("/workspace") if info.path == "mine"] == []
        await one.destroy()
        assert (await run(second, "echo", "on")).text == "on"

    async def test_many_at_once(self, kit: Kit) -> None:
        many = at_once(kit.name)
        sandboxes = await asyncio.gather(*(kit.sandbox() for _ in range(many)))
        links = await asyncio.gather(*(kit.link(sandbox) for sandbox in sandboxes))
        results = await asyncio.gather(*(run(link, "echo", str(n)) for n, link in enumerate(links)))
        assert [done.text for done in results] == [str(n) for n in range(many)]
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))

    async def test_a_start_that_is_cancelled_leaves_nothing(self, kit: Kit) -> None:
        before = set(os.listdir(kit.state / "sandboxes"))
        starting = asyncio.create_task(kit.node.create(request_for(kit.name)))
        for _ in range(20):
            await asyncio.sleep(0)
        starting.cancel()
        try:
            kit.sandboxes.append(await starting)  # it was faster
        except asyncio.CancelledError:
            await eventually(lambda: set(os.listdir(kit.state / "sandboxes")) == before, "a folder is left")

    @pytest.mark.parametrize("defect", ["lower", "bind", "folder", "cgroup"])
    async def test_a_start_that_fails_names_the_step_and_leaves_nothing(self, kit: Kit, defect: str) -> None:
        spec = await kit.spec()
        nowhere = str(kit.state / "nowhere")
        if defect == "lower":
            broken = replace(spec, root=replace(spec.root, lowers=(nowhere,)))
        elif defect == "bind":
            extra = (*spec.root.binds, Bind(nowhere, "/mnt"))
            broken = replace(spec, root=replace(spec.root, binds=extra))
        elif defect == "folder":
            broken = replace(spec, folder=nowhere)
        else:
            broken = replace(spec, cgroup=replace(spec.cgroup, agent=(nowhere + "/cgroup.procs",)))
        if kit.name == "fake" and defect in ("lower", "bind"):
            return  # its root is the host's: it looks at neither
        if defect == "bind" and not kit.capabilities.mounts:
            return  # none is taken, whatever its source
        with pytest.raises(RingfenceError) as caught:
            await kit.start(broken)
        assert isinstance(caught.value, StartFailed), repr(caught.value)
        assert caught.value.details.get("step"), caught.value.details
        assert "nowhere" in str(caught.value) or caught.value.details.get("errno"), caught.value
        assert os.listdir(spec.folder) == []
        Path(spec.folder).rmdir()
        await nothing_left(kit.state, [spec.id])
        good = await kit.spec()  # and the driver still works
        await kit.start(good)

    async def test_what_it_can_not_do_is_refused(self, kit: Kit) -> None:
        has = kit.capabilities
        spec = await kit.spec()
        if not has.user_zero:
            identity = replace(spec.identity, uid=0, gid=0)
            with pytest.raises(Unsupported):
                await kit.start(replace(spec, identity=identity))
        if "open" not in has.network:
            with pytest.raises(Unsupported):
                await kit.start(replace(spec, network="open"))

    @needs("programs")
    @needs("pause")
    async def test_pausing(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        script = "n=0; while :; do n=$((n+1)); echo $n > /workspace/count; done"
        await link.start(ProcessSpec(("/bin/sh", "-c", script), detached=True))
        await self._count(link)
        await kit.runtime.pause(sandbox.handle)  # type: ignore[attr-defined]
        with pytest.raises(RingfenceError):
            await link.ping(0.3)
        await kit.runtime.resume(sandbox.handle)  # type: ignore[attr-defined]
        before = await self._count(link)
        deadline = time.monotonic() + 60
        while await self._count(link) <= before:
            assert time.monotonic() < deadline, "it did not go on"

    async def _count(self, link: GuestLink) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(RingfenceError):
                text = (await link.files.read_bytes("/workspace/count")).strip()
                if text:
                    return int(text)
            await asyncio.sleep(0.01)  # on a slow machine the reader keeps the writer from its work
        raise AssertionError("nothing is counted")

    @needs("pause")
    async def test_a_paused_wall_can_be_destroyed(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        await kit.runtime.pause(sandbox.handle)  # type: ignore[attr-defined]
        await asyncio.wait_for(sandbox.destroy(), 60)
        await gone(sandbox.handle)
