"""The connection: frames in any pieces, descriptors in order, peers that do not keep to the rules."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from ringfence.model.errors import ProtocolViolation
from ringfence.placement import wire
from ringfence.placement.wire import Connection

Frame = tuple[int, int, bytes, int | None]


class End:
    """One end, with all that came."""

    def __init__(self, sock: socket.socket, **options: object) -> None:
        sock.setblocking(False)
        self.frames: list[Frame] = []
        self.ended: list[Exception | None] = []
        self.came = asyncio.Event()
        self.connection = Connection(sock, self._frame, self._end, **{"descriptors": True, **options})  # type: ignore[arg-type]

    def _frame(self, *frame: object) -> None:
        self.frames.append(frame)  # type: ignore[arg-type]
        self.came.set()

    def _end(self, error: Exception | None) -> None:
        self.ended.append(error)
        self.came.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.frames) < count and not self.ended:
                self.came.clear()
                await self.came.wait()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


async def test_frames_arrive_whole_however_they_are_cut(pair: tuple[socket.socket, socket.socket]) -> None:
    end = End(pair[0])
    data = wire.HEADER.pack(5, wire.CALL, 7) + b"hello" + wire.HEADER.pack(0, wire.END, 8)
    for at in range(len(data)):
        pair[1].sendall(data[at : at + 1])
        await asyncio.sleep(0)
    await end.until(2)
    assert end.frames == [(wire.CALL, 7, b"hello", None), (wire.END, 8, b"", None)]
    end.connection.close()
    assert end.ended == [None]


async def test_large_frames_and_many(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = End(pair[0]), End(pair[1])
    payloads = [os.urandom(1 << 20), b"", b"x", *(bytes([n]) * n for n in range(200))]
    for number, payload in enumerate(payloads):
        left.connection.send(wire.DATA, number, payload)
    await right.until(len(payloads))
    assert [frame[2] for frame in right.frames] == payloads
    await left.connection.drain()
    left.connection.close()
    await right.until(len(payloads) + 1)
    assert right.ended == [None]


async def test_descriptors_come_with_their_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = End(pair[0]), End(pair[1])
    pipes = [os.pipe() for _ in range(20)]
    for number, (read, write) in enumerate(pipes):
        os.write(write, b"%d" % number)
        os.close(write)
        left.connection.send(wire.RESULT, number, b"x" * 100_000, read)  # it is the connection's now
        left.connection.send(wire.RESULT, 1000 + number)
    await right.until(40)
    for _, number, _, descriptor in right.frames:
        if number >= 1000:
            assert descriptor is None
            continue
        assert descriptor is not None
        assert os.read(descriptor, 10) == b"%d" % number
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    left.connection.close()
    right.connection.close()


async def test_descriptors_that_nobody_wants_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    """A node receives none, whoever sends them: the control of a client that does is above."""
    end = End(pair[0], descriptors=False)
    read, write = os.pipe()
    frame = wire.HEADER.pack(0, wire.CALL, 1)
    socket.send_fds(pair[1], [frame], [write])
    os.close(write)
    await end.until(1)
    assert end.frames == [(wire.CALL, 1, b"", None)]
    assert os.read(read, 1) == b""  # no writer is left anywhere
    os.close(read)
    end.connection.close()


async def test_a_closed_connection_closes_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    end = End(pair[0])
    end.connection.close()
    read, write = os.pipe()
    end.connection.send(wire.RESULT, 1, b"", write)
    assert os.read(read, 1) == b""
    os.close(read)
    end.connection.close()
    assert end.ended == [None]  # told once


@pytest.mark.parametrize(
    "data",
    [
        wire.HEADER.pack(1001, wire.DATA, 1),
        wire.HEADER.pack(0xFFFFFFFF, wire.DATA, 1),
        wire.HEADER.pack(0, wire.RESULT | wire.WITH_DESCRIPTOR, 1),
    ],
)
async def test_peers_that_break_the_rules_are_hung_up_on(
    pair: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    end = End(pair[0], largest=1000)
    pair[1].sendall(data)
    await end.until(1)
    assert end.frames == []
    assert isinstance(end.ended[0], ProtocolViolation)


async def test_a_peer_that_reads_nothing_is_given_up(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_WAITING", 1 << 20)
    end = End(pair[0])
    for number in range(64):
        end.connection.send(wire.DATA, number, bytes(100_000))
    assert isinstance(end.ended[0], ProtocolViolation)
    await end.connection.drain()  # and nobody waits for it


async def test_whoever_waits_for_room_is_let_go(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = End(pair[0]), End(pair[1])
    left.connection.send(wire.DATA, 1, bytes(4 << 20))
    waiting = asyncio.create_task(left.connection.drain())
    await right.until(1)
    async with asyncio.timeout(60):
        await waiting
    left.connection.close()
    right.connection.close()
