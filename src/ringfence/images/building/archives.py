"""Layers as archives: sorted, with times cut off at the epoch, so that the same content has the same digest.

Times after the epoch become the epoch; what COPY brings has it always. Owners are ids inside. Attributes are
not kept. What a layer can't hold (pipes, sockets, devices, names that begin with ``.wh.``) is left out.
"""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import stat
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator

from ringfence.images.building.context import Context, Found, changed
from ringfence.images.merged import Merged, is_opaque
from ringfence.model.errors import HostLimit, InvalidRequest, WrongState
from ringfence.model.quantities import format_size
from ringfence.model.values import dataclass

WHITEOUT, OPAQUE = b".wh.", b".wh..wh..opq"
EARLIEST = 315_619_200  # 1980-01-02, what zip can hold: the epoch where nobody gives one
MOST_ZEROS = 8 << 30  # bytes of holes that a layer may have beside its data
END = bytes(2 * tarfile.BLOCKSIZE)
_MOST_REWRITTEN = 1 << 20
_CHUNK = 1 << 18
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Stream:
    """Pieces as something that can be read, as ``TemplateStore.add_layer_from`` wants it."""

    def __init__(self, pieces: Iterable[bytes], stop: threading.Event | None = None) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")
        self._stop = stop

    def read(self, size: int) -> bytes:
        """At most that many bytes; empty at the end.

        Raises:
            WrongState: ``stop`` was set.
        """
        if self._stop is not None and self._stop.is_set():
            raise WrongState("the build was given up")
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        data, self._rest = self._rest[:size], self._rest[size:]
        return bytes(data)


# -- what a sandbox wrote


def of_upper(
    folder: str,
    *,
    epoch: int,
    limit: int,
    left_out: list[str] | None = None,
    rewrite: Callable[[bytes, bytes], bytes] | None = None,
) -> Iterator[bytes]:
    """An overlay's upper layer as an archive. The folder is the host's own copy, which nobody writes to.

    Args:
        folder: see ``ringfence.node.layers``; owners are ids inside (as a normal user all are root's).
        epoch: seconds; no time is later.
        limit: bytes of the sandbox's disk.
        left_out: gets a sentence for each thing that is not kept.
        rewrite: is given path and content of each small file of /etc, and says its content in the layer.

    Raises:
        HostLimit: holes of files would make it far larger than the disk.
    """
    yield from _Upper(epoch, limit, [] if left_out is None else left_out, rewrite).pieces(folder)


