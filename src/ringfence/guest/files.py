"""Files in a sandbox. Names that the guest sends are checked; contents are hostile bytes."""

from __future__ import annotations

import errno
import os
import struct
from builtins import list as List
from collections import deque
from collections.abc import AsyncIterable
from typing import NamedTuple

from ringfence.guest.channels import DEFAULT_WINDOW, Channel
from ringfence.guest.fields import Fields, Value, decode
from ringfence.guest.wire import Wire
from ringfence.model.errors import GuestRefused, InvalidRequest, ProtocolViolation

_READ, _WRITE, _LIST, _STAT, _MOVE, _REMOVE, _MKDIR, _WATCH, _TAR_IN, _TAR_OUT = range(16, 26)
_TYPES = ("other", "file", "directory", "symlink")
_KINDS = {1: "created", 2: "modified", 3: "deleted", 4: "attributes", 5: "moved"}
_CHANGE, _OVERFLOW = 2, 3
_MOST_CHANGES = 1024  # events that wait for a slow consumer; beyond, they become one overflow
_MOST_ENTRY = 16 * 1024  # bytes of one listed entry: a path and a target of 4,096 bytes each, and numbers
_MOST_PATH = 4096  # PATH_MAX
_LENGTH = struct.Struct("<I")
_READ_WINDOW = 8 * 61_440  # a multiple of what the agent reads at once: credit cuts no piece in two
_PIECE = 200_000  # bytes that are handed on at once, if so many have come

Source = bytes | bytearray | memoryview | AsyncIterable[bytes]


class FileInfo(NamedTuple):
    """A file as the guest reports it. ``type``: file, directory, symlink, other. Names that are not UTF-8
    are surrogate-escaped.
    """

    path: str
    type: str
    size: int
    mode: int
    mtime_ns: int
    uid: int
    gid: int
    target: str | None
    inode: int


class WatchEvent(NamedTuple):
    """Something changed below a watched folder. ``kind`` is created, modified, deleted, attributes, moved,
    or overflow: events were lost, look again.
    """

    path: str
    kind: str
    directory: bool


