"""Saving a sandbox, starting others from it, beginning anew: on every runtime that says it can."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from ringfence.conformance.harness import Kit, RuntimeSuite, alive, finish, run
from ringfence.conformance.plugin import needs
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import InvalidRequest, LinkLost, NotFound, Unsupported, WrongState
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.snapshots import Snapshot

# Two files that are always the same but for the moment in between; a copy shows how far apart they were.
PAIR = """
import os, time
n = 0
while True:
    n += 1
    for name in ("a", "b"):
        with open("/workspace/.new", "w") as file:
            file.write(f"{n:08d}" * 4096)
        os.rename("/workspace/.new", "/workspace/" + name)
    with open("/workspace/log", "a") as file:
        file.write(f"{n}\\n")
    if n == 20:
        print("going", flush=True)
"""
COUNT = "import sys\nn = 0\nfor line in sys.stdin:\n    n += 1\n    print(n, flush=True)"


class SnapshotSuite(RuntimeSuite):
    """Snapshots, forks and resets."""

    @pytest_asyncio.fixture
    async def saving(self, kit: Kit) -> AsyncIterator[Kit]:
        """The kit; whatever snapshots a test has made are removed, and nothing half made was left."""
        yield kit
        for sandbox in kit.sandboxes:
            await sandbox.destroy()
        store = kit.node.snapshots
        left = [name for name in os.listdir(store.folder) if name.startswith(".") and name != ".lock"]
        for snapshot in store.all(temporary=True):
            store.remove(snapshot.name)
        for name in store.damaged():
            store.remove(name)
        assert left == []

    async def _restored(self, kit: Kit, name: str, **changes: Any) -> NodeSandbox:
        made = await kit.node.restore(name, **changes)
        kit.sandboxes.append(made)
        kit.ids.add(made.id)
        return made

    async def _shell(self, kit: Kit, sandbox: NodeSandbox, script: str) -> str:
        done = await run(await kit.link(sandbox), "/bin/sh", "-c", script)
        assert done.exit.code == 0, done.stderr
        return done.text

    @needs("disk_snapshot", "programs")
    async def test_files_come_back_as_they_were(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        # A whole system clears /tmp when it starts, which it does here.
        elsewhere = "/workspace/.t" if saving.name == "qemu" else "/tmp/t"
        await self._shell(
            saving,
            sandbox,
            "cd /workspace; echo kept > file; chmod 640 file; ln file other; ln -s /nowhere link;"
            " mkdir -p folder/below; chmod 751 folder; touch -d 2001-02-03T04:05:06Z file;"
            f" echo t > {elsewhere}",
        )
        look = (
            f"cd /workspace; cat file other {elsewhere}; readlink link; "
            "stat -c '%n %a %u %g %h %Y' file folder folder/below"
        )
        before = await self._shell(saving, sandbox, look)
        made = await sandbox.snapshot("files", kind="disk")
        assert made.kind == "disk"
        assert made.runtime == saving.name
        assert not made.secrets
        await self._shell(saving, sandbox, "rm -r /workspace/*")  # it goes on, and what it does is its own
        names = ("files", made.id) if saving.capabilities.overlay else (made.id,)  # a machine takes its time
        copies = [await self._restored(saving, name) for name in names]
        for copy in copies:
            assert await self._shell(saving, copy, look) == before
            assert (await (await saving.link(copy)).processes())[0].state != "running"
        await self._shell(saving, copies[0], "echo mine > /workspace/file")
        for copy in copies[1:]:
            assert await self._shell(saving, copy, "cat /workspace/file") == "kept"

    @needs("disk_snapshot", "programs", "user_zero", "overlay")
    async def test_what_was_deleted_stays_so_also_in_the_second_generation(self, saving: Kit) -> None:
        sandbox = await saving.sandbox(user=0)
        await self._shell(
            saving,
            sandbox,
            "rm /etc/hosts; rm -r /home/agent; mkdir /home/agent; mkdir /srv/one; echo 1 > /srv/one/1",
        )
        await sandbox.snapshot("first", kind="disk")
        second = await self._restored(saving, "first")
        look = "test ! -e /etc/hosts; ls -A /home/agent; cat /srv/one/*"
        assert await self._shell(saving, second, look) == "1"
        await self._shell(
            saving, second, "echo 2 > /srv/one/2; rm /srv/one/1; mkdir /srv/two; touch /home/agent/x"
        )
        made = await second.snapshot("second", kind="disk")
        await second.destroy()
        saving.node.snapshots.remove("first")  # the second stands alone
        third = await self._restored(saving, made.id)
        assert await self._shell(saving, third, look) == "x\n2"
        assert await self._shell(saving, third, "ls /srv") == "one\ntwo"

    @needs("disk_snapshot", "programs")
    async def test_under_load_a_copy_is_of_one_moment(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        link = await saving.link(sandbox)
        writer = await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", PAIR)))
        async for _ in writer:
            break
        saved = []
        for number in range(3 if saving.capabilities.overlay else 1):  # a machine takes its time
            if (made := await self._saved(saving, sandbox, f"load{number}")) is not None:
                saved.append(made.name)
        assert writer.exit is None
        if not saving.capabilities.pause:
            await writer.signal(9)
            await writer.wait()
            saved.append((await sandbox.snapshot("rest", kind="disk")).name)  # the control
            assert saving.node.snapshots.get("rest").consistency == "unchanged"
        for name in saved:
            copy = await self._restored(saving, name)
            text = await self._shell(
                saving, copy, "cd /workspace; head -c 8 a; echo; head -c 8 b; echo; tail -n 1 log; wc -c < a"
            )
            first, second, last, size = (int(line) for line in text.splitlines())
            assert size == 8 * 4096
            assert first - second in (0, 1)  # a is renamed first
            assert last in (second, second - 1)

    async def _saved(self, kit: Kit, sandbox: NodeSandbox, name: str) -> Snapshot | None:
        """A snapshot; None where the wall can't be frozen and its files changed: that is refused."""
        try:
            return await sandbox.snapshot(name, kind="disk")
        except WrongState as error:
            if kit.capabilities.pause or "change while they are copied" not in error.message:
                raise
            return None

    @needs("disk_snapshot", "programs", "overlay")  # machines are forked with their memory, below
    async def test_copies_of_a_fork_are_each_their_own(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        await self._shell(saving, sandbox, "echo common > /workspace/file")
        copies = await sandbox.fork(3, kind="disk")
        saving.sandboxes += copies
        saving.ids.update(copy.id for copy in copies)
        seen: dict[str, set[str]] = {"host": set(), "machine": set(), "random": set(), "token": set()}
        for copy in copies:
            assert await self._shell(saving, copy, "cat /workspace/file") == "common"
            seen["host"].add(await self._shell(saving, copy, "hostname"))
            seen["machine"].add(await self._shell(saving, copy, "cat /etc/machine-id"))
            seen["random"].add(await self._shell(saving, copy, "head -c 8 /dev/urandom | od -An -tx1"))
            seen["token"].add((await saving.link(copy)).instance.hex())
            await self._shell(saving, copy, "hostname > /workspace/file")
        assert {name: len(found) for name, found in seen.items()} == dict.fromkeys(seen, 3)
        assert seen["host"] == {copy.id for copy in copies}
        assert all(len(found) == 32 and int(found, 16) for found in seen["machine"])
        assert await self._shell(saving, sandbox, "cat /workspace/file") == "common"
        assert len(saving.node.snapshots.all(temporary=True)) == 1
        for copy in copies:
            await copy.destroy()
        assert saving.node.snapshots.all(temporary=True) == ()  # it went with its last user

    @needs("programs", "disk_limit")
    async def test_reset_leaves_nothing_but_the_name(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        name, first = sandbox.id, sandbox.handle
        for number in range(3):
            link = await saving.link(sandbox)
            await run(link, "/bin/sh", "-c", "echo x > /workspace/mark; echo x > /tmp/mark")
            sleeper = await link.start(ProcessSpec(("sleep", "600"), id="sleeper"))
            before = sandbox.handle
            await sandbox.reset()
            assert sandbox.id == name
            assert sandbox.handle.pid != before.pid
            with pytest.raises(LinkLost):
                await asyncio.wait_for(sleeper.wait(), 30)
            link = await saving.link(sandbox)
            assert [p for p in await link.processes() if p.id == "sleeper"] == []
            look = "ls -A /workspace /tmp | grep mark; hostname"
            assert (await run(link, "/bin/sh", "-c", look)).text == name, number
            assert (await sandbox.boundary()).runtime == saving.name
        assert (await sandbox.usage()).wall_seconds > 0
        await sandbox.destroy()
        assert not alive(first)

    @needs("disk_snapshot", "overlay")  # else the files are somewhere in an image of the runtime's own
    async def test_what_is_damaged_or_foreign_is_refused(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        link = await saving.link(sandbox)
        await link.files.write("/workspace/file", b"as it was" * 1000)
        made = await sandbox.snapshot("whole", kind="disk")
        file = next(path for path in made.folder.rglob("*") if path.name == "file" and path.is_file())
        whole = file.read_bytes()

        async def refused(words: str) -> None:
            with pytest.raises(InvalidRequest, match=words):
                await saving.node.restore("whole")

        file.write_bytes(b"X" + whole[1:])
        await refused("damaged: '/workspace/file' is not what was saved")
        file.write_bytes(whole)
        moved = file.rename(made.folder.parent / ".moved")
        await refused("damaged: '/workspace/file' is missing")
        file.symlink_to(moved)
        await refused("damaged: '/workspace/file' is not what was saved")
        file.unlink()
        moved.rename(file)
        extra = file.parent / "extra"
        extra.write_text("not mine")
        await refused("damaged: '/workspace/extra' was not there")
        extra.unlink()
        manifest = made.folder / "manifest.json"
        text = manifest.read_text()
        manifest.write_text(text.replace('"x86_64"', '"sparc64"').replace('"aarch64"', '"sparc64"'))
        await refused("its manifest is")
        manifest.write_text(text)
        await self._restored(saving, "whole")  # the control: as it was, it is taken
        with pytest.raises(NotFound):
            await saving.node.restore("whale")

    async def test_what_a_runtime_can_not_is_refused_by_capability(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        able = saving.capabilities
        for kind in ("disk", "memory"):
            if not getattr(able, f"{kind}_snapshot"):
                with pytest.raises(Unsupported) as error:
                    await sandbox.snapshot(kind=kind)
                assert error.value.details["capability"] == f"{kind}_snapshot"
                assert "gvisor" in error.value.hint
        assert alive(sandbox.handle)
        assert saving.node.snapshots.all(temporary=True) == ()

    @needs("memory_snapshot", "programs")
    async def test_memory_goes_on_where_it_stood(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        link = await saving.link(sandbox)
        counter = await link.start(
            ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", COUNT), id="counter", stdin=True)
        )
        await counter.write(b"x\nx\n")
        seen = b""
        while seen.count(b"\n") < 2:
            seen += (await anext(counter)).data
        epoch = link.epoch
        made = await sandbox.snapshot("memory", kind="memory")
        assert made.kind == "memory"
        with pytest.raises(LinkLost):
            await asyncio.wait_for(counter.wait(), 30)
        copies = await sandbox.fork(1, kind="memory")
        copies.append(await self._restored(saving, "memory"))
        saving.sandboxes += copies
        saving.ids.update(copy.id for copy in copies)
        instances = set()
        for each in (sandbox, *copies):
            link = await saving.link(each)
            assert link.epoch > epoch
            instances.add(link.instance)
            counter = await link.attach("counter", stdout=0)
            await counter.write(b"x\n")
            await counter.close_stdin()
            assert (await finish(counter)).text == "1\n2\n3"
            assert (await run(link, "hostname")).text == each.id
        assert len(instances) == 3

    @needs("memory_snapshot", "programs", "ports")
    async def test_connections_end_with_a_snapshot_of_memory(self, saving: Kit) -> None:
        sandbox = await saving.sandbox()
        link = await saving.link(sandbox)
        code = (
            "import socket\ns = socket.create_server(('127.0.0.1', 7070))\nprint('up', flush=True)\n"
            "while True:\n c = s.accept()[0]\n c.sendall(b'hello')"
        )
        server = await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", code)))
        async for _ in server:
            break
        stream = await link.dial(7070)
        assert await stream.read() == b"hello"
        await sandbox.snapshot("ports", kind="memory")
        with pytest.raises(LinkLost):
            await asyncio.wait_for(stream.read(), 30)
        again = await (await saving.link(sandbox)).dial(7070)  # the listener itself goes on
        assert await again.read() == b"hello"
