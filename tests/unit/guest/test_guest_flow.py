"""Flow control against a scripted guest: credit, back-pressure, and what hostile pieces may cost."""

from __future__ import annotations

import asyncio
import os
import struct

import pytest

from ringfence.guest import frames, wire
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import (
    GuestRefused,
    ProtocolViolation,
    WrongState,
)
from support.peers import exited, linked, reply, started

START, ATTACH, SIGNAL, LIST, DIAL, LISTEN = 1, 2, 3, 4, 32, 33


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
        many = 15_000
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


async def test_a_flood_of_frames_is_read_no_faster_than_it_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are free for a guest and not for us: after a burst the link rests, and others are served."""
    monkeypatch.setattr(wire, "_BURST", 100)
    monkeypatch.setattr(wire, "_BURST_SECONDS", 3600.0)
    async with linked() as (link, peer), linked() as (bystander, other):
        process, channel = await started(link, peer)
        credit = frames.credit_frame(channel, 0, 1) * 60
        for _ in range(4):
            assert link._wire._transport.is_reading()  # type: ignore[union-attr]
            await peer.send(credit, frames.frame(0, frames.PING, b"."))
            assert (await peer.receive()).kind == frames.PONG
        assert not link._wire._transport.is_reading()  # type: ignore[union-attr]
        await peer.send(credit)
        task = asyncio.create_task(bystander.ping())
        await other.send(frames.frame(0, frames.PONG, (await other.receive()).payload))
        await task
        channel_ = process._channel
        assert channel_ is not None
        assert channel_.credit == 65_536 + 240
        link._wire._transport.resume_reading()  # type: ignore[union-attr]
        while channel_.credit != 65_536 + 300:
            await channel_.changed()
