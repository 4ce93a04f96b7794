"""Layers of ours as an image of the engine: a ``docker save`` archive that is made while it is sent.

The image has nothing but files (no command, no environment), a label that says whose it is, and a name made
from its content, so it is sent once. :func:`remove_all` takes such images away again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from typing import IO

from ringfence.runtimes.engines.client import Client, EngineError

REPOSITORY = "ringfence-template"
LABEL = "dev.ringfence.template"
_PIECE = 1 << 20
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


def name_of(template: str, layers: tuple[str, ...]) -> str:
    """The image's name for these layers, topmost first.

    Layers of a template with a digest are named by it and what lies above (folders named by their content);
    for the host's skeleton everything in it counts.
    """
    found = hashlib.sha256(f"2 {os.uname().machine} {template}\n".encode())
    for layer in layers:
        if template == "host":
            _fingerprint(found, layer)
        else:
            found.update("/".join(layer.split("/")[-3:]).encode() + b"\n")
    return f"{REPOSITORY}:{found.hexdigest()[:32]}"


def _fingerprint(found: hashlib._Hash, layer: str) -> None:
    for path, info in _walk(layer, layer):
        found.update(os.fsencode(f"{path} {info.st_mode:o} {info.st_uid} {info.st_gid}\n"))
        if stat.S_ISLNK(info.st_mode):
            found.update(os.fsencode(os.readlink(f"{layer}/{path}")))
        elif stat.S_ISREG(info.st_mode):
            with open(f"{layer}/{path}", "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())


def _walk(top: str, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path below ``top``, stat) of everything, folders before what they hold, in a fixed order."""
    for entry in sorted(os.scandir(folder), key=lambda found: found.name):
        info = entry.stat(follow_symlinks=False)
        yield entry.path[len(top) + 1 :], info
        if stat.S_ISDIR(info.st_mode):
            yield from _walk(top, entry.path)


async def load(client: Client, name: str, template: str, layers: tuple[str, ...]) -> None:
    """Send the image.

    Raises:
        OSError: a layer can't be read. EngineError, RuntimeUnavailable: see the client.
    """
    said = await client.upload("POST", "/images/load", {"quiet": "1"}, _archive(name, template, layers))
    try:
        await client.call("GET", f"/images/{name}/json")
    except EngineError as error:
        why = _error_in(said) or error.message
        raise EngineError(error.status, f"it did not take the image {name}: {why}") from None


def _error_in(said: object) -> str:
    """The error of a call that reports its progress, one JSON object a line, under status 200."""
    lines = said.splitlines() if isinstance(said, bytes) else [json.dumps(said).encode()]
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and found.get("error"):
            return str(found["error"])[:1000]
    return ""


async def remove_all(client: Client, keep: frozenset[str] = frozenset()) -> list[str]:
    """Remove the images that were made here and that no container uses, but for those named in ``keep``.

    Returns:
        The names of those that are gone.
    """
    gone = []
    for image in await client.call("GET", "/images/json", {"filters": json.dumps({"label": [LABEL]})}) or []:
        for name in image.get("RepoTags") or []:
            if not name.rpartition("/")[2].startswith(REPOSITORY + ":") or name in keep:
                continue
            try:
                await client.call("DELETE", f"/images/{name}")
            except EngineError as error:
                if error.status not in (404, 409):
                    raise
                continue
            gone.append(name)
    return gone


def _archive(name: str, template: str, layers: tuple[str, ...]) -> Iterator[bytes]:
    """A ``docker save`` archive: each layer is written to a file first, as its digest comes before it."""
    entries, digests = [], []
    with tempfile.TemporaryDirectory(prefix="ringfence-image-") as folder:
        for number, layer in enumerate(reversed(layers)):
            path = f"{folder}/{number}"
            digests.append("sha256:" + _write_layer(path, layer))
            entries.append((f"{number}/layer.tar", path))
        config = json.dumps(
            {
                "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64"),
                "os": "linux",
                "config": {"Labels": {LABEL: template}},
                "rootfs": {"type": "layers", "diff_ids": digests},
                "history": [{"created_by": "ringfence"}] * len(digests),
            }
        ).encode()
        place = hashlib.sha256(config).hexdigest() + ".json"
        manifest = [{"Config": place, "RepoTags": [name], "Layers": [path for path, _ in entries]}]
        yield from _entry(place, io.BytesIO(config), len(config))
        for path, source in entries:
            with open(source, "rb") as file:
                yield from _entry(path, file, os.fstat(file.fileno()).st_size)
        text = json.dumps(manifest).encode()
        yield from _entry("manifest.json", io.BytesIO(text), len(text))
        yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(path: str, file: IO[bytes], size: int) -> Iterator[bytes]:
    info = tarfile.TarInfo(path)
    info.size = size
    yield info.tobuf(tarfile.GNU_FORMAT)
    while piece := file.read(_PIECE):
        yield piece
    yield bytes(-size % tarfile.BLOCKSIZE)


def _write_layer(path: str, layer: str) -> str:
    """A layer's tar, whiteouts as archives have them; returns its digest."""
    with open(path, "w+b") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            links: dict[tuple[int, int], str] = {}
            for name, info in _walk(layer, layer):
                _add(tar, f"{layer}/{name}", name, info, links)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(
    tar: tarfile.TarFile, path: str, name: str, info: os.stat_result, links: dict[tuple[int, int], str]
) -> None:
    member = tarfile.TarInfo(name)
    member.mode, member.uid, member.gid = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
    if info.st_uid == os.geteuid():  # a normal user's layers are all its own, and stand for root's
        member.uid = member.gid = 0
    member.mtime = int(info.st_mtime)
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
        member.name = f"{os.path.dirname(name)}/.wh.{os.path.basename(name)}".lstrip("/")
        tar.addfile(member)
    elif stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        if _is_opaque(path):
            tar.addfile(tarfile.TarInfo(f"{name}/.wh..wh..opq"))
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        tar.addfile(member)
    elif stat.S_ISREG(info.st_mode):
        first = links.setdefault((info.st_dev, info.st_ino), name)
        if first != name:
            member.type, member.linkname = tarfile.LNKTYPE, first
            tar.addfile(member)
            return
        with open(path, "rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)
    # Nothing else is in a layer: importing refuses devices, sockets and pipes.


def _is_opaque(path: str) -> bool:
    for name in _OPAQUE:
        try:
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue
    return False
