"""Files of a sandbox: ranges, atomic uploads and downloads of any size with SHA-256, archives, watch, signed
URLs.

Paths come in the query, are the guest's to resolve, and mean nothing on the host.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Literal
from urllib.parse import quote

from pydantic import Field

from ringfence.api.calls import Answer, Call, Request, as_json
from ringfence.api.errors import IntegrityMismatch, RangeNotSatisfiable, body_of
from ringfence.api.routing import Routes
from ringfence.api.sse import event as sse_event
from ringfence.api.sse import events as sse_events
from ringfence.api.types import Body, Page, Path, Query, Shown
from ringfence.guest.files import FileInfo, GuestFiles, Reading
from ringfence.guest.link import GuestLink
from ringfence.model.errors import GuestRefused, InvalidRequest, RingfenceError

routes = Routes("files")
_FILES = "/v1/sandboxes/{sandbox}/files"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
_MOST_KNOWN = 1000  # digests of what was downloaded last
_MOST_SIGNED = 7 * 24 * 3600


class PathQuery(Query):
    """A path inside, absolute or relative to the working folder."""

    path: str = Field(min_length=1, max_length=4096)


class ListQuery(Query):
    """A folder, and how deep."""

    path: str = Field(".", min_length=1, max_length=4096)
    depth: int = Field(1, ge=1, le=64)
    limit: int = Field(10_000, ge=1, le=100_000)


class StatQuery(PathQuery):
    """A path; of a symlink itself with `follow=false`."""

    follow: bool = True


class WriteQuery(PathQuery):
    """Where and how to write."""

    mode: str = Field("644", pattern=r"^[0-7]{3,4}$", description="Octal permission bits of a new file.")
    parents: bool = Field(True, description="Make missing folders.")
    append: bool = False
    exclusive: bool = Field(False, description="Fail with 409 if there is one.")


class RemoveQuery(PathQuery):
    """What to remove."""

    recursive: bool = False
    missing_ok: bool = False


class ArchiveQuery(PathQuery):
    """A file or folder."""

    exclude: tuple[str, ...] = Field((), max_length=64)


class WatchQuery(Query):
    """A folder."""

    path: str = Field(".", min_length=1, max_length=4096)
    recursive: bool = False


class MakeFolder(Body):
    """A folder, please."""

    path: Path
    mode: str = Field("755", pattern=r"^[0-7]{3,4}$")
    parents: bool = True


class Move(Body):
    """Rename."""

    source: Path
    target: Path
    exclusive: bool = False


class Sign(Body):
    """A URL for one file that needs no key, please."""

    path: Path
    method: Literal["GET", "PUT"] = "GET"
    seconds: int = Field(3600, ge=1, le=_MOST_SIGNED)


class SignedQuery(WriteQuery):
    """What a signed URL carries."""

    expires: str = Field(max_length=12)
    signature: str = Field(max_length=64)


class File(Shown):
    """A file as the guest reports it; `path_base64` where its name is not UTF-8."""

    path: str
    type: str
    size: int
    mode: int
    mtime: float
    uid: int
    gid: int
    target: str | None


class Written(Shown):
    """What was written."""

    path: str
    size: int
    sha256: str


def _shown(info: FileInfo) -> dict[str, Any]:
    told: dict[str, Any] = {
        "path": info.path,
        "type": info.type,
        "size": info.size,
        "mode": info.mode,
        "mtime": info.mtime_ns / 1e9,
        "uid": info.uid,
        "gid": info.gid,
        "target": info.target,
    }
    for name in ("path", "target"):
        text = told[name]
        if text is not None and not text.isascii():
            raw = os.fsencode(text)
            try:
                raw.decode()
            except UnicodeDecodeError:
                told[name] = raw.decode("utf-8", "replace")
                told[f"{name}_base64"] = base64.b64encode(raw).decode()
    return told


async def _files(call: Request) -> GuestFiles:
    return (await call.control.link(call.principal, call.sandbox)).files


@routes.get(_FILES, query=ListQuery, answer=Page)
async def list_files(call: Call, query: ListQuery) -> dict[str, Any]:
    """What is in a folder, `depth` levels deep; links are not followed."""
    found = await (await _files(call)).list(query.path, query.depth, query.limit)
    return {"items": [_shown(info) for info in found], "next_cursor": None}


@routes.get(_FILES + "/stat", query=StatQuery, answer=File)
async def stat(call: Call, query: StatQuery) -> dict[str, Any]:
    """What a path is."""
    return _shown(await (await _files(call)).stat(query.path, follow=query.follow))


@routes.get(_FILES + "/content", query=PathQuery, answer="application/octet-stream")
async def read(call: Call, query: PathQuery) -> Answer:
    """The bytes of a file; one range, if asked for. Compare a download with `digest`."""
    return await _read(call, await call.control.link(call.principal, call.sandbox), query.path)


async def _read(call: Call, link: GuestLink, path: str) -> Answer:
    info = await link.files.stat(path)
    if info.type != "file":
        raise InvalidRequest(f"{path[:200]} is a {info.type}", hint="list it, or take it as an archive")
    headers = {
        "accept-ranges": "bytes",
        "last-modified": _http_date(info.mtime_ns / 1e9),
        "etag": _etag(info),
        # Hostile bytes: no browser shows them as a page of ours.
        "content-disposition": "attachment",
        "content-security-policy": "sandbox",
        "content-type": "application/octet-stream",
    }
    asked = _range(call.headers.get("range"), info.size)
    status, offset, length = 200, 0, info.size
    if asked is not None and call.headers.get("if-range", headers["etag"]) == headers["etag"]:
        status, (offset, length) = 206, asked
        headers["content-range"] = f"bytes {offset}-{offset + length - 1}/{info.size}"
    if call.method == "HEAD":
        return Answer(status, b"", headers={**headers, "content-length": str(length)})
    reading = link.files.read(path, offset, None if status == 200 and not info.size else length)
    if status == 200 and not info.size:
        # Files of /proc say 0 and have more: as long as it gets.
        return Answer(status, stream=_bytes(call, reading, None), headers=headers)
    pieces = _bytes(call, reading, length)
    if status == 200 and "sha-256" in call.headers.get("want-repr-digest", ""):
        pieces = _hashed(call, pieces, (call.params.get("sandbox", ""), path, headers["etag"]))
    return Answer(status, stream=pieces, headers={**headers, "content-length": str(length)})


def _etag(info: FileInfo) -> str:
    return f'"{info.inode:x}-{info.mtime_ns:x}-{info.size:x}"'


async def _hashed(
    call: Call, pieces: AsyncIterator[bytes], key: tuple[str, str, str]
) -> AsyncIterator[bytes]:
    """The same, and `digest` knows afterwards what was sent, without reading it again."""
    found, known = hashlib.sha256(), call.service.digests
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        async for piece in pieces:
            found.update(piece)
            yield piece
    known[key] = found.hexdigest()
    while len(known) > _MOST_KNOWN:
        known.popitem(last=False)


async def _bytes(call: Call, reading: Reading, length: int | None) -> AsyncIterator[bytes]:
    sent = 0
    try:
        async for piece in reading:
            sent += len(piece)
            if length is not None and sent > length:
                return
            yield piece
        if length is not None and sent < length:
            # Shorter than its headers say: the connection is cut, so that nobody takes it for all of it.
            raise ConnectionAbortedError(f"the file became shorter while it was read, after {sent} bytes")
    finally:
        await reading.aclose()


def _range(text: str | None, size: int) -> tuple[int, int] | None:
    """Offset and length; ``None``: no range, or one that this does not know (then all of it).

    Raises:
        RangeNotSatisfiable.
    """
    found = _RANGE.fullmatch(text.strip()) if text else None
    if found is None or found[1] == found[2] == "":
        return None
    if found[1] == "":
        length = min(int(found[2]), size)
        offset = size - length
    else:
        offset = int(found[1])
        last = min(int(found[2]) if found[2] else size - 1, size - 1)
        length = last - offset + 1
    if length <= 0:
        raise RangeNotSatisfiable(f"the file has {size} bytes", hint=f"ask for bytes=0-{size}", size=size)
    return offset, length


def _http_date(seconds: float) -> str:
    from email.utils import formatdate

    try:
        return formatdate(seconds, usegmt=True)
    except (OverflowError, ValueError, OSError):
        return formatdate(0, usegmt=True)


@routes.get(_FILES + "/digest", query=PathQuery)
async def digest(call: Call, query: PathQuery) -> dict[str, Any]:
    """SHA-256 of a file, computed on the way: what a download is compared with. With the ETag of a download
    that asked for it (`Want-Repr-Digest: sha-256=1`) as `If-Match`: of what was read then.
    """
    files = await _files(call)
    tag = call.headers.get("if-match", "")
    if (known := call.service.digests.get((call.sandbox, query.path, tag))) is not None:
        return {
            "path": query.path,
            "size": int(tag.strip('"').split("-")[-1], 16),
            "sha256": known,
            "etag": tag,
        }
    told = {"etag": _etag(await files.stat(query.path))} if tag else {}
    # A file with holes may be larger than any disk: nobody reads it for a client who has left.
    found, size = await call.while_there(_digested(files, query.path))
    return {"path": query.path, "size": size, "sha256": found, **told}


async def _digested(files: GuestFiles, path: str) -> tuple[str, int]:
    found, size = hashlib.sha256(), 0
    reading = files.read(path)
    try:
        async for piece in reading:
            found.update(piece)
            size += len(piece)
    finally:
        await reading.aclose()
    return found.hexdigest(), size


@routes.put(_FILES + "/content", query=WriteQuery, body="stream", answer=Written, status=201)
async def write(call: Call, query: WriteQuery) -> dict[str, Any]:
    """Write a file: it appears whole or not at all. A digest (`Content-Digest: sha-256=:…:` or
    `X-Content-SHA256`, as header or trailer) is compared before it does.
    """
    return await _write(call, await call.control.link(call.principal, call.sandbox), query)


async def _write(call: Call, link: GuestLink, query: WriteQuery) -> dict[str, Any]:
    found = hashlib.sha256()
    wanted = _digest_of(call)
    body = _checked(call, found, wanted)
    size = await link.files.write(
        query.path,
        body,
        int(query.mode, 8),
        parents=query.parents,
        append=query.append,
        exclusive=query.exclusive,
        atomic=not query.append,
    )
    return {"path": query.path, "size": size, "sha256": found.hexdigest()}


async def _checked(call: Call, found: Any, wanted: bytes | None) -> AsyncIterator[bytes]:
    length, total = call.length(), 0
    async for piece in call.stream():
        found.update(piece)
        total += len(piece)
        yield piece
    wanted = wanted or _digest_of(call, trailers=True)
    if wanted is not None and wanted != found.digest():
        # Raised before the end of the input is said: the guest forgets what it has.
        raise IntegrityMismatch(
            "what arrived has another SHA-256", hint="send it again", sha256=found.hexdigest()
        )
    if length is not None and total != length:
        raise IntegrityMismatch("what arrived is shorter than its length", hint="send it again")


def _digest_of(call: Call, *, trailers: bool = False) -> bytes | None:
    """The SHA-256 that the client gives.

    Raises:
        InvalidRequest: it can't be read.
    """
    get = call.trailer if trailers else call.headers.get
    try:
        if plain := get("x-content-sha256"):
            raw = bytes.fromhex(plain)
        elif field := get("content-digest"):
            entries = (entry.strip() for entry in field.split(","))
            text = next((entry for entry in entries if entry.lower().startswith("sha-256=:")), "")
            if not text:
                return None
            raw = base64.b64decode(text[9:].rstrip(":"), validate=True)
        else:
            return None
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise InvalidRequest("a digest that is no SHA-256", hint="Content-Digest: sha-256=:BASE64:")
    return raw


@routes.delete(_FILES, query=RemoveQuery, status=204)
async def remove(call: Call, query: RemoveQuery) -> None:
    """Delete a file, or a folder with all that is in it."""
    files = await _files(call)
    await files.remove(query.path, recursive=query.recursive, missing_ok=query.missing_ok)


@routes.post(_FILES + "/mkdir", body=MakeFolder, status=204)
async def mkdir(call: Call, body: MakeFolder) -> None:
    """Make a folder."""
    await (await _files(call)).mkdir(body.path, int(body.mode, 8), parents=body.parents)


@routes.post(_FILES + "/move", body=Move, status=204)
async def move(call: Call, body: Move) -> None:
    """Rename, within the sandbox."""
    await (await _files(call)).move(body.source, body.target, exclusive=body.exclusive)


@routes.get(_FILES + "/archive", query=ArchiveQuery, answer="application/x-tar")
async def archive(call: Call, query: ArchiveQuery) -> Answer:
    """A file or folder as a pax tar. Written by the sandbox: unpack it with care."""
    reading = (await _files(call)).tar_out(query.path, query.exclude)
    headers = {
        "content-type": "application/x-tar",
        "content-disposition": "attachment",
        "content-security-policy": "sandbox",
    }
    return Answer(200, stream=_bytes(call, reading, None), headers=headers)


@routes.put(_FILES + "/archive", query=PathQuery, body="stream")
async def unpack(call: Call, query: PathQuery) -> dict[str, Any]:
    """Unpack a tar into a folder; an entry that would leave it ends the request."""
    found = hashlib.sha256()
    entries = await (await _files(call)).tar_in(query.path, _checked(call, found, _digest_of(call)))
    return {"path": query.path, "entries": entries, "sha256": found.hexdigest()}


@routes.get(_FILES + "/watch", query=WatchQuery, answer="text/event-stream")
async def watch(call: Call, query: WatchQuery) -> Answer:
    """Changes below a folder as server-sent events; `overflow`: some were lost, look again."""
    watching = await (await _files(call)).watch(query.path, recursive=query.recursive)

    async def changes() -> AsyncIterator[bytes]:
        try:
            yield sse_event("watching", {"path": query.path})
            async with call.control.using(call.sandbox, call.principal.project):
                async for change in watching:
                    told = {"path": change.path, "kind": change.kind, "directory": change.directory}
                    yield sse_event("change", told)
        except RingfenceError as error:
            yield sse_event("error", body_of(error, call.request_id)["error"])
        finally:
            await watching.close()

    return sse_events(call, changes())


# -- signed URLs


@routes.post(_FILES + "/sign", body=Sign)
async def sign(call: Call, body: Sign) -> dict[str, Any]:
    """A URL that reads or writes this one file, without a key, until its time has passed."""
    await call.control.sandboxes.get(call.principal, call.sandbox)
    expires = int(time.time()) + body.seconds
    signature = call.service.signer.sign(body.method, call.sandbox, body.path, expires)
    path = quote(body.path, safe="/", errors="surrogateescape")
    url = f"/v1/signed/{call.sandbox}?path={path}&expires={expires}&signature={signature}"
    return {
        "url": call.service.base_url(call) + url,
        "method": body.method,
        "expires_at": expires,
    }


async def _signed(call: Call, query: SignedQuery) -> GuestLink:
    method = "GET" if call.method == "HEAD" else call.method
    call.service.signer.check_signature(query.signature, method, call.sandbox, query.path, query.expires)
    return await call.control.links.link(call.sandbox)


@routes.get("/v1/signed/{sandbox}", scope="token", query=SignedQuery, answer="application/octet-stream")
async def signed_read(call: Call, query: SignedQuery) -> Answer:
    """Read a file by a signed URL."""
    return await _read(call, await _signed(call, query), query.path)


@routes.put(
    "/v1/signed/{sandbox}", scope="token", query=SignedQuery, body="stream", answer=Written, status=201
)
async def signed_write(call: Call, query: SignedQuery) -> dict[str, Any]:
    """Write a file by a signed URL."""
    return await _write(call, await _signed(call, query), query)


__all__ = ["GuestRefused", "as_json", "routes"]
