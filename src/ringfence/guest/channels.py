"""One channel of a link: its states, its flow control, and what it may hold.

All conditions are level-triggered: whoever waits looks at the state, waits for any change, looks again.
So a cancelled waiter leaves nothing behind, and any number may wait.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringfence.guest import frames
from ringfence.guest.fields import Fields, clean, decode
from ringfence.model.errors import GuestError, GuestRefused, ProtocolViolation, WrongState

if TYPE_CHECKING:
    from ringfence.guest.wire import Wire

DEFAULT_WINDOW = 262_144  # bytes a stream the guest may send before we consume
SEND_WINDOW = 65_536  # bytes a stream we may send before the guest says more
# Beyond so many pieces, new data joins the tail of its own stream, at the price of the order between
# streams: a guest that sends single bytes in turn on two streams must not cost 100 times its credit.
_ORDERED_PIECES = 256
# Pieces can't be joined across a gap. A real agent leaves gaps only when a ring ran over, a ring at a time.
_MOST_PIECES = 2048
_PROMPT = 1024  # bytes that we may owe a guest that waits: less than the smallest ring of output has room for
_MOST_CREDIT = (
    2**40
)  # an absurd sum of credit is cut here; it grants nothing that the guest can't refuse later

EventHandler = Callable[[int, Fields], None]
ReplyHandler = Callable[["Channel", Fields], None]


class _Piece:
    """Contiguous bytes of one stream that nobody took yet."""

    __slots__ = ("data", "offset", "stream")

    def __init__(self, stream: int, offset: int, data: bytes) -> None:
        self.stream = stream
        self.offset = offset
        self.data: bytes | bytearray = data


class Incoming:
    """One stream from the guest: what was received, and how much more may come."""

    __slots__ = ("credit", "delivered", "ended", "owed", "position", "window")

    def __init__(self, window: int) -> None:
        self.window = self.credit = window
        self.owed = 0  # consumed, but not given back as credit yet
        self.position = 0  # offset of the next byte to come
        self.delivered = 0  # offset after the last byte that the consumer took
        self.ended = False


class Channel:
    """A channel of a link. ``what`` names the operation in messages."""

    __slots__ = (
        "_eof_sent",
        "_pieces",
        "_position",
        "_sends",
        "_tails",
        "_waiters",
        "credit",
        "error",
        "gaps",
        "got_close",
        "incoming",
        "left",
        "number",
        "on_event",
        "on_reply",
        "over",
        "reply",
        "sent_close",
        "single",
        "what",
        "wire",
    )

    def __init__(
        self,
        wire: Wire,
        number: int,
        what: str,
        *,
        single: bool = False,
        receives: tuple[int, ...] = (),
        window: int = DEFAULT_WINDOW,
        sends: bool = False,
        gaps: bool = False,
        on_event: EventHandler | None = None,
        on_reply: ReplyHandler | None = None,
    ) -> None:
        self.wire = wire
        self.number = number
        self.what = what
        self.single = single
        self.gaps = gaps
        self.on_event = on_event
        self.on_reply = on_reply
        self.incoming = {stream: Incoming(window) for stream in receives}
        self.reply: Fields | None = None
        self.error: GuestError | None = None
        self.over = False  # both sides are done; the id is free
        self.sent_close = self.got_close = False
        self.left = False  # it was we who closed it
        self.credit = SEND_WINDOW
        self._sends = sends
        self._position = 0
        self._eof_sent = False
        self._pieces: deque[_Piece] = deque()
        self._tails: dict[int, _Piece] = {}  # the newest piece of each stream
        self._waiters: list[asyncio.Future[None]] = []

    # -- what the guest sends

    def handle(self, kind: int, payload: memoryview) -> None:
        """One frame for this channel.

        Raises:
            ProtocolViolation: the frame is malformed, or the state does not allow it.
        """
        if kind == frames.DATA:
            self._data(payload)
        elif kind == frames.CREDIT:
            stream, count = frames.parse_credit(payload)
            if stream or not self._sends:
                raise ProtocolViolation(f"credit for a stream that {self.what} does not send")
            self.credit = min(self.credit + count, _MOST_CREDIT)
        elif kind == frames.EOF:
            self._eof(payload)
        elif kind == frames.EVENT:
            number, rest = frames.parse_u16(payload, "an EVENT")
            self._require_reply("an event")
            if self.on_event is not None and not self.sent_close:
                self.on_event(number, decode(rest))
        elif kind == frames.REPLY:
            if self.reply is not None:
                raise ProtocolViolation(f"a second reply to {self.what}")
            fields = decode(payload)
            # At once, not when the waiter runs: the next frame may depend on it.
            if self.on_reply is not None and not self.sent_close:
                self.on_reply(self, fields)
            self.reply = fields
            if self.single:
                self.finish()
        elif kind == frames.ERROR:
            number, text = frames.parse_error(payload)
            if not 0 < number < 4096:
                raise ProtocolViolation("an ERROR frame without an errno")
            said = clean(text).removesuffix(f": {os.strerror(number)}")  # the error says it itself
            if said == self.what.partition(" ")[0]:
                said = ""
            self.error = GuestRefused(number, f"{self.what} ({said})" if said else self.what)
            self.finish()
        elif kind == frames.CLOSE:
            if len(payload):
                raise ProtocolViolation("a CLOSE frame with a payload")
            self._closed()
        else:
            raise ProtocolViolation(f"a frame of type {kind} on an open channel")
        self.wake()

    def _require_reply(self, what: str) -> None:
        if self.reply is None:
            raise ProtocolViolation(f"{what} before the reply to {self.what}")
        if self.got_close:
            raise ProtocolViolation(f"{what} after the close of {self.what}")

    def _data(self, payload: memoryview) -> None:
        stream, offset, data = frames.parse_data(payload)
        incoming = self._incoming(stream, offset, "data")
        if len(data) > incoming.credit:
            raise ProtocolViolation(f"data beyond the credit on stream {stream} of {self.what}")
        incoming.credit -= len(data)
        contiguous = offset == incoming.position
        incoming.position = offset + len(data)
        if not self.sent_close:
            self._keep(stream, offset, data, contiguous)

    def _eof(self, payload: memoryview) -> None:
        stream, offset = frames.parse_eof(payload)
        incoming = self._incoming(stream, offset, "an end")
        incoming.position = offset
        incoming.ended = True

    def _incoming(self, stream: int, offset: int, what: str) -> Incoming:
        self._require_reply(what)
        incoming = self.incoming.get(stream)
        if incoming is None:
            raise ProtocolViolation(f"{what} on stream {stream}, which {self.what} does not have")
        if incoming.ended:
            raise ProtocolViolation(f"{what} after the end of stream {stream} of {self.what}")
        if offset != incoming.position and (offset < incoming.position or not self.gaps):
            raise ProtocolViolation(f"{what} at the wrong offset on stream {stream} of {self.what}")
        return incoming

    def _keep(self, stream: int, offset: int, data: memoryview, contiguous: bool) -> None:
        pieces = self._pieces
        tail = self._tails.get(stream)
        if pieces and tail is not None and contiguous:
            near = pieces[-1] is tail and len(tail.data) + len(data) <= frames.MAX_FRAME
            if near or len(pieces) >= _ORDERED_PIECES:
                if not isinstance(tail.data, bytearray):
                    tail.data = bytearray(tail.data)
                tail.data += data
                return
        if len(pieces) >= _MOST_PIECES:
            raise ProtocolViolation(f"more pieces of output than any real agent sends, in {self.what}")
        piece = _Piece(stream, offset, bytes(data))
        pieces.append(piece)
        self._tails[stream] = piece

    def _closed(self) -> None:
        if self.got_close:
            raise ProtocolViolation(f"a second close of {self.what}")
        if self.reply is None and not self.sent_close and self.number & 1:
            raise ProtocolViolation(f"a close of {self.what} before its reply")
        self.got_close = True
        if not self.sent_close:
            self.sent_close = True
            self.wire.control(frames.close_frame(self.number))
        self.finish()

    # -- what the consumer takes

    def take(self) -> tuple[int, int, bytes] | None:
        """The oldest piece as (stream, offset, bytes), and its credit goes back; None if there is none."""
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        stream, offset, chunk = piece.stream, piece.offset, bytes(piece.data)
        if self._tails.get(stream) is piece:
            del self._tails[stream]
        incoming = self.incoming[stream]
        incoming.delivered = offset + len(chunk)
        incoming.owed += len(chunk)
        # Early enough that the guest never waits. What was consumed to the last byte is said soon: the guest
        # keeps for us what we have not given back, since we may die and come again.
        due = incoming.window // 4
        if not self._pieces:
            due = min(due, _PROMPT)
        if incoming.owed >= max(1, due) and not self.sent_close and not incoming.ended:
            incoming.credit += incoming.owed
            self.wire.control(frames.credit_frame(self.number, stream, incoming.owed))
            incoming.owed = 0
        return stream, offset, chunk

    def holds(self, stream: int) -> bool:
        """Bytes of the stream were received that nobody took yet."""
        return stream in self._tails

    async def answer(self, *, keep: bool = False) -> Fields:
        """The fields of the reply. Whoever is cancelled here has closed the channel, unless ``keep``.

        Raises:
            GuestRefused: the guest answered ERROR.
            LinkLost, ProtocolViolation: the link ended.
        """
        try:
            while self.reply is None:
                self.check()
                await self.changed()
        except BaseException:
            if not keep:
                self.close()
            raise
        return self.reply

    async def read(self, stream: int, want: int = 1) -> bytes:
        """The next bytes of the only stream; ``b""`` at its end.

        Of what has come already it takes pieces until there are ``want`` bytes; it waits for the first only.

        Raises:
            GuestRefused: the operation failed half way, or the guest gave the channel up.
            LinkLost, ProtocolViolation: the link ended, after everything received was returned.
        """
        incoming = self.incoming[stream]
        while True:
            piece = self.take()
            if piece is not None:
                if len(piece[2]) >= want or not self._pieces:
                    return piece[2]
                found, size = [piece[2]], len(piece[2])
                while size < want and (piece := self.take()) is not None:
                    found.append(piece[2])
                    size += len(piece[2])
                return b"".join(found)
            if incoming.ended:
                return b""
            self.check()
            if self.sent_close:
                raise GuestRefused(errno.ECONNRESET, f"{self.what} ended early")
            await self.changed()

    # -- what we send

    async def send(
        self, data: bytes | bytearray | memoryview, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Send all bytes on stream 0, as the guest and the socket take them; EPIPE once ``until`` holds.

        Raises:
            WrongState: after :meth:`send_eof`.
            GuestRefused: the guest ended the operation; EPIPE if it said no reason.
            LinkLost, ProtocolViolation: the link ended.
        """
        rest = memoryview(data).cast("B")
        while len(rest):
            await self._sendable(until)
            count = min(len(rest), self.credit, frames.MAX_DATA)
            self.wire.write_data(frames.data_head(self.number, 0, self._position, count), rest[:count])
            self.credit -= count
            self._position += count
            rest = rest[count:]

    async def _sendable(self, until: Callable[[], bool]) -> None:
        while True:
            if self._eof_sent:
                raise WrongState(f"the input of {self.what} was closed")
            self.check()
            if self.sent_close or until():
                raise GuestRefused(errno.EPIPE, self.what)
            if self.wire.blocked:
                await self.wire.writable()
            elif self.credit <= 0:
                await self.changed()
            else:
                return

    def begin_sending(self, offset: int) -> None:
        """Stream 0 goes on at ``offset`` (attach)."""
        self._position = offset

    def send_eof(self) -> None:
        """End stream 0. Harmless when done before, or when the channel is over."""
        if not self._eof_sent and not self.sent_close and not self.over:
            self.wire.control(frames.eof_frame(self.number, 0, self._position))
        self._eof_sent = True

    def close(self) -> None:
        """Done with it: CLOSE is sent, what was received is dropped. Idempotent, never fails."""
        self._pieces.clear()
        self._tails.clear()
        if self.sent_close:
            return
        self.sent_close = self.left = True
        self.wire.control(frames.close_frame(self.number))
        self.wake()

    def accept(self) -> bool:
        """Answer a channel that the guest opened with REPLY; False if it is gone already."""
        if self.sent_close:
            return False
        self.reply = Fields({})
        self.wire.control(frames.frame(self.number, frames.REPLY))
        return True

    def refuse(self, number: int, text: str) -> None:
        """Answer a channel that the guest opened with ERROR."""
        if not self.over:
            self.wire.control(frames.error_frame(self.number, number, text))
            self.finish()

    # -- ends and waiting

    def check(self) -> None:
        """Raise what ended the operation, if something did (as a new exception each time)."""
        if self.error is not None:
            error = self.error
            if isinstance(error, GuestRefused):
                raise GuestRefused(error.errno, error.message.rpartition(": ")[0])
            raise type(error)(error.message, hint=error.hint)

    def finish(self) -> None:
        """The id is free again."""
        self.over = self.sent_close = True
        self.wire.forget(self)
        self.wake()

    def fail(self, error: GuestError) -> None:
        """The link ended."""
        if self.error is None:
            self.error = error
        self.over = self.sent_close = True
        self.wake()

    def wake(self) -> None:
        """Something changed."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def changed(self) -> None:
        """Return when anything happened on the channel."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
