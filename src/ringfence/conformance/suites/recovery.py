"""Recovery: the process that holds the node is killed, and another takes over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import ringfence
from ringfence.conformance.harness import (
    Kit,
    RuntimeSuite,
    alive,
    eventually,
    finish,
    gone,
    nothing_left,
    run,
)
from ringfence.conformance.plugin import needs
from ringfence.guest.processes import ProcessSpec
from ringfence.model.levels import Cause
from ringfence.node.sandboxes import NodeSandbox

HOST = """
import asyncio, sys
from ringfence.conformance.harness import request_for
from ringfence.guest.processes import ProcessSpec
from ringfence.node.service import Node

async def main():
    node = await Node.open(sys.argv[1], adopt=False)
    sandbox = await node.create(request_for(sys.argv[2], keep=sys.argv[3] == "keep"))
    link = await sandbox.link()
    code = (
        "import os, time\\nfor n in range(1, 201):\\n print(n, flush=True)\\n"
        " while n == 100 and not os.path.exists('go'): time.sleep(0.01)"
    )
    await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", code), id="counting"))
    print(sandbox.id, sandbox.handle.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


class RecoverySuite(RuntimeSuite):
    """kill -9 of the process that holds the node, and what the next one finds."""

    @asynccontextmanager
    async def _host(self, kit: Kit, kind: str) -> AsyncIterator[tuple[str, int, subprocess.Popen[str]]]:
        """A host process with one sandbox: its id, the pid of its wall, the process."""
        source = str(Path(ringfence.__file__).parents[1])
        host = subprocess.Popen(
            [sys.executable, "-c", HOST, str(kit.state), kit.name, kind],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )
        wall: tuple[int, str] | None = None
        try:
            assert host.stdout is not None
            line = await asyncio.to_thread(host.stdout.readline)
            name, pid = line.split()
            kit.ids.add(name)
            wall = int(pid), _birth(int(pid))
            yield name, int(pid), host
        finally:
            # A test that fails before it adopted the wall must not leave it on the machine.
            if wall is not None and wall[1] and _birth(wall[0]) == wall[1]:
                with contextlib.suppress(ProcessLookupError):  # it was dying
                    os.kill(wall[0], 9)
            if host.poll() is None:
                host.kill()
            host.wait()
            assert host.stdout is not None
            host.stdout.close()

    async def _adopted(self, kit: Kit, name: str) -> NodeSandbox:
        found = [sandbox for sandbox in await kit.node.recover() if sandbox.id == name]
        assert len(found) == 1
        kit.sandboxes.append(found[0])
        return found[0]

    @needs("recover")
    async def test_a_kept_sandbox_survives_kill_9_and_is_adopted(self, kit: Kit) -> None:
        async with self._host(kit, "keep") as (name, _, host):
            host.kill()
            host.wait()
            sandbox = await self._adopted(kit, name)
            assert alive(sandbox.handle)
            assert await kit.runtime.recover(sandbox.handle) is True
            link = await kit.link(sandbox)
            # The command runs on, nothing of its output is lost, and new ones can be run.
            assert [(p.id, p.state) for p in await link.processes()] == [("counting", "running")]
            await link.files.write("go", b"")
            done = await finish(await link.attach("counting", stdout=0))
            assert done.stdout == b"".join(b"%d\n" % n for n in range(1, 201))
            assert (await run(link, "echo", "mine now")).text == "mine now"
            assert (await kit.runtime.measure(sandbox.handle)).runtime == kit.name
            await sandbox.destroy()
            await gone(sandbox.handle)

    @needs("recover")
    async def test_an_adopted_wall_can_be_waited_for_and_stopped(self, kit: Kit) -> None:
        async with self._host(kit, "keep") as (name, _, host):
            host.kill()
            host.wait()
            sandbox = await self._adopted(kit, name)
            end = await sandbox.stop(0)
            assert end.cause is Cause.KILLED

    @needs("recover")
    async def test_links_of_a_killed_process_disturb_nobody(self, kit: Kit) -> None:
        async with self._host(kit, "keep") as (name, _, host):
            host.kill()
            host.wait()
            sandbox = await self._adopted(kit, name)
            for _ in range(3):
                link = await kit.link(sandbox)
                process = await link.start(ProcessSpec(("cat",), stdin=True))
                await process.write(b"x")
                await link.close()
            assert (await run(await kit.link(sandbox), "echo", "on")).text == "on"

    @needs("recover")
    async def test_a_kept_sandbox_whose_wall_died_is_swept(self, kit: Kit) -> None:
        async with self._host(kit, "keep") as (name, pid, host):
            host.kill()
            host.wait()
            os.kill(pid, 9)
            await eventually(lambda: not _lives(pid), "the wall does not die")
            assert [s.id for s in await kit.node.recover()] == []
            await nothing_left(kit.state, [name])

    async def test_an_ephemeral_sandbox_dies_with_its_process(self, kit: Kit) -> None:
        async with self._host(kit, "ephemeral") as (name, pid, host):
            host.kill()
            host.wait()
            await eventually(lambda: not _lives(pid), "the wall outlived its node")
            assert await kit.node.recover() == []
            await nothing_left(kit.state, [name])

    async def test_a_living_node_is_left_alone(self, kit: Kit) -> None:
        async with self._host(kit, "ephemeral") as (_, pid, host):
            assert await kit.node.recover() == []
            assert _lives(pid)
            host.terminate()
            host.wait()
            await eventually(lambda: not _lives(pid), "the wall outlived its node")
            await kit.node.recover()


def _birth(pid: int) -> str:
    """When the process was born, in clock ticks; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
