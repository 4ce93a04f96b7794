"""The connection under a link: HELLO, the table of channels, and the rules for every frame.

Bytes are read with ``recv_into`` only, so descriptors that a hostile guest attaches are closed by the
kernel and never received. Whatever breaks a rule closes the link, and every waiter hears of it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from ringfence.guest import frames
from ringfence.guest.channels import Channel
from ringfence.guest.fields import Fields, Value, decode, encode
from ringfence.model.errors import (
    DeadlineExceeded,
    GuestError,
    GuestRefused,
    InvalidRequest,
    LinkLost,
    ProtocolViolation,
)

VERSION = 1
MOST_CHANNELS = 1024
REQUEST_TIMEOUT = 30.0  # seconds that a guest has to answer a request that needs no waiting
ANSWER_TIMEOUT = 20.0  # to answer HELLO or a ping: a busy machine may stop all that is on it for a while
# Answers (credit, pong, close) are not under flow control. A guest that makes us answer and does not read
# the answers is cut off when so many bytes of them wait.
_MOST_UNREAD = 1024 * 1024
_WRITE_HIGH = 256 * 1024
# A frame costs the guest nothing and us microseconds. Beyond so many in so short a time we read no more for
# the rest of it: no real agent gets there, and a hostile one must not keep the node from its other sandboxes.
_BURST, _BURST_SECONDS = 8192, 0.25
_FLUSH = 1.0  # seconds that the last bytes of a closing link may take
_MOST_STRAYS = 64  # answers to earlier hosts that are discarded while we wait for ours

AcceptHandler = Callable[[Channel, Fields], None]


class Wire(asyncio.BufferedProtocol):
    """One connection to a guest agent. Made by :meth:`dial` only."""

    def __init__(self, role: str, resync: bool) -> None:
        self.failure: GuestError | None = None
        self.blocked = False  # the socket takes no more for now
        self.epoch = 0
        self.instance = b""
        self.agent = ""
        self.version = 0
        self.accepting: dict[int, AcceptHandler] = {}  # listening channel → who takes its connections
        self._role = role
        self._resync = resync
        self._nonce = os.urandom(16)
        self._parser = frames.FrameParser()
        self._transport: asyncio.Transport | None = None
        self._channels: dict[int, Channel] = {}
        self._limit = MOST_CHANNELS
        self._next = 1
        self._guest_highest = 0
        self._strays = 0
        self._greeted = False
        self._lost = False
        self._frames = 0  # in the burst that began at _burst
        self._burst = 0.0
        self._corked: list[bytes] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._pings: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._waiters: list[asyncio.Future[None]] = []

    @classmethod
    async def dial(
        cls,
        sock: socket.socket,
        role: str,
        timeout: float,  # noqa: ASYNC109
        *,
        resync: bool,
        wait: bool = True,
    ) -> Wire:
        """Say HELLO over a connected socket and wait for the answer. Owns the socket, even on failure.

        Without ``wait`` it returns at once: what is sent goes out behind the HELLO, and when no answer comes
        within the time, the link ends. See :meth:`greeted`.

        Raises:
            LinkLost: no answer in time, or the connection ended.
            ProtocolViolation: the answer was none.
        """
        wire = cls(role, resync)
        try:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: wire, sock=sock)
            wire._patience = loop.call_later(timeout, wire._unanswered, timeout)
            if wait:
                await wire.greeted()
        except OSError as error:
            wire.abort()
            sock.close()
            raise LinkLost(f"the connection to the guest agent failed: {error.strerror}") from error
        except BaseException:
            wire.abort()
            sock.close()
            raise
        return wire

    async def greeted(self) -> None:
        """Return when the guest has answered HELLO.

        Raises:
            LinkLost, ProtocolViolation: it has not, and won't.
        """
        while not self._greeted:
            self.check()
            await self._changed()

    def _unanswered(self, timeout: float) -> None:
        if not self._greeted:
            self.fail(
                LinkLost(
                    f"the guest agent did not answer within {timeout:g} s",
                    hint="the sandbox may be overloaded or ended; dial again or destroy it",
                )
            )

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say HELLO at once."""
        made = cast(asyncio.Transport, transport)  # other event loops have classes of their own
        self._transport = made
        made.set_write_buffer_limits(high=_WRITE_HIGH)
        fields = encode([(1, frames.MAGIC), (2, VERSION), (3, self._nonce), (4, self._role)])
        hello = frames.frame(0, frames.HELLO, fields)
        if self._resync:
            self._parser.seek()
            hello = bytes(frames.RESYNC_ZEROS) + hello
        made.write(hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._parser.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is whole now; what we answer goes out in one write."""
        self._corked = []
        try:
            for channel, kind, payload in self._parser.advance(nbytes):
                self._frames += 1
                self._handle(channel, kind, payload)
                if self.failure is not None:
                    return
        except ProtocolViolation as error:
            self.fail(error)
            return
        finally:
            corked, self._corked = self._corked, None
        if corked:
            self.control(b"".join(corked))
        if self._frames >= _BURST:
            self._slow_down()

    def _slow_down(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        end = self._burst + _BURST_SECONDS
        self._frames, self._burst = 0, max(now, end)
        if now < end and self._transport is not None:
            self._transport.pause_reading()
            loop.call_at(end, self._transport.resume_reading)

    def eof_received(self) -> None:
        """The guest closed its side; asyncio closes ours."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever ended it."""
        self._lost = True
        where = " in the middle of a frame" if self._parser.held and self._greeted else ""
        why = f": {exc}" if exc is not None else ""
        text = f"the link to the guest agent ended{where}{why}"
        self.fail(LinkLost(text, hint="dial again and resume by offset"))
        self._wake()

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self.blocked = True

    def resume_writing(self) -> None:
        """The socket takes bytes again."""
        self.blocked = False
        self._wake()

    # -- frames

    def _handle(self, number: int, kind: int, payload: memoryview) -> None:
        if not self._greeted:
            self._greet(number, kind, payload)
            return
        if number == 0:
            self._link_frame(kind, payload)
            return
        channel = self._channels.get(number)
        if channel is not None:
            if kind == frames.REPLY and not number & 1:
                raise ProtocolViolation("a reply on a channel that the guest opened")
            channel.handle(kind, payload)
        elif kind == frames.OPEN:
            self._opened(number, payload)
        elif number >= self._next if number & 1 else number > self._guest_highest:
            raise ProtocolViolation("a frame for a channel that was never opened")
        # Else it was under way when we closed the channel.

    def _greet(self, number: int, kind: int, payload: memoryview) -> None:
        if number or kind != frames.HELLO:
            raise ProtocolViolation("the guest did not begin with HELLO")
        fields = decode(payload)
        if fields.raw(1) != frames.MAGIC:
            raise ProtocolViolation("the guest does not speak the link protocol")
        if fields.raw(3, b"") != self._nonce:
            self._strays += 1
            if self._strays > _MOST_STRAYS:
                raise ProtocolViolation("the guest answers to everybody but this host")
            if self._resync:
                self._parser.seek()
            return
        version, epoch, instance = fields.number(2), fields.number(5), fields.raw(6)
        if not version or not epoch or len(instance) != 16:
            raise ProtocolViolation("a HELLO without version, epoch or instance")
        self.version, self.epoch, self.instance = min(version, VERSION), epoch, instance
        self.agent = fields.text(7, "", limit=64)
        self._limit = min(MOST_CHANNELS, fields.number(8, MOST_CHANNELS))
        if not self._limit:
            raise ProtocolViolation("a guest that allows no channel")
        self._greeted = True
        if self._patience is not None:
            self._patience.cancel()
        self._wake()

    def _link_frame(self, kind: int, payload: memoryview) -> None:
        if kind == frames.PING and len(payload) <= 64:
            self.control(frames.frame(0, frames.PONG, bytes(payload)))
        elif kind == frames.PONG and self._pings and self._pings[0][0] == payload:
            waiter = self._pings.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)
        else:
            raise ProtocolViolation(f"a frame of type {kind} that does not belong on channel 0")

    def _opened(self, number: int, payload: memoryview) -> None:
        if number & 1:
            raise ProtocolViolation("the guest opened a channel with an id of ours")
        operation, rest = frames.parse_u16(payload, "an OPEN")
        fields = decode(rest)
        self._guest_highest = max(self._guest_highest, number)
        handler = self.accepting.get(fields.number(1)) if operation == 34 else None
        if handler is None:
            code = errno.ECONNREFUSED if operation == 34 else errno.EOPNOTSUPP
            self.control(frames.error_frame(number, code, "nobody listens"))
        elif len(self._channels) >= MOST_CHANNELS:
            self.control(frames.error_frame(number, errno.EMFILE, "too many channels"))
        else:
            channel = Channel(self, number, "a connection from inside", receives=(0,), sends=True)
            self._channels[number] = channel
            handler(channel, fields)

    # -- what the calls use

    async def open(
        self, operation: int, fields: Iterable[tuple[int, Value | None]], what: str, **options: Any
    ) -> Channel:
        """Send OPEN on a new channel. ``options`` are those of :class:`Channel`.

        Raises:
            InvalidRequest: the fields do not fit in a frame.
            GuestRefused: EMFILE, too many channels are open.
            LinkLost, ProtocolViolation: the link ended.
        """
        while self.blocked and self.failure is None:
            await self.writable()
        return self.open_now(operation, fields, what, **options)

    def open_now(
        self, operation: int, fields: Iterable[tuple[int, Value | None]], what: str, **options: Any
    ) -> Channel:
        """:meth:`open` without waiting for the socket."""
        self.check()
        if len(self._channels) >= self._limit:
            raise GuestRefused(errno.EMFILE, f"{what}: {len(self._channels)} channels are open on this link")
        payload = encode(fields)
        if len(payload) + 2 > frames.MAX_PAYLOAD:
            raise InvalidRequest(
                f"{what}: {len(payload)} bytes of arguments do not fit in a frame of {frames.MAX_FRAME}",
                hint="pass large values through a file or standard input",
            )
        number = self._next
        if number > 0xFFFF_FFFF:
            raise LinkLost("the link has used up its channel ids", hint="dial again")
        self._next = number + 2
        channel = Channel(self, number, what, **options)
        self._channels[number] = channel
        self.control(frames.open_frame(number, operation, payload))
        return channel

    async def request(
        self,
        operation: int,
        fields: Iterable[tuple[int, Value | None]],
        what: str,
        timeout: float | None = REQUEST_TIMEOUT,  # noqa: ASYNC109
    ) -> Fields:
        """One question, one answer.

        Raises:
            GuestRefused: the guest answered with an errno.
            DeadlineExceeded: it did not answer in time.
            LinkLost, ProtocolViolation: the link ended.
        """
        try:
            async with asyncio.timeout(timeout):
                channel = await self.open(operation, fields, what, single=True)
                reply = await channel.answer()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: the guest agent did not answer within {timeout:g} s",
                hint="the sandbox may be overloaded; try again or destroy it",
            ) from None
        return reply

    async def ping(self, timeout: float = ANSWER_TIMEOUT) -> None:  # noqa: ASYNC109
        """Return when the guest has answered everything before.

        Raises:
            DeadlineExceeded: it did not answer in time.
            LinkLost, ProtocolViolation: the link ended.
        """
        self.check()
        waiter = asyncio.get_running_loop().create_future()
        token = os.urandom(8)
        self._pings.append((token, waiter))
        self.control(frames.frame(0, frames.PING, token))
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            raise DeadlineExceeded(f"the guest agent did not answer a ping within {timeout:g} s") from None

    def write(self, data: bytes) -> None:
        """Send a frame; the caller has looked at :attr:`blocked`."""
        if self._corked is not None:
            self._corked.append(data)
        elif self._transport is not None and self.failure is None:
            self._transport.write(data)

    def write_data(self, head: bytes, data: memoryview) -> None:
        """:meth:`write` of a frame in two parts; what can't change is not copied where the loop can do so."""
        if self._corked is not None or not isinstance(data.obj, bytes):
            self.write(head + data)
        elif self._transport is not None and self.failure is None:
            self._transport.writelines((head, data))

    def control(self, data: bytes) -> None:
        """Send a frame that can't wait."""
        self.write(data)
        if self._corked is None and self._transport is not None and self.failure is None:
            unread = self._transport.get_write_buffer_size()
            if unread > _MOST_UNREAD:
                self.fail(ProtocolViolation("the guest does not read its answers"))

    async def writable(self) -> None:
        """Return when the socket may take more, or the link ended."""
        if self.blocked and self.failure is None:
            await self._changed()

    def forget(self, channel: Channel) -> None:
        """The channel is over."""
        self._channels.pop(channel.number, None)
        self.accepting.pop(channel.number, None)

    # -- ends

    def check(self) -> None:
        """Raise why the link ended, if it did."""
        if self.failure is not None:
            raise type(self.failure)(self.failure.message, hint=self.failure.hint)

    def fail(self, error: GuestError) -> None:
        """Close the link; every waiter gets ``error``. The first reason stays."""
        if self.failure is not None:
            return
        self.failure = error
        if self._patience is not None:
            self._patience.cancel()
        self.abort()
        channels, self._channels = self._channels, {}
        self.accepting.clear()
        for channel in channels.values():
            channel.fail(error)
        pings, self._pings = self._pings, deque()
        for _, waiter in pings:
            if not waiter.done():
                waiter.set_exception(type(error)(error.message, hint=error.hint))
                waiter.exception()  # a waiter that was cancelled meanwhile is no unhandled error
        self._wake()

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Send what is under way, close, and return when the connection is gone. Idempotent."""
        if self._transport is None:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(_FLUSH):
                while not self._lost:
                    await self._changed()
        except TimeoutError:
            self._transport.abort()  # the guest does not read: what is left is lost anyway
            while not self._lost:
                await self._changed()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
