"""The link against a scripted guest: HELLO, every kind of violation, loss at every byte, flow control."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from ringfence.guest import frames
from ringfence.guest.fields import encode
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import GuestProcess, ProcessSpec
from ringfence.model.errors import (
    DeadlineExceeded,
    GuestRefused,
    InvalidRequest,
    LinkLost,
    ProtocolViolation,
    WrongState,
)
from support.peers import INSTANCE, Peer, exited, linked, pair, reply

START, ATTACH, SIGNAL, LIST, DIAL, LISTEN = 1, 2, 3, 4, 32, 33
SPEC = ProcessSpec(argv=("true",), id="p1", stdin=True)


async def started(link: GuestLink, peer: Peer, spec: ProcessSpec = SPEC) -> tuple[GuestProcess, int]:
    task = asyncio.create_task(link.start(spec))
    got = await peer.opened(START)
    await peer.send(reply(got.channel, (1, 42)))
    return await task, got.channel


# -- HELLO


async def test_hello_is_exchanged() -> None:
    async with linked(epoch=3) as (link, _):
        assert (link.epoch, link.instance, link.agent, link.failure) == (3, INSTANCE, "scripted", None)


async def test_the_first_bytes_are_the_documented_pattern() -> None:
    ours, peer = pair()
    task = asyncio.create_task(GuestLink.open(ours))
    loop = asyncio.get_running_loop()
    data = await loop.sock_recv(peer.sock, 65536)
    assert data[4:12] == bytes([0, 0, 0, 0, 1, 0, 0, 0])
    assert data[12:17] == bytes([1, 16, 0, 0, 0])
    assert data[17:33] == b"RINGFENCE-LINK-1"
    peer.shut()
    with pytest.raises(LinkLost):
        await task


async def test_an_answer_to_an_earlier_host_is_discarded() -> None:
    ours, peer = pair()
    task = asyncio.create_task(GuestLink.open(ours))
    peer.nonce = (await peer.receive()).fields.raw(3)
    await peer.send(peer.hello(nonce=bytes(16), epoch=9), peer.hello(epoch=2))
    link = await task
    assert link.epoch == 2
    await link.close()
    peer.shut()


@pytest.mark.parametrize(
    "wrong",
    [
        {"magic": b"RINGFENCE-LINK-2"},
        {"version": 0},
        {"version": b"1"},
        {"epoch": 0},
        {"instance": b"short"},
        {"limits": 0},
        {"magic": None},
        {"instance": None},
    ],
)
async def test_a_wrong_hello_is_a_violation(wrong: dict[str, object]) -> None:
    ours, peer = pair()
    task = asyncio.create_task(GuestLink.open(ours))
    await peer.greet(**wrong)
    with pytest.raises(ProtocolViolation):
        await task
    await peer.ended()
    assert ours.fileno() == -1
    peer.shut()


@pytest.mark.parametrize(
    "first",
    [frames.frame(0, frames.PING), frames.frame(1, frames.HELLO), reply(1), b"SSH-2.0-OpenSSH_9.2\r\n"],
)
async def test_something_else_than_hello_is_a_violation(first: bytes) -> None:
    ours, peer = pair()
    task = asyncio.create_task(GuestLink.open(ours))
    await peer.send(first)
    with pytest.raises(ProtocolViolation):
        await task
    peer.shut()


async def test_a_guest_that_answers_everybody_else_is_a_violation() -> None:
    ours, peer = pair()
    task = asyncio.create_task(GuestLink.open(ours))
    await peer.send(*(peer.hello(nonce=bytes(16)) for _ in range(100)))
    with pytest.raises(ProtocolViolation, match="everybody"):
        await task
    peer.shut()


async def test_a_silent_guest_costs_the_timeout_only() -> None:
    ours, peer = pair()
    with pytest.raises(LinkLost, match="did not answer") as caught:
        await GuestLink.open(ours, timeout=0.05)
    assert caught.value.hint
    assert ours.fileno() == -1
    peer.shut()


async def test_a_single_stream_is_resynchronised() -> None:
    ours, peer = pair()
    task = asyncio.create_task(GuestLink.open(ours, resync=True))
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < frames.RESYNC_ZEROS + 12 or frames.MAGIC not in data:
        data += await loop.sock_recv(peer.sock, 65536)
    assert data[: frames.RESYNC_ZEROS] == bytes(frames.RESYNC_ZEROS)
    hello = data[frames.RESYNC_ZEROS :]
    peer.nonce = hello[hello.index(b"\3\20\0\0\0") + 5 :][:16]
    # The rest of an old frame, an answer to an old host, more of the old stream, then ours.
    await peer.send(b"\xffold" * 5000, peer.hello(nonce=bytes(16)), b"old" * 777, peer.hello(epoch=7))
    link = await task
    assert link.epoch == 7
    await link.close()
    peer.shut()


# -- the link ends


async def script(link: GuestLink, peer: Peer) -> bytes:
    """What a guest sends in a whole session after HELLO."""
    return b"".join(
        (
            reply(1, (1, 42)),
            frames.data_frame(1, 1, 0, b"hello"),
            frames.data_frame(1, 2, 0, b"oops"),
            frames.eof_frame(1, 1, 5),
            frames.eof_frame(1, 2, 4),
            exited(1, 3, 5, 4),
            frames.close_frame(1),
        )
    )


async def test_the_whole_session_is_understood() -> None:
    """The control for the test below."""
    async with linked() as (link, peer):
        await peer.send(b"")
        task = asyncio.create_task(link.start(SPEC))
        await peer.opened(START)
        await peer.send(await script(link, peer))
        process = await task
        assert [piece async for piece in process] == [(1, 0, b"hello"), (2, 0, b"oops")]
        assert (await process.wait()).status == 3
        assert (await peer.receive()).kind == frames.CLOSE


async def test_a_connection_cut_at_any_byte_loses_the_link_and_nothing_else() -> None:
    whole = b""
    async with linked() as (link, peer):
        whole = await script(link, peer)
    for at in range(len(whole)):
        async with linked() as (link, peer):
            task = asyncio.create_task(link.start(SPEC))
            await peer.opened(START)
            await peer.send(whole[:at])
            peer.shut()
            data = bytearray()
            try:
                process = await task
                async for piece in process:
                    data += piece.data
                exit_ = await process.wait()
            except LinkLost:
                pass
            else:
                assert exit_.code == 3
                assert bytes(data) == b"hellooops"
            assert b"hellooops".startswith(data)
            with pytest.raises(LinkLost) as caught:
                await link.stats()
            assert caught.value.hint == "dial again and resume by offset"


async def test_half_close_by_the_guest_ends_the_link() -> None:
    async with linked() as (link, peer):
        process, _ = await started(link, peer)
        peer.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkLost):
            await process.wait()


async def test_every_waiter_hears_of_the_end() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)

        async def output() -> None:
            async for _ in process:
                pass

        await peer.send(frames.credit_frame(channel, 0, 1))
        waiters: list[Awaitable[object]] = [
            process.wait(),
            process.wait(),
            output(),
            process.write(bytes(200_000)),
            link.stats(),
            link.ping(),
            link.dial(80),
            link.listen(),
            link.files.read_bytes("x"),
            link.files.write("x", b"y"),
        ]
        tasks = [asyncio.ensure_future(waiter) for waiter in waiters]
        for _ in range(5):
            await asyncio.sleep(0)
        await peer.send(struct.pack("<IIBBH", 0, 1, 99, 0, 0))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ProtocolViolation] * len(waiters)
        assert isinstance(link.failure, ProtocolViolation)


WRONG: dict[str, Callable[[int], bytes]] = {
    "a channel never opened": lambda c: frames.close_frame(c + 2),
    "an even channel never opened": lambda c: frames.close_frame(8),
    "a second HELLO": lambda c: frames.frame(0, frames.HELLO, encode([(1, frames.MAGIC)])),
    "OPEN of channel 0": lambda c: frames.open_frame(0, 34, b""),
    "OPEN with an id of ours": lambda c: frames.open_frame(c + 2, 34, b""),
    "OPEN of an open channel": lambda c: frames.open_frame(c, 34, b""),
    "OPEN that is too short": lambda c: frames.frame(2, frames.OPEN, b"\1"),
    "OPEN with a field past its end": lambda c: frames.open_frame(2, 34, b"\1\xff\0\0\0"),
    "DATA on channel 0": lambda c: frames.data_frame(0, 1, 0, b"x"),
    "a second REPLY": lambda c: reply(c),
    "DATA on an unknown stream": lambda c: frames.data_frame(c, 3, 0, b"x"),
    "DATA on our stream": lambda c: frames.data_frame(c, 0, 0, b"x"),
    "empty DATA": lambda c: frames.data_frame(c, 1, 0, b""),
    "DATA without an offset": lambda c: frames.frame(c, frames.DATA, b"\1\0"),
    "DATA with a gap": lambda c: frames.data_frame(c, 1, 5, b"x"),
    "DATA with an absurd offset": lambda c: frames.data_frame(c, 1, 2**63, b"x"),
    "DATA again": lambda c: frames.data_frame(c, 1, 0, b"x") * 2,
    "DATA after EOF": lambda c: frames.eof_frame(c, 1, 0) + frames.data_frame(c, 1, 0, b"x"),
    "EOF twice": lambda c: frames.eof_frame(c, 1, 0) * 2,
    "EOF elsewhere": lambda c: frames.eof_frame(c, 1, 9),
    "EOF that is too short": lambda c: frames.frame(c, frames.EOF, b"\1"),
    "CREDIT on a stream that we do not send": lambda c: frames.credit_frame(c, 1, 5),
    "CREDIT that is too long": lambda c: frames.frame(c, frames.CREDIT, bytes(6)),
    "CLOSE with a payload": lambda c: frames.frame(c, frames.CLOSE, b"x"),
    "ERROR without an errno": lambda c: frames.frame(c, frames.ERROR, b"\1"),
    "ERROR with errno 0": lambda c: frames.frame(c, frames.ERROR, bytes(4)),
    "ERROR with a long text": lambda c: frames.frame(c, frames.ERROR, b"\1\0\0\0" + bytes(513)),
    "EVENT that is too short": lambda c: frames.frame(c, frames.EVENT, b"\1"),
    "an exit without code or signal": lambda c: exited(c, None),
    "an exit with both": lambda c: exited(c, 1, signal=9),
    "an exit with signal 0": lambda c: exited(c, None, signal=0),
    "an exit with code 256": lambda c: exited(c, 256),
    "an exit with signal 65": lambda c: exited(c, None, signal=65),
    "an exit twice": lambda c: exited(c) * 2,
    "PONG that nobody asked for": lambda c: frames.frame(0, frames.PONG, b"x"),
    "PING that is too long": lambda c: frames.frame(0, frames.PING, bytes(65)),
    "PING on a channel": lambda c: frames.frame(c, frames.PING),
    "CREDIT on channel 0": lambda c: frames.credit_frame(0, 0, 5),
    "data beyond the credit": lambda c: b"".join(
        frames.data_frame(c, 1, i * 65_000, bytes(65_000)) for i in range(5)
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_violation_closes_the_link(name: str) -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        await peer.send(frames.frame(0, frames.PING, b"control"))
        assert (await peer.receive()).kind == frames.PONG  # the control: until now all was well
        await peer.send(WRONG[name](channel))
        await peer.ended()
        with pytest.raises(ProtocolViolation):
            await link.stats()
        with pytest.raises(ProtocolViolation):
            await process.write(b"x")


@pytest.mark.parametrize(
    "early",
    [
        frames.data_frame(1, 1, 0, b"x"),
        frames.eof_frame(1, 1, 0),
        exited(1),
        frames.close_frame(1),
    ],
)
async def test_nothing_comes_before_the_reply(early: bytes) -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.start(SPEC))
        await peer.opened(START)
        await peer.send(early)
        with pytest.raises(ProtocolViolation, match="before"):
            await task


async def test_frames_under_way_to_a_closed_channel_are_dropped() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        await process.close()
        assert (await peer.receive()).kind == frames.CLOSE
        await peer.send(
            frames.data_frame(channel, 1, 0, b"late"),
            frames.close_frame(channel),
            frames.credit_frame(channel, 0, 1),
        )
        await peer.send(frames.frame(0, frames.PING, b"alive"))
        assert (await peer.receive()).payload == b"alive"
        assert [piece async for piece in process] == []


async def test_error_answers_become_guest_refused() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.start(SPEC))
        got = await peer.opened(START)
        await peer.send(frames.error_frame(got.channel, 2, "exec\x1b[2J"))
        with pytest.raises(GuestRefused, match="No such file") as caught:
            await task
        assert caught.value.errno == 2
        assert "\x1b" not in str(caught.value)
        assert "start true" in str(caught.value)


async def test_descriptors_are_never_received() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        before = count()
        for number in range(50):
            frame = frames.data_frame(channel, 1, number, b"x")
            rights = array.array("i", [peer.sock.fileno()])
            peer.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        received = 0
        async for piece in process:
            received += len(piece.data)
            if received == 50:
                break
        assert count() == before


async def test_a_guest_that_pings_and_never_reads_is_cut_off() -> None:
    async with linked() as (link, peer):
        process, _ = await started(link, peer)
        ping = frames.frame(0, frames.PING, bytes(64)) * 500

        async def flood() -> None:
            while True:
                await peer.send(ping)

        task = asyncio.create_task(flood())
        with pytest.raises(ProtocolViolation, match="does not read"):
            await process.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_guest_that_answers_nothing_hits_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as (link, peer):
        with pytest.raises(DeadlineExceeded):
            await link._wire.request(49, [], "stats", 0.02)
        assert (await peer.receive()).operation == 49
        assert (await peer.receive()).kind == frames.CLOSE
        with pytest.raises(DeadlineExceeded):
            await link.ping(0.02)
        # A late answer is no violation: it was under way.
        await peer.send(reply(1, (1, 1)), frames.frame(0, frames.PONG, (await peer.receive()).payload))
        task = asyncio.create_task(link.ping())
        got = await peer.receive()
        await peer.send(frames.frame(0, frames.PONG, got.payload))
        await task


async def test_close_returns_though_the_guest_does_not_read() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        await peer.send(frames.credit_frame(channel, 0, 50_000_000))
        task = asyncio.create_task(process.write(bytes(20_000_000)))
        await asyncio.sleep(0.05)
        assert not task.done()
        await link.close()
        with pytest.raises(LinkLost):
            await task


# -- flow control


async def test_credit_is_returned_only_as_the_consumer_consumes() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer, ProcessSpec(argv=("yes",), window=100_000))
        for number in range(2):
            await peer.send(frames.data_frame(channel, 1, number * 50_000, bytes(50_000)))
        await peer.send(frames.frame(0, frames.PING, b"all read"))
        assert (await peer.receive()).kind == frames.PONG  # and no CREDIT before it
        assert (await anext(process)).data == bytes(50_000)
        got = await peer.receive()
        assert (got.channel, got.kind, got.payload) == (channel, frames.CREDIT, struct.pack("<BI", 1, 50_000))
        await peer.send(frames.data_frame(channel, 1, 100_000, bytes(50_000)))
        assert (await anext(process)).offset == 50_000
        assert (await anext(process)).offset == 100_000


async def test_what_was_consumed_to_the_last_byte_is_said_soon() -> None:
    """A guest keeps what was not given back; a small ring must not fill with what nobody needs any more."""
    async with linked() as (link, peer):
        process, channel = await started(link, peer, ProcessSpec(argv=("yes",)))
        await peer.send(frames.data_frame(channel, 1, 0, bytes(1023)))
        assert len((await anext(process)).data) == 1023
        await peer.send(frames.frame(0, frames.PING, b"too little for a frame of its own"))
        assert (await peer.receive()).kind == frames.PONG
        await peer.send(frames.data_frame(channel, 1, 1023, b"x"))
        await anext(process)
        assert (await peer.receive()).payload == struct.pack("<BI", 1, 1024)


async def test_a_window_is_never_larger_than_the_ring() -> None:
    async with linked() as (link, peer):
        for spec, window in (
            (ProcessSpec(("a",)), 262_144),
            (ProcessSpec(("a",), ring=4096), 4096),
            (ProcessSpec(("a",), ring=65_536, window=1_000_000), 65_536),
            (ProcessSpec(("a",), ring=1_000_000), 262_144),
            (ProcessSpec(("a",), window=100), 100),
        ):
            task = asyncio.create_task(link.start(spec))
            got = await peer.opened(START)
            assert got.fields.number(8) == window
            await peer.send(reply(got.channel, (1, 2)))
            await task


async def test_single_bytes_do_not_cost_more_than_their_credit() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer, ProcessSpec(argv=("yes",)))
        many = 50_000
        sent = bytearray()
        for offset in range(many):
            sent += frames.data_frame(channel, 1, offset, b"a") + frames.data_frame(channel, 2, offset, b"b")
        await peer.send(bytes(sent), frames.frame(0, frames.PING, b"read"))
        assert (await peer.receive()).kind == frames.PONG
        channel_ = process._channel
        assert channel_ is not None
        assert len(channel_._pieces) <= 256
        totals = {1: 0, 2: 0}
        while channel_._pieces:
            piece = await anext(process)
            assert piece.offset == totals[piece.stream]
            totals[piece.stream] += len(piece.data)
        assert totals == {1: many, 2: many}


async def test_gaps_without_end_are_a_violation() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer, ProcessSpec(argv=("yes",), drop=True))
        await peer.send(b"".join(frames.data_frame(channel, 1, 2 * at, b"x") for at in range(5000)))
        with pytest.raises(ProtocolViolation, match="pieces"):
            await process.wait()


async def test_a_gap_of_a_ring_that_dropped_is_visible() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer, ProcessSpec(argv=("yes",), drop=True))
        await peer.send(
            frames.data_frame(channel, 1, 0, b"abc"),
            frames.data_frame(channel, 1, 1000, b"xyz"),
            exited(channel, 0, 1003, 0),
        )
        assert [(p.offset, p.data) async for p in process] == [(0, b"abc"), (1000, b"xyz")]


async def test_input_waits_for_credit() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        data = os.urandom(200_000)
        task = asyncio.create_task(process.write(data))
        got = bytearray()
        while len(got) < 65_536:
            frame = await peer.receive()
            stream, offset, piece = frames.parse_data(memoryview(frame.payload))
            assert (stream, offset) == (0, len(got))
            got += piece
        await peer.send(frames.frame(0, frames.PING, b"nothing more"))
        assert (await peer.receive()).kind == frames.PONG
        assert len(got) == 65_536
        assert not task.done()
        await peer.send(frames.credit_frame(channel, 0, 2**32 - 1))
        while len(got) < len(data):
            got += frames.parse_data(memoryview((await peer.receive()).payload))[2]
        await task
        assert bytes(got) == data
        await process.close_stdin()
        await process.close_stdin()
        frame = await peer.receive()
        assert (frame.kind, frames.parse_eof(memoryview(frame.payload))) == (frames.EOF, (0, len(data)))
        with pytest.raises(WrongState):
            await process.write(b"x")


async def test_input_of_an_ended_command_is_refused() -> None:
    async with linked() as (link, peer):
        process, channel = await started(link, peer)
        task = asyncio.create_task(process.write(bytes(100_000)))
        await peer.receive()
        await peer.send(exited(channel))
        with pytest.raises(GuestRefused) as caught:
            await task
        assert caught.value.errno == 32


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
        assert first.peer == (555, 1000)
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