class _Upper:
    def __init__(
        self,
        epoch: int,
        limit: int,
        left_out: list[str],
        rewrite: Callable[[bytes, bytes], bytes] | None,
    ) -> None:
        self._rewrite = rewrite
        self._epoch = epoch
        self._limit = limit + MOST_ZEROS
        self._left_out = left_out
        self._size = 0
        self._owners = os.geteuid() == 0
        self._links: dict[tuple[int, int], bytes] = {}

    def pieces(self, folder: str) -> Iterator[bytes]:
        top = os.open(folder, _FOLDER)
        yield from self._folder(top, b"")
        yield END

    def _folder(self, here: int, path: bytes) -> Iterator[bytes]:
        try:
            if path:
                yield self._header(path + b"/", tarfile.DIRTYPE, os.fstat(here))
                if is_opaque(f"/proc/self/fd/{here}"):
                    yield header(path + b"/" + OPAQUE, tarfile.REGTYPE, mode=0o644, mtime=self._epoch)
            for name in sorted(os.listdir(os.fsencode(f"/proc/self/fd/{here}"))):
                info = os.stat(name, dir_fd=here, follow_symlinks=False)
                whole = path + b"/" + name if path else name
                if name.startswith(WHITEOUT):
                    self._left_out.append(f"{shown(whole)}: layers can't hold a name that begins with .wh.")
                elif stat.S_ISDIR(info.st_mode):
                    yield from self._folder(os.open(name, _FOLDER, dir_fd=here), whole)
                else:
                    yield from self._other(here, name, whole, info)
        finally:
            os.close(here)

    def _other(self, here: int, name: bytes, whole: bytes, info: os.stat_result) -> Iterator[bytes]:
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            above, _, _ = whole.rpartition(name)
            yield header(above + WHITEOUT + name, tarfile.REGTYPE, mode=0o644, mtime=self._epoch)
            return
        if stat.S_ISLNK(info.st_mode):
            yield self._header(whole, tarfile.SYMTYPE, info, link=os.readlink(name, dir_fd=here))
            return
        if not stat.S_ISREG(info.st_mode):
            self._left_out.append(f"{shown(whole)}: a pipe, socket or device")
            return
        first = self._links.setdefault((info.st_dev, info.st_ino), whole) if info.st_nlink > 1 else whole
        if first is not whole:
            yield self._header(whole, tarfile.LNKTYPE, info, link=first)
            return
        self._size += info.st_size
        if self._size > self._limit:
            raise HostLimit(
                f"with {shown(whole)} ({format_size(info.st_size)}, most of it holes) the layer is far "
                "larger than the disk of the step",
                hint="write no huge empty files",
            )
        file = os.open(name, _FILE, dir_fd=here)
        try:
            if self._rewrite is not None and whole.startswith(b"etc/") and info.st_size <= _MOST_REWRITTEN:
                data = self._rewrite(whole, os.read(file, _MOST_REWRITTEN))
                yield self._header(whole, tarfile.REGTYPE, info, size=len(data))
                yield data + bytes(-len(data) % tarfile.BLOCKSIZE)
                return
            yield self._header(whole, tarfile.REGTYPE, info, size=info.st_size)
            yield from _data(file, info.st_size, shown(whole))
        finally:
            os.close(file)

    def _header(
        self, name: bytes, kind: bytes, info: os.stat_result, *, size: int = 0, link: bytes = b""
    ) -> bytes:
        uid, gid = (info.st_uid, info.st_gid) if self._owners else (0, 0)
        mtime = min(info.st_mtime_ns // 10**9, self._epoch)
        return header(
            name, kind, mode=stat.S_IMODE(info.st_mode), uid=uid, gid=gid, mtime=mtime, size=size, link=link
        )


# -- what COPY brings


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a COPY goes: ``folder`` is the folder that is there or made, through no link."""

    path: str  # through no link, begins with a slash
    uid: int = 0
    gid: int = 0
    mode: int | None = None  # of files; None: as in the context


def of_context(
    context: Context | None,
    found: list[Found],
    inline: dict[str, bytes],
    place: Placed,
    below: Merged | None,
    *,
    epoch: int,
) -> Iterator[bytes]:
    """What a COPY found, as an archive with the folders on the way to it as they are in the template.

    ``inline``: digests of :class:`Found` without a context, and their bytes.

    Raises:
        InvalidRequest: a file has changed since it was found.
    """
    written: set[str] = set()
    folders: dict[str, str] = {"": place.path}  # of the context's folders: where each goes
    for each in found:
        above, _, last = each.name.rpartition("/")
        path = posixpath.join(folders.get(above, posixpath.join(place.path, above)), last).rstrip("/") or "/"
        existing = below.find(path) if below is not None else None
        if each.kind == "folder":
            if existing is not None and stat.S_ISLNK(existing[1].st_mode):
                assert below is not None
                path = below.resolve(path)  # a folder that is reached by a link, as /lib is
                existing = below.find(path)
            if existing is not None and not stat.S_ISDIR(existing[1].st_mode):
                raise InvalidRequest(f"{path} is a file in the template, and a folder in the context")
            folders[each.name] = path
        elif existing is not None and stat.S_ISDIR(existing[1].st_mode):
            raise InvalidRequest(
                f"{path} is a folder in the template, and no folder in the context",
                hint="end the destination with a slash to copy into it",
            )
        yield from _folders_to(path, below, written, epoch)
        name = os.fsencode(path.lstrip("/"))
        head = functools.partial(header, uid=place.uid, gid=place.gid, mtime=epoch)
        if each.kind == "folder":
            if path == "/" or path in written:
                continue
            written.add(path)
            if existing is not None:
                yield _existing(path, existing[1], epoch)  # a folder that is there stays as it is
            else:
                yield head(name + b"/", tarfile.DIRTYPE, mode=each.mode or 0o755)
        elif each.kind == "symlink":
            yield head(name, tarfile.SYMTYPE, mode=0o777, link=os.fsencode(each.link))
        else:
            mode = each.mode if place.mode is None else place.mode
            yield head(name, tarfile.REGTYPE, mode=mode, size=each.size)
            if not each.path:
                data = inline[each.digest]
                yield data + bytes(-len(data) % tarfile.BLOCKSIZE)
                continue
            assert context is not None
            file = context.open(each)
            try:
                total = hashlib.sha256()
                yield from _data(file, each.size, each.path, total.update)
            finally:
                os.close(file)
            if total.hexdigest() != each.digest:
                raise changed(each.path)
    yield END


def of_folder(path: str, below: Merged | None, *, epoch: int) -> Iterator[bytes]:
    """A new folder of root's, with those on the way to it."""
    yield from _folders_to(path, below, set(), epoch)
    yield header(os.fsencode(path.strip("/")) + b"/", tarfile.DIRTYPE, mode=0o755, mtime=epoch)
    yield END


def _folders_to(path: str, below: Merged | None, written: set[str], epoch: int) -> Iterator[bytes]:
    """The folders above a path that were not written yet; as they are in the template, or new."""
    parts = path.strip("/").split("/")[:-1]
    for count in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:count])
        if folder in written:
            continue
        written.add(folder)
        existing = below.find(folder) if below is not None else None
        if existing is not None and stat.S_ISDIR(existing[1].st_mode):
            yield _existing(folder, existing[1], epoch)
        else:
            yield header(os.fsencode(folder[1:]) + b"/", tarfile.DIRTYPE, mode=0o755, mtime=epoch)


def _existing(path: str, info: os.stat_result, epoch: int) -> bytes:
    root = os.geteuid() == 0
    return header(
        os.fsencode(path[1:]) + b"/",
        tarfile.DIRTYPE,
        mode=stat.S_IMODE(info.st_mode),
        uid=info.st_uid if root else 0,
        gid=info.st_gid if root else 0,
        mtime=min(info.st_mtime_ns // 10**9, epoch),
    )


# -- the format


def header(
    name: bytes,
    kind: bytes,
    *,
    mode: int,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 0,
    size: int = 0,
    link: bytes = b"",
) -> bytes:
    """One entry's header, with what a long name needs before it."""
    info = tarfile.TarInfo(os.fsdecode(name))
    info.type, info.mode, info.uid, info.gid = kind, mode & 0o7777, uid, gid
    info.mtime, info.size, info.linkname = max(0, mtime), size, os.fsdecode(link)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _data(file: int, size: int, path: str, each: Callable[[bytes], object] | None = None) -> Iterator[bytes]:
    """Exactly so many bytes of a file, padded."""
    left = size
    while left:
        data = os.read(file, min(_CHUNK, left))
        if not data:
            raise changed(path)
        if each is not None:
            each(data)
        left -= len(data)
        yield data
    if each is not None and os.read(file, 1):
        raise changed(path)
    if size % tarfile.BLOCKSIZE:
        yield bytes(-size % tarfile.BLOCKSIZE)


def shown(name: bytes) -> str:
    """A name for messages."""
    return ascii(os.fsdecode(name))
