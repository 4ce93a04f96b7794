"""A machine's life through the published interface, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ringfence.model.errors import LinkLost, RingfenceError, StartFailed
from ringfence.model.levels import Boundary
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.firecracker import machine
from ringfence.runtimes.firecracker.driver import FirecrackerRuntime
from support.firecracker_api import problem
from support.firecracker_bench import Bench


def processes_of(bench: Bench) -> list[int]:
    """Living processes whose command line names the bench's folder."""
    mark = str(bench.base).encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if mark in line:
            found.append(int(name))
    return found


async def gone(bench: Bench) -> None:
    """Wait until none is left."""
    async with asyncio.timeout(60):
        while processes_of(bench):
            await asyncio.sleep(0.02)


async def test_commands_run(bench: Bench) -> None:
    handle = await bench.start()
    assert await bench.run(handle, "echo hello") == "hello"
    requests = [call for call in bench.calls() if "path" in call]
    assert [r["path"] for r in requests if r["method"] != "GET"] == [
        "/logger", "/machine-config", "/boot-source", "/drives/template", "/drives/disk", "/vsock",
        "/entropy", "/actions",
    ]  # fmt: skip
    assert not [r for r in requests if r["method"] != "GET" and problem(r["method"], r["path"], r["body"])]
    await bench.runtime.destroy(handle)
    await gone(bench)
    assert os.listdir(handle.folder) in ([], ["exit"])


async def test_links_are_independent(bench: Bench) -> None:
    handle = await bench.start()
    texts = await asyncio.gather(*(bench.run(handle, f"echo {number}") for number in range(8)))
    assert texts == [str(number) for number in range(8)]


