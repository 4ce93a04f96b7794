"""Fields: the tag, length, value lists inside frames, and text that hostile code wrote."""

from __future__ import annotations

import struct

from ringfence.model.errors import ProtocolViolation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

Value = int | str | bytes

_HEAD = struct.Struct("<BI")
_U64 = struct.Struct("<Q")
# Control characters (they would drive the terminal of whoever reads a message), and the marks that
# turn the direction of text round or hide it.
_HIDDEN = {*range(32), *range(127, 160), *range(0x200B, 0x2010), *range(0x2028, 0x202F)}
_HIDDEN |= {*range(0x2060, 0x2070), 0xFEFF, 0x061C}
_CLEAN = dict.fromkeys(_HIDDEN, "\N{REPLACEMENT CHARACTER}")


def encode(fields: Iterable[tuple[int, Value | None]]) -> bytes:
    """Fields in order; a value of ``None`` is left out. Numbers are u64 (signed: two's complement)."""
    parts = bytearray()
    for tag, value in fields:
        if value is None:
            continue
        if isinstance(value, int):
            value = _U64.pack(value & 0xFFFF_FFFF_FFFF_FFFF)
        elif isinstance(value, str):
            value = value.encode("utf-8", "surrogateescape")
        parts += _HEAD.pack(tag, len(value))
        parts += value
    return bytes(parts)


def decode(payload: bytes | memoryview) -> Fields:
    """Fields of a payload.

    Raises:
        ProtocolViolation: a length past the end.
    """
    data = bytes(payload)
    end = len(data)
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < end:
        if end - at < _HEAD.size:
            raise ProtocolViolation("a field that is cut off")
        tag, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if length > end - at:
            raise ProtocolViolation("a field whose length is past the end of its frame")
        found.setdefault(tag, []).append(data[at : at + length])
        at += length
    return Fields(found)


class Fields:
    """Decoded fields. Every accessor checks the form of what it returns.

    Raises (all accessors):
        ProtocolViolation: the field is missing and has no default, or has the wrong form.
    """

    __slots__ = ("_found",)

    def __init__(self, found: dict[int, list[bytes]]) -> None:
        self._found = found

    def __contains__(self, tag: int) -> bool:
        return tag in self._found

    def all(self, tag: int) -> list[bytes]:
        """Every value of a repeated tag, in order."""
        return self._found.get(tag, [])

    def raw(self, tag: int, default: bytes | None = None) -> bytes:
        """The bytes of a field."""
        values = self._found.get(tag)
        if values is None:
            if default is None:
                raise ProtocolViolation(f"field {tag} is missing")
            return default
        return values[0]

    def number(self, tag: int, default: int | None = None, *, most: int = 2**64 - 1) -> int:
        """An unsigned number, at most ``most``."""
        values = self._found.get(tag)
        if values is None:
            if default is None:
                raise ProtocolViolation(f"field {tag} is missing")
            return default
        if len(values[0]) != _U64.size:
            raise ProtocolViolation(f"field {tag} is not a number")
        value: int = _U64.unpack(values[0])[0]
        if value > most:
            raise ProtocolViolation(f"field {tag} is larger than {most}")
        return value

    def signed(self, tag: int, default: int = 0) -> int:
        """A signed number."""
        value = self.number(tag, default & 0xFFFF_FFFF_FFFF_FFFF)
        return value - 2**64 if value >= 2**63 else value

    def text(self, tag: int, default: str | None = None, *, limit: int = 512) -> str:
        """Text made harmless, see :func:`clean`."""
        return clean(self.raw(tag, None if default is None else default.encode()), limit)


def clean(raw: bytes, limit: int = 512) -> str:
    """Text from the guest, fit for a message or a terminal: bounded, and without control characters."""
    text = raw[: limit * 4].decode("utf-8", "replace").translate(_CLEAN)
    return text if len(text) <= limit else text[: limit - 1] + "…"
