"""What one attempt of a job gets in, and what it leaves: URLs, outputs, and how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from ringfence.control.jobs import FAILED
from ringfence.control.jobs_files import JobFiles
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused, QuotaExceeded
from ringfence.store.contract import Row

MOST_OUTPUTS: Final = 1024**3  # bytes of a job that are kept
_FETCH: Final = (
    'if command -v curl >/dev/null; then exec curl -fsSL --retry 2 -o "$2" "$1"; '
    'elif command -v wget >/dev/null; then exec wget -q -O "$2" "$1"; '
    "else exec python3 -c 'import sys,shutil,urllib.request as u;"
    'shutil.copyfileobj(u.urlopen(sys.argv[1]),open(sys.argv[2],"wb"))\' "$1" "$2"; fi'
)


class Over(Exception):
    """The attempt has ended: state that follows (``""``: whatever retries say) and facts."""

    def __init__(self, state: str = "", **facts: Any) -> None:
        super().__init__(state)
        self.state = state
        self.facts = facts


async def fetch(link: GuestLink, url: str, path: str) -> None:
    """Have the sandbox fetch a URL, through its egress, into a file.

    Raises:
        Over: it can't be had.
    """
    said = bytearray()
    with contextlib.suppress(GuestRefused):
        await link.files.mkdir(path.rpartition("/")[0] or ".", parents=True)
    async with await link.start(ProcessSpec(("sh", "-c", _FETCH, "sh", url, path))) as process:
        async for piece in process:
            said += piece.data[: 2000 - len(said)]
        exit = await process.wait()
    if exit.status:
        text = bytes(said).decode("utf-8", "replace").strip()
        raise Over(cause="input", detail=f"{url} can't be fetched: {text or f'exit code {exit.status}'}")


async def keep(row: Row, link: GuestLink, files: JobFiles) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Keep the outputs that were asked for: what is known of each, and those that are not there.

    Raises:
        Over: there are more bytes than a job may keep.
    """
    kept: list[Mapping[str, Any]] = []
    missing: list[str] = []
    room = MOST_OUTPUTS
    for path in row.document["spec"]["outputs"]:
        name = path.strip("/")
        try:
            info = await link.files.stat(path)
            folder = info.type == "directory"
            source: AsyncIterator[bytes] = link.files.tar_out(path) if folder else link.files.read(path)
            digest, size = await files.keep(row.id, source, room)
        except GuestRefused:
            missing.append(path)
            continue
        except QuotaExceeded as error:
            raise Over(FAILED, cause="outputs", detail=error.message, error=error.as_dict()) from None
        room -= size
        kept.append({"name": name + ".tar" if folder else name, "path": path, "size": size, "sha256": digest})
    return kept, missing
