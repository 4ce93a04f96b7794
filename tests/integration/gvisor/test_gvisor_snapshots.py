"""Saving a wall of gVisor, and starting others from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ringfence.conformance.harness import Kit, finish, python, run
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import InvalidRequest, LinkLost
from ringfence.runtimes.contract import Handle

COUNT = """
import os, sys
n = 0
for line in sys.stdin:
    n += 1
    print(n, os.getpid(), os.urandom(8).hex(), flush=True)
"""


async def _saved(kit: Kit, *, memory: bool = True, user: int = 1000) -> tuple[Handle, str, dict[str, Any]]:
    """A wall with a file and a command that counts lines, and a snapshot of it."""
    handle = await kit.start(await kit.spec(user=user))
    async with await GuestLink.open(await kit.runtime.connect(handle)) as link:
        await run(link, "/bin/sh", "-c", "echo kept > /workspace/file; rm -f /etc/hosts; echo t > /tmp/t")
        process = await link.start(ProcessSpec(("/usr/bin/python3", "-c", COUNT), id="counter", stdin=True))
        await process.write(b"x\nx\n")
        async for _ in process:
            break
    folder = str(kit.state / "snapshot")
    return handle, folder, await kit.runtime.snapshot(handle, folder, memory=memory)  # type: ignore[attr-defined]


async def _restored(kit: Kit, folder: str, data: dict[str, Any], user: int = 1000) -> Handle:
    spec = await kit.spec(user=user)
    handle: Handle = await kit.runtime.restore(spec, folder, data)  # type: ignore[attr-defined]
    kit.handles.append(handle)
    return handle


async def test_copies_go_on_where_it_stood_each_as_its_own(kit: Kit) -> None:
    source, folder, data = await _saved(kit)
    copies = [await _restored(kit, folder, data) for _ in range(3)]
    seen, names, numbers, instances = set(), set(), set(), set()
    for handle in (source, *copies):
        async with await GuestLink.open(await kit.runtime.connect(handle)) as link:
            assert link.epoch == 2
            instances.add(link.instance)
            counter = await link.attach("counter", stdout=0)
            await counter.write(b"x\n")
            await counter.close_stdin()
            lines = (await finish(counter)).text.splitlines()
            assert [line.split()[0] for line in lines] == ["1", "2", "3"]  # its memory went on
            seen.add(tuple(lines[:2]))
            numbers.add(lines[2].split()[2])
            assert (await run(link, "cat", "/workspace/file", "/tmp/t")).text == "kept\nt"
            name = (await run(link, "hostname")).text
            assert name == handle.id
            names.add(name)
            await link.files.write("/workspace/file", handle.id.encode())
    assert len(seen) == 1
    assert len(names) == len(numbers) == len(instances) == 4
    # What one writes no other sees.
    for handle in (source, *copies):
        async with await GuestLink.open(await kit.runtime.connect(handle)) as link:
            assert (await run(link, "cat", "/workspace/file")).text == handle.id
    uids = {(await kit.runtime.measure(handle)).host_uid for handle in copies}
    assert 0 not in uids


@pytest.mark.parametrize("user", [0, 1000])
async def test_files_alone(kit: Kit, user: int) -> None:
    _, folder, data = await _saved(kit, memory=False, user=user)
    copy = await _restored(kit, folder, data, user)
    async with await GuestLink.open(await kit.runtime.connect(copy)) as link:
        assert link.epoch == 1
        assert await link.processes() == []
        assert (await run(link, "cat", "/workspace/file")).text == "kept"
        assert (await run(link, "stat", "-c", "%u %g", "/workspace/file")).text == f"{user} {user}"
        # What was deleted stays so: only user 0 can delete this one.
        assert (await run(link, "test", "-e", "/etc/hosts")).exit.code == int(user == 0)


async def test_open_links_end_and_new_ones_can_be_opened(kit: Kit) -> None:
    handle = await kit.start(await kit.spec())
    link = await GuestLink.open(await kit.runtime.connect(handle))
    process = await link.start(ProcessSpec(("sleep", "60"), id="sleeper"))
    await kit.runtime.snapshot(handle, str(kit.state / "snapshot"))  # type: ignore[attr-defined]
    with pytest.raises(LinkLost):
        await asyncio.wait_for(process.wait(), 60)
    await link.close()
    async with await GuestLink.open(await kit.runtime.connect(handle)) as again:
        assert [found.id for found in await again.processes()] == ["sleeper"]
        assert (await python(again, "print(6 * 7)")).text == "42"


async def test_what_is_damaged_or_foreign_is_refused(kit: Kit) -> None:
    _, folder, data = await _saved(kit)
    spec = await kit.spec()
    pages = Path(folder) / "memory" / "pages.img"
    whole = pages.read_bytes()

    async def refused(words: str, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest, match=words):
            await kit.runtime.restore(spec, folder, wrong)  # type: ignore[attr-defined]

    pages.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    await refused("damaged: pages.img", data)
    pages.write_bytes(whole[:-1])
    await refused("damaged: pages.img", data)
    pages.rename(Path(folder) / "elsewhere")
    await refused("files are missing", data)
    (Path(folder) / "elsewhere").write_bytes(whole)
    pages.symlink_to(Path(folder) / "elsewhere")
    await refused("can't be read", data)
    pages.unlink()
    (Path(folder) / "elsewhere").rename(pages)
    pages.write_bytes(whole)
    await refused("not one of gVisor", {**data, "runtime": "qemu"})
    await refused("machine", {**data, "machine": "aarch64"})
    await refused("runsc", {**data, "runsc": "0.0~20200101.0"})
    await refused("does not fit: its user", {**data, "user": 0})
    await refused("does not fit: its lowers", {**data, "lowers": ["/elsewhere"]})
    # The control: as it was, it is taken.
    await _restored(kit, folder, data)


async def test_a_snapshot_that_fails_leaves_nothing_and_the_wall_goes_on(kit: Kit) -> None:
    handle = await kit.start(await kit.spec())
    folder = kit.state / "snapshot"
    folder.mkdir()
    (folder / "memory").write_text("in the way")
    with pytest.raises(Exception, match="snapshot can't be written"):
        await kit.runtime.snapshot(handle, str(folder))  # type: ignore[attr-defined]
    assert not folder.exists()
    async with await GuestLink.open(await kit.runtime.connect(handle)) as link:
        assert (await run(link, "echo", "on")).text == "on"