class Reading:
    """Bytes of a file or an archive, piece by piece; iterate once. Leaving early ends the transfer."""

    def __init__(
        self,
        wire: Wire,
        operation: int,
        fields: List[tuple[int, Value | None]],
        what: str,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        self._wire = wire
        self._operation = operation
        self._fields = fields
        self._what = what
        self._window = window
        self._channel: Channel | None = None
        self._done = False

    def __aiter__(self) -> Reading:
        return self

    async def open(self) -> Fields:
        """Begin, and return the guest's first answer.

        Raises:
            GuestRefused: the file can't be read.
        """
        self._channel = await self._wire.open(
            self._operation, self._fields, self._what, receives=(1,), window=self._window
        )
        return await self._channel.answer()

    async def __anext__(self) -> bytes:
        if self._done:
            raise StopAsyncIteration
        if self._channel is None:
            await self.open()
        assert self._channel is not None
        data = await self._channel.read(1, _PIECE)
        if not data:
            await self.aclose()
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        """End the transfer. Idempotent."""
        self._done = True
        if self._channel is not None:
            self._channel.close()

    def __del__(self) -> None:
        # A loop that was left by break or an exception: nobody else will say CLOSE.
        if not self._done and self._channel is not None and self._wire.failure is None:
            self._channel.close()


class Watch:
    """Changes below a folder; iterate until :meth:`close`."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._events: deque[WatchEvent] = deque()
        self._overflow = False

    def bind(self, channel: Channel, _: Fields) -> None:
        """The guest watches."""
        self._channel = channel

    def on_event(self, number: int, fields: Fields) -> None:
        """EVENT of the channel."""
        if number == _OVERFLOW or (number == _CHANGE and len(self._events) >= _MOST_CHANGES):
            self._overflow = True
        elif number == _CHANGE:
            kind = _KINDS.get(fields.number(2))
            if kind is None:
                raise ProtocolViolation("a change of unknown kind")
            self._events.append(WatchEvent(_below(fields.raw(1, b"")), kind, bool(fields.number(3, 0))))

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> WatchEvent:
        """The next change.

        Raises:
            GuestRefused: the guest gave the watch up.
            LinkLost, ProtocolViolation: the link ended.
        """
        channel = self._channel
        assert channel is not None
        while True:
            if self._events:
                return self._events.popleft()
            if self._overflow:
                self._overflow = False
                return WatchEvent("", "overflow", False)
            channel.check()
            if channel.got_close:
                raise GuestRefused(errno.ECONNRESET, channel.what)
            if channel.sent_close:
                raise StopAsyncIteration
            await channel.changed()

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._channel is not None:
            self._channel.close()

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class GuestFiles:
    """Files of one sandbox, over one link. Paths are absolute or relative to the workdir.

    Every call may raise GuestRefused with the errno that the same call inside would have given.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Reading:
        """The bytes of a file from ``offset``, at most ``length``: ``async for data in files.read(path)``."""
        fields: List[tuple[int, Value | None]] = [
            (1, _path(path)),
            (2, offset),
            (3, length),
            (8, _READ_WINDOW),
        ]
        return Reading(self._wire, _READ, fields, f"read {path}", _READ_WINDOW)

    async def read_bytes(self, path: str, limit: int = 16 * 1024 * 1024) -> bytes:
        """The whole file.

        Raises:
            GuestRefused: EFBIG, it has more than ``limit`` bytes.
        """
        # One byte more than allowed is asked for: that it comes says that the file is too big.
        reading = self.read(path, length=limit + 1)
        data = bytearray()
        try:
            async for piece in reading:
                data += piece
                if len(data) > limit:
                    raise GuestRefused(errno.EFBIG, f"read {path} (more than {limit} bytes)")
        finally:
            await reading.aclose()
        return bytes(data)

    async def write(
        self,
        path: str,
        data: Source,
        mode: int = 0o644,
        *,
        parents: bool = False,
        append: bool = False,
        atomic: bool = True,
        exclusive: bool = False,
    ) -> int:
        """Write a file; with ``atomic`` (default) it appears whole or not at all. Returns its size.

        Args:
            path: where.
            data: all of it, or what yields it.
            mode: permission bits of a new file.
            parents: make missing folders.
            append: add to the end (never atomic).
            atomic: through a temporary file beside it.
            exclusive: fail with EEXIST if there is one.
        """
        flags = parents * 1 | append * 2 | (not atomic) * 4 | exclusive * 8
        reply = await self._send(_WRITE, [(1, _path(path)), (2, mode), (3, flags)], f"write {path}", data)
        return reply.number(1, 0)

    async def list(self, path: str = ".", depth: int = 1, limit: int = 100_000) -> List[FileInfo]:
        """Everything below a folder down to ``depth`` levels, at most ``limit`` entries; links not followed.

        Raises:
            ProtocolViolation: an entry that can't be, or more than ``limit``.
        """
        reading = Reading(self._wire, _LIST, [(1, _path(path)), (2, depth), (3, limit)], f"list {path}")
        found: List[FileInfo] = []
        held = bytearray()
        try:
            async for piece in reading:
                held += piece
                at = 0
                while len(held) - at >= _LENGTH.size:
                    (length,) = _LENGTH.unpack_from(held, at)
                    if length > _MOST_ENTRY or len(found) >= limit:
                        raise ProtocolViolation("a listing with an absurd entry, or more than was asked for")
                    if len(held) - at - _LENGTH.size < length:
                        break
                    at += _LENGTH.size
                    info = decode(bytes(held[at : at + length]))
                    found.append(_info(info, _below(info.raw(1))))
                    at += length
                del held[:at]
        finally:
            await reading.aclose()
        if held:
            raise ProtocolViolation("a listing that ends within an entry")
        return found

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What a path is; of a symlink itself with ``follow=False``."""
        reply = await self._wire.request(_STAT, [(1, _path(path)), (2, int(follow))], f"stat {path}")
        return _info(reply, path)

    async def move(self, source: str, target: str, *, exclusive: bool = False) -> None:
        """Rename; ``exclusive``: EEXIST instead of replacing."""
        fields: List[tuple[int, Value | None]] = [(1, _path(source)), (2, _path(target)), (3, int(exclusive))]
        await self._wire.request(_MOVE, fields, f"move {source}")

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Delete a file, or a folder (with ``recursive`` and all that is in it)."""
        flags = recursive * 1 | missing_ok * 2
        await self._wire.request(_REMOVE, [(1, _path(path)), (2, flags)], f"remove {path}", None)

    async def mkdir(self, path: str, mode: int = 0o755, *, parents: bool = False) -> None:
        """Make a folder; ``parents``: also those above, and an existing one is fine."""
        await self._wire.request(_MKDIR, [(1, _path(path)), (2, mode), (3, int(parents))], f"mkdir {path}")

    async def watch(self, path: str = ".", *, recursive: bool = False) -> Watch:
        """Watch a folder; returns when changes are being seen."""
        watch = Watch()
        channel = await self._wire.open(
            _WATCH,
            [(1, _path(path)), (2, int(recursive))],
            f"watch {path}",
            on_event=watch.on_event,
            on_reply=watch.bind,
        )
        await channel.answer()
        return watch

    async def tar_in(self, folder: str, archive: Source) -> int:
        """Unpack a tar stream into a folder (made if missing). Returns the number of entries.

        Raises:
            GuestRefused: EINVAL, an entry that leaves the folder, or no tar.
        """
        reply = await self._send(_TAR_IN, [(1, _path(folder))], f"unpack into {folder}", archive)
        return reply.number(1, 0)

    def tar_out(self, path: str, exclude: tuple[str, ...] = ()) -> Reading:
        """A pax tar of a file or folder. Hostile bytes: unpack with ``guest.archives.extract_tar`` only."""
        fields: List[tuple[int, Value | None]] = [(1, _path(path)), *((2, _path(name)) for name in exclude)]
        return Reading(self._wire, _TAR_OUT, fields, f"pack {path}")

    async def _send(
        self, operation: int, fields: List[tuple[int, Value | None]], what: str, data: Source
    ) -> Fields:
        channel = await self._wire.open(operation, fields, what, sends=True)
        try:
            if isinstance(data, bytes | bytearray | memoryview):
                await channel.send(data)
            else:
                async for piece in data:
                    await channel.send(piece)
            channel.send_eof()
            return await channel.answer()
        finally:
            channel.close()


def _path(path: str) -> bytes:
    raw = os.fsencode(path)
    if not raw or b"\0" in raw or len(raw) > _MOST_PATH:
        raise InvalidRequest(
            f"{path[:80]!r} is not a path: empty, longer than 4096 bytes, or with a NUL byte"
        )
    return raw


def _below(raw: bytes) -> str:
    """A path from the guest that must stay below the folder that was asked for."""
    if len(raw) > _MOST_PATH or b"\0" in raw or raw.startswith(b"/") or b".." in raw.split(b"/"):
        raise ProtocolViolation("a path that is not below the folder that was asked for")
    return os.fsdecode(raw)


def _info(fields: Fields, path: str) -> FileInfo:
    target = fields.raw(8) if 8 in fields else None
    if target is not None and len(target) > _MOST_PATH:
        raise ProtocolViolation("a symlink target longer than any")
    return FileInfo(
        path,
        _TYPES[fields.number(2, most=3)],
        fields.number(3, 0),
        fields.number(4, 0) & 0o7777,
        fields.signed(5),
        fields.number(6, 0),
        fields.number(7, 0),
        None if target is None else os.fsdecode(target),
        fields.number(9, 0),
    )
