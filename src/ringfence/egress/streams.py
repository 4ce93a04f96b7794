"""Byte streams of every kind in one shape: a connection from inside, a socket, TLS over either.

A stream has one reader and one writer at a time: ``read``, ``write``, ``eof``, ``close``, as ``GuestStream``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from typing import Protocol, cast

from ringfence.model.errors import GuestError, WrongState

_HIGH = 256 * 1024  # bytes that wait before a socket is read no more
PIECE = 65536


class Stream(Protocol):
    """What the proxy reads from and writes to."""

    async def read(self, limit: int = PIECE) -> bytes:
        """1 to ``limit`` bytes; ``b""`` at the end."""
        ...

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it, as fast as the other side takes it."""

    async def eof(self) -> None:
        """End our half."""

    async def close(self) -> None:
        """End the connection. Idempotent."""


# What a stream raises when the other side, or the link to it, is gone.
BROKEN = (OSError, GuestError, WrongState, ssl.SSLError, EOFError)


class SocketStream(asyncio.Protocol):
    """A stream over a socket of the event loop."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._ended = False
        self._error: BaseException | None = None
        self._paused = self._blocked = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] | None = None

    @classmethod
    async def over(cls, sock: socket.socket) -> SocketStream:
        """A stream over a connected socket, which it owns."""
        _, stream = await asyncio.get_running_loop().create_connection(cls, sock=sock)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has taken the socket."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH)
        self._gone = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._pieces.append(data)
        self._held += len(data)
        if self._held > _HIGH and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake("_reader")

    def eof_received(self) -> bool:
        """The other side ended its half; ours goes on."""
        self._ended = True
        self._wake("_reader")
        return True

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        self._blocked = True

    def resume_writing(self) -> None:
        """It does again."""
        self._blocked = False
        self._wake("_writer")

    def connection_lost(self, exc: Exception | None) -> None:
        """Over."""
        self._ended, self._error, self._blocked = True, exc, False
        self._wake("_reader")
        self._wake("_writer")
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def _wake(self, who: str) -> None:
        waiter = getattr(self, who)
        if waiter is not None:
            setattr(self, who, None)
            if not waiter.done():
                waiter.set_result(None)

    async def read(self, limit: int = PIECE) -> bytes:
        """1 to ``limit`` bytes; ``b""`` at the end.

        Raises:
            OSError: the connection broke.
        """
        while not self._pieces:
            if self._error is not None:
                raise ConnectionResetError(str(self._error))
            if self._ended:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        data = self._pieces.popleft()
        if len(data) > limit:
            self._pieces.appendleft(data[limit:])
            data = data[:limit]
        self._held -= len(data)
        if self._paused and self._held <= _HIGH // 2 and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it.

        Raises:
            OSError: the connection broke.
        """
        if self._transport is None or self._transport.is_closing():
            raise BrokenPipeError("the connection is closed")
        self._transport.write(data)
        while self._blocked:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self._error is not None:
            raise BrokenPipeError(str(self._error))

    async def eof(self) -> None:
        """End our half."""
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):
                self._transport.write_eof()

    async def close(self) -> None:
        """End the connection; what was written still goes out, for a while."""
        if self._transport is None:
            return
        self._transport.close()
        if self._gone is not None:
            try:
                async with asyncio.timeout(1.0):
                    await asyncio.shield(self._gone)
            except TimeoutError:
                self._transport.abort()
                await self._gone

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def stirred(self) -> bool:
        """Whether anything came that nobody has read, be it the end."""
        return bool(self._pieces) or self._ended

    @property
    def peer(self) -> tuple[str, int]:
        """The address at the other end."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return (str(name[0]), int(name[1])) if name else ("", 0)


class Rewound:
    """A stream of which somebody has read the beginning already."""

    def __init__(self, stream: Stream, head: bytes) -> None:
        self._stream = stream
        self._head = head

    async def read(self, limit: int = PIECE) -> bytes:
        """What was read before, then the rest."""
        if self._head:
            data, self._head = self._head[:limit], self._head[limit:]
            return data
        return await self._stream.read(limit)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """As the stream."""
        await self._stream.write(data)

    async def eof(self) -> None:
        """As the stream."""
        await self._stream.eof()

    async def close(self) -> None:
        """As the stream."""
        await self._stream.close()


class TlsStream:
    """TLS over a stream, either side."""

    def __init__(self, stream: Stream, context: ssl.SSLContext, server: bool, name: str | None) -> None:
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server, server_hostname=name)
        self._lock = asyncio.Lock()

    @classmethod
    async def client(cls, stream: Stream, context: ssl.SSLContext, name: str) -> TlsStream:
        """Shake hands as a client with the server ``name``.

        Raises:
            ssl.SSLError: the handshake failed (``SSLCertVerificationError``: the certificate is not his).
            OSError: the connection broke.
        """
        made = cls(stream, context, False, name)
        await made._handshake()
        return made

    @classmethod
    async def server(cls, stream: Stream, context: ssl.SSLContext) -> TlsStream:
        """Shake hands as a server.

        Raises:
            ssl.SSLError: the handshake failed; e.g. the client did not accept the certificate.
            OSError, GuestError: the connection broke.
        """
        made = cls(stream, context, True, None)
        await made._handshake()
        return made

    @property
    def protocol(self) -> str | None:
        """What ALPN agreed on."""
        return self._tls.selected_alpn_protocol()

    async def _flush(self) -> None:
        async with self._lock:
            data = self._outgoing.read()
            if data:
                await self._stream.write(data)

    async def _handshake(self) -> None:
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._more()
        finally:
            with contextlib.suppress(*BROKEN):  # an alert says to the other side what was wrong
                await self._flush()

    async def read(self, limit: int = PIECE) -> bytes:
        """1 to ``limit`` bytes; ``b""`` at the end.

        Raises:
            ssl.SSLError, OSError: the connection broke.
        """
        while True:
            if not self._incoming.pending and not self._incoming.eof and not self._tls.pending():
                await self._more()  # a try would only say that there is nothing
            try:
                data = self._tls.read(limit)
            except ssl.SSLWantReadError:
                await self._more()
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""  # many leave without a goodbye; who needs the length has it from HTTP
            if self._outgoing.pending:
                await self._flush()
            return data

    async def _more(self) -> None:
        if self._outgoing.pending:
            await self._flush()
        data = await self._stream.read()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view[:PIECE]) :]
            await self._flush()

    async def eof(self) -> None:
        """Say that nothing more comes. TLS has no half that goes on in every implementation."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        with contextlib.suppress(*BROKEN):
            await self._flush()

    async def close(self) -> None:
        """Say goodbye and end the connection."""
        await self.eof()
        await self._stream.close()
