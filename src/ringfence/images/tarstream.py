"""Reading a tar stream that somebody hostile wrote: headers only, nothing is touched on the disk.

Our own parser, since what decides about names must not be generous: ustar, GNU long names and pax; base-256
numbers; every extension header is bounded before it is read. Names are bytes. What it does not know it
refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ringfence.model.errors import InvalidRequest

BLOCK = 512
MOST_LONG = 8192  # bytes of a GNU long name: PATH_MAX and padding
MOST_NAME = 64 << 10  # bytes of a name: unpacking allows fewer, an index of many has to hold them
MOST_PAX = 1 << 20  # bytes of one entry's pax records
MOST_EXTENSIONS = 8  # extension headers before one entry
MOST_ATTRIBUTES = 64
MOST_PADDING = 1 << 20  # bytes after the end mark: tar fills up its last record, 10 KiB by default
_CHUNK = 1 << 16
_KINDS = {
    b"0": "file", b"\0": "file", b"7": "file", b"1": "hardlink", b"2": "symlink", b"3": "device",
    b"4": "device", b"5": "folder", b"6": "pipe",
}  # fmt: skip
_XATTR = b"SCHILY.xattr."
_ZEROS = bytes(BLOCK)


class Readable(Protocol):
    """A stream of bytes; a short answer is not the end, an empty one is."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes."""


class Entry(NamedTuple):
    """One header. ``kind``: file, folder, symlink, hardlink, device or pipe; ``link`` is a link's target."""

    name: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime: float
    link: bytes
    attributes: tuple[tuple[bytes, bytes], ...]
    offset: int  # of its data in the uncompressed archive


