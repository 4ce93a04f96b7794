"""Compressed streams, uncompressed with a limit, and counted and hashed on the way."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringfence.images.contract import ImportLimits
from ringfence.images.tarstream import Readable
from ringfence.model.errors import HostLimit, InvalidRequest, RuntimeUnavailable
from ringfence.model.quantities import format_size

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNK = 1 << 18
_ZSTD_WINDOW = "128MB"  # of zstd: the most memory it may take; images are made with 8 MB
_HEAD = 6


class Hashed:
    """A stream that remembers how much was read, and its SHA-256."""

    def __init__(self, stream: Readable, progress: Callable[[int], object] | None = None) -> None:
        import hashlib

        self._stream = stream
        self._hash: _Hash = hashlib.sha256()
        self._progress = progress
        self.count = 0

    def read(self, size: int) -> bytes:
        """See :class:`Readable`."""
        data = self._stream.read(size)
        if data:
            self._hash.update(data)
            self.count += len(data)
            if self._progress is not None:
                self._progress(self.count)
        return data

    def digest(self) -> str:
        """``sha256:…`` of what was read so far."""
        return "sha256:" + self._hash.hexdigest()

    def drain(self) -> None:
        """Read to the end."""
        while self.read(_CHUNK):
            pass


class _Peeked:
    """A stream whose first bytes have been looked at."""

    def __init__(self, head: bytes, stream: Readable) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._stream.read(size)


class Bounded:
    """What comes out of a decompressor: no more than the limits allow for what went in.

    Raises (from ``read``):
        HostLimit: more than that.
    """

    def __init__(self, stream: Readable, raw: Hashed, limits: ImportLimits, *, compressed: bool) -> None:
        self._stream = stream
        self._raw = raw
        self._limits = limits
        self._compressed = compressed
        # Headers, padding and long names of as many entries as there may be come on top of their bytes.
        self._most = limits.size + (64 << 20) + 4096 * min(limits.entries, 1 << 20)
        self.count = 0

    def read(self, size: int) -> bytes:
        """See :class:`Readable`."""
        data = self._stream.read(size)
        self.count += len(data)
        if self.count > self._most:
            raise HostLimit(
                f"the layer is larger than {format_size(self._limits.size)}, the limit of an import",
                hint="raise the limit with --max-size if you trust it",
            )
        if (
            self._compressed
            and self.count > self._limits.ratio_floor
            and self.count > self._raw.count * self._limits.ratio
        ):
            raise HostLimit(
                f"{format_size(self._raw.count)} of the layer unpack to more than {format_size(self.count)}: "
                "a decompression bomb",
                hint="raise the limit with --max-ratio if you trust it",
            )
        return data


class _Gzip:
    """One or more gzip members, one after the other."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._engine = zlib.decompressobj(wbits=31)
        self._input = b""
        self._ended = False

    def read(self, size: int) -> bytes:
        while not self._ended:
            try:
                # Also without input: what did not fit into the last answer may still be inside.
                data = self._engine.decompress(self._input, size)
            except zlib.error as error:
                raise _damaged("gzip", str(error)) from None
            self._input = self._engine.unconsumed_tail
            if not data and not self._input and not self._engine.eof:
                self._input = self._stream.read(_CHUNK)
                if not self._input:
                    raise _cut_off("gzip")
                continue
            if self._engine.eof:
                self._input = self._engine.unused_data or self._stream.read(_CHUNK)
                # Zeros after the last member are padding.
                while self._input and not self._input.strip(b"\0"):
                    self._input = self._stream.read(_CHUNK)
                self._ended = not self._input
                self._engine = zlib.decompressobj(wbits=31)
            if data:
                return data
        return b""


class _Program:
    """A decompressor that is a program: our stream into its stdin by a thread, its stdout is ours."""

    def __init__(self, stream: Readable, argv: list[str]) -> None:
        self._stream = stream
        self._name = argv[0]
        self._failure: BaseException | None = None
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, close_fds=True
        )
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()
        self._ended = False

    def _feed(self) -> None:
        pipe: Any = self._process.stdin
        try:
            while data := self._stream.read(_CHUNK):
                pipe.write(data)
        except BrokenPipeError:
            pass  # it has ended: its own words say why
        except BaseException as error:
            self._failure = error
        finally:
            with contextlib.suppress(OSError):
                pipe.close()

    def read(self, size: int) -> bytes:
        if self._ended:
            return b""
        assert self._process.stdout is not None
        data = self._process.stdout.read1(size)  # type: ignore[attr-defined]
        if data:
            return bytes(data)
        self._ended = True
        self._feeder.join()
        assert self._process.stderr is not None
        words = self._process.stderr.read(4096).decode(errors="replace").strip()
        code = self._process.wait()
        self.close()
        if self._failure is not None:
            raise self._failure
        if code:
            raise _damaged(self._name, words.splitlines()[-1] if words else f"exit code {code}")
        return b""

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._feeder.join(5)


class Uncompressed:
    """The tar in a stream that is plain, gzip or zstd: told by its first bytes, never by a name.

    ``raw`` is the stream as it came, counted and hashed; ``read`` gives the tar, within the limits.

    Raises (from the constructor and ``read``):
        InvalidRequest: damaged, cut off, or a compression that Ringfence does not read.
        RuntimeUnavailable: zstd, and the program is not here.
        HostLimit: over a limit.
    """

    def __init__(
        self, stream: Readable, limits: ImportLimits, progress: Callable[[int], object] | None = None
    ) -> None:
        self.raw = Hashed(stream, progress)
        head = b""
        while len(head) < _HEAD:
            more = self.raw.read(_HEAD - len(head))
            if not more:
                break
            head += more
        whole = _Peeked(head, self.raw)
        self._program: _Program | None = None
        inner: Readable = whole
        if head.startswith(b"\x1f\x8b"):
            inner = _Gzip(whole)
        elif head.startswith(b"\x28\xb5\x2f\xfd"):
            program = shutil.which("zstd")
            if program is None:
                raise RuntimeUnavailable(
                    "a layer is compressed with zstd, and the program zstd is not here",
                    hint="apt-get install zstd",
                )
            inner = self._program = _Program(whole, [program, "-dcq", f"--memory={_ZSTD_WINDOW}"])
        elif head.startswith((b"\xfd7zXZ\0", b"BZh")):
            kind = "bzip2" if head.startswith(b"BZh") else "xz"
            raise InvalidRequest(
                f"an archive compressed with {kind}: Ringfence reads plain tar, gzip and zstd",
                hint=f"uncompress it first: {kind} -dk FILE",
            )
        self._bounded = Bounded(inner, self.raw, limits, compressed=inner is not whole)

    def read(self, size: int) -> bytes:
        """See :class:`Readable`."""
        return self._bounded.read(size)

    def close(self) -> None:
        """End the program, if there is one. Idempotent."""
        if self._program is not None:
            self._program.close()
            self._program = None


def _cut_off(kind: str) -> InvalidRequest:
    return InvalidRequest(f"the archive ends in the middle of its {kind} stream", hint="fetch it again")


def _damaged(kind: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the archive is damaged: {kind} says: {reason}", hint="fetch it again")
