"""What a kernel says, as events of one call. All that comes may be hostile; nothing here ever fails."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Final, NamedTuple, Protocol

from ringfence.guest.contexts.results import ContextEvent, Finished, Text, clean, event_of
from ringfence.guest.processes import STDERR, STDOUT

MOST_MESSAGE: Final = 16 * 1024 * 1024  # characters of one message: a result with its pictures
MOST_LINE: Final = 256 * 1024  # bytes of one line; the kernels send at most 40,000
_RECORD: Final = re.compile(rb"ringfence (ready|begin|end) ([A-Za-z0-9_-]{1,40}) ([0-9]{1,3})\Z")
_MOST_RECORD: Final = 80  # bytes


class Place(NamedTuple):
    """Where to go on: offsets in the context's streams, and whether the call had begun there."""

    stdout: int = 0
    stderr: int = 0
    begun: bool = False


class Reader(Protocol):
    """Makes events of one call out of what comes on a context's streams 1 and 2."""

    ready: bool  # the kernel has said that it can be called
    begun: bool  # the call has begun: calls before it are over

    def feed(self, stream: int, offset: int, data: bytes) -> list[tuple[Place, ContextEvent]]:
        """The events that are complete now, each with the place after it."""
        ...


class Messages:
    """Whole messages out of a kernel's stream of bytes. Never fails, never holds more than its bounds.

    Lines that are no JSON object are skipped: the start in the middle of somebody else's line, or junk that
    the sandbox wrote over the kernel's head. ``offset``: where to go on after the last whole message.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.skipped = 0  # lines that meant nothing
        self._position = offset
        self._held = bytearray()
        self._skipping = False
        self._parts: list[str] = []
        self._size = 0

    def feed(self, offset: int, data: bytes) -> list[tuple[int, dict[str, Any]]]:
        """The messages that are complete now, each with the offset after it."""
        if offset != self._position:  # output was dropped in between
            self._held.clear()
            self._parts.clear()
            self._size, self._skipping = 0, True
        self._position = offset + len(data)
        found: list[tuple[int, dict[str, Any]]] = []
        self._held += data
        start = 0
        while (end := self._held.find(b"\n", start)) >= 0:
            line = bytes(self._held[start:end])
            start = end + 1
            after = self._position - len(self._held) + start
            if self._skipping:
                self._skipping = False
                self.skipped += 1
            elif (message := self._message(line)) is not None:
                found.append((after, message))
        del self._held[:start]
        if len(self._held) > MOST_LINE:
            self._held.clear()
            self._skipping = True
        return found

    def _message(self, line: bytes) -> dict[str, Any] | None:
        message = _object(line) if len(line) <= MOST_LINE else None
        if message is None:
            self.skipped += 1
            return None
        if message.get("t") not in ("part", "last"):
            self._parts, self._size = [], 0
            return message
        piece = message.get("d")
        if isinstance(piece, str) and self._size <= MOST_MESSAGE:
            self._parts.append(piece)
            self._size += len(piece)
            if self._size > MOST_MESSAGE:
                self._parts.clear()
        if message["t"] == "part":
            return None
        whole, size = "".join(self._parts), self._size
        self._parts, self._size = [], 0
        if size > MOST_MESSAGE:
            return {
                "t": "result",
                "x": message.get("x"),
                "text": f"(left out: over {MOST_MESSAGE} characters)",
            }
        found = _object(whole)
        if found is None:
            self.skipped += 1
        return found


def _object(line: bytes | str) -> dict[str, Any] | None:
    try:
        found = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Lines:
    """A kernel that says lines of JSON on stream 1; what comes on stream 2 was printed by others there."""

    def __init__(self, call: str, begun: bool = False) -> None:
        self.ready, self.begun = False, begun
        self._call = call
        self._messages: Messages | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = Place(begun=begun)

    def feed(self, stream: int, offset: int, data: bytes) -> list[tuple[Place, ContextEvent]]:
        """See :class:`Reader`."""
        if stream == STDERR:
            self._place = self._place._replace(stderr=offset + len(data))
            text = self._decoder.decode(data)
            return [(self._place, Text("stderr", text))] if text else []
        if stream != STDOUT:
            return []
        if self._messages is None:
            self._messages = Messages(offset)
        found: list[tuple[Place, ContextEvent]] = []
        for after, message in self._messages.feed(offset, data):
            self.ready = self.ready or message.get("t") == "ready"
            if message.get("x") != self._call:
                continue
            self.begun = True
            event = event_of(message)
            if event is not None:
                self._place = self._place._replace(stdout=after, begun=True)
                found.append((self._place, event))
        return found


class Records:
    """A kernel whose streams are the code's own output, with records where calls begin and end."""

    def __init__(self, call: str, begun: bool = False) -> None:
        self.ready, self.begun = False, begun
        self._call = call.encode()
        self._inside = {STDOUT: begun, STDERR: begun}
        self._over: dict[int, int] = {}  # stream: exit code
        self._held = {STDOUT: b"", STDERR: b""}
        self._decoders = {
            stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in (STDOUT, STDERR)
        }
        self._at = {STDOUT: 0, STDERR: 0}
        self._finished = False
        self._events: list[tuple[Place, ContextEvent]] = []

    def feed(self, stream: int, offset: int, data: bytes) -> list[tuple[Place, ContextEvent]]:
        """See :class:`Reader`."""
        if stream not in self._held:
            return []
        if offset != self._at[stream]:  # dropped output, or the beginning
            self._held[stream] = b""
        rest = self._held[stream] + data
        self._at[stream] = offset + len(data)
        text = b""
        while rest:
            before, mark, after = rest.partition(b"\x1e")
            text += before
            if not mark:
                rest = b""
                break
            record, closing, following = after.partition(b"\x1e")
            if not closing and len(after) < _MOST_RECORD:
                rest = mark + after
                break
            found = _RECORD.match(record) if closing else None
            if found is None:
                text += mark
                rest = after
                continue
            if not self._ours(stream, found[1], found[2]):  # printed by the code
                text += mark
                rest = after
                continue
            self._print(stream, text)
            text, rest = b"", following
            self._mark(stream, found[1], found[2], int(found[3]))
        self._held[stream] = rest
        self._print(stream, text)
        events, self._events = self._events, []
        return events

    def _place(self) -> Place:
        out, err = (self._at[stream] - len(self._held[stream]) for stream in (STDOUT, STDERR))
        return Place(out, err, self._inside[STDOUT])

    def _print(self, stream: int, data: bytes, *, final: bool = False) -> None:
        if (data or final) and self._inside[stream] and stream not in self._over:
            text = self._decoders[stream].decode(data, final)
            if text:
                name = "stdout" if stream == STDOUT else "stderr"
                self._events.append((self._place(), Text(name, clean(text))))

    def _ours(self, stream: int, what: bytes, call: bytes) -> bool:
        """Whether such a record can be the kernel's: in a call its end, or another begin."""
        return not self._inside[stream] or what == b"begin" or (what == b"end" and call == self._call)

    def _mark(self, stream: int, what: bytes, call: bytes, code: int) -> None:
        if what == b"ready":
            self.ready = True
        elif what == b"begin" and call == self._call:
            self._inside[stream] = self.begun = True
        elif (
            self._inside[stream] and stream not in self._over
        ):  # its end, or another's begin: the code took its record away
            self._print(stream, b"", final=True)
            self._over.setdefault(stream, code if call == self._call else 0)
            if len(self._over) == 2 and not self._finished:
                self._finished = True
                code = self._over[STDOUT]
                status = "error" if code else "ok"
                self._events.append((self._place(), Finished(status, 0, code)))
