"""Files of a sandbox: small ones as values, large ones as streams, whole folders as archives.

Uploads carry their SHA-256, which the service compares before the file appears; downloads are counted, go on
from where they were when the connection breaks, and end in an error rather than short.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from builtins import list as List
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, BinaryIO

from ringfence.model.errors import InvalidRequest, LinkLost
from ringfence.sdk import archives, sse, wire
from ringfence.sdk.failures import ServiceUnreachable
from ringfence.sdk.results import FileInfo, WatchEvent
from ringfence.sdk.transport import CHUNK, Retry, Transport, closing

_MOST = 256 * 1024 * 1024  # bytes that `read` holds in memory


Local = str | os.PathLike[str]


class AsyncFiles:
    """The files of one sandbox. Paths are absolute, or below its working folder.

    Every call may raise ``GuestRefused`` with the errno that the same call inside would have given:
    ``error.errno == errno.ENOENT`` and so on.

    >>> async with AsyncSandbox.create() as sandbox:
    ...     _ = await sandbox.files.write("notes/today.txt", "hello")
    ...     print(await sandbox.files.read_text("notes/today.txt"))
    ...     print([info.path async for info in sandbox.files.walk("notes")])
    hello
    ['today.txt']
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self._transport = transport
        self._path = f"{path}/files"

    # -- contents

    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file, or ``length`` of them from ``offset`` on.

        Raises:
            InvalidRequest: it is larger than 256 MiB: :meth:`stream` or :meth:`download` it.
        """
        data = bytearray()
        async with closing(self.stream(path, offset=offset, length=length)) as pieces:
            async for piece in pieces:
                data += piece
                if len(data) > _MOST:
                    raise InvalidRequest(
                        f"{path} has more than {_MOST} bytes", hint="use files.stream or files.download"
                    )
        return bytes(data)

    async def read_text(self, path: str, *, errors: str = "strict") -> str:
        """The text of a file in UTF-8."""
        return (await self.read(path)).decode("utf-8", errors)

    async def stream(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes of a file, piece by piece; over lost connections, as long as it is the same file.

        Raises:
            LinkLost: the file was changed while it was read.
        """
        async with closing(self._pieces(path, offset, length)) as pieces:
            async for piece in pieces:
                yield piece

    async def _pieces(
        self, path: str, offset: int, length: int | None, told: dict[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """As :meth:`stream`; ``told``: is given the file's ETag, and the service asked to know its digest."""
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest("offset and length are not negative")
        if length == 0:
            return
        at, end, tag = offset, None if length is None else offset + length, ""
        retry = Retry(self._transport.settings.retry_for)
        while True:
            headers = {"accept-encoding": "identity"}
            if told is not None and not tag:
                headers["want-repr-digest"] = "sha-256=1"
            if at or end is not None:
                headers["range"] = f"bytes={at}-{'' if end is None else end - 1}"
            try:
                async with self._transport.stream(
                    "GET", f"{self._path}/content", params={"path": path}, headers=headers
                ) as response:
                    found = response.headers.get("etag", "")
                    if tag and found != tag:
                        raise LinkLost(f"{path} was changed while it was read", hint="read it again")
                    tag = found
                    if told is not None:
                        told["etag"] = tag
                    async for piece in response.aiter_raw(CHUNK):
                        at += len(piece)
                        retry = Retry(self._transport.settings.retry_for)
                        yield piece
                    return
            except ServiceUnreachable:
                if (not tag and at > offset) or not retry.allows():
                    raise
                await retry.pause()

    async def write(
        self,
        path: str,
        data: bytes | str | AsyncIterable[bytes],
        *,
        mode: int = 0o644,
        parents: bool = True,
        append: bool = False,
        exclusive: bool = False,
    ) -> FileInfo:
        """Write a file; it appears whole or not at all (but with ``append``).

        Args:
            path: where.
            data: text, bytes, or what yields bytes.
            mode: permission bits of a new file.
            parents: make missing folders. ``append``: to its end. ``exclusive``: fail if there is one.
        """
        params = {
            "path": path, "mode": f"{mode:03o}", "parents": parents, "append": append or None,
            "exclusive": exclusive or None,
        }  # fmt: skip
        headers = {"content-type": "application/octet-stream"}
        content: bytes | AsyncIterable[bytes]
        if isinstance(data, str | bytes | bytearray | memoryview):
            content = data.encode() if isinstance(data, str) else bytes(data)
            headers["content-digest"] = _digest(hashlib.sha256(content).digest())
        else:
            content = data
        value = await self._transport.call(
            "PUT", f"{self._path}/content", params=params, content=content, headers=headers,
            timeout=3600, once=append or exclusive,
        )  # fmt: skip
        return FileInfo(path=str(value["path"]), type="file", size=int(value["size"]), mode=mode)

    async def upload(self, local: Local, path: str, *, parents: bool = True) -> FileInfo:
        """Copy a file of this machine in, whatever its size; its digest is compared on arrival.

        >>> import tempfile
        >>> async with AsyncSandbox.create() as sandbox:
        ...     with tempfile.NamedTemporaryFile() as file:
        ...         _ = file.write(b"a,b")
        ...         file.flush()
        ...         print((await sandbox.files.upload(file.name, "data.csv")).size)
        3
        """
        mode = os.stat(local).st_mode & 0o777 | 0o200
        digest, size = await asyncio.to_thread(_hash, local)
        headers = {
            "content-digest": _digest(digest), "content-length": str(size),
            "content-type": "application/octet-stream",
        }  # fmt: skip
        params = {"path": path, "mode": f"{mode:03o}", "parents": parents}
        retry = Retry(self._transport.settings.retry_for)
        while True:
            try:
                value = await self._transport.call(
                    "PUT", f"{self._path}/content", params=params, content=_contents(local), headers=headers,
                    timeout=3600,
                )  # fmt: skip
                return FileInfo(path=str(value["path"]), type="file", size=int(value["size"]), mode=mode)
            except ServiceUnreachable:
                if not retry.allows():
                    raise
                await retry.pause()  # a file that is written again is the same file

    async def download(self, path: str, local: Local) -> int:
        """Copy a file out, whatever its size; it appears whole or not at all, and with the SHA-256 that the
        sandbox says it has. Returns its size.

        Raises:
            LinkLost: the file was changed while it was read, or damaged on the way.
        """
        place = os.fspath(local)
        temporary = f"{place}.{os.getpid()}.part"
        size, found, told = 0, hashlib.sha256(), dict[str, str]()
        with open(temporary, "xb") as file:
            try:
                async with closing(self._pieces(path, 0, None, told)) as pieces:
                    async for piece in pieces:
                        size += len(piece)
                        await asyncio.to_thread(_keep, file, found, piece)
                file.flush()
                await self._compare(path, told.get("etag", ""), found.hexdigest())
                os.replace(temporary, place)
            except BaseException:
                os.unlink(temporary)
                raise
        return size

    async def _compare(self, path: str, tag: str, found: str) -> None:
        """Raise LinkLost if what was read is not what was sent. What has changed since can't be compared."""
        value = await self._transport.call(
            "GET", f"{self._path}/digest", params={"path": path}, headers={"if-match": tag}
        )
        if value.get("etag") == tag != "" and value["sha256"] != found:
            raise LinkLost(
                f"{path} is not what its digest says: changed while it was read, or damaged on the way",
                hint="read it again",
            )

    async def digest(self, path: str) -> str:
        """SHA-256 of a file, in hexadecimal."""
        return str(
            (await self._transport.call("GET", f"{self._path}/digest", params={"path": path}))["sha256"]
        )

    # -- names

    async def list(self, path: str = ".", *, depth: int = 1) -> List[FileInfo]:
        """What is in a folder, ``depth`` levels deep; links are not followed."""
        value = await self._transport.call(
            "GET", self._path, params={"path": path, "depth": depth, "limit": 100_000}
        )
        return [wire.file(each) for each in value["items"]]

    async def walk(self, path: str = ".") -> AsyncIterator[FileInfo]:
        """Everything below a folder."""
        for info in await self.list(path, depth=64):
            yield info

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What a path is; of a symlink itself with ``follow=False``."""
        params = {"path": path, "follow": follow}
        return wire.file(await self._transport.call("GET", f"{self._path}/stat", params=params))

    async def exists(self, path: str) -> bool:
        """Whether there is something of this name."""
        import errno

        from ringfence.model.errors import GuestRefused

        try:
            await self.stat(path, follow=False)
        except GuestRefused as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise
        return True

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> None:
        """Make a folder; with ``parents`` also those above, and one that is there is fine."""
        body = {"path": path, "mode": f"{mode:03o}", "parents": parents}
        await self._transport.call("POST", f"{self._path}/mkdir", json=body, safe=parents)

    async def move(self, source: str, target: str, *, exclusive: bool = False) -> None:
        """Rename; ``exclusive``: fail instead of replacing."""
        body = {"source": source, "target": target, "exclusive": exclusive}
        await self._transport.call("POST", f"{self._path}/move", json=body)

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Delete a file, or a folder (with ``recursive`` and all that is in it)."""
        params = {"path": path, "recursive": recursive, "missing_ok": missing_ok}
        await self._transport.call("DELETE", self._path, params=params)

    # -- folders

    async def upload_folder(self, local: Local, path: str) -> int:
        """Copy a folder's contents into a folder inside (made if missing); returns the number of entries."""
        return await self.unpack(archives.pack(local), path)

    async def download_folder(self, path: str, local: Local) -> int:
        """Copy a folder out into one that does not exist yet, or is empty; returns the number of files.

        What comes out was written by hostile code: links, devices and names that would lead out of the
        folder are left out, owners and set-uid bits are dropped.
        """
        return await archives.unpack(self.archive(path), local)

    async def archive(self, path: str) -> AsyncIterator[bytes]:
        """A file or folder as a tar, piece by piece. Hostile bytes: unpack them with care."""
        async with self._transport.stream("GET", f"{self._path}/archive", params={"path": path}) as response:
            async for piece in response.aiter_raw(CHUNK):
                yield piece

    async def unpack(self, tar: bytes | AsyncIterable[bytes], path: str) -> int:
        """Unpack a tar into a folder inside; returns the number of its entries."""
        value = await self._transport.call(
            "PUT", f"{self._path}/archive", params={"path": path}, content=tar,
            headers={"content-type": "application/x-tar"}, timeout=3600,
        )  # fmt: skip
        return int(value["entries"])

    # -- others

    async def watch(self, path: str = ".", *, recursive: bool = False) -> AsyncIterator[WatchEvent]:
        """Changes below a folder as they happen, until the iteration is left. The first event is
        ``watching``: from then on nothing is missed.
        """
        params = {"path": path, "recursive": recursive}
        first = True
        async with closing(sse.events(self._transport, f"{self._path}/watch", params)) as events:
            async for name, value in events:
                if name == "watching":
                    # Once more: the connection was lost, and what happened meanwhile is not known.
                    yield WatchEvent("", "watching" if first else "overflow", directory=True)
                    first = False
                else:
                    yield wire.event(value)

    async def sign(self, path: str, *, method: str = "GET", seconds: int = 3600) -> str:
        """A URL that reads (``GET``) or writes (``PUT``) this one file without a key, for a while."""
        body = {"path": path, "method": method, "seconds": seconds}
        return str((await self._transport.call("POST", f"{self._path}/sign", json=body, safe=True))["url"])


def _digest(raw: bytes) -> str:
    return f"sha-256=:{base64.b64encode(raw).decode()}:"


def _keep(file: BinaryIO, found: Any, piece: bytes) -> None:
    found.update(piece)
    file.write(piece)


def _hash(path: Local) -> tuple[bytes, int]:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256")
        return found.digest(), file.tell()


async def _contents(path: Local) -> AsyncIterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while data := await asyncio.to_thread(file.read, CHUNK):
            yield data
