"""Frames of the link protocol: building them, and an incremental parser with every bound checked.

The parser serves hostile bytes: whatever it is fed, in whatever pieces, it either yields frames within
the protocol's limits or raises :class:`ProtocolViolation`, and never holds more than its buffer.
"""

from __future__ import annotations

import struct

from ringfence.model.errors import ProtocolViolation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER = struct.Struct("<IIBBH")  # size, channel, type, flags, reserved
MAX_FRAME = 65536
MAX_PAYLOAD = MAX_FRAME - HEADER.size
DATA_HEAD = struct.Struct("<BQ")  # stream, offset
MAX_DATA = MAX_PAYLOAD - DATA_HEAD.size
MAX_OFFSET = 2**63 - 1  # no real stream gets here; keeps sums of offsets within 64 bits on every side

HELLO, OPEN, REPLY, ERROR, DATA, CREDIT, EOF, CLOSE, EVENT, PING, PONG = range(1, 12)

MAGIC = b"RINGFENCE-LINK-1"
# What follows the size of every frame that opens a link: channel 0, HELLO, no flags, then field 1.
HELLO_MARK = struct.pack("<IBBHBI", 0, HELLO, 0, 0, 1, len(MAGIC)) + MAGIC
RESYNC_ZEROS = 65536  # a single stream begins with so many zero bytes: longer than any frame under way

