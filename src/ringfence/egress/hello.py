"""The first message of a TLS client, read for the name it asks for. No I/O."""

from __future__ import annotations

from ringfence.model.values import dataclass

MOST_HELLO = 64 * 1024
_SNI, _ALPN, _ECH, _QUIC = 0, 16, 0xFE0D, 57


class NotTls(ValueError):
    """The bytes are no ClientHello. The message says why."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a ClientHello says in the clear. ``name``: lower case, ``None`` without SNI."""

    name: str | None
    alpn: tuple[str, ...]
    ech: bool  # a name is hidden, or (GREASE) looks as if one were


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) < count:
            raise NotTls("a ClientHello that ends early")
        self.at += count
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def block(self, size: int) -> _Cursor:
        return _Cursor(self.take(self.number(size)))

    @property
    def left(self) -> int:
        return len(self.data) - self.at


def parse(data: bytes) -> Hello | None:
    """The ClientHello that a stream begins with; ``None``: more bytes are needed.

    Raises:
        NotTls: it does not begin with one.
    """
    message = bytearray()
    at = 0
    while True:
        if len(data) >= at + 2 and (data[at] != 22 or data[at + 1] != 3):
            raise NotTls("no TLS handshake")
        if len(data) < at + 5:
            return None
        size = int.from_bytes(data[at + 3 : at + 5])
        if not 0 < size <= 16640:
            raise NotTls("a TLS record of an impossible size")
        message += data[at + 5 : at + 5 + size]
        if message and message[0] != 1:
            raise NotTls("a TLS handshake that does not begin with ClientHello")
        whole = 4 + int.from_bytes(message[1:4]) if len(message) >= 4 else 4
        if whole > MOST_HELLO:
            raise NotTls("a ClientHello that is too large")
        if len(message) >= whole and len(message) >= 4:
            return _hello(_Cursor(bytes(message[4:whole])))
        if len(data) < at + 5 + size:
            return None
        at += 5 + size


def _hello(cursor: _Cursor) -> Hello:
    cursor.take(34)  # version, random
    cursor.block(1)  # session
    cursor.block(2)  # cipher suites
    cursor.block(1)  # compression
    name: str | None = None
    alpn: list[str] = []
    ech = False
    seen: set[int] = set()
    if not cursor.left:
        return Hello(None, (), False)
    extensions = cursor.block(2)
    if cursor.left:
        raise NotTls("bytes after the ClientHello's extensions")
    while extensions.left:
        kind = extensions.number(2)
        body = extensions.block(2)
        if kind in seen:
            raise NotTls("an extension that is there twice")
        seen.add(kind)
        if kind == _SNI:
            name = _server_name(body)
        elif kind == _ALPN:
            protocols = body.block(2)
            while protocols.left:
                alpn.append(protocols.block(1).data.decode("latin-1"))
        elif kind == _ECH:
            ech = True
    return Hello(name, tuple(alpn), ech)


def _server_name(body: _Cursor) -> str:
    names = body.block(2)
    kind = names.number(1)
    name = names.block(2).data
    if kind or names.left or body.left:
        raise NotTls("a server name list with other than one host name")
    if not name.isascii() or not name or any(byte <= 32 or byte == 127 for byte in name):
        raise NotTls("a server name that is none")
    return name.decode("ascii").lower()


def alert(description: int = 49) -> bytes:
    """A fatal TLS alert in the clear; 49: access denied, 80: internal error, 112: unrecognized name."""
    return bytes((21, 3, 3, 0, 2, 2, description))
