"""The link against a scripted guest: HELLO, every kind of violation, loss at every byte."""

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
from ringfence.model.errors import (
    DeadlineExceeded,
    GuestRefused,
    LinkLost,
    ProtocolViolation,
)
from support.peers import INSTANCE, SPEC, Peer, exited, linked, pair, reply, started

START, ATTACH, SIGNAL, LIST, DIAL, LISTEN = 1, 2, 3, 4, 32, 33


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


async def test_calls_may_go_out_behind_the_hello() -> None:
    ours, peer = pair()
    link = await GuestLink.open(ours, wait=False)
    starting = asyncio.create_task(link.start(SPEC))
    greeting, opened = await peer.receive(), await peer.opened(START)  # both before any answer
    peer.nonce = greeting.fields.raw(3)
    await peer.send(peer.hello(epoch=4), reply(opened.channel, (1, 42)))
    assert (await starting).pid == 42
    await link.ready()
    assert link.epoch == 4
    await link.close()
    peer.shut()


@pytest.mark.parametrize("answer", ["nothing", "an answer too early", "a wrong HELLO", "an end"])
async def test_what_went_out_behind_the_hello_fails_with_it(answer: str) -> None:
    ours, peer = pair()
    link = await GuestLink.open(ours, wait=False, timeout=60)
    starting = asyncio.create_task(link.start(SPEC))
    greeting, opened = await peer.receive(), await peer.opened(START)
    peer.nonce = greeting.fields.raw(3)
    if answer == "nothing":  # its time is over
        waits = link._wire._patience
        assert waits is not None and not waits.cancelled()
        waits._run()
    elif answer == "an answer too early":
        await peer.send(reply(opened.channel, (1, 42)))
    elif answer == "a wrong HELLO":
        await peer.send(peer.hello(version=0), reply(opened.channel, (1, 42)))
    elif answer == "an end":
        peer.shut()
    expected = LinkLost if answer in ("nothing", "an end") else ProtocolViolation
    for call in (starting, link.ready(), link.start(SPEC)):
        with pytest.raises(expected):
            await call
    peer.shut()


async def test_a_link_that_is_given_up_ends_what_waits() -> None:
    async with linked() as (link, peer):
        process, _ = await started(link, peer)
        waiting = asyncio.create_task(process.wait())
        await asyncio.sleep(0)
        link.abort()
        link.abort()
        with pytest.raises(LinkLost):
            await waiting
        await peer.ended()


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
        assert count() <= before


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