_CREDIT = struct.Struct("<BI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
# A frame under way stays at the front while a read fills the rest: as much as a socket usually holds, so that
# little is moved to the front.
_BUFFER = 4 * MAX_FRAME
_SMALL = 8192  # until more than that is under way: most links carry one command and a few lines


def frame(channel: int, kind: int, payload: bytes = b"") -> bytes:
    """One whole frame.

    Raises:
        ValueError: the payload is longer than a frame holds.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a payload of {len(payload)} bytes does not fit in a frame")
    return HEADER.pack(len(payload), channel, kind, 0, 0) + payload


def data_frame(channel: int, stream: int, offset: int, data: bytes | memoryview) -> bytes:
    """DATA: ``data`` (1 to ``MAX_DATA`` bytes) is at ``offset`` of ``stream``."""
    return b"".join((data_head(channel, stream, offset, len(data)), data))


def data_head(channel: int, stream: int, offset: int, count: int) -> bytes:
    """What comes before the ``count`` bytes of a DATA frame."""
    return HEADER.pack(count + DATA_HEAD.size, channel, DATA, 0, 0) + DATA_HEAD.pack(stream, offset)


def credit_frame(channel: int, stream: int, count: int) -> bytes:
    """CREDIT: ``count`` more bytes of ``stream`` may come."""
    return HEADER.pack(_CREDIT.size, channel, CREDIT, 0, 0) + _CREDIT.pack(stream, count)


def eof_frame(channel: int, stream: int, offset: int) -> bytes:
    """EOF: ``stream`` ended at ``offset``."""
    return HEADER.pack(DATA_HEAD.size, channel, EOF, 0, 0) + DATA_HEAD.pack(stream, offset)


def close_frame(channel: int) -> bytes:
    """CLOSE: done with the channel."""
    return HEADER.pack(0, channel, CLOSE, 0, 0)


def open_frame(channel: int, operation: int, fields: bytes) -> bytes:
    """OPEN: ``operation`` on a new channel.

    Raises:
        ValueError: the fields do not fit in a frame.
    """
    return frame(channel, OPEN, _U16.pack(operation) + fields)


def event_frame(channel: int, event: int, fields: bytes) -> bytes:
    """EVENT: something happened on the channel (only peers in tests send this from the host's side)."""
    return frame(channel, EVENT, _U16.pack(event) + fields)


def error_frame(channel: int, number: int, text: str = "") -> bytes:
    """ERROR: the operation failed with an errno; the text is cut at the protocol's 512 bytes."""
    return frame(channel, ERROR, _U32.pack(number) + text.encode()[:512].decode(errors="ignore").encode())


def parse_data(payload: memoryview) -> tuple[int, int, memoryview]:
    """Stream, offset and bytes of DATA.

    Raises:
        ProtocolViolation: too short, empty, or ends beyond the largest offset.
    """
    if len(payload) <= DATA_HEAD.size:
        raise ProtocolViolation("a DATA frame without data")
    stream, offset = DATA_HEAD.unpack_from(payload)
    if offset + len(payload) > MAX_OFFSET:
        raise ProtocolViolation("a DATA frame with an absurd offset")
    return stream, offset, payload[DATA_HEAD.size :]


def parse_eof(payload: memoryview) -> tuple[int, int]:
    """Stream and offset of EOF.

    Raises:
        ProtocolViolation: wrong length or offset.
    """
    if len(payload) != DATA_HEAD.size:
        raise ProtocolViolation("an EOF frame of the wrong length")
    stream, offset = DATA_HEAD.unpack(payload)
    if offset > MAX_OFFSET:
        raise ProtocolViolation("an EOF frame with an absurd offset")
    return stream, offset


def parse_credit(payload: memoryview) -> tuple[int, int]:
    """Stream and count of CREDIT.

    Raises:
        ProtocolViolation: wrong length.
    """
    if len(payload) != _CREDIT.size:
        raise ProtocolViolation("a CREDIT frame of the wrong length")
    stream, count = _CREDIT.unpack(payload)
    return stream, count


def parse_u16(payload: memoryview, what: str) -> tuple[int, memoryview]:
    """The leading u16 of OPEN (operation) and EVENT (event), and the fields after it.

    Raises:
        ProtocolViolation: too short.
    """
    if len(payload) < 2:
        raise ProtocolViolation(f"{what} frame that is too short")
    return _U16.unpack_from(payload)[0], payload[2:]


def parse_error(payload: memoryview) -> tuple[int, bytes]:
    """Errno and raw text of ERROR.

    Raises:
        ProtocolViolation: too short, or a text beyond 512 bytes.
    """
    if not 4 <= len(payload) <= 4 + 512:
        raise ProtocolViolation("an ERROR frame of the wrong length")
    return _U32.unpack_from(payload)[0], bytes(payload[4:])


class FrameParser:
    """Cuts a byte stream into frames, one connection long.

    A reader writes into :meth:`space` and says how much by :meth:`advance`, which yields every whole
    frame as ``(channel, type, payload)``; the payload is a view that is good until the next step of
    the iteration. :meth:`seek` makes it look for the HELLO pattern first (single streams).
    """

    __slots__ = ("_buffer", "_end", "_searching", "_start", "_view")

    def __init__(self) -> None:
        self._buffer = bytearray(_SMALL)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._searching = False

    @property
    def held(self) -> int:
        """Bytes of an unfinished frame."""
        return self._end - self._start

    def seek(self) -> None:
        """Drop bytes until a frame that looks like HELLO begins."""
        self._searching = True

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._view[self._end :]

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """:meth:`space` and :meth:`advance` for bytes that are already here."""
        rest = memoryview(data)
        while rest:
            free = self.space()
            taken = min(len(free), len(rest))
            free[:taken] = rest[:taken]
            rest = rest[taken:]
            yield from self.advance(taken)

    def advance(self, count: int) -> Iterator[tuple[int, int, memoryview]]:
        """``count`` more bytes lie in :meth:`space`: yield the frames that are whole now.

        Raises:
            ProtocolViolation: a size over the limit, an unknown type, or a reserved bit that is set.
        """
        self._end += count
        while self._locate():
            start = self._start
            available = self._end - start
            if available < HEADER.size:
                break
            size, channel, kind, flags, reserved = HEADER.unpack_from(self._buffer, start)
            if size > MAX_PAYLOAD:
                raise ProtocolViolation(f"a frame of {size} bytes; the limit is {MAX_PAYLOAD}")
            if not HELLO <= kind <= PONG:
                raise ProtocolViolation(f"a frame of unknown type {kind}")
            if flags or reserved:
                raise ProtocolViolation("a frame with reserved bits set")
            if available < HEADER.size + size:
                break
            self._start = start + HEADER.size + size
            yield channel, kind, self._view[start + HEADER.size : self._start]
        self._compact()

    def _locate(self) -> bool:
        """While searching: move to the next HELLO pattern. False when no frame can be cut yet."""
        if not self._searching:
            return True
        while (at := self._buffer.find(HELLO_MARK, self._start + 4, self._end)) >= 0:
            self._start = at - 4
            if _U32.unpack_from(self._buffer, self._start)[0] <= MAX_PAYLOAD:
                self._searching = False
                return True
            self._start += 1
        # Keep what may be the beginning of the pattern (and the size before it).
        self._start = max(self._start, self._end - len(HELLO_MARK) - 3)
        return False

    def _compact(self) -> None:
        rest = self._end - self._start
        old = self._view
        if len(self._buffer) == _SMALL and (rest or self._end == _SMALL):
            self._buffer = bytearray(_BUFFER)
            self._view = memoryview(self._buffer)
        elif rest and not self._start:
            return
        # An unfinished frame is at most MAX_FRAME - 1 bytes, so most of the buffer stays free. (Views of one
        # buffer may overlap: they are copied as memmove does it.)
        self._view[:rest] = old[self._start : self._end]
        self._start, self._end = 0, rest