class TarReader:
    """Iterate over the entries; read a file's bytes with :meth:`read` before the next one."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._left = 0  # bytes of data of the present entry
        self._padding = 0
        self.offset = 0

    def __iter__(self) -> Iterator[Entry]:
        """Entries in order.

        Raises:
            InvalidRequest: not a tar, damaged, cut off, or something in it that is refused.
        """
        while True:
            self._skip(self._left)
            # Some writers leave out the padding of the last entry, as they do with the end mark.
            self._skip(self._padding, whole=False)
            self._left = self._padding = 0
            entry = self._next()
            if entry is None:
                return
            if entry.kind == "file":
                self._left = entry.size
                self._padding = -entry.size % BLOCK
            yield entry

    def read(self, size: int) -> bytes:
        """Data of the present file; empty at its end.

        Raises:
            InvalidRequest: the archive ends before it should.
        """
        wanted = min(size, self._left)
        if not wanted:
            return b""
        data = self._stream.read(wanted)
        if not data:
            raise _cut_off()
        self._left -= len(data)
        self.offset += len(data)
        return data

    def finish(self) -> None:
        """Read on to the end of the stream: what follows the archive's end mark is padding.

        Raises:
            InvalidRequest: more than that.
        """
        left = MOST_PADDING
        while data := self._stream.read(_CHUNK):
            self.offset += len(data)
            left -= len(data)
            if left < 0:
                raise InvalidRequest(
                    f"more than {MOST_PADDING >> 20} MiB follow the end of the archive",
                    hint="an archive that was appended to another: make one of both",
                )

    def _exactly(self, size: int) -> bytes:
        parts = []
        left = size
        while left:
            data = self._stream.read(left)
            if not data:
                raise _cut_off()
            parts.append(data)
            left -= len(data)
        self.offset += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _skip(self, size: int, *, whole: bool = True) -> None:
        skip = getattr(self._stream, "skip", None)
        if skip is not None and size > _CHUNK:
            if not skip(size):
                raise _cut_off()
            self.offset += size
            return
        while size:
            data = self._stream.read(min(size, _CHUNK))
            if not data:
                if whole:
                    raise _cut_off()
                return
            size -= len(data)
            self.offset += len(data)

    def _header(self) -> bytes | None:
        """The next header block, None at the end mark or the end of the stream."""
        block = self._stream.read(BLOCK)
        if not block:
            return None  # some writers leave the end mark out
        while len(block) < BLOCK:
            more = self._stream.read(BLOCK - len(block))
            if not more:
                raise _cut_off() if self.offset else _no_tar()
            block += more
        self.offset += BLOCK
        if block == _ZEROS:
            return None
        if not _checksum_holds(block):
            raise (
                _no_tar()
                if self.offset == BLOCK
                else InvalidRequest(
                    f"the archive is damaged: no header at byte {self.offset - BLOCK}", hint="fetch it again"
                )
            )
        return block

    def _next(self) -> Entry | None:
        long_name = long_link = None
        pax: dict[bytes, bytes] = {}
        for _ in range(MOST_EXTENSIONS):
            block = self._header()
            if block is None:
                return None
            kind = block[156:157]
            size = _number(block[124:136], "size")
            if kind in (b"L", b"K"):
                text = self._extension(size, MOST_LONG).rstrip(b"\0")
                if kind == b"L":
                    long_name = text
                else:
                    long_link = text
            elif kind == b"x":
                pax |= _pax_records(self._extension(size, MOST_PAX))
            elif kind == b"g":
                self._extension(size, MOST_PAX)  # defaults for all that follows: comments, in practice
            else:
                return self._entry(block, kind, size, long_name, long_link, pax)
        raise InvalidRequest(f"more than {MOST_EXTENSIONS} extension headers for one entry")

    def _extension(self, size: int, most: int) -> bytes:
        if size > most:
            raise InvalidRequest(f"an extension header of {size} bytes: more than {most} is no honest one")
        data = self._exactly(size)
        self._skip(-size % BLOCK)
        return data

    def _entry(
        self,
        block: bytes,
        kind: bytes,
        size: int,
        long_name: bytes | None,
        long_link: bytes | None,
        pax: dict[bytes, bytes],
    ) -> Entry:
        name, link = _text(block[:100]), _text(block[157:257])
        if block[257:263] == b"ustar\0" and block[345]:
            name = _text(block[345:500]) + b"/" + name
        name = pax.get(b"path", long_name if long_name is not None else name)
        link = pax.get(b"linkpath", long_link if long_link is not None else link)
        if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in pax):
            raise InvalidRequest(
                f"{_shown(name)} is stored as a sparse file, which no image needs",
                hint="make the archive without tar's --sparse",
            )
        found = _KINDS.get(kind)
        if found is None:
            raise InvalidRequest(f"{_shown(name)}: an entry of the unknown type {kind!r}")
        if found == "file" and name.endswith(b"/"):
            found = "folder"  # as tar did before there was a type for it
        if b"size" in pax:
            size = _decimal(pax[b"size"], "size")
        for text in (name, link):
            if b"\0" in text:
                raise InvalidRequest(f"{_shown(name)}: a name with a zero byte")
            if len(text) > MOST_NAME:
                raise InvalidRequest(f"{_shown(name)}: a name of {len(text)} bytes")
        attributes = tuple(
            (key[len(_XATTR) :], value) for key, value in pax.items() if key.startswith(_XATTR)
        )
        if any(b"\0" in key for key, _ in attributes):
            raise InvalidRequest(f"{_shown(name)}: an attribute with a zero byte in its name")
        if len(attributes) > MOST_ATTRIBUTES:
            raise InvalidRequest(f"{_shown(name)} has {len(attributes)} extended attributes")
        return Entry(
            name=name,
            kind=found,
            mode=_number(block[100:108], "mode") & 0o7777,
            uid=_decimal(pax[b"uid"], "uid") if b"uid" in pax else _number(block[108:116], "uid"),
            gid=_decimal(pax[b"gid"], "gid") if b"gid" in pax else _number(block[116:124], "gid"),
            size=size if found == "file" else 0,
            mtime=_time(pax[b"mtime"]) if b"mtime" in pax else _possible(_number(block[136:148], "mtime")),
            link=link,
            attributes=attributes,
            offset=self.offset,
        )


def _checksum_holds(block: bytes) -> bool:
    try:
        told = int(block[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return told == sum(block[:148]) + 8 * 32 + sum(block[156:])


def _number(field: bytes, what: str) -> int:
    """Octal text, or GNU's base-256. Negative numbers are refused but for times, which count as 0."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40:
            value = 0 if what == "mtime" else -1
    else:
        try:
            value = int(field.strip(b" \0").split(b"\0")[0] or b"0", 8)
        except ValueError:
            value = -1
    if value < 0 or value >= 1 << 63:
        raise InvalidRequest(f"the archive is damaged: a {what} that is no number", hint="fetch it again")
    return value


def _decimal(text: bytes, what: str) -> int:
    if not text.isdigit() or len(text) > 19 or int(text) >= 1 << 63:
        raise InvalidRequest(f"the archive is damaged: a {what} that is no number", hint="fetch it again")
    return int(text)


def _time(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    return _possible(value)


def _possible(value: float) -> float:
    """A time that every file system can hold; 0 for others."""
    return float(value) if 0 <= value < 1 << 34 else 0.0


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """``length key=value\\n`` …; the length counts itself."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        if data[at] == 0:
            break  # some writers pad with zeros
        space = data.find(b" ", at, at + 20)
        text = data[at:space] if space > 0 else b""
        if not text.isdigit():
            raise InvalidRequest(
                "the archive is damaged: a pax record without a length", hint="fetch it again"
            )
        end = at + int(text)
        record = data[space + 1 : end]
        key, equals, value = record.partition(b"=")
        if end > len(data) or not equals or not record.endswith(b"\n"):
            raise InvalidRequest("the archive is damaged: a broken pax record", hint="fetch it again")
        found[key] = value[:-1]
        at = end
    return found


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _shown(name: bytes) -> str:
    text = name[:200].decode("utf-8", "backslashreplace")
    return repr(text) if not text.isprintable() else text


def _cut_off() -> InvalidRequest:
    return InvalidRequest("the archive ends in the middle: it is cut off", hint="fetch it again")


def _no_tar() -> InvalidRequest:
    return InvalidRequest(
        "this is not a tar archive", hint="see `ringfence template add --help` for the sources"
    )
