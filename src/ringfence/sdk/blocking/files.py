"""``ringfence.sdk.files`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from builtins import list as List
from collections.abc import Iterable, Iterator

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade, _flowing
from ringfence.sdk.files import AsyncFiles, Local
from ringfence.sdk.results import FileInfo, WatchEvent


class Files(Facade):
    """The files of one sandbox. Paths are absolute, or below its working folder.

    Every call may raise ``GuestRefused`` with the errno that the same call inside would have given:
    ``error.errno == errno.ENOENT`` and so on.

    >>> with Sandbox.create() as sandbox:
    ...     _ = sandbox.files.write("notes/today.txt", "hello")
    ...     print(sandbox.files.read_text("notes/today.txt"))
    ...     print([info.path for info in sandbox.files.walk("notes")])
    hello
    ['today.txt']
    """

    _async: AsyncFiles

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file, or ``length`` of them from ``offset`` on.

        Raises:
            InvalidRequest: it is larger than 256 MiB: :meth:`stream` or :meth:`download` it.
        """
        return BACKGROUND.run(self._async.read(path, offset=offset, length=length))

    def read_text(self, path: str, *, errors: str = "strict") -> str:
        """The text of a file in UTF-8."""
        return BACKGROUND.run(self._async.read_text(path, errors=errors))

    def stream(self, path: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes of a file, piece by piece; over lost connections, as long as it is the same file.

        Raises:
            LinkLost: the file was changed while it was read.
        """
        return BACKGROUND.iterate(self._async.stream(path, offset=offset, length=length))

    def write(
        self,
        path: str,
        data: bytes | str | Iterable[bytes],
        *,
        mode: int = 420,
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
        return BACKGROUND.run(
            self._async.write(
                path, _flowing(data), mode=mode, parents=parents, append=append, exclusive=exclusive
            )
        )

    def upload(self, local: Local, path: str, *, parents: bool = True) -> FileInfo:
        """Copy a file of this machine in, whatever its size; its digest is compared on arrival.

        >>> import tempfile
        >>> with Sandbox.create() as sandbox:
        ...     with tempfile.NamedTemporaryFile() as file:
        ...         _ = file.write(b"a,b")
        ...         file.flush()
        ...         print(sandbox.files.upload(file.name, "data.csv").size)
        3
        """
        return BACKGROUND.run(self._async.upload(local, path, parents=parents))

    def download(self, path: str, local: Local) -> int:
        """Copy a file out, whatever its size; it appears whole or not at all, and with the SHA-256 that the
        sandbox says it has. Returns its size.

        Raises:
            LinkLost: the file was changed while it was read, or damaged on the way.
        """
        return BACKGROUND.run(self._async.download(path, local))

    def digest(self, path: str) -> str:
        """SHA-256 of a file, in hexadecimal."""
        return BACKGROUND.run(self._async.digest(path))

    def list(self, path: str = ".", *, depth: int = 1) -> List[FileInfo]:
        """What is in a folder, ``depth`` levels deep; links are not followed."""
        return BACKGROUND.run(self._async.list(path, depth=depth))

    def walk(self, path: str = ".") -> Iterator[FileInfo]:
        """Everything below a folder."""
        return BACKGROUND.iterate(self._async.walk(path))

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What a path is; of a symlink itself with ``follow=False``."""
        return BACKGROUND.run(self._async.stat(path, follow=follow))

    def exists(self, path: str) -> bool:
        """Whether there is something of this name."""
        return BACKGROUND.run(self._async.exists(path))

    def mkdir(self, path: str, *, mode: int = 493, parents: bool = True) -> None:
        """Make a folder; with ``parents`` also those above, and one that is there is fine."""
        BACKGROUND.run(self._async.mkdir(path, mode=mode, parents=parents))

    def move(self, source: str, target: str, *, exclusive: bool = False) -> None:
        """Rename; ``exclusive``: fail instead of replacing."""
        BACKGROUND.run(self._async.move(source, target, exclusive=exclusive))

    def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Delete a file, or a folder (with ``recursive`` and all that is in it)."""
        BACKGROUND.run(self._async.remove(path, recursive=recursive, missing_ok=missing_ok))

    def upload_folder(self, local: Local, path: str) -> int:
        """Copy a folder's contents into a folder inside (made if missing); returns the number of entries."""
        return BACKGROUND.run(self._async.upload_folder(local, path))

    def download_folder(self, path: str, local: Local) -> int:
        """Copy a folder out into one that does not exist yet, or is empty; returns the number of files.

        What comes out was written by hostile code: links, devices and names that would lead out of the
        folder are left out, owners and set-uid bits are dropped.
        """
        return BACKGROUND.run(self._async.download_folder(path, local))

    def archive(self, path: str) -> Iterator[bytes]:
        """A file or folder as a tar, piece by piece. Hostile bytes: unpack them with care."""
        return BACKGROUND.iterate(self._async.archive(path))

    def unpack(self, tar: bytes | Iterable[bytes], path: str) -> int:
        """Unpack a tar into a folder inside; returns the number of its entries."""
        return BACKGROUND.run(self._async.unpack(_flowing(tar), path))

    def watch(self, path: str = ".", *, recursive: bool = False) -> Iterator[WatchEvent]:
        """Changes below a folder as they happen, until the iteration is left. The first event is
        ``watching``: from then on nothing is missed.
        """
        return BACKGROUND.iterate(self._async.watch(path, recursive=recursive))

    def sign(self, path: str, *, method: str = "GET", seconds: int = 3600) -> str:
        """A URL that reads (``GET``) or writes (``PUT``) this one file without a key, for a while."""
        return BACKGROUND.run(self._async.sign(path, method=method, seconds=seconds))
