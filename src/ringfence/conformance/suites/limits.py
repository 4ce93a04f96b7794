"""Limits through the node: what happens at each, what the cause is, and that the host goes on."""

from __future__ import annotations

import asyncio
import errno

from ringfence.conformance.harness import Kit, RuntimeSuite, gone, python, run
from ringfence.conformance.plugin import needs
from ringfence.guest.processes import Output, ProcessSpec
from ringfence.model.levels import Boundary, Cause
from ringfence.node.sandboxes import NodeSandbox, RunResult

MIB = 1024 * 1024


async def node_run(sandbox: NodeSandbox, *argv: str) -> tuple[RunResult, bytes]:
    """Run through the node, which counts and says why it ended."""
    seen = bytearray()

    def take(output: Output) -> None:
        seen.extend(output.data)

    return await sandbox.run(ProcessSpec(argv), take), bytes(seen)


def script(code: str) -> tuple[str, ...]:
    """A Python program as a command."""
    return ("/usr/bin/python3", "-I", "-S", "-c", code)


class LimitSuite(RuntimeSuite):
    """Memory, processes, disk, files, processor time, output, deadline."""

    @needs("programs")
    async def test_an_end_within_limits(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        result, output = await node_run(sandbox, "/bin/sh", "-c", "echo hello; exit 3")
        assert (result.end.cause, result.end.exit_code, output) == (Cause.EXITED, 3, b"hello\n")
        assert result.end.reported
        assert result.usage.output_bytes == 6
        assert result.usage.wall_seconds > 0

    @needs("programs")
    async def test_a_signal_of_its_own(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        result, _ = await node_run(sandbox, "/bin/sh", "-c", "kill -ABRT $$")
        assert (result.end.cause, result.end.exit_code) == (Cause.SIGNALED, 134)

    async def test_memory(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(memory=64 * MIB, disk=16 * MIB)
        # Slow enough for a watchdog that looks ten times a second; a cgroup needs no such help.
        code = (
            "import time\nx=[]\nfor n in range(400):\n x.append(bytearray(1<<20)); time.sleep(0.005)\n"
            "time.sleep(60)"
        )
        result, _ = await node_run(sandbox, *script(code))
        assert (result.end.cause, result.end.exit_code) == (Cause.OUT_OF_MEMORY, 137), result
        # A kernel of the sandbox's own is the only one that knows.
        assert result.end.reported == (kit.runtime.boundary in (Boundary.HARDWARE, Boundary.EMULATED))

    @needs("programs")
    async def test_processes(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(max_processes=32)
        code = (
            "import os,time\nn=0\ntry:\n"
            " while n<400:\n  if os.fork()==0: time.sleep(60)\n  n+=1\n"
            "except OSError as e: print(e.errno, n, flush=True)"
        )
        result, output = await node_run(sandbox, *script(code))
        number, count = map(int, output.split())
        assert number == errno.EAGAIN
        # This process is one of them; gVisor's kernel looks before it counts the new one.
        assert count < 32 + (kit.name == "gvisor")
        assert result.end.cause is Cause.EXITED

    @needs("disk_limit")
    async def test_disk(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(memory=128 * MIB, disk=16 * MIB)
        code = (
            "import os, errno\nfd=os.open('/workspace/big', os.O_CREAT|os.O_WRONLY)\nn=0\ntry:\n"
            " while n<200: n+=os.write(fd, bytes(1<<20))>>20\n"
            "except OSError as e: print(errno.errorcode[e.errno], n)"
        )
        result, output = await node_run(sandbox, *script(code))
        name, written = output.split()
        assert name == b"ENOSPC"  # and nobody was killed
        assert int(written) <= 16
        assert result.end.cause is Cause.EXITED
        link = await kit.link(sandbox)
        await link.files.remove("/workspace/big")
        await link.files.write("/workspace/small", b"x")  # space that is given back can be used again

    async def test_open_files(self, kit: Kit) -> None:
        link = await kit.started(max_open_files=64)
        code = (
            "import os, errno\nfds=[]\ntry:\n while True: fds.append(os.open('/tmp', os.O_RDONLY))\n"
            "except OSError as e: print(errno.errorcode[e.errno], len(fds))"
        )
        done = await python(link, code)
        name, count = done.text.split()
        assert name == ("EMFILE" if kit.capabilities.programs else "EIO")  # Wasmtime has no word for it
        assert int(count) <= 64

    @needs("programs")
    async def test_processor_time(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(cpu_time=0.5)
        result, _ = await node_run(sandbox, "/bin/sh", "-c", "while :; do :; done")
        assert (result.end.cause, result.end.exit_code) == (Cause.CPU_TIME, 137)
        await gone(sandbox.handle)

    @needs("programs")
    async def test_output(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(output=100_000)
        result, output = await node_run(sandbox, "/bin/sh", "-c", "yes; yes >&2")
        assert result.end.cause is Cause.OUTPUT_LIMIT
        assert len(output) <= 100_000
        await gone(sandbox.handle)

    @needs("programs")
    async def test_output_of_all_commands_counts(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(output=10_000)
        for _ in range(3):
            result, _ = await node_run(sandbox, "head", "-c", "3000", "/dev/zero")
            assert result.end.cause is Cause.EXITED
        result, _ = await node_run(sandbox, "head", "-c", "3000", "/dev/zero")
        assert result.end.cause is Cause.OUTPUT_LIMIT

    @needs("programs")
    async def test_deadline(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(timeout=0.5)
        result, _ = await node_run(
            sandbox, "/bin/sh", "-c", "trap '' TERM INT HUP; sleep 60 & setsid sleep 61 & wait"
        )
        assert (result.end.cause, result.end.exit_code) == (Cause.DEADLINE, 124)
        assert (await sandbox.ended).cause is Cause.DEADLINE
        await gone(sandbox.handle)

    async def test_killed_on_request(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        running = asyncio.create_task(node_run(sandbox, "sleep", "60"))
        link = await kit.link(sandbox)
        while not await link.processes():
            pass
        await sandbox.stop(0)
        result, _ = await running
        assert (result.end.cause, result.end.exit_code) == (Cause.KILLED, 137)

    async def test_the_limits_say_how_they_are_enforced(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        limits = (await sandbox.boundary()).limits
        assert set(limits) >= {"memory", "cpu", "pids", "disk", "cpu_time", "output", "deadline"}
        assert limits["deadline"] == limits["output"] == "host"
        assert limits["memory"] != "none"
        assert limits["pids"] != "none"
        assert (limits["disk"] != "none") == kit.capabilities.disk_limit

    async def test_usage_is_measured(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        code = "x=bytearray(30<<20)\nfor n in range(3_000_000): pass"
        if (await sandbox.boundary()).limits["memory"] == "polled":
            code += "\nimport time; time.sleep(3)"  # whoever looks may be late
        result, _ = await node_run(sandbox, *script(code))
        assert result.usage.cpu_seconds is None or result.usage.cpu_seconds > 0.01
        assert result.usage.memory_peak is None or result.usage.memory_peak > 1 << 20

    @needs("programs")
    @needs("overlay")
    async def test_changes(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        await run(
            link,
            "/bin/sh",
            "-c",
            "echo new > /workspace/new; mkdir /workspace/d; rm -f /etc/hosts; ln -s x /tmp/l",
        )
        changes = {change.path: change for change in await sandbox.changes()}
        assert changes["/workspace/new"].kind == "added"
        assert changes["/workspace/new"].size == 4
        assert changes["/workspace/new"].digest == (
            "sha256:7aa7a5359173d05b63cfd682e3c38487f3cb4f7f1d60659fe59fab1505977d4c"
        )
        assert changes["/workspace/d"].type == "directory"
        assert changes["/tmp/l"].type == "symlink"
