"""File operations of the link protocol, by the worker itself: it is the workload's user, in the same wall."""

from __future__ import annotations

import errno
import os
import stat
import struct

from ringfence.guest import frames
from ringfence.guest.fields import Fields, Value, encode
from ringfence.runtimes.wasm.lean import suppress
from ringfence.runtimes.wasm.serving import HOST_WINDOW, Channel, Link, window_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.runtimes.wasm.worker import Worker

_PIECE = 65_536
_PARENTS, _APPEND, _NOT_ATOMIC, _NEW = 1, 2, 4, 8
_LENGTH = struct.Struct("<I")
_DEEPEST = 256


class Streaming(Channel):
    """Bytes to the host, made as it takes them."""

    streams = (1,)

    def __init__(self, link: Link, number: int, window: int, source: Iterator[bytes]) -> None:
        super().__init__(link, number, window)
        self._source = source
        self._piece = b""
        self._offset = 0

    def pump(self) -> None:
        """See the base."""
        while self.open() and not self.sent_close and self.credit[1] and not self.link.full:
            if not self._piece:
                try:
                    self._piece = next(self._source, b"")
                except OSError as error:
                    self.error(error.errno or errno.EIO, error.strerror or "")
                    return
                if not self._piece:
                    self.link.send(frames.eof_frame(self.number, 1, self._offset))
                    self.finish()
                    return
            data = self._piece[: min(self.credit[1], frames.MAX_DATA)]
            self._piece = self._piece[len(data) :]
            self.credit[1] -= len(data)
            self.link.send(frames.data_frame(self.number, 1, self._offset, data))
            self._offset += len(data)

    def gone(self) -> None:
        """See the base."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()


class Receiving(Channel):
    """Bytes from the host into an open file; what becomes of it is said at the end."""

    takes_input = True

    def __init__(self, link: Link, number: int, descriptor: int) -> None:
        super().__init__(link, number)
        self.descriptor = descriptor

    def on_data(self, data: bytes) -> None:
        """See the base."""
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        except OSError as error:
            self.error(error.errno or errno.EIO, error.strerror or "")
            return
        self.grant(min(len(data), HOST_WINDOW - self.room))

    def on_eof(self) -> None:
        """See the base."""
        try:
            answer = self.complete()
        except OSError as error:
            self.error(error.errno or errno.EIO, error.strerror or "")
            return
        self.reply(answer)
        self.finish()

    def complete(self) -> list[tuple[int, Value | None]]:
        """Everything has come; what to answer."""
        raise NotImplementedError

    def gone(self) -> None:
        """See the base."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Write(Receiving):
    def __init__(
        self, link: Link, number: int, descriptor: int, temporary: bytes, path: bytes, new: bool
    ) -> None:
        super().__init__(link, number, descriptor)
        self._temporary = temporary
        self._path = path
        self._new = new

    def complete(self) -> list[tuple[int, Value | None]]:
        size = os.fstat(self.descriptor).st_size
        if self._temporary:
            os.fsync(self.descriptor)
            if self._new:
                os.link(self._temporary, self._path)
                os.unlink(self._temporary)
            else:
                os.rename(self._temporary, self._path)
            self._temporary = b""
        return [(1, size)]

    def gone(self) -> None:
        """See the base."""
        super().gone()
        if self._temporary:
            with suppress(OSError):
                os.unlink(self._temporary)


class _Unpack(Receiving):
    def __init__(self, link: Link, number: int, descriptor: int, folder: bytes) -> None:
        super().__init__(link, number, descriptor)
        self._folder = folder

    def complete(self) -> list[tuple[int, Value | None]]:
        from ringfence.runtimes.wasm.archives import unpack

        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return [(1, unpack(self.descriptor, self._folder))]


def _path(worker: Worker, fields: Fields, tag: int = 1) -> bytes:
    raw = fields.raw(tag)
    if not raw or b"\0" in raw:
        raise OSError(errno.EINVAL, "an impossible path")
    return os.path.join(os.fsencode(worker.config["workdir"]), raw)


def stat_fields(info: os.stat_result, path: bytes, target: bytes | None) -> list[tuple[int, Value | None]]:
    """What the protocol says about a file."""
    kind = 1 if stat.S_ISREG(info.st_mode) else 2 if stat.S_ISDIR(info.st_mode) else 0
    if stat.S_ISLNK(info.st_mode):
        kind = 3
    return [
        (1, path),
        (2, kind),
        (3, info.st_size),
        (4, stat.S_IMODE(info.st_mode)),
        (5, info.st_mtime_ns),
        (6, info.st_uid),
        (7, info.st_gid),
        (8, target),
        (9, info.st_ino),
    ]


