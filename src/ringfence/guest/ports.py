"""Connections into a sandbox (dial) and out of it (listen)."""

from __future__ import annotations

import errno
import ipaddress
import struct
from collections import deque
from typing import NamedTuple

from ringfence.guest.channels import Channel
from ringfence.guest.fields import Fields
from ringfence.model.errors import GuestRefused, ProtocolViolation, WrongState


class Peer(NamedTuple):
    """Who connected inside, as the guest reports it. ``uid`` is ``None`` when it does not know.

    ``destination``: the IPv4 address and port that the connection was meant for, where a rule of the
    sandbox's network namespace caught it on the way; ``None`` where it was meant for the listener itself.
    ``pid``, ``program``: of one process that held the connection, as seen inside, with its first argument (or
    what the kernel calls it, if it has none); 0 and ``""`` where it was not found.
    """

    port: int
    uid: int | None
    destination: tuple[str, int] | None = None
    pid: int = 0
    program: str = ""

    def told(self) -> dict[str, object]:
        """What a log says under ``reported``."""
        process = {"pid": self.pid, "program": self.program} if self.pid else {}
        return {"port": self.port, "uid": self.uid, **process}


_MOST_PROGRAM = 256  # characters that are kept of a program's name
_MOST_PID = 2**22  # of the kernel

MOST_DATAGRAM = 4096  # bytes
_RECORD = struct.Struct("<II")  # size, number


class Datagram(NamedTuple):
    """What somebody inside sent to a UDP port. ``number`` names who asked, for the answer."""

    number: int
    data: bytes


class GuestDatagrams:
    """A UDP port of loopback inside. Datagrams may be lost on both ways, as UDP has it."""

    def __init__(self, channel: Channel, port: int) -> None:
        self.port = port
        self._channel = channel
        self._held = bytearray()

    async def receive(self) -> Datagram:
        """The next one.

        Raises:
            GuestRefused: the guest gave the port up.
            ProtocolViolation: it sent what is no datagram; or the link ended by one.
            LinkLost: the link ended.
        """
        while True:
            if len(self._held) >= _RECORD.size:
                size, number = _RECORD.unpack_from(self._held)
                if size > MOST_DATAGRAM:
                    await self.close()
                    raise ProtocolViolation(f"a datagram of {size} bytes")
                if len(self._held) >= _RECORD.size + size:
                    data = bytes(self._held[_RECORD.size : _RECORD.size + size])
                    del self._held[: _RECORD.size + size]
                    return Datagram(number, data)
            piece = await self._channel.read(0)
            if not piece:
                raise GuestRefused(errno.ECONNRESET, self._channel.what)
            self._held += piece

    async def answer(self, number: int, data: bytes) -> None:
        """Send an answer to whoever sent datagram ``number``; one who asked long ago may be forgotten.

        Raises:
            ValueError: longer than ``MOST_DATAGRAM``.
            GuestRefused, LinkLost, ProtocolViolation: the port or the link has ended.
        """
        if len(data) > MOST_DATAGRAM:
            raise ValueError(f"a datagram of {len(data)} bytes")
        await self._channel.send(_RECORD.pack(len(data), number) + data)

    async def close(self) -> None:
        """Give the port up. Idempotent."""
        self._channel.close()

    async def __aenter__(self) -> GuestDatagrams:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class GuestStream:
    """A connection to or from a port inside. One reader and one writer at a time."""

    def __init__(self, channel: Channel, peer: Peer | None = None) -> None:
        self.peer = peer
        self._channel = channel
        self._rest = b""

    async def read(self, limit: int = 65536) -> bytes:
        """1 to ``limit`` bytes; ``b""`` when the other side has ended its half.

        Raises:
            GuestRefused: ECONNRESET or what the guest said.
            LinkLost, ProtocolViolation: the link ended.
        """
        if not self._rest:
            self._rest = await self._channel.read(0)
        data, self._rest = self._rest[:limit], self._rest[limit:]
        return data

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it, as fast as the other side takes it.

        Raises:
            GuestRefused: EPIPE or what the guest said.
            WrongState: after :meth:`eof`.
            LinkLost, ProtocolViolation: the link ended.
        """
        await self._channel.send(data)

    async def eof(self) -> None:
        """End our half; reading goes on."""
        self._channel.send_eof()

    async def close(self) -> None:
        """End the connection; what was written still arrives. Idempotent."""
        self._channel.send_eof()
        self.abort()

    def abort(self) -> None:
        """End it at once: the other side sees a reset, unless our half has ended already. Idempotent."""
        self._rest = b""
        self._channel.close()

    async def __aenter__(self) -> GuestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _destination(fields: Fields) -> tuple[str, int] | None:
    if 4 not in fields:
        return None
    try:
        address = ipaddress.IPv4Address(fields.text(4))
    except ValueError:
        raise ProtocolViolation("an address that is none") from None
    return str(address), fields.number(5, most=65535)


class GuestListener:
    """A port that the guest listens on; iterate or :meth:`accept` for its connections."""

    def __init__(self, backlog: int) -> None:
        self.port = 0
        self._backlog = backlog
        self._channel: Channel | None = None
        self._waiting: deque[GuestStream] = deque()

    def bind(self, channel: Channel, reply: Fields) -> None:
        """The guest listens."""
        self._channel = channel
        self.port = reply.number(1, most=65535)
        channel.wire.accepting[channel.number] = self._opened

    def _opened(self, channel: Channel, fields: Fields) -> None:
        if self._channel is None or self._channel.sent_close or len(self._waiting) >= self._backlog:
            channel.refuse(errno.ECONNREFUSED, "nobody accepts")
            return
        try:
            uid = fields.number(3, most=2**32 - 1) if 3 in fields else None
            pid = fields.number(6, 0, most=_MOST_PID)
            program = fields.text(8, "", limit=_MOST_PROGRAM) or fields.text(7, "", limit=_MOST_PROGRAM)
            peer = Peer(fields.number(2, 0, most=65535), uid, _destination(fields), pid, program)
        except ProtocolViolation:
            channel.refuse(errno.EINVAL, "peer")
            return
        self._waiting.append(GuestStream(channel, peer))
        self._channel.wake()

    async def accept(self) -> GuestStream:
        """The next connection.

        Raises:
            WrongState: the listener was closed.
            GuestRefused: the guest gave it up.
            LinkLost, ProtocolViolation: the link ended.
        """
        channel = self._channel
        if channel is None:
            raise WrongState("the listener is not open")
        while True:
            while self._waiting:
                stream = self._waiting.popleft()
                if stream._channel.accept():
                    return stream
            channel.check()
            if channel.got_close:
                raise GuestRefused(errno.ECONNRESET, channel.what)
            if channel.sent_close:
                raise WrongState("the listener was closed")
            await channel.changed()

    def __aiter__(self) -> GuestListener:
        return self

    async def __anext__(self) -> GuestStream:
        try:
            return await self.accept()
        except WrongState:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """Stop listening; connections that nobody accepted are reset. Idempotent."""
        while self._waiting:
            self._waiting.popleft()._channel.refuse(errno.ECONNREFUSED, "nobody accepts")
        if self._channel is not None:
            self._channel.wire.accepting.pop(self._channel.number, None)
            self._channel.close()

    async def __aenter__(self) -> GuestListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