async def test_the_monitor_is_nobody_with_no_network(bench: Bench) -> None:
    handle = await bench.start()
    jailer = bench.calls()[0]
    assert jailer["network"] == ["lo"]
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{handle.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert set(status["Uid"].split()) == {str(handle.data["uid"])} != {"0"}
    assert status["Groups"].strip() == ""
    assert int(status["CapEff"], 16) == 0
    for name in ("pid", "net", "mnt", "ipc", "uts"):
        assert os.readlink(f"/proc/{handle.pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


async def test_what_is_not_filtered_is_not_called_a_wall(bench: Bench) -> None:
    handle = await bench.start()
    found = await bench.runtime.measure(handle)
    # The stand-in installs no filter, which the real one does: the measure must not believe its name.
    assert found.boundary is Boundary.NONE
    assert any("no system call filter around Firecracker" in note for note in found.notes)


async def test_its_files_are_its_own(bench: Bench) -> None:
    handle = await bench.start()
    jail = bench.jail(handle)
    assert not (jail / machine.INITRD).exists()  # it held the environment
    assert (jail / machine.TEMPLATE).stat().st_uid == 0
    assert (jail / machine.TEMPLATE).stat().st_mode & 0o777 == 0o444
    assert (jail / machine.DISK).stat().st_mode & 0o777 == 0o600
    base = Path(handle.folder) / machine.FOLDER
    assert (base.stat().st_uid, base.stat().st_mode & 0o777) == (0, 0o700)  # no other user passes through


async def test_pause_and_resume(bench: Bench) -> None:
    handle = await bench.start()
    await bench.runtime.pause(handle)
    await bench.runtime.resume(handle)
    states = [call["body"]["state"] for call in bench.calls() if call.get("path") == "/vm"]
    assert states == ["Paused", "Resumed"]
    assert await bench.run(handle, "echo on") == "on"


async def test_stop_asks_the_guest(bench: Bench) -> None:
    handle = await bench.start()
    await bench.runtime.stop(handle, 30)
    assert (await asyncio.wait_for(bench.runtime.wait(handle), 60)).signal is None
    await gone(bench)


async def test_killing_the_monitor_ends_the_machine(bench: Bench) -> None:
    handle = await bench.start()
    os.kill(handle.pid, signal.SIGKILL)
    assert (await asyncio.wait_for(bench.runtime.wait(handle), 60)).signal == signal.SIGKILL
    await gone(bench)
    with pytest.raises(RingfenceError):
        await bench.runtime.connect(handle)


async def test_it_dies_with_its_launcher(bench: Bench) -> None:
    handle = await bench.start()
    await bench.context.close()
    await gone(bench)
    assert not FirecrackerRuntime.ref(handle).alive()


async def test_a_kept_one_is_found_again(bench: Bench) -> None:
    handle = await bench.start(bench.spec(ephemeral=False))
    await bench.context.close()
    bench.context = await RuntimeContext.open()
    try:
        again = FirecrackerRuntime(bench.context)
        assert await again.recover(handle)
        bench.driver = again
        sock = await again.connect(handle)
        sock.close()
        await again.destroy(handle)
        await gone(bench)
        assert not await again.recover(handle)
    finally:
        await bench.context.close()
        bench.made.clear()


class TestFaults:
    """One error with its cause, and nothing left."""

    async def fails(self, bench: Bench, words: str) -> StartFailed:
        with pytest.raises(StartFailed, match=words) as caught:
            await bench.runtime.start(bench.spec())
        await gone(bench)
        assert bench.left() == []
        return caught.value

    async def test_a_refused_request(self, bench: Bench) -> None:
        bench.faults(refuse={"/drives/disk": "Unable to create the block device: BackingFile"})
        error = await self.fails(bench, r"refuses PUT /drives/disk: Unable to create the block device")
        assert error.details["step"] == "/drives/disk"

    async def test_no_kvm(self, bench: Bench) -> None:
        bench.faults(refuse={"/actions": "Cannot create VM: Error creating KVM object: Permission denied"})
        await self.fails(bench, "Error creating KVM object")

    async def test_it_dies_on_the_way(self, bench: Bench) -> None:
        bench.faults(die="/actions")
        error = await self.fails(bench, r"RunWithApiError error: the scripted end")
        assert error.details["step"] in ("boot", "agent")

    async def test_its_jailer_dies(self, bench: Bench) -> None:
        bench.faults(die_in_jailer="Failed to create the jail root directory")
        await self.fails(bench, "Failed to create the jail root directory")

    async def test_it_hangs(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ringfence.runtimes.firecracker.saving.TIMEOUT", 4.0)
        bench.faults(hang="/machine-config")
        await self.fails(bench, "does not answer PUT /machine-config within 4 s")

    async def test_it_never_listens(self, bench: Bench) -> None:
        bench.driver.api_timeout = 1.0
        bench.faults(slow={"/version": 3600})
        await self.fails(bench, "does not")

    @pytest.mark.parametrize("fault", ["garbage", "huge"])
    async def test_what_is_no_answer(self, bench: Bench, fault: str) -> None:
        bench.faults(**{fault: "/vsock"})
        await self.fails(bench, "at PUT /vsock")

    async def test_nobody_answers_inside(self, bench: Bench) -> None:
        bench.driver.start_timeout = 1.0
        bench.faults(no_guest=True)
        error = await self.fails(bench, "the guest does not come up in time")
        assert error.details["step"] == "agent"

    async def test_another_version_than_its_program(self, bench: Bench) -> None:
        bench.faults(api_version="1.14.0")
        error = await self.fails(bench, r"says that it is 1\.14\.0, and its program is 1\.15\.1")
        assert error.hint

    async def test_a_slow_one_is_waited_for(self, bench: Bench) -> None:
        bench.faults(slow={"/boot-source": 1.0})
        handle = await bench.start()
        assert await bench.run(handle, "echo late") == "late"

    async def test_the_caller_gives_up(self, bench: Bench) -> None:
        bench.faults(hang="/vsock")
        task = asyncio.ensure_future(bench.runtime.start(bench.spec()))
        async with asyncio.timeout(60):
            while not any(call.get("path") == "/vsock" for call in bench.calls()):
                assert not task.done(), task.result()
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(bench)
        assert bench.left() == []

    async def test_a_dead_machine_has_no_links(self, bench: Bench) -> None:
        handle = await bench.start()
        (bench.jail(handle) / "vsock.sock").unlink()
        with pytest.raises(LinkLost, match="can't be reached"):
            await bench.driver.connect(handle)


async def test_the_probe_boots_a_machine(bench: Bench) -> None:
    if not os.path.exists("/dev/kvm"):
        pytest.skip("there is no /dev/kvm")
    found = await bench.runtime.probe()
    # No filter around the stand-in: what is no wall is not healthy, whatever it answers.
    assert found.health == "unavailable"
    assert "no wall: no system call filter" in found.reason
    assert [call["path"] for call in bench.calls() if "path" in call][-1] == "/actions"
    await gone(bench)
