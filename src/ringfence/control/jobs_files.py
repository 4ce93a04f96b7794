"""What jobs bring and leave: inputs, logs and artifacts, in one folder of the state root.

One folder a job, files by the digest of their content, so no name from a sandbox ever becomes a path here.
All of it is removed with its job.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any, Final

from ringfence.model.errors import Conflict, NotFound, QuotaExceeded

_JOB: Final = re.compile(r"job-[0-9a-hjkmnp-tv-z]{20}\Z", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
HEAD: Final = struct.Struct(">BQI")  # stream, offset, length
_CHUNK: Final = 256 * 1024
_SETTLED: Final = 600.0  # seconds from what a job brings to its row
STDOUT, STDERR = 1, 2


class JobFiles:
    """The folder. ``home`` names it among those of a service's machines: a job runs where its files are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = folder / "home"
        if not name.exists():
            part = folder / f"home.{secrets.token_hex(4)}"
            part.write_text(secrets.token_hex(12))
            try:
                os.link(part, name)  # of several processes that start, one names it
            except FileExistsError:
                pass
            finally:
                part.unlink()
        self.home = name.read_text()

    def folder(self, job: str) -> Path:
        """The folder of a job. Raises NotFound: an impossible id."""
        if not _JOB.match(job):
            raise NotFound(f"no job {job[:64]!r}")
        return self._folder / job

    def put(self, job: str, data: bytes) -> str:
        """Keep an input; its digest."""
        digest = hashlib.sha256(data).hexdigest()
        folder = self.folder(job)
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / digest).write_bytes(data)
        return digest

    async def keep(self, job: str, pieces: AsyncIterator[bytes], most: int) -> tuple[str, int]:
        """Keep an artifact of at most ``most`` bytes: its digest and size.

        Raises:
            QuotaExceeded: there is more. What was written is gone then.
        """
        folder = self.folder(job)
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f"part.{secrets.token_hex(8)}"
        digest, size = hashlib.sha256(), 0
        try:
            with part.open("xb") as file:
                async for piece in pieces:
                    size += len(piece)
                    if size > most:
                        raise QuotaExceeded("the outputs are larger than a job may keep", most=most)
                    digest.update(piece)
                    await asyncio.to_thread(file.write, piece)
            name = digest.hexdigest()
            part.rename(folder / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return name, size

    def path(self, job: str, digest: str) -> Path:
        """Where content is. Raises NotFound."""
        place = self.folder(job) / digest
        if not _DIGEST.match(digest) or not place.is_file():
            raise NotFound(f"job {job} keeps no such file here")
        return place

    async def read(self, job: str, digest: str) -> AsyncIterator[bytes]:
        """Content, piece by piece."""
        with self.path(job, digest).open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _CHUNK):
                yield piece

    def facts(self, path: Path) -> tuple[str, int]:
        """Digest and size of a file. Content is not read for that: it is named by its digest."""
        if _DIGEST.match(path.name):
            return path.name, path.stat().st_size
        digest = hashlib.sha256()
        size = 0
        with path.open("rb") as file:
            while piece := file.read(_CHUNK):
                digest.update(piece)
                size += len(piece)
        return digest.hexdigest(), size

    def drop(self, job: str, digests: set[str]) -> None:
        """Remove some content. Idempotent."""
        for digest in digests:
            if _DIGEST.match(digest):
                (self.folder(job) / digest).unlink(missing_ok=True)

    def remove(self, job: str) -> None:
        """Remove all that a job has here. Idempotent."""
        shutil.rmtree(self.folder(job), ignore_errors=True)

    def jobs(self) -> list[str]:
        """Those that have something here."""
        return [name for name in os.listdir(self._folder) if _JOB.match(name)]

    def settled(self) -> Iterator[str]:
        """Those that have had it for so long that they must be in the store."""
        for name in self.jobs():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - (self._folder / name).stat().st_mtime > _SETTLED:
                    yield name

    # -- logs

    def log(self, job: str, attempt: int) -> Path:
        """The log of an attempt: records of stream, offset, length and bytes."""
        return self.folder(job) / f"{attempt}.log"


class Log:
    """A log that is being written, by one process at a time; opening it finds where it ends, whole records
    only.

    Raises:
        Conflict: another process writes it.
    """

    def __init__(self, path: Path, most: int) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._file: IO[bytes] = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise Conflict(f"another process writes {path.name} of {path.parent.name}") from None
        self.offsets = {STDOUT: 0, STDERR: 0}
        self.most = most
        self.size = 0
        end = 0
        for stream, offset, length, after in _records(path):
            self.offsets[stream] = max(self.offsets.get(stream, 0), offset + length)
            self.size += length
            end = after
        self._file.truncate(end)

    def add(self, stream: int, offset: int, data: bytes) -> None:
        """Append output; beyond ``most`` bytes of an attempt it is only counted."""
        room = max(0, self.most - self.size)
        kept = data[:room]
        self.offsets[stream] = offset + len(data)
        if kept:
            self._file.write(HEAD.pack(stream, offset, len(kept)) + kept)
            self._file.flush()
            self.size += len(kept)

    def close(self) -> None:
        """Done."""
        if not self._file.closed:
            with self._file:
                self._file.flush()
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a child that is being forked and has a copy


def _records(path: Path) -> Iterator[tuple[int, int, int, int]]:
    """Stream, offset, length of each whole record, and where it ends in the file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        total, at = os.fstat(file.fileno()).st_size, 0
        while len(head := file.read(HEAD.size)) == HEAD.size:
            stream, offset, length = HEAD.unpack(head)
            at += HEAD.size + length
            if stream not in (STDOUT, STDERR) or at > total:
                return
            file.seek(length, os.SEEK_CUR)
            yield stream, offset, length, at


class LogReader:
    """Reads a log that may still grow."""

    def __init__(self, path: Path, streams: tuple[int, ...]) -> None:
        self._path = path
        self._streams = streams
        self._at = 0

    def more(self) -> list[bytes]:
        """What has come since the last call, at most some MiB."""
        found: list[bytes] = []
        taken = 0
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return found
        with file:
            file.seek(self._at)
            while taken < 16 * _CHUNK and len(head := file.read(HEAD.size)) == HEAD.size:
                stream, _, length = HEAD.unpack(head)
                data = file.read(length)
                if len(data) < length:
                    break
                self._at += HEAD.size + length
                taken += length
                if stream in self._streams:
                    found.append(data)
        return found


def usage(path: Path) -> int:
    """Bytes of a folder's files."""
    total = 0
    for entry in os.scandir(path) if path.is_dir() else ():
        total += entry.stat(follow_symlinks=False).st_size
    return total


__all__: list[Any] = ["STDERR", "STDOUT", "JobFiles", "Log", "LogReader", "usage"]
