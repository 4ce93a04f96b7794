"""The parts of an image in a folder (OCI layout) or in an archive (``docker save``, OCI archive)."""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import Path
from typing import BinaryIO

from ringfence.images.contract import ImportLimits
from ringfence.images.streams import Uncompressed
from ringfence.images.tarstream import Readable, TarReader
from ringfence.model.errors import InvalidRequest

_MOST_MEMBERS = 100_000
_MOST_LINKS = 8
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class FolderBlobs:
    """A folder in OCI's layout. Its files must be files: what is a link or a pipe is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[BinaryIO] = []

    def open(self, name: str) -> Readable:
        """See :class:`ringfence.images.manifests.Blobs`."""
        try:
            file = os.open(self._folder / name, _READ)
        except (OSError, ValueError):
            raise _missing(name) from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise _missing(name)
        stream = os.fdopen(file, "rb")
        self._opened.append(stream)
        return stream

    def has(self, name: str) -> bool:
        """See :class:`ringfence.images.manifests.Blobs`."""
        try:
            return stat.S_ISREG(os.lstat(self._folder / name).st_mode)
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """Close what was opened."""
        for stream in self._opened:
            stream.close()


class ArchiveBlobs:
    """An image in an uncompressed archive: its members by name, read where they lie.

    Raises (from the constructor):
        InvalidRequest: not a tar, or one with too many members.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._members: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        file.seek(0)
        for count, entry in enumerate(TarReader(_Skipping(file))):
            if count > _MOST_MEMBERS:
                raise InvalidRequest(
                    f"more than {_MOST_MEMBERS} members: this is not the archive of an image"
                )
            name = posixpath.normpath(entry.name.decode("utf-8", "surrogateescape")).lstrip("/")
            if entry.kind == "file":
                self._members[name] = (entry.offset, entry.size)
            elif entry.kind in ("symlink", "hardlink"):
                # Old archives of Docker say so that two images share a layer.
                link = entry.link.decode("utf-8", "surrogateescape")
                base = posixpath.dirname(name) if entry.kind == "symlink" else ""
                self._links[name] = posixpath.normpath(posixpath.join(base, link))

    def _find(self, name: str) -> tuple[int, int] | None:
        name = posixpath.normpath(name)
        for _ in range(_MOST_LINKS):
            if name in self._members:
                return self._members[name]
            if name not in self._links:
                return None
            name = self._links[name]
        return None

    def open(self, name: str) -> Readable:
        """See :class:`ringfence.images.manifests.Blobs`."""
        found = self._find(name)
        if found is None:
            raise _missing(name)
        return _Part(self._file, *found)

    def has(self, name: str) -> bool:
        """See :class:`ringfence.images.manifests.Blobs`."""
        return self._find(name) is not None

    def close(self) -> None:
        """Close the archive."""
        self._file.close()


class _Part:
    """Some bytes of a file, as a stream of its own."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file = file
        self._at = offset
        self._end = offset + size

    def read(self, size: int) -> bytes:
        data = os.pread(self._file.fileno(), min(size, self._end - self._at), self._at)
        self._at += len(data)
        return data


class _Skipping:
    """A file of which data that nobody wants is not read: an archive is indexed in a moment."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def skip(self, size: int) -> bool:
        return self._file.seek(size, os.SEEK_CUR) <= self._size


def _missing(name: str) -> InvalidRequest:
    return InvalidRequest(f"the image lacks {name}", hint="the copy is not whole, or it is no image at all")


def uncompressed_file(path: Path, aside: Path, limits: ImportLimits) -> BinaryIO:
    """The archive at ``path`` as a file that can be read anywhere; a compressed one is unpacked to ``aside``.

    Raises:
        InvalidRequest, HostLimit, RuntimeUnavailable: see :class:`Uncompressed`.
        OSError: it can't be read, or the disk is full.
    """
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    try:
        if file.read(2) not in (b"\x1f\x8b", b"\x28\xb5", b"\xfd7", b"BZ"):  # gzip, zstd, xz, bzip2
            return file
        file.seek(0)
        source = Uncompressed(file, limits)
        plain = open(aside, "w+b")  # noqa: SIM115
        try:
            os.unlink(aside)
            while data := source.read(1 << 18):
                plain.write(data)
            plain.flush()
        except BaseException:
            plain.close()
            raise
        finally:
            source.close()
    except BaseException:
        file.close()
        raise
    file.close()
    return plain
