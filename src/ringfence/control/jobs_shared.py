"""What jobs bring and leave, in the store too: where machines share one, each of them has all of it.

A file is rows of one kind, a part each, under the job's id and the file's digest. Which files a job has
there is in the job's own row (``shared``: digest → size) before the first part is written, so whoever forgets
the job removes them all, also those of a process that died in between.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from ringfence.control.jobs_files import HEAD, STDERR, STDOUT
from ringfence.model.errors import Conflict, NotFound, StoreUnavailable
from ringfence.store.contract import Put, Remove, Row, Store

KIND: Final = "job-part"
PART: Final = 192 * 1024  # bytes of a file a row
AT_ONCE: Final = 500  # parts that one transaction removes


class SharedFiles:
    """Files of jobs in a store that several machines share."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, row: Row, digest: str, path: Path) -> None:
        """Copy a file of a job there; what is there already stays.

        Raises:
            FileNotFoundError.
        """
        with path.open("rb") as file:
            number = 0
            while piece := await asyncio.to_thread(file.read, PART):
                part = Row(
                    KIND, _id(row.id, digest, number), row.project, key=row.id,
                    document={"data": base64.b64encode(piece).decode()},
                )  # fmt: skip
                number += 1
                try:
                    await self._store.commit(Put(part))
                except Conflict:  # somebody who died had come so far, with the same bytes
                    continue

    async def read(self, job: str, digest: str, size: int) -> AsyncIterator[bytes]:
        """A whole file, piece by piece.

        Raises:
            NotFound: a part is not there. StoreUnavailable: it is damaged.
        """
        found = hashlib.sha256()
        for number in range(_parts(size)):
            row = await self._store.get(KIND, _id(job, digest, number))
            piece = base64.b64decode(str(row.document["data"]))
            found.update(piece)
            # Compared before its last piece is given: what is not whole is never ended well.
            if number == _parts(size) - 1 and found.hexdigest() != digest:
                raise StoreUnavailable(f"what job {job} left is damaged in the store")
            yield piece

    async def opened(self, job: str, digest: str, size: int) -> AsyncIterator[bytes]:
        """As :meth:`read`, when it is known that its end is there.

        Raises:
            NotFound.
        """
        if size:
            await self._store.get(KIND, _id(job, digest, _parts(size) - 1))
        return self.read(job, digest, size)

    async def drop(self, job: str, files: Mapping[str, int]) -> None:
        """Remove files of a job. Idempotent."""
        changes = list(removed(job, files))
        for at in range(0, len(changes), AT_ONCE):
            await self._store.commit(*changes[at : at + AT_ONCE])


def removed(job: str, files: Mapping[str, int]) -> Iterator[Remove]:
    """The removal of all parts of files (digest → size)."""
    for digest, size in files.items():
        for number in range(_parts(size)):
            yield Remove(KIND, _id(job, digest, number))


async def records(pieces: AsyncIterator[bytes], streams: Iterable[int]) -> AsyncIterator[bytes]:
    """What a log (the file of :class:`~ringfence.control.jobs_files.Log`) has of some streams."""
    held = bytearray()
    async for piece in pieces:
        held += piece
        at = 0
        while len(held) - at >= HEAD.size:
            stream, _, length = HEAD.unpack_from(held, at)
            if stream not in (STDOUT, STDERR) or len(held) - at < HEAD.size + length:
                break
            if stream in streams:
                yield bytes(held[at + HEAD.size : at + HEAD.size + length])
            at += HEAD.size + length
        del held[:at]


def shared_of(row: Row) -> dict[str, int]:
    """The files that a job has in the store: digest → size."""
    return {str(digest): int(size) for digest, size in dict(row.document.get("shared", {})).items()}


def missing(job: str) -> NotFound:
    """The error for what only another machine has."""
    return NotFound(
        f"what job {job} left is on another machine of the service", hint="ask again when it has ended"
    )


def _parts(size: int) -> int:
    return -(-size // PART)


def _id(job: str, digest: str, number: int) -> str:
    return f"{job}.{digest}.{number:06d}"
