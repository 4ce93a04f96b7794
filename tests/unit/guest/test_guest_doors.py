"""The inner side of the door against a scripted guest: destinations, datagrams, what programs are told."""

from __future__ import annotations

import asyncio
import struct

import pytest

from ringfence.guest import doors, frames
from ringfence.guest.fields import Value, encode
from ringfence.guest.link import GuestLink
from ringfence.guest.ports import MOST_DATAGRAM, GuestDatagrams
from ringfence.model.errors import GuestRefused, ProtocolViolation
from support.peers import Peer, linked, reply

LISTEN, DATAGRAMS = 33, 35


def record(number: int, data: bytes) -> bytes:
    return struct.pack("<II", len(data), number) + data


@pytest.mark.parametrize(
    ("told", "destination"),
    [
        ([(4, "198.18.0.7"), (5, 443)], ("198.18.0.7", 443)),
        ([], None),
    ],
)
async def test_destinations(told: list[tuple[int, Value]], destination: tuple[str, int] | None) -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.listen(doors.CAUGHT_PORT))
        got = await peer.opened(LISTEN)
        await peer.send(reply(got.channel, (1, doors.CAUGHT_PORT)))
        listener = await task
        fields = encode([(1, got.channel), (2, 555), (3, 1000), *told])
        await peer.send(frames.open_frame(2, 34, fields))
        stream = await listener.accept()
        assert stream.peer is not None and stream.peer.destination == destination
        await stream.close()
        await listener.close()


@pytest.mark.parametrize(
    "told",
    [
        [(4, "198.18.0.7")],  # no port
        [(4, "198.18.0.7"), (5, 70000)],
        [(4, "evil.attacker.test"), (5, 443)],
        [(4, "::1"), (5, 443)],
        [(4, b"\xff\xfe"), (5, 443)],
        [(3, 2**40)],
        [(6, 2**40), (8, "curl")],  # no such process id
    ],
)
async def test_lies_about_destinations_are_refused(told: list[tuple[int, Value]]) -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.listen(0))
        got = await peer.opened(LISTEN)
        await peer.send(reply(got.channel, (1, 5555)))
        listener = await task
        await peer.send(frames.open_frame(2, 34, encode([(1, got.channel), (2, 555), *told])))
        refused = await peer.receive()
        assert (refused.channel, refused.kind) == (2, frames.ERROR)
        await listener.close()


async def opened(link: GuestLink, peer: Peer) -> tuple[GuestDatagrams, int]:
    task = asyncio.create_task(link.datagrams(53))
    got = await peer.opened(DATAGRAMS)
    await peer.send(reply(got.channel, (1, 53)))
    return await task, got.channel


async def test_datagrams_come_whole_however_they_are_cut() -> None:
    async with linked() as (link, peer):
        port, channel = await opened(link, peer)
        assert port.port == 53
        data = record(1, b"one") + record(2, b"") + record(3, b"x" * MOST_DATAGRAM)
        offset = 0
        for size in (1, 7, 4, 9, 4000, 10000):
            piece = data[offset : offset + size]
            if piece:
                await peer.send(frames.data_frame(channel, 0, offset, piece))
            offset += size
        assert [await port.receive() for _ in range(3)] == [
            (1, b"one"),
            (2, b""),
            (3, b"x" * MOST_DATAGRAM),
        ]
        await port.answer(2, b"two")
        while (frame := await peer.receive()).kind == frames.CREDIT:
            pass
        assert frame.payload[9:] == record(2, b"two")
        with pytest.raises(ValueError, match="datagram"):
            await port.answer(2, b"x" * (MOST_DATAGRAM + 1))
        await port.close()


async def test_a_datagram_that_can_not_be_ends_the_port() -> None:
    async with linked() as (link, peer):
        port, channel = await opened(link, peer)
        await peer.send(frames.data_frame(channel, 0, 0, struct.pack("<II", MOST_DATAGRAM + 1, 1)))
        with pytest.raises(ProtocolViolation, match="datagram"):
            await port.receive()


async def test_a_port_that_the_guest_gives_up() -> None:
    async with linked() as (link, peer):
        port, channel = await opened(link, peer)
        await peer.send(frames.close_frame(channel))
        with pytest.raises(GuestRefused):
            await port.receive()


def test_what_programs_are_told() -> None:
    told = doors.environment()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        assert told[name] == told[name.upper()] == f"http://127.0.0.1:{doors.HTTP_PORT}"
    assert "127.0.0.1" in told["no_proxy"].split(",")
    assert {told[name] for name in ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")} == {
        doors.BUNDLE
    }
    assert f"-Dhttps.proxyPort={doors.HTTP_PORT}" in told["JAVA_TOOL_OPTIONS"].split()
    # Out of the range that the kernel gives out by itself: nothing inside gets them by chance.
    assert all(
        port > 60999 for port in (doors.HTTP_PORT, doors.SOCKS_PORT, doors.CAUGHT_PORT, doors.DNS_PORT)
    )


@pytest.mark.parametrize(
    ("told", "process"),
    [
        ([], (0, "")),
        ([(6, 7), (7, "python3"), (8, "/usr/bin/python3")], (7, "/usr/bin/python3")),
        ([(6, 7), (7, "kworker"), (8, "")], (7, "kworker")),
        ([(6, 7), (7, "x"), (8, b"a\nb\x1b[31m\xff")], (7, "a\ufffdb\ufffd[31m\ufffd")),
        ([(6, 7), (7, "x"), (8, "y" * 4096)], (7, "y" * 255 + "…")),
    ],
)
async def test_who_asked_is_text_that_harms_no_log(
    told: list[tuple[int, Value]], process: tuple[int, str]
) -> None:
    async with linked() as (link, peer):
        task = asyncio.create_task(link.listen(0))
        got = await peer.opened(LISTEN)
        await peer.send(reply(got.channel, (1, 5555)))
        listener = await task
        await peer.send(frames.open_frame(2, 34, encode([(1, got.channel), (2, 555), (3, 1000), *told])))
        stream = await listener.accept()
        assert stream.peer is not None
        assert (stream.peer.pid, stream.peer.program) == process
        said = stream.peer.told()
        assert said.get("program", "") == process[1]
        assert ("pid" in said) == bool(process[0])
        await stream.close()
        await listener.close()
