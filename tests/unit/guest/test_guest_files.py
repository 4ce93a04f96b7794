"""Files over a link, against a scripted guest: every answer is hostile until checked."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator

import pytest

from ringfence.guest import frames
from ringfence.guest.fields import Value, encode
from ringfence.guest.files import Watch, WatchEvent
from ringfence.guest.link import GuestLink
from ringfence.model.errors import GuestRefused, InvalidRequest, ProtocolViolation
from support.peers import Peer, linked, reply

READ, WRITE, LIST, STAT, MOVE, REMOVE, MKDIR, WATCH, TAR_IN, TAR_OUT = range(16, 26)
STAT_FIELDS: list[tuple[int, Value | None]] = [
    (2, 1),
    (3, 5),
    (4, 0o100644),
    (5, -7),
    (6, 1000),
    (7, 1000),
    (9, 3),
]


def entry(path: bytes | str, *more: tuple[int, Value]) -> bytes:
    body = encode([(1, path), *STAT_FIELDS, *more])
    return struct.pack("<I", len(body)) + body


async def body(peer: Peer, operation: int, data: bytes) -> int:
    """Answer a reading operation with ``data``."""
    got = await peer.opened(operation)
    sent = [frames.data_frame(got.channel, 1, at, data[at : at + 9]) for at in range(0, len(data), 9)]
    await peer.send(
        reply(got.channel),
        *sent,
        frames.eof_frame(got.channel, 1, len(data)),
        frames.close_frame(got.channel),
    )
    return got.channel


async def test_a_file_is_read() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.read_bytes("/etc/x"))
        await body(peer, READ, b"some contents, longer than a piece")
        assert await task == b"some contents, longer than a piece"


async def test_what_has_come_is_handed_on_together() -> None:
    async with linked() as (link, peer):
        reading = link.files.read("/x")
        opening = asyncio.create_task(reading.open())
        got = await peer.opened(READ)
        window = got.fields.number(8)
        await peer.send(reply(got.channel))
        await opening
        sizes = [60_000] * (window // 60_000) + [window % 60_000]
        at = [sum(sizes[:number]) for number in range(len(sizes))]
        data = os.urandom(window)
        sent = [
            frames.data_frame(got.channel, 1, start, data[start : start + size])
            for start, size in zip(at, sizes, strict=True)
        ]
        await peer.send(*sent, frames.frame(0, frames.PING, b"all read"))
        while (await peer.receive()).kind != frames.PONG:
            pass
        first = await anext(reading)
        assert len(first) == 240_000  # no more at once, the rest is still there
        whole = first
        while len(whole) < window:
            whole += await anext(reading)
        assert whole == data
        await reading.aclose()


async def test_only_what_can_not_change_is_sent_without_a_copy() -> None:
    """An event loop may keep what it was given until the socket takes it."""
    async with linked() as (link, peer):
        data = bytearray(b"first" * 10_000)
        link._wire._transport, real = _Keeping(), link._wire._transport  # type: ignore[assignment]
        kept: list[bytes | memoryview] = link._wire._transport.kept  # type: ignore[union-attr]
        task = asyncio.create_task(link.files.write("/x", data))
        while len(kept) < 3:  # OPEN, DATA, EOF
            await asyncio.sleep(0)
        data[:] = b"later" * 10_000
        for piece in kept:
            real.write(piece)  # type: ignore[union-attr]
        link._wire._transport = real
        got = await peer.opened(WRITE)
        assert (await peer.receive()).payload[9:] == b"first" * 10_000
        assert (await peer.receive()).kind == frames.EOF
        await peer.send(reply(got.channel, (1, len(data))))
        assert await task == len(data)
        assert (await peer.receive()).kind == frames.CLOSE
        await peer.send(frames.close_frame(got.channel))


class _Keeping:
    """A transport that keeps what it is given, as it is."""

    def __init__(self) -> None:
        self.kept: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview) -> None:
        self.kept.append(data)

    def writelines(self, parts: tuple[bytes | memoryview, ...]) -> None:
        self.kept += parts

    def get_write_buffer_size(self) -> int:
        return 0


async def test_a_file_that_is_too_big_is_not_swallowed() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.read_bytes("/x", limit=3))
        await body(peer, READ, b"1234")
        with pytest.raises(GuestRefused, match="more than 3"):
            await task
        task = asyncio.create_task(link.files.read_bytes("/x", limit=4))
        await peer.receive()
        await body(peer, READ, b"1234")
        assert await task == b"1234"


async def test_a_file_that_ends_without_eof_is_an_error() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.read_bytes("/x"))
        got = await peer.opened(READ)
        await peer.send(
            reply(got.channel), frames.data_frame(got.channel, 1, 0, b"half"), frames.close_frame(got.channel)
        )
        with pytest.raises(GuestRefused, match="ended early"):
            await task


async def test_an_error_half_way_is_raised() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.read_bytes("/x"))
        got = await peer.opened(READ)
        await peer.send(
            reply(got.channel),
            frames.data_frame(got.channel, 1, 0, b"x"),
            frames.error_frame(got.channel, 5, "io"),
        )
        with pytest.raises(GuestRefused) as caught:
            await task
        assert caught.value.errno == 5


async def test_leaving_a_read_early_closes_its_channel() -> None:
    async with linked() as (link, peer):

        async def first() -> bytes:
            async for data in link.files.read("/x"):
                return data
            return b""

        task = asyncio.create_task(first())
        got = await peer.opened(READ)
        await peer.send(reply(got.channel), frames.data_frame(got.channel, 1, 0, b"begin"))
        assert await task == b"begin"
        assert await peer.receive() == (got.channel, frames.CLOSE, b"")


async def test_a_file_is_written_in_pieces() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"one"
        yield b""
        yield b"two"

    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.write("/x", source(), 0o600, parents=True, exclusive=True))
        got = await peer.opened(WRITE)
        assert (got.fields.raw(1), got.fields.number(2), got.fields.number(3)) == (b"/x", 0o600, 9)
        pieces = [(await peer.receive()).payload[9:] for _ in range(2)]
        assert pieces == [b"one", b"two"]
        assert (await peer.receive()).kind == frames.EOF
        await peer.send(reply(got.channel, (1, 6)))
        assert await task == 6
        assert (await peer.receive()).kind == frames.CLOSE
        await peer.send(frames.close_frame(got.channel))


async def test_a_source_that_fails_leaves_no_channel() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"one"
        raise RuntimeError("the disk of the host")

    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.tar_in("/x", source()))
        got = await peer.opened(TAR_IN)
        with pytest.raises(RuntimeError):
            await task
        assert (await peer.receive()).kind == frames.DATA
        assert await peer.receive() == (got.channel, frames.CLOSE, b"")


async def test_a_write_stops_when_the_guest_refuses() -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.write("/x", bytes(10_000_000)))
        got = await peer.opened(WRITE)
        await peer.send(frames.error_frame(got.channel, 28, "write"))
        with pytest.raises(GuestRefused) as caught:
            await task
        assert caught.value.errno == 28


async def test_a_folder_is_listed() -> None:
    names = [b"a", b"dir/b", b"new\nline", b"\xff\xfe", b"x" * 255, b"dir..with.dots/..."]
    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.list("/x", depth=3))
        await body(
            peer, LIST, b"".join(entry(name) for name in names) + entry("link", (8, b"../../etc/passwd"))
        )
        found = await task
        assert [os.fsencode(info.path) for info in found] == [*names, b"link"]
        assert found[0][1:] == ("file", 5, 0o644, -7, 1000, 1000, None, 3)
        assert found[-1].target == "../../etc/passwd"


@pytest.mark.parametrize(
    "listing",
    [
        entry("../x"),
        entry("a/../../x"),
        entry("/etc/passwd"),
        entry(b"a\0b"),
        entry(b"a" * 5000),
        entry("a", (8, b"t" * 5000)),
        entry("a") + b"\1\0",
        entry("a")[:-1],
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 5) + b"\1\xff\0\0\0",
        entry("a") * 4,
        struct.pack("<I", len(encode([(1, "a"), (2, 9)]))) + encode([(1, "a"), (2, 9)]),
    ],
)
async def test_a_hostile_listing_is_a_violation(listing: bytes) -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.files.list("/x", limit=3))
        await body(peer, LIST, entry("control") * 3)
        assert len(await task) == 3
        await peer.receive()
        task = asyncio.create_task(link.files.list("/x", limit=3))
        await body(peer, LIST, listing)
        with pytest.raises(ProtocolViolation):
            await task


async def test_single_requests_say_what_they_mean() -> None:
    async with linked() as (link, peer):
        files = link.files
        calls = [
            (files.move("/a", "/b", exclusive=True), MOVE, {2: b"/b"}, {3: 1}),
            (files.remove("/a", recursive=True, missing_ok=True), REMOVE, {1: b"/a"}, {2: 3}),
            (files.mkdir("/a", 0o700, parents=True), MKDIR, {1: b"/a"}, {2: 0o700, 3: 1}),
        ]
        for call, operation, texts, numbers in calls:
            task = asyncio.ensure_future(call)
            got = await peer.opened(operation)
            assert all(got.fields.raw(tag) == value for tag, value in texts.items())
            assert all(got.fields.number(tag) == value for tag, value in numbers.items())
            await peer.send(reply(got.channel))
            await task
        task = asyncio.ensure_future(files.stat("/a", follow=False))
        got = await peer.opened(STAT)
        assert got.fields.number(2) == 0
        await peer.send(frames.frame(got.channel, frames.REPLY, encode(STAT_FIELDS)))
        assert (await task).type == "file"


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
async def test_an_impossible_path_is_refused(path: str) -> None:
    async with linked() as (link, _):
        with pytest.raises(InvalidRequest):
            await link.files.stat(path)


async def watched(link: GuestLink, peer: Peer) -> tuple[Watch, int]:
    task = asyncio.create_task(link.files.watch("/x", recursive=True))
    got = await peer.opened(WATCH)
    await peer.send(reply(got.channel))
    return await task, got.channel


def change(channel: int, path: str, kind: int = 1) -> bytes:
    return frames.event_frame(channel, 2, encode([(1, path), (2, kind), (3, 0)]))


async def test_changes_are_seen() -> None:
    async with linked() as (link, peer):
        watch, channel = await watched(link, peer)
        await peer.send(change(channel, "a"), change(channel, "b/c", 3), frames.event_frame(channel, 3, b""))
        assert await anext(watch) == WatchEvent("a", "created", False)
        assert await anext(watch) == WatchEvent("b/c", "deleted", False)
        assert (await anext(watch)).kind == "overflow"
        await watch.close()
        assert [event async for event in watch] == []


async def test_a_flood_of_changes_becomes_one_overflow() -> None:
    async with linked() as (link, peer):
        watch, channel = await watched(link, peer)
        await peer.send(*(change(channel, f"f{n}") for n in range(5000)), frames.frame(0, frames.PING, b"."))
        await peer.receive()
        assert len(watch._events) == 1024
        for _ in range(1024):
            assert (await anext(watch)).kind == "created"
        assert (await anext(watch)).kind == "overflow"


@pytest.mark.parametrize(("path", "kind"), [("../x", 1), ("/x", 1), ("x", 9)])
async def test_a_hostile_change_is_a_violation(path: str, kind: int) -> None:
    async with linked() as (link, peer):
        watch, channel = await watched(link, peer)
        await peer.send(change(channel, path, kind))
        with pytest.raises(ProtocolViolation):
            await anext(watch)
