"""Commands on the real agent, through the real client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest

from ringfence.guest.link import GuestLink
from ringfence.guest.processes import FROM_NOW, GuestProcess, ProcessExit, ProcessSpec
from ringfence.model.errors import GuestRefused, WrongState
from support.agents import BareAgent


async def finish(process: GuestProcess) -> tuple[ProcessExit, bytes, bytes]:
    parts = {1: bytearray(), 2: bytearray()}
    async for stream, offset, data in process:
        assert offset == len(parts[stream])
        parts[stream] += data
    return await process.wait(), bytes(parts[1]), bytes(parts[2])


async def run(link: GuestLink, *argv: str | bytes, stdin: bytes | None = None, **wishes: Any) -> Any:
    process = await link.start(ProcessSpec(argv, stdin=stdin is not None, **wishes))
    if stdin is not None:
        writing = asyncio.ensure_future(process.write(stdin))
        writing.add_done_callback(lambda _: asyncio.ensure_future(process.close_stdin()))
        result = await finish(process)
        await writing
        return result
    return await finish(process)


async def test_streams_and_status(link: GuestLink) -> None:
    exit_, out, err = await run(link, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (exit_.code, exit_.signal, exit_.status, out, err) == (3, None, 3, b"out\n", b"err\n")
    assert (exit_.stdout_end, exit_.stderr_end) == (4, 4)
    assert exit_.max_rss > 0


async def test_death_by_signal(link: GuestLink) -> None:
    exit_, _, _ = await run(link, "sh", "-c", "kill -9 $$")
    assert (exit_.code, exit_.signal, exit_.status) == (None, 9, 137)


async def test_arguments_and_environment_are_bytes(link: GuestLink) -> None:
    odd = b"\xff\xfe new\nline '\" $x \\"
    _, out, _ = await run(link, "printf", "%s", odd)
    assert out == odd
    _, out, _ = await run(link, "sh", "-c", 'printf %s "$ODD"', env={"ODD": os.fsdecode(odd)})
    assert out == odd


async def test_input_of_any_size_comes_back(link: GuestLink) -> None:
    data = os.urandom(3_000_000)
    exit_, out, _ = await run(link, "cat", stdin=data)
    assert exit_.code == 0
    assert out == data


async def test_input_that_nobody_reads_waits_and_ends_with_the_command(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sh", "-c", "read line; echo $line"), stdin=True))
    task = asyncio.ensure_future(process.write(b"first\n" + bytes(3_000_000)))
    exit_, out, _ = await finish(process)
    assert out == b"first\n"
    # What was under way is refused, or swallowed by an agent that knew of the closed pipe before of the end.
    with contextlib.suppress(GuestRefused):
        await task
    with pytest.raises(GuestRefused) as caught:
        await process.write(b"x")
    assert caught.value.errno == 32
    assert exit_.code == 0


async def test_no_input_is_an_end_of_file(link: GuestLink) -> None:
    exit_, out, _ = await run(link, "cat")
    assert (exit_.code, out) == (0, b"")


async def test_stderr_into_stdout(link: GuestLink) -> None:
    _, out, err = await run(link, "sh", "-c", "echo a; echo b >&2; echo c", merge_stderr=True)
    assert (out, err) == (b"a\nb\nc\n", b"")


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        (ProcessSpec(("no-such-program",)), 2),
        (ProcessSpec(("/etc/passwd",)), 13),
        (ProcessSpec(("true",), cwd="/no/such/folder"), 2),
        (ProcessSpec(("true",), cwd="/etc/passwd"), 20),
        (ProcessSpec(("true",), as_root=True), 1),
    ],
)
async def test_a_start_that_can_not_be_says_why(link: GuestLink, spec: ProcessSpec, number: int) -> None:
    with pytest.raises(GuestRefused) as caught:
        await link.start(spec)
    assert caught.value.errno == number
    assert (await run(link, "true"))[0].code == 0


async def test_an_id_is_started_once(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sleep", "60"), id="mine"))
    with pytest.raises(GuestRefused) as caught:
        await link.start(ProcessSpec(("true",), id="mine"))
    assert caught.value.errno == 17
    await process.signal(signal.SIGTERM)
    assert (await process.wait()).signal == signal.SIGTERM


async def test_a_descendant_that_holds_the_pipe_does_not_hold_the_output(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sh", "-c", "sleep 600 & echo started; exit 5")))
    async with asyncio.timeout(60):
        exit_, out, _ = await finish(process)
    assert (exit_.code, out) == (5, b"started\n")
    await link.signal_all(signal.SIGKILL)


async def test_a_terminal_is_one(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sh",), pty=True, rows=31, columns=97))
    await process.write(b"stty size; tty; exit 4\n")
    exit_, out, _ = await finish(process)
    assert exit_.code == 4
    assert b"31 97" in out
    assert b"/dev/pts/" in out


async def test_a_terminal_is_resized_and_interrupted(link: GuestLink) -> None:
    process = await link.start(
        ProcessSpec(
            ("sh", "-c", "trap 'stty size; exit' WINCH; echo go; while :; do sleep 0.01; done"), pty=True
        )
    )
    assert b"go" in (await anext(process)).data
    await process.resize(40, 120)
    _, out, _ = await collect(process)
    assert b"40 120" in out
    # A shell that is interrupted while it forks may miss it, so this is a program that surely runs.
    process = await link.start(ProcessSpec(("cat",), pty=True))
    await process.write(b"x\n")
    seen = b""
    while seen.count(b"x") < 2:
        seen += (await anext(process)).data
    await process.write(b"\x03")
    exit_, _, _ = await collect(process)
    assert exit_.signal == signal.SIGINT
    with pytest.raises(GuestRefused):
        await (await link.start(ProcessSpec(("true",)))).resize(1, 1)


async def collect(process: GuestProcess) -> tuple[ProcessExit, bytes, bytes]:
    parts = {1: bytearray(), 2: bytearray()}
    async for stream, _, data in process:
        parts[stream] += data
    return await process.wait(), bytes(parts[1]), bytes(parts[2])


async def test_signals_reach_the_group_or_the_process(link: GuestLink) -> None:
    # The shell survives a TERM of its own; its child does not, if the whole group is meant.
    script = "trap 'echo term' TERM; sh -c 'echo ready; exec sleep 600'; echo child $?; sleep 600"
    process = await link.start(ProcessSpec(("sh", "-c", script)))
    assert (await anext(process)).data == b"ready\n"
    await process.signal(signal.SIGTERM, "group")
    seen = b""
    while b"child 143" not in seen:
        seen += (await anext(process)).data
    assert b"term" in seen
    await process.signal(signal.SIGKILL, "group")
    assert (await process.wait()).signal == 9
    with pytest.raises(GuestRefused) as caught:
        await process.signal(signal.SIGTERM)
    assert caught.value.errno == 3


async def test_detached_commands_are_found_and_forgotten(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sh", "-c", "echo hello; sleep 600"), id="back", detached=True))
    table = {row.id: row for row in await link.processes()}
    assert (table["back"].state, table["back"].pid, table["back"].argv0) == ("running", process.pid, "sh")
    with pytest.raises(GuestRefused) as caught:
        await link.remove("back")
    assert caught.value.errno == 16
    attached = await link.attach("back")
    assert await anext(attached) == (1, 0, b"hello\n")
    await link.signal("back", signal.SIGKILL)
    assert (await attached.wait()).signal == 9
    await link.remove("back")
    assert "back" not in {row.id for row in await link.processes()}
    with pytest.raises(GuestRefused) as caught:
        await link.attach("back")
    assert caught.value.errno == 2


async def test_ended_commands_can_be_read_again(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sh", "-c", "printf 0123456789; exit 2"), id="done"))
    assert (await finish(process))[1] == b"0123456789"
    again = await link.attach("done", stdout=4)
    assert [piece async for piece in again] == [(1, 4, b"456789")]
    assert (await again.wait()).code == 2
    nothing = await link.attach("done", stdout=FROM_NOW, stderr=FROM_NOW)
    assert [piece async for piece in nothing] == []
    only_exit = await link.attach("done", output=False)
    assert (await only_exit.wait()).code == 2


async def test_a_ring_that_drops_shows_the_gap(link: GuestLink) -> None:
    spec = ProcessSpec(
        ("sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x; echo end"),
        id="d",
        detached=True,
        drop=True,
        ring=4096,
    )
    await link.start(spec)
    only_exit = await link.attach("d", output=False)
    await only_exit.wait()
    late = await link.attach("d", stdout=0)
    pieces = [piece async for piece in late]
    assert pieces[0].offset >= 100_004 - 4096
    assert b"".join(piece.data for piece in pieces).endswith(b"xend\n")


async def test_a_closed_process_lives_on(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sh", "-c", "sleep 0.2; echo late"), id="p"))
    await process.close()
    await process.close()
    with pytest.raises((GuestRefused, WrongState)):
        await process.write(b"x")
    assert (await collect(await link.attach("p")))[1] == b"late\n"


async def test_a_cancelled_start_leaves_no_process(agent: BareAgent, link: GuestLink) -> None:
    for delay in range(20):
        task = asyncio.ensure_future(link.start(ProcessSpec(("sleep", "600"), id=f"c{delay}")))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        if isinstance(results[0], GuestProcess):
            await results[0].signal(signal.SIGKILL)
            await results[0].wait()
    await link.ping()
    deadline = asyncio.get_running_loop().time() + 60
    while any(row.state == "running" for row in await link.processes()):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
