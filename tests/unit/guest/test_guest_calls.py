"""Commands and ports against a scripted guest: output, ends, attaching, cancellation, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from ringfence.guest import frames
from ringfence.guest.fields import encode
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import (
    GuestRefused,
    InvalidRequest,
    ProtocolViolation,
)
from support.peers import SPEC, exited, linked, reply, started

START, ATTACH, SIGNAL, LIST, DIAL, LISTEN = 1, 2, 3, 4, 32, 33


# -- processes


async def test_output_ends_with_the_command_though_a_descendant_holds_the_pipe() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        await peer.send(
            exited(channel, 0, 3, 0), frames.data_frame(channel, 1, 0, b"own, and more of a descendant")
        )
        assert [piece async for piece in process] == [(1, 0, b"own")]
        assert (await process.wait()).stdout_end == 3
        assert (await peer.receive()).kind == frames.CLOSE  # nothing keeps the channel open


async def test_output_before_the_exit_is_awaited() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        await peer.send(exited(channel, 0, 3, 2), frames.data_frame(channel, 1, 0, b"out"))
        assert (await anext(process)).data == b"out"
        task = asyncio.ensure_future(anext(process))
        await asyncio.sleep(0)
        assert not task.done()
        await peer.send(frames.data_frame(channel, 2, 0, b"er"))
        assert (await task).data == b"er"
        with pytest.raises(StopAsyncIteration):
            await anext(process)


async def test_an_exit_that_promises_more_than_comes_ends_at_the_end_of_the_streams() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        await peer.send(
            exited(channel, 0, 2**60, 2**60), frames.eof_frame(channel, 1, 0), frames.eof_frame(channel, 2, 0)
        )
        assert [piece async for piece in process] == []


async def test_a_channel_that_the_guest_drops_is_an_error_not_an_end() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        await peer.send(frames.data_frame(channel, 1, 0, b"x"), frames.close_frame(channel))
        assert (await anext(process)).data == b"x"
        with pytest.raises(GuestRefused, match="ended early"):
            await anext(process)
        with pytest.raises(GuestRefused):
            await process.wait()


async def test_attach_goes_on_at_the_offset() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.attach("p1", stdout=100, stderr=7))
        got = await peer.opened(ATTACH)
        assert [got.fields.number(tag) for tag in (2, 3)] == [100, 7]
        # The guest replies and goes on in one write: the offsets must hold for the very next frame.
        await peer.send(
            reply(got.channel, (1, 42), (2, 100), (3, 9), (4, 11)),
            frames.data_frame(got.channel, 1, 100, b"abc"),
            frames.data_frame(got.channel, 2, 9, b"e"),
            exited(got.channel, 0, 103, 10),
        )
        process = await task
        assert (process.pid, process.stdin_offset) == (42, 11)
        assert [piece async for piece in process] == [(1, 100, b"abc"), (2, 9, b"e")]
        assert process.offsets == (103, 10)


async def test_attach_refuses_output_from_before_the_offset() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.attach("p1", stdout=100))
        got = await peer.opened(ATTACH)
        await peer.send(reply(got.channel, (1, 42), (2, 99), (3, 0)))
        with pytest.raises(ProtocolViolation, match="before the offset"):
            await task


async def test_a_cancelled_start_leaves_nothing() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.start(SPEC))
        got = await peer.opened(START)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # It may not run yet, so nothing can be killed before the guest says that it does.
        await peer.send(reply(got.channel, (1, 5)), frames.data_frame(got.channel, 1, 0, b"output"))
        kill = await peer.opened(SIGNAL)
        assert (kill.fields.raw(1), kill.fields.number(2), kill.fields.number(3)) == (b"p1", 9, 1)
        assert await peer.receive() == (got.channel, frames.CLOSE, b"")
        await peer.send(frames.close_frame(got.channel), reply(kill.channel))
        await peer.send(frames.frame(0, frames.PING, b"."))
        await peer.receive()
        assert link._wire._channels == {}


@pytest.mark.parametrize("spec", [SPEC, ProcessSpec(("true",), id="p1", detached=True)])
async def test_a_start_cancelled_together_with_its_answer_leaves_nothing(spec: ProcessSpec) -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.start(spec))
        got = await peer.opened(START)
        await peer.send(reply(got.channel, (1, 5)))
        while link._wire._channels and next(iter(link._wire._channels.values())).reply is None:
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
            kill = await peer.opened(SIGNAL)
            assert kill.fields.raw(1) == b"p1"


async def test_a_cancelled_start_that_failed_is_over() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.start(SPEC))
        got = await peer.opened(START)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await peer.send(frames.error_frame(got.channel, 2), frames.frame(0, frames.PING, b"."))
        assert (await peer.receive()).kind == frames.PONG
        assert link._wire._channels == {}


async def test_cancelled_calls_close_their_channels() -> None:
    async with linked() as (link, peer):
        calls: list[Awaitable[object]] = [
            link.dial(80),
            link.listen(),
            link.stats(),
            link.files.stat("x"),
            link.files.read_bytes("x"),
            link.files.write("x", b"data"),
            link.files.watch("x"),
            link.attach("p"),
        ]
        for call in calls:
            task = asyncio.ensure_future(call)
            opened = await peer.receive()
            assert opened.kind == frames.OPEN
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            got = await peer.receive()
            while got.kind in (frames.DATA, frames.EOF):
                got = await peer.receive()
            assert got == (opened.channel, frames.CLOSE, b"")
            await peer.send(frames.close_frame(opened.channel))
        await peer.send(frames.frame(0, frames.PING, b"."))
        await peer.receive()
        assert link._wire._channels == {}


async def test_a_cancelled_reader_loses_no_byte() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        for number in range(20):
            task = asyncio.ensure_future(anext(process))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await peer.send(frames.data_frame(channel, 1, number, b"x"))
            assert await anext(process) == (1, number, b"x")


async def test_detached_start_ends_with_its_reply() -> None:
    async with linked() as (link, peer):
        process, _ = await started(link, peer, ProcessSpec(argv=("true",), detached=True))
        assert process.pid == 42
        with pytest.raises(GuestRefused, match="detached"):
            await process.wait()
        assert link._wire._channels == {}
        await peer.send(frames.frame(0, frames.PING, b"."))
        assert (await peer.receive()).kind == frames.PONG


@pytest.mark.parametrize(
    "spec",
    [
        ProcessSpec(argv=()),
        ProcessSpec(argv=("a\0b",)),
        ProcessSpec(argv=("a",), env={"A=B": "c"}),
        ProcessSpec(argv=("a",), env={"": "c"}),
        ProcessSpec(argv=("a",), env={"A": "c\0"}),
        ProcessSpec(argv=("a",), cwd="\0"),
        ProcessSpec(argv=("a",), id=""),
        ProcessSpec(argv=("a",), id="x" * 65),
        ProcessSpec(argv=("a",), id="a/b"),
        ProcessSpec(argv=("a",), id="ä"),
        ProcessSpec(argv=("a",), ring=1),
        ProcessSpec(argv=("a",), window=0),
        ProcessSpec(argv=("a",), pty=True, rows=0),
        ProcessSpec(argv=("x" * 70_000,)),
    ],
)
async def test_an_impossible_spec_is_refused_before_anything_is_sent(spec: ProcessSpec) -> None:
    async with linked() as (link, peer):
        with pytest.raises(InvalidRequest):
            await link.start(spec)
        await started(link, peer)  # the control; and its OPEN is the first frame that came


async def test_the_table_of_processes_is_checked() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.processes())
        got = await peer.opened(LIST)
        one = encode([(1, "a"), (2, 7), (3, 2), (4, 9), (5, 3), (7, b"sh\x1b[2J"), (8, 5)])
        await peer.send(reply(got.channel, (1, one), (2, 1)))
        table = await task
        assert table.truncated
        assert (table[0].id, table[0].state, table[0].signal, table[0].code) == ("a", "killed", 9, None)
        assert "\x1b" not in table[0].argv0
        task = asyncio.create_task(link.processes())
        got = await peer.opened(LIST)
        await peer.send(reply(got.channel, (1, encode([(1, "../x"), (2, 7), (3, 0)]))))
        with pytest.raises(ProtocolViolation, match="impossible id"):
            await task


# -- ports


async def test_a_dialled_port_reads_and_writes_and_half_closes() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.dial(8080))
        got = await peer.opened(DIAL)
        assert (got.fields.number(1), got.fields.raw(2)) == (8080, b"127.0.0.1")
        await peer.send(reply(got.channel), frames.data_frame(got.channel, 0, 0, b"hello"))
        stream = await task
        assert [await stream.read(2), await stream.read()] == [b"he", b"llo"]
        await stream.write(b"GET")
        await stream.eof()
        assert (await peer.receive()).payload[9:] == b"GET"
        assert (await peer.receive()).kind == frames.EOF
        await peer.send(frames.data_frame(got.channel, 0, 5, b"!"), frames.eof_frame(got.channel, 0, 6))
        assert [await stream.read(), await stream.read(), await stream.read()] == [b"!", b"", b""]
        await stream.close()
        assert (await peer.receive()).kind == frames.CLOSE
        await peer.send(frames.close_frame(got.channel))


async def test_a_connection_that_is_reset_is_an_error() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.dial(8080))
        got = await peer.opened(DIAL)
        await peer.send(
            reply(got.channel), frames.data_frame(got.channel, 0, 0, b"ha"), frames.close_frame(got.channel)
        )
        stream = await task
        assert await stream.read() == b"ha"
        with pytest.raises(GuestRefused, match="ended early"):
            await stream.read()
        with pytest.raises(GuestRefused):
            await stream.write(b"x")


async def test_connections_from_inside_are_accepted() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.listen(0, backlog=2))
        got = await peer.opened(LISTEN)
        await peer.send(reply(got.channel, (1, 3128)))
        listener = await task
        assert listener.port == 3128
        accepted = encode([(1, got.channel), (2, 555), (3, 1000)])
        await peer.send(*(frames.open_frame(c, 34, accepted) for c in (2, 4, 6)))
        refused = await peer.receive()  # beyond the backlog
        assert (refused.channel, refused.kind) == (6, frames.ERROR)
        first = await listener.accept()
        assert first.peer == (555, 1000, None, 0, "")
        assert await peer.receive() == (2, frames.REPLY, b"")
        await peer.send(frames.data_frame(2, 0, 0, b"CONNECT"))
        assert await first.read() == b"CONNECT"
        await first.write(b"200")
        assert (await peer.receive()).payload[9:] == b"200"
        # The client behind channel 4 goes away before anybody accepts it.
        await peer.send(frames.close_frame(4))
        assert await peer.receive() == (4, frames.CLOSE, b"")
        await peer.send(frames.open_frame(8, 34, accepted))
        async for stream in listener:
            assert stream._channel.number == 8
            break
        await peer.receive()
        await peer.send(frames.open_frame(10, 34, accepted), frames.frame(0, frames.PING, b"."))
        await peer.receive()
        await listener.close()
        assert (await peer.receive()).kind == frames.ERROR
        assert await peer.receive() == (got.channel, frames.CLOSE, b"")
        await peer.send(frames.open_frame(12, 34, accepted))
        assert (await peer.receive()).kind == frames.ERROR
        assert [stream async for stream in listener] == []


async def test_a_guest_can_not_open_anything_else() -> None:
    async with linked() as (_, peer):
        await peer.send(frames.open_frame(2, 1, encode([(1, "x"), (2, "sh")])))
        got = await peer.receive()
        assert (got.channel, got.kind, int.from_bytes(got.payload[:4], "little")) == (2, frames.ERROR, 95)
        await peer.send(frames.close_frame(2))  # crossed with the error: dropped
        await peer.send(frames.frame(0, frames.PING, b"."))
        assert (await peer.receive()).kind == frames.PONG


async def test_channels_are_limited_to_what_the_guest_allows() -> None:
    async with linked(limits=2) as (link, peer):
        await started(link, peer, ProcessSpec(argv=("a",)))
        await started(link, peer, ProcessSpec(argv=("b",)))
        with pytest.raises(GuestRefused) as caught:
            await link.stats()
        assert caught.value.errno == 24
