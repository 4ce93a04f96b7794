"""Every limit and every cause of an end, on a real wall, measured from outside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused, LinkLost
from ringfence.model.levels import Cause
from ringfence.model.policy import MIB
from ringfence.node import cgroups
from ringfence.node.sandboxes import NodeProcess, NodeSandbox
from ringfence.node.service import Node
from support.nodes import run

Make = Callable[..., Awaitable[NodeSandbox]]
enforced = cgroups.detect().enforced()
EATER = "x = bytearray({0} << 20)\nprint('had it')"


async def test_a_command_and_its_code(one: Make) -> None:
    sandbox = await one()
    result, text = await run(sandbox, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (result.end.cause, result.end.exit_code, result.end.reported) == (Cause.EXITED, 7, True)
    assert sorted(text.split()) == ["err", "out"]
    assert result.usage.output_bytes == 8
    assert result.usage.wall_seconds > 0
    assert result.usage.cpu_seconds is not None
    await sandbox.destroy()


async def test_a_signal_of_its_own_and_one_of_ours(one: Make) -> None:
    sandbox = await one()
    result, _ = await run(sandbox, "sh", "-c", "kill -TERM $$")
    assert (result.end.cause, result.end.exit_code) == (Cause.SIGNALED, 143)
    started: list[NodeProcess] = []
    waiting = asyncio.ensure_future(run(sandbox, "sleep", "60", on_start=started.append))
    while not started:
        await asyncio.sleep(0.005)
    await started[0].signal(15)
    result, _ = await waiting
    assert (result.end.cause, result.end.exit_code) == (Cause.KILLED, 143)
    await sandbox.destroy()


async def test_a_missing_program_is_refused(one: Make) -> None:
    sandbox = await one()
    with pytest.raises(GuestRefused, match="no-such-program"):
        await run(sandbox, "no-such-program")
    await sandbox.destroy()


async def test_memory(one: Make) -> None:
    sandbox = await one(memory=64 * MIB)
    result, text = await run(sandbox, "python3", "-c", EATER.format(24))
    assert (result.end.cause, text) == (Cause.EXITED, "had it\n")  # the control
    result, text = await run(sandbox, "python3", "-c", EATER.format(800))
    assert (result.end.cause, result.end.exit_code, result.end.reported) == (Cause.OUT_OF_MEMORY, 137, False)
    assert "had it" not in text
    assert result.usage.memory_peak is not None
    assert result.usage.memory_peak > 48 * MIB
    if enforced["memory"] != "polled":
        # Only the eater is gone; the sandbox lives on, and a plain SIGKILL is not called out of memory.
        result, text = await run(sandbox, "echo", "still here")
        assert text == "still here\n"
        result, _ = await run(sandbox, "sh", "-c", "kill -KILL $$")
        assert (result.end.cause, result.end.exit_code) == (Cause.SIGNALED, 137)
    await sandbox.destroy()


@pytest.mark.skipif(enforced["memory"] == "polled", reason="without a cgroup the whole wall is killed")
async def test_a_child_that_ran_out_of_memory_is_mentioned(one: Make) -> None:
    sandbox = await one(memory=64 * MIB)
    result, _ = await run(sandbox, "sh", "-c", "python3 -c 'x = bytearray(800 << 20)'; exit 3")
    assert (result.end.cause, result.end.exit_code) == (Cause.EXITED, 3)
    assert "killed for memory" in result.end.detail
    await sandbox.destroy()


async def test_deadline_kills_the_whole_tree(one: Make) -> None:
    sandbox = await one(timeout=0.6)
    script = "trap '' TERM INT; (trap '' TERM; setsid sleep 61) & sleep 60"
    result, _ = await run(sandbox, "sh", "-c", script)
    assert (result.end.cause, result.end.exit_code) == (Cause.DEADLINE, 124)
    assert (await sandbox.ended) == result.end
    with pytest.raises(LinkLost, match="deadline"):
        await sandbox.link()
    await sandbox.destroy()


async def test_output(one: Make) -> None:
    sandbox = await one(output=100_000)
    seen = 0

    def take(piece: object) -> None:
        nonlocal seen
        seen += len(piece.data)  # type: ignore[attr-defined]

    result = await sandbox.run(ProcessSpec(("yes",)), on_output=take)
    assert (result.end.cause, result.end.exit_code) == (Cause.OUTPUT_LIMIT, 137)
    assert seen == 100_000  # to the byte
    await sandbox.destroy()


async def test_output_of_all_commands_together(one: Make) -> None:
    sandbox = await one(output=1000)
    result, _ = await run(sandbox, "head", "-c", "600", "/dev/zero")
    assert result.end.cause is Cause.EXITED
    result, _ = await run(sandbox, "head", "-c", "600", "/dev/zero")
    assert result.end.cause is Cause.OUTPUT_LIMIT
    await sandbox.destroy()


async def test_processor_time_of_all_processes_together(one: Make) -> None:
    sandbox = await one(cpu_time=0.4)
    spin = "(while :; do :; done) & (while :; do :; done) & wait"
    result, _ = await run(sandbox, "sh", "-c", spin)
    assert (result.end.cause, result.end.exit_code) == (Cause.CPU_TIME, 137)
    assert result.usage.cpu_seconds is not None
    assert result.usage.cpu_seconds >= 0.4
    await sandbox.destroy()


async def test_processor_time_counts_the_dead_too(one: Make) -> None:
    sandbox = await one(cpu_time=0.4)
    script = "while :; do sh -c 'i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done'; done"
    result, _ = await run(sandbox, "sh", "-c", script)
    assert result.end.cause is Cause.CPU_TIME
    await sandbox.destroy()


DISK_BOMB = (
    "import os\nn = 0\nf = os.open('/workspace/bomb', os.O_CREAT | os.O_WRONLY)\n"
    "try:\n for _ in range(400): n += os.write(f, bytes(1 << 20)) >> 20\n"
    "except OSError as e: print(e.errno, n)"
)


@pytest.mark.parametrize(
    ("memory", "disk"),
    [
        pytest.param(64, 32, id="tmpfs"),
        pytest.param(
            64, 96, id="image", marks=pytest.mark.skipif(os.geteuid() != 0, reason="images need root")
        ),
    ],
)
async def test_a_full_disk_is_said_before_memory_is_out(one: Make, memory: int, disk: int) -> None:
    sandbox = await one(memory=memory * MIB, disk=disk * MIB)
    result, text = await run(sandbox, "python3", "-c", DISK_BOMB)
    number, written = map(int, text.split())
    assert result.end.cause is Cause.EXITED
    assert number == 28  # ENOSPC
    assert disk * 0.7 < written <= disk
    assert (await sandbox.boundary()).limits["disk"] == ("tmpfs" if disk <= memory / 2 else "image")
    await sandbox.destroy()


async def test_inodes_are_limited(one: Make) -> None:
    sandbox = await one(disk=2 * MIB)
    code = (
        "n = 0\ntry:\n while n < 50000: open(f'/tmp/{n}', 'w').close(); n += 1\n"
        "except OSError as e: print(e.errno, n)"
    )
    result, text = await run(sandbox, "python3", "-c", code)
    number, made = map(int, text.split())
    assert result.end.cause is Cause.EXITED
    assert number == 28
    assert made < 1024
    await sandbox.destroy()


async def test_a_fork_bomb_hits_its_limit_and_the_agent_answers(one: Make) -> None:
    sandbox = await one(processes=24)
    code = (
        "import os, time\nn = 0\ntry:\n while n < 500:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\n"
        "except OSError as e: print(e.errno, n, flush=True)\ntime.sleep(60)"
    )
    process = await sandbox.start(ProcessSpec(("python3", "-c", code)))
    async for piece in process:
        number, made = map(int, piece.data.split())
        break
    assert number == 11  # EAGAIN
    assert made < 24 + 64
    await (await sandbox.link()).ping()
    await sandbox.destroy()


async def test_the_first_process_dying_is_a_crash(one: Make) -> None:
    sandbox = await one()
    os.kill(sandbox.handle.pid, 9)
    end = await sandbox.ended
    assert (end.cause, end.exit_code) == (Cause.RUNTIME_CRASH, 125)
    result, _ = await run(sandbox, "true")
    assert result.end == end
    await sandbox.destroy()


async def test_stopping(one: Make) -> None:
    sandbox = await one()
    running = asyncio.ensure_future(run(sandbox, "sleep", "60"))
    await asyncio.sleep(0.05)
    end = await sandbox.stop(0)
    assert (end.cause, end.exit_code) == (Cause.KILLED, 137)
    assert (await running)[0].end == end
    assert await sandbox.stop(0) == end
    await sandbox.destroy()
    await sandbox.destroy()


async def test_limits_are_reported_as_they_are(one: Make, node: Node) -> None:
    sandbox = await one(cpu_time=60.0)
    limits = (await sandbox.boundary()).limits
    assert limits == {**enforced, "disk": "tmpfs", "output": "host", "deadline": "host"}
    assert set(limits) == {"memory", "cpu", "pids", "cpu_time", "disk", "output", "deadline"}
    await sandbox.destroy()


async def test_a_limit_that_is_not_in_force_is_not_claimed(
    one: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await one()
    monkeypatch.setattr(type(sandbox.group), "outside", lambda *_: ["memory"])
    assert (await sandbox.boundary()).limits["memory"] == "none"
    await sandbox.destroy()


async def test_input(one: Make) -> None:
    sandbox = await one()
    result, text = await run(sandbox, "cat", stdin=b"x" * 300_000)
    assert len(text) == 300_000

    async def pieces():  # type: ignore[no-untyped-def]
        for number in range(100):
            yield b"%d\n" % number

    result, text = await run(sandbox, "wc", "-l", stdin=pieces())
    assert text.strip() == "100"
    result, _ = await run(sandbox, "true", stdin=b"nobody reads this" * 100_000)
    assert result.end.exit_code == 0
    await sandbox.destroy()


async def test_a_slow_reader_makes_the_command_wait(one: Make) -> None:
    sandbox = await one()
    total = 0

    async def slowly(piece: object) -> None:
        nonlocal total
        total += len(piece.data)  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    result = await sandbox.run(ProcessSpec(("head", "-c", "3000000", "/dev/zero")), on_output=slowly)
    assert (result.end.exit_code, total) == (0, 3_000_000)
    await sandbox.destroy()


async def test_a_lost_link_loses_nothing(one: Make) -> None:
    sandbox = await one()
    cut = False

    async def take(piece: object) -> None:
        nonlocal cut
        seen.append(piece.data)  # type: ignore[attr-defined]
        if not cut and len(seen) == 3:
            cut = True
            await (await sandbox.link()).close()

    seen: list[bytes] = []
    script = (
        "i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo $i; [ $((i % 20)) = 0 ] && sleep 0.02; done; exit 5"
    )
    result = await sandbox.run(ProcessSpec(("sh", "-c", script)), on_output=take)
    assert cut
    assert b"".join(seen) == b"".join(b"%d\n" % n for n in range(1, 201))
    assert (result.end.cause, result.end.exit_code) == (Cause.EXITED, 5)
    await sandbox.destroy()


async def test_cancelling_a_run_ends_the_command(one: Make) -> None:
    sandbox = await one()
    running = asyncio.ensure_future(run(sandbox, "sleep", "60"))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    link = await sandbox.link()
    async with asyncio.timeout(60):
        while any(entry.state == "running" for entry in await link.processes()):
            await asyncio.sleep(0.01)
    await sandbox.destroy()
