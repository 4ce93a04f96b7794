"""From a stream to a folder that can be renamed into the store: unpacked, verified, flushed."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

from ringfence.images import records
from ringfence.images.contract import Imported, ImportLimits
from ringfence.images.streams import Hashed, Uncompressed
from ringfence.images.tarstream import Readable, TarReader
from ringfence.images.unpacking import unpack
from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass
from ringfence.runtimes.context import privileged


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A finished layer that has no place yet. ``blob``: digest of the stream as it came."""

    digest: str
    blob: str
    report: Imported


def unpack_layer(
    stream: Readable,
    folder: Path,
    *,
    diff_id: str = "",
    blob_digest: str = "",
    limits: ImportLimits | None = None,
    progress: Callable[[int], object] | None = None,
) -> Unpacked:
    """Unpack into ``folder/fs`` and write ``folder/layer.json``; both are on the disk when this returns.

    Raises:
        InvalidRequest, HostLimit, RuntimeUnavailable, OSError: see ``TemplateStore.add_layer_from``.
    """
    limits = limits or ImportLimits()
    root_path = folder / "fs"
    root_path.mkdir(0o755)
    root_path.chmod(0o755)
    root = os.open(root_path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    source = None
    try:
        source = Uncompressed(stream, limits, progress)
        tar = Hashed(source)
        reader = TarReader(tar)
        report = unpack(reader, root, limits, privileged=privileged())
        reader.finish()
        source.raw.drain()
        digest, blob = tar.digest(), source.raw.digest()
        # An empty stream is no layer: some failed download made it.
        if not tar.count:
            raise InvalidRequest("this is not a tar archive: it is empty", hint="fetch it again")
        for what, wanted, found in (("layer", blob_digest, blob), ("unpacked layer", diff_id, digest)):
            if wanted and wanted != found:
                raise InvalidRequest(
                    f"the {what} is not what its digest says: {found} instead of {wanted}",
                    hint="it is damaged, or somebody has changed it: fetch it again from a source you trust",
                )
        record = {"digest": digest, "blob": blob, "size": report.size, "files": report.files}
        records.write(folder / "layer.json", record, aside=folder)
        flush(root_path)
    finally:
        if source is not None:
            source.close()
        os.close(root)
    return Unpacked(digest, blob, report)


def flush(folder: Path) -> None:
    """Everything of this file system to the disk: one call, where one for each file takes minutes.

    Raises:
        OSError: the disk gives an error.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc().syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