def _described(path: bytes, shown: bytes, *, follow: bool = False) -> list[tuple[int, Value | None]]:
    info = os.stat(path, follow_symlinks=follow)
    return stat_fields(info, shown, os.readlink(path) if stat.S_ISLNK(info.st_mode) else None)


def read(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """file.read"""
    path = _path(worker, fields)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL, "it is no file")
        offset = fields.number(2, 0, most=2**63 - 1)
        left = fields.number(3, 2**63 - 1)
        channel = Streaming(link, number, window_of(fields, 8), _contents(descriptor, offset, left))
    except BaseException:
        os.close(descriptor)
        raise
    link.add(channel)
    channel.reply(stat_fields(info, fields.raw(1), None))
    channel.pump()


def _contents(descriptor: int, offset: int, left: int) -> Iterator[bytes]:
    try:
        while left > 0:
            data = os.pread(descriptor, min(left, _PIECE), offset)
            if not data:
                return
            offset += len(data)
            left -= len(data)
            yield data
    finally:
        os.close(descriptor)


def write(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """file.write"""
    path, mode = _path(worker, fields), fields.number(2, 0o644, most=0o7777) & 0o777
    flags = fields.number(3, 0)
    if flags & _PARENTS:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    if flags & _NEW and os.path.lexists(path):
        raise OSError(errno.EEXIST, "it is there")
    if os.path.isdir(path):
        raise OSError(errno.EISDIR, "it is a folder")
    base = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    temporary = b""
    if flags & _APPEND:
        descriptor = os.open(path, base | os.O_APPEND, mode)
    elif flags & _NOT_ATOMIC:
        descriptor = os.open(path, base | os.O_TRUNC | (os.O_EXCL if flags & _NEW else 0), mode)
    else:
        path = os.path.realpath(path)
        mark = f".{os.urandom(8).hex()}.part".encode()
        temporary = os.path.join(os.path.dirname(path), mark)
        descriptor = os.open(temporary, base | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    if temporary:
        os.fchmod(descriptor, mode)
    link.add(_Write(link, number, descriptor, temporary, path, bool(flags & _NEW)))


def listing(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """file.list"""
    path, depth = _path(worker, fields), fields.number(2, 1, most=_DEEPEST)
    most = fields.number(3, 2**63)
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise OSError(errno.ENOTDIR, "it is no folder")
    with os.scandir(path):
        pass
    channel = Streaming(link, number, window_of(fields, 8), _entries(path, depth, most))
    link.add(channel)
    channel.reply([])
    channel.pump()


def _entries(root: bytes, depth: int, most: int) -> Iterator[bytes]:
    waiting = [(b"", 1)]
    while waiting:
        below, level = waiting.pop()
        try:
            names = sorted(os.listdir(os.path.join(root, below)))
        except OSError:
            continue
        for name in names:
            if not most:
                return
            shown = os.path.join(below, name)
            try:
                fields = _described(os.path.join(root, shown), shown)
            except OSError:
                continue
            most -= 1
            entry = encode(fields)
            yield _LENGTH.pack(len(entry)) + entry
            if fields[1][1] == 2 and level < depth:
                waiting.append((shown, level + 1))


def status(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """file.stat"""
    follow = bool(fields.number(2, 0) & 1)
    link.answer(number, _described(_path(worker, fields), fields.raw(1), follow=follow))


def move(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """file.move"""
    source, target = _path(worker, fields), _path(worker, fields, 2)
    if fields.number(3, 0) & 1 and os.path.lexists(target):
        raise OSError(errno.EEXIST, "the target is there")
    os.rename(source, target)
    link.answer(number, [])


def remove(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """file.remove"""
    path, flags = _path(worker, fields), fields.number(2, 0)
    try:
        folder = stat.S_ISDIR(os.lstat(path).st_mode)
        if folder and flags & 1:
            import shutil

            shutil.rmtree(path)
        elif folder:
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        if not flags & 2:
            raise
    link.answer(number, [])


def mkdir(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """file.mkdir"""
    path, mode = _path(worker, fields), fields.number(2, 0o755, most=0o7777) & 0o777
    if fields.number(3, 0) & 1:
        os.makedirs(path, mode, exist_ok=True)
    else:
        os.mkdir(path, mode)
    link.answer(number, [])


def tar_in(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """tar.in: kept until it is whole, on the sandbox's own disk and out of the modules' sight."""
    path = _path(worker, fields)
    os.makedirs(path, exist_ok=True)
    descriptor = os.open("/var/tmp", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)  # noqa: S108
    link.add(_Unpack(link, number, descriptor, path))


def tar_out(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """tar.out"""
    from ringfence.runtimes.wasm.archives import pack

    path = _path(worker, fields)
    os.lstat(path)
    channel = Streaming(link, number, 262_144, pack(path, frozenset(fields.all(2))))
    link.add(channel)
    channel.reply([])
    channel.pump()
