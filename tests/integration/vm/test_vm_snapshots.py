"""Snapshots of machines: memory and disk, copies with an identity of their own, and what is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.conformance.harness import Kit, eventually, run
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import InvalidRequest, LinkLost

pytestmark = pytest.mark.timeout(900)

COUNTING = "import time\nfor n in range(10**9): print(n, flush=True); time.sleep(0.02)"
WHO = "hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/uuid; cat /workspace/file; date +%s"


async def test_memory_comes_back_to_life_as_somebody_else(kit: Kit, tmp_path: Path) -> None:
    driver: Any = kit.runtime
    small: dict[str, Any] = {"memory": 128 << 20, "disk": 64 << 20}
    handle = await kit.start(await kit.spec(**small))
    link = await GuestLink.open(await driver.connect(handle))
    await link.files.write("/workspace/file", b"saved\n")
    counting = await link.start(ProcessSpec(("python3", "-c", COUNTING), id="counting"))
    seen = 0
    async for piece in counting:
        seen += len(piece.data)
        if seen > 20:
            break
    folder = tmp_path / "snapshot"
    data = await driver.snapshot(handle, str(folder))
    await eventually(lambda: link.failure is not None, "a link outlived the snapshot", 30)
    assert isinstance(link.failure, LinkLost)
    await link.close()
    people = []
    for number in range(2):
        spec = replace(await kit.spec(**small), hostname=f"copy-{number}")
        copy = await driver.restore(spec, str(folder), data)
        kit.handles.append(copy)
        async with await GuestLink.open(await driver.connect(copy)) as inside:
            # The command goes on where it was, and nothing of its output is lost.
            again = await inside.attach("counting", stdout=0)
            text = b""
            async for piece in again:
                text += piece.data
                if len(text) > seen + 40:
                    break
            numbers = [int(line) for line in text.split(b"\n")[:-1]]
            assert numbers == list(range(len(numbers)))
            done = await run(inside, "/bin/sh", "-c", WHO)
            name, machine, unique, file, clock = done.text.split()
            assert (name, file) == (f"copy-{number}", "saved")
            assert abs(int(clock) - time.time()) < 60  # the snapshot's own clock stood still
            people.append((name, machine, unique))
    assert all(len(set(column)) == 2 for column in zip(*people, strict=True))
    # The wall that was saved goes on, too.
    async with await GuestLink.open(await driver.connect(handle)) as source:
        assert (await run(source, "cat", "/workspace/file")).text == "saved"
    await _refused(kit, folder, data)


async def _refused(kit: Kit, folder: Path, data: dict[str, Any]) -> None:
    driver: Any = kit.runtime
    spec = await kit.spec(memory=256 << 20, disk=64 << 20)
    with pytest.raises(InvalidRequest, match="its memory is"):
        await driver.restore(spec, str(folder), data)
    spec = await kit.spec(memory=128 << 20, disk=64 << 20)
    with pytest.raises(InvalidRequest, match="not one of a virtual machine"):
        await driver.restore(spec, str(folder), {"runtime": "gvisor", "format": 7})
    memory = folder / "memory"
    memory.chmod(0o600)
    with open(memory, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    spec = await kit.spec(memory=128 << 20, disk=64 << 20)
    with pytest.raises(InvalidRequest, match="memory is not what was saved"):
        await driver.restore(spec, str(folder), data)
    memory.unlink()
    spec = await kit.spec(memory=128 << 20, disk=64 << 20)
    with pytest.raises(InvalidRequest, match="damaged"):
        await driver.restore(spec, str(folder), data)


async def test_a_disk_under_load_is_a_sound_file_system(kit: Kit, tmp_path: Path) -> None:
    driver: Any = kit.runtime
    small: dict[str, Any] = {"memory": 128 << 20, "disk": 64 << 20}
    handle = await kit.start(await kit.spec(**small))
    folder = tmp_path / "snapshot"
    async with await GuestLink.open(await driver.connect(handle)) as link:
        await link.files.write("/workspace/file", b"saved\n")
        script = (
            "n=0; while :; do n=$((n+1)); head -c 100000 /dev/zero > /workspace/w$((n%50));"
            " echo $n > /workspace/count; done"
        )
        await link.start(ProcessSpec(("/bin/sh", "-c", script), detached=True))
        for _ in range(1000):
            if (await run(link, "/bin/sh", "-c", "test -s /workspace/count")).exit.code == 0:
                break
        data = await driver.snapshot(handle, str(folder), memory=False)
        assert (await run(link, "echo", "on")).text == "on"  # no link ended
    copy = await driver.restore(await kit.spec(**small), str(folder), data)
    kit.handles.append(copy)
    async with await GuestLink.open(await driver.connect(copy)) as inside:
        assert (await run(inside, "cat", "/workspace/file")).text == "saved"
        # No command is part of a disk.
        assert {process.argv0 for process in await inside.processes()} == {"cat"}
        assert (
            await run(inside, "/bin/sh", "-c", "cat /workspace/w* > /dev/null; rm /workspace/*")
        ).exit.code == 0
