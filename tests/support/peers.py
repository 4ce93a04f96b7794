"""A scripted guest: the other end of a link, played frame by frame, right or wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ringfence.guest import frames
from ringfence.guest.fields import Fields, Value, decode, encode
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import GuestProcess, ProcessSpec

INSTANCE = bytes(range(16))


class Got(NamedTuple):
    """One frame from the host."""

    channel: int
    kind: int
    payload: bytes

    @property
    def operation(self) -> int:
        assert self.kind == frames.OPEN, self
        return int.from_bytes(self.payload[:2], "little")

    @property
    def fields(self) -> Fields:
        return decode(self.payload[2:] if self.kind in (frames.OPEN, frames.EVENT) else self.payload)


class Peer:
    """The guest's end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.nonce = b""
        self._parser = frames.FrameParser()
        self._frames: list[Got] = []

    async def send(self, *data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(data))

    async def receive(self) -> Got:
        """The next frame; EOFError at the end of the stream."""
        while not self._frames:
            data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
            if not data:
                raise EOFError
            self._frames += [Got(c, k, bytes(p)) for c, k, p in self._parser.feed(data)]
        return self._frames.pop(0)

    async def ended(self) -> list[Got]:
        """Wait until the host has closed; what it sent before."""
        rest = []
        try:
            while True:
                rest.append(await self.receive())
        except (EOFError, ConnectionError):
            return rest

    async def greet(self, **changes: object) -> None:
        """Take the host's HELLO and answer it."""
        got = await self.receive()
        assert got.kind == frames.HELLO
        self.nonce = got.fields.raw(3)
        await self.send(self.hello(**changes))

    def hello(self, **changes: object) -> bytes:
        """A HELLO; ``changes`` replace fields by name."""
        values: dict[str, object] = {
            "magic": frames.MAGIC,
            "version": 1,
            "nonce": self.nonce,
            "epoch": 1,
            "instance": INSTANCE,
            "agent": "scripted",
            "limits": 1024,
            **changes,
        }
        tags = {"magic": 1, "version": 2, "nonce": 3, "epoch": 5, "instance": 6, "agent": 7, "limits": 8}
        fields: list[tuple[int, Value | None]] = [(tags[name], value) for name, value in values.items()]  # type: ignore[misc]
        return frames.frame(0, frames.HELLO, encode(fields))

    async def opened(self, operation: int) -> Got:
        """The next frame, which must open ``operation``."""
        got = await self.receive()
        assert got.kind == frames.OPEN, got
        assert got.operation == operation, got
        return got

    def shut(self) -> None:
        """End our side at once."""
        self.sock.close()


def reply(channel: int, *fields: tuple[int, Value]) -> bytes:
    return frames.frame(channel, frames.REPLY, encode(fields))


def exited(
    channel: int, code: int | None = 0, stdout: int = 0, stderr: int = 0, signal: int | None = None
) -> bytes:
    return frames.event_frame(
        channel, 1, encode([(1, code), (2, signal), (3, stdout), (4, stderr), (5, 10), (6, 20), (7, 4096)])
    )


def pair() -> tuple[socket.socket, Peer]:
    """The host's socket and the guest's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return ours, Peer(theirs)


SPEC = ProcessSpec(argv=("true",), id="p1", stdin=True)


async def started(link: GuestLink, peer: Peer, spec: ProcessSpec = SPEC) -> tuple[GuestProcess, int]:
    """A command that the peer says it runs, and its channel."""
    task = asyncio.create_task(link.start(spec))
    got = await peer.opened(1)
    await peer.send(reply(got.channel, (1, 42)))
    return await task, got.channel


@asynccontextmanager
async def linked(**changes: object) -> AsyncIterator[tuple[GuestLink, Peer]]:
    """A link that is open, and its peer."""
    ours, peer = pair()
    async with asyncio.TaskGroup() as group:
        group.create_task(peer.greet(**changes))
        opening = group.create_task(GuestLink.open(ours))
    link = opening.result()
    try:
        yield link, peer
    finally:
        await link.close()
        peer.shut()
