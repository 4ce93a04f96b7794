"""HTTP/1.1, read strictly and written anew.

Two programs that read one message differently are how a request is smuggled past a guard. So whatever the
standard leaves to taste is refused here, and what goes on is not the bytes that came but a message written
from what was understood: one framing, one host, no header that was not a header.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import field

from ringfence.egress.streams import PIECE, Stream
from ringfence.model.values import dataclass

MOST_HEAD = 64 * 1024  # bytes of a request line or status line and its headers
MOST_HEADERS = 200
MOST_TARGET = 32 * 1024

Headers = list[tuple[str, str]]

_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"  # noqa: S105 - a grammar's word
_REQUEST = re.compile(rf"({_TOKEN}) ([\x21-\x7e]+) HTTP/1\.([01])", re.ASCII)
_STATUS = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?", re.ASCII)
_HEADER = re.compile(
    rf"({_TOKEN}):[ \t]*([\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?[ \t]*"
)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]{0,256})?")
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)

# Headers of one hop, which end here.
HOP = frozenset({"connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization",
                 "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"})  # fmt: skip
# What a Connection header may not take out of a message behind the back of whoever judged it.
_FIRM = frozenset({"host", "content-length", "authorization", "cookie", "origin", "x-api-key"})


class BadMessage(Exception):
    """A message that is malformed, or that two programs could read differently. ``status``: the answer."""

    def __init__(self, why: str, status: int = 400, code: str = "bad_request") -> None:
        super().__init__(why)
        self.status = status
        self.code = code


class Incomplete(Exception):
    """The stream ended in the middle of a message, or before it (``begun`` is False)."""

    def __init__(self, begun: bool = True) -> None:
        super().__init__("the connection ended in the middle of a message")
        self.begun = begun


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request line and its headers. ``length``: of the body, -1 chunked."""

    method: str
    target: str
    minor: int
    headers: Headers
    length: int
    host: str | None
    keep: bool  # the connection may go on after it
    upgrade: str = ""
    expects: bool = False


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A status line and its headers. ``length``: of the body, -1 chunked, -2 until the end."""

    status: int
    reason: str
    headers: Headers
    length: int
    keep: bool
    minor: int = 1
    trailers: Headers = field(default_factory=list)


class Reader:
    """Reads a stream in lines, heads and counted pieces."""

    def __init__(self, stream: Stream, head: bytes = b"") -> None:
        self.stream = stream
        self._held = bytearray(head)

    def take(self) -> bytes:
        """What was read but not used yet; the reader forgets it."""
        data = bytes(self._held)
        self._held.clear()
        return data

    def peek(self) -> bytes:
        """What was read but not used yet."""
        return bytes(self._held)

    async def exactly(self, count: int) -> bytes:
        """So many bytes.

        Raises:
            Incomplete: the stream ended before.
        """
        while len(self._held) < count:
            if not await self.more():
                raise Incomplete
        return self.cut(count)

    def cut(self, count: int) -> bytes:
        """So many bytes of those that are held."""
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    @property
    def has_head(self) -> bool:
        """Whether a whole head is there, so that :meth:`head` does not wait."""
        return b"\r\n\r\n" in self._held

    @property
    def held(self) -> int:
        """Bytes that were read but not used yet."""
        return len(self._held)

    async def more(self) -> bool:
        """Read on; False at the end."""
        data = await self.stream.read()
        self._held += data
        return bool(data)

    async def head(self) -> list[str]:
        """The lines up to an empty one.

        Raises:
            BadMessage: too long, or lines that end otherwise than in CR LF.
            Incomplete: the stream ended before.
        """
        start = 0
        while (end := self._held.find(b"\r\n\r\n", start)) < 0:
            # A line feed without its carriage return, or a first line that never ends, is seen at once.
            if len(self._held) > MOST_HEAD:
                raise BadMessage(f"the head has more than {MOST_HEAD} bytes", 431, "head_too_large")
            if self._held[:1] and self._held[0] in b"\r\n":
                raise BadMessage("an empty line before the message")
            start = max(0, len(self._held) - 3)
            if not await self.more():
                raise Incomplete(begun=bool(self._held))
        if end > MOST_HEAD:
            raise BadMessage(f"the head has more than {MOST_HEAD} bytes", 431, "head_too_large")
        text = self._held[:end].decode("latin-1")
        del self._held[: end + 4]
        lines = text.split("\r\n")
        if "\n" in text and any("\n" in line for line in lines):
            raise BadMessage("a line that ends in LF alone")
        return lines

    async def line(self, limit: int) -> bytes:
        """One line without its CR LF.

        Raises:
            BadMessage: longer than ``limit``, or it ends in LF alone.
            Incomplete: the stream ended before.
        """
        while (end := self._held.find(b"\n")) < 0:
            if len(self._held) > limit + 1:  # its CR may be there already
                raise BadMessage("a line is too long")
            if not await self.more():
                raise Incomplete
        line = bytes(self._held[: end + 1])
        del self._held[: end + 1]
        if len(line) > limit + 2 or not line.endswith(b"\r\n"):
            raise BadMessage("a line that ends in LF alone, or is too long")
        return line[:-2]

    async def some(self, limit: int) -> bytes:
        """1 to ``limit`` bytes; ``b""`` at the end."""
        if self._held:
            data = bytes(self._held[:limit])
            del self._held[:limit]
            return data
        return await self.stream.read(min(limit, PIECE))

    async def body(self, length: int) -> AsyncIterator[bytes]:
        """A body in pieces: of a length, chunked (-1), or until the end (-2).

        Raises:
            BadMessage: a malformed chunk.
            Incomplete: the stream ended before the body.
        """
        if length == -2:
            while data := await self.some(PIECE):
                yield data
        elif length == -1:
            async for data in self._chunks():
                yield data
        else:
            while length:
                data = await self.some(length)
                if not data:
                    raise Incomplete
                length -= len(data)
                yield data

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await self.line(300)
            match = _CHUNK.fullmatch(line)
            if match is None:
                raise BadMessage("a chunk without a proper size")
            size = int(match[1], 16)
            if not size:
                break
            while size:
                data = await self.some(size)
                if not data:
                    raise Incomplete
                size -= len(data)
                yield data
            if await self.line(0):
                raise BadMessage("a chunk that is longer than it says")
        count = 0
        while trailer := await self.line(8192):  # trailers are read and left out
            count += 1
            if count > 32 or _HEADER.fullmatch(trailer.decode("latin-1")) is None:
                raise BadMessage("a malformed trailer")


def _headers(lines: list[str]) -> Headers:
    if len(lines) > MOST_HEADERS:
        raise BadMessage(f"more than {MOST_HEADERS} headers", 431, "head_too_large")
    found: Headers = []
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            if line[:1] in (" ", "\t"):
                raise BadMessage("a header that goes on in the next line")
            if ":" in line and line.partition(":")[0].rstrip(" \t") != line.partition(":")[0]:
                raise BadMessage("white space before a colon")
            raise BadMessage("a malformed header")
        found.append((match[1], match[2] or ""))
    return found


def _framing(headers: Headers, minor: int) -> tuple[int | None, set[str], dict[str, list[str]]]:
    """Length (``None``: not said), connection options, and the headers by name."""
    by_name: dict[str, list[str]] = {}
    for name, value in headers:
        by_name.setdefault(name.lower(), []).append(value)
    for name in by_name:
        # What some servers take for the header that it resembles.
        if "_" in name and name.replace("_", "-") in ("content-length", "transfer-encoding"):
            raise BadMessage(f"{name} looks like another header")
    lengths = by_name.get("content-length", [])
    encodings = by_name.get("transfer-encoding", [])
    length: int | None = None
    if encodings:
        if lengths:
            raise BadMessage("both Transfer-Encoding and Content-Length")
        if minor == 0:
            raise BadMessage("Transfer-Encoding in HTTP/1.0")
        if len(encodings) > 1 or encodings[0].lower() != "chunked":
            raise BadMessage("a Transfer-Encoding that is not just chunked", 501)
        length = -1
    elif lengths:
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
            raise BadMessage("Content-Length twice, or not a number")
        length = int(lengths[0])
    options = {
        option.strip(" \t").lower()
        for name in ("connection", "proxy-connection")
        for value in by_name.get(name, [])
        for option in value.split(",")
    }
    if options & _FIRM:
        raise BadMessage("Connection names a header that belongs to the request")
    return length, options, by_name


def parse_request(lines: list[str]) -> RequestHead:
    """A request from the lines of its head.

    Raises:
        BadMessage: it is malformed or ambiguous.
    """
    match = _REQUEST.fullmatch(lines[0])
    if match is None:
        raise BadMessage("a malformed request line")
    method, target, minor = match[1], match[2], int(match[3])
    if len(target) > MOST_TARGET:
        raise BadMessage("the URL is too long", 414)
    if method != method.upper():
        raise BadMessage("a method in small letters", 501)
    headers = _headers(lines[1:])
    length, options, by_name = _framing(headers, minor)
    hosts = by_name.get("host", [])
    if len(hosts) > 1 or (not hosts and minor == 1):
        raise BadMessage("Host is missing, or there twice")
    upgrade = ""
    if "upgrade" in options and by_name.get("upgrade"):
        upgrade = ",".join(by_name["upgrade"]).strip().lower()
    expects = [value.lower() for value in by_name.get("expect", [])]
    if expects and expects != ["100-continue"]:
        raise BadMessage("an Expect that is not 100-continue", 417)
    keep = "close" not in options if minor else "keep-alive" in options
    return RequestHead(
        method,
        target,
        minor,
        [(name, value) for name, value in headers if _kept(name, options)],
        length or 0,
        hosts[0] if hosts else None,
        keep,
        upgrade,
        bool(expects) and minor == 1,
    )


def _kept(name: str, options: set[str]) -> bool:
    lower = name.lower()
    return lower not in HOP and lower not in options and lower not in ("expect", "content-length", "host")


def parse_response(lines: list[str], method: str) -> ResponseHead:
    """A response from the lines of its head, to a request of that method.

    Raises:
        BadMessage: it is malformed or ambiguous.
    """
    match = _STATUS.fullmatch(lines[0])
    if match is None:
        raise BadMessage("a malformed status line", 502)
    minor, status = int(match[1]), int(match[2])
    headers = _headers(lines[1:])
    said, options, _ = _framing(headers, minor)
    bodiless = method == "HEAD" or status < 200 or status in (204, 304)
    length = 0 if bodiless else -2 if said is None else said
    keep = ("close" not in options if minor else "keep-alive" in options) and length != -2
    kept = [
        (name, value)
        for name, value in headers
        if name.lower() not in HOP and name.lower() not in options and name.lower() != "content-length"
    ]
    if said is not None and said >= 0 and length == 0 and status >= 200 and status != 204:
        kept.append(("Content-Length", str(said)))  # of the body that HEAD leaves out
    return ResponseHead(status, match[3] or "", kept, length, keep, minor)


def write_request(
    method: str, target: str, host: str, headers: Headers, length: int, upgrade: str = ""
) -> bytes:
    """The head of a request to a server. ``length`` as in :class:`RequestHead`."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length == -1:
        lines.append("Transfer-Encoding: chunked")
    elif length or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {length}")
    if upgrade:
        lines += ["Connection: Upgrade", f"Upgrade: {upgrade}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def write_response(head: ResponseHead, keep: bool, minor: int = 1) -> tuple[bytes, bool, bool]:
    """The head of a response to a client; whether its body goes out in chunks; whether the connection stays.

    A body whose end only the server's hanging up tells is chunked, so that the client knows it is whole.
    """
    chunked = head.length in (-1, -2) and minor == 1
    keep = keep and (head.length >= 0 or chunked)
    lines = [f"HTTP/1.1 {head.status} {head.reason}".rstrip()]
    lines += [f"{name}: {value}" for name, value in head.headers]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    elif head.length > 0 or (
        head.length == 0
        and head.status not in (204, 304)
        and head.status >= 200
        and not any(name.lower() == "content-length" for name, _ in head.headers)
    ):
        lines.append(f"Content-Length: {head.length}")
    if not keep:
        lines.append("Connection: close")
    elif minor == 0:
        lines.append("Connection: keep-alive")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), chunked, keep


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
