"""Unpacking a tar stream that hostile code wrote, on the host.

The parser is our own and small: ustar, GNU long names and pax, nothing else. Names are bytes. Nothing is
ever opened through a symlink: every folder on the way is opened by itself, relative to the one above it, with
``O_NOFOLLOW``; files are created with ``O_EXCL``. So whatever the archive says, and whatever lies in the
destination, no byte lands outside of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterable, AsyncIterator
from typing import NamedTuple

from ringfence.guest.fields import clean
from ringfence.model.errors import HostLimit, InvalidRequest, ProtocolViolation

_BLOCK = 512
_MOST_LONG_NAME = 8192  # GNU long name: a path of 4,096 bytes and room for padding
_MOST_PAX = 1024 * 1024  # pax records of one entry; attributes of a file may be among them
_MOST_COMPONENT = 255  # NAME_MAX
_MOST_PATH = 4096  # PATH_MAX
_MOST_SKIPPED = 100  # names that are remembered for the report
_LATEST = 2**33  # seconds since the epoch (the year 2242): no real file is younger
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArchiveLimits(NamedTuple):
    """What one archive may take: bytes of contents, entries of any kind, folders below each other."""

    bytes: int = 1024**3
    entries: int = 200_000
    depth: int = 64


class Extracted(NamedTuple):
    """What came out. ``skipped`` has (name, reason) of the first 100 entries that were left out."""

    files: int
    folders: int
    links: int
    bytes: int
    skipped: tuple[tuple[str, str], ...]
    skipped_count: int


async def extract_tar(
    archive: AsyncIterable[bytes],
    destination: str | os.PathLike[str],
    limits: ArchiveLimits = ArchiveLimits(),  # noqa: B008 - an immutable value
    *,
    replace: bool = False,
    any_links: bool = False,
) -> Extracted:
    """Unpack into a folder, which is made if it is missing.

    Left out, and reported: symlinks that leave the folder, device nodes, pipes, sockets. Owners, setuid and
    setgid bits and attributes are dropped, permissions go through the umask.

    Args:
        archive: the tar stream, e.g. ``link.files.tar_out(path)``.
        destination: folder on the host.
        limits: budgets for the whole archive.
        replace: files that were there before are replaced (never followed); else they are an error.
        any_links: symlinks are kept wherever they lead, for a folder in which only sandboxes follow any.

    Raises:
        ProtocolViolation: no tar, cut off, or a name that is absolute, climbs, comes twice or passes
            through something that is not a folder. What was unpacked before stays.
        HostLimit: over a budget, or the disk is full.
        InvalidRequest: a file is there already, or the destination is no folder.
    """
    try:
        os.makedirs(destination, exist_ok=True)
        root = os.open(destination, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"{os.fspath(destination)}: {error.strerror}", hint="name a folder") from error
    tree = _Tree(root, limits, replace, any_links)
    try:
        await _unpack(_Blocks(aiter(archive)), tree, limits)
    except OSError as error:
        raise HostLimit(f"unpacking into {os.fspath(destination)}: {error.strerror}") from error
    finally:
        tree.close()
    return tree.result()


class _Blocks:
    """The stream, cut as the parser asks; holds one piece of the source at a time."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._rest = memoryview(b"")

    async def some(self, most: int) -> memoryview:
        """1 to ``most`` bytes.

        Raises:
            ProtocolViolation: the stream has ended.
        """
        while not len(self._rest):
            try:
                self._rest = memoryview(await anext(self._source))
            except StopAsyncIteration:
                raise ProtocolViolation("the archive is cut off") from None
        data, self._rest = self._rest[:most], self._rest[most:]
        return data

    async def exactly(self, count: int) -> bytes:
        """``count`` bytes, which the caller has bounded."""
        data = bytearray()
        while len(data) < count:
            data += await self.some(count - len(data))
        return bytes(data)

    async def skip(self, count: int) -> None:
        """Drop ``count`` bytes."""
        while count:
            count -= len(await self.some(count))

    async def drain(self) -> None:
        """Drop the padding after the end, so that the sender is not left waiting."""
        async for _ in self._source:
            pass


class _Header(NamedTuple):
    name: bytes
    mode: int
    size: int
    mtime: float
    kind: bytes
    target: bytes


class _Tree:
    """The destination, written without ever following a link."""

    def __init__(self, root: int, limits: ArchiveLimits, replace: bool, any_links: bool = False) -> None:
        self._root = root
        self._limits = limits
        self._replace = replace
        self._any_links = any_links
        self._stack: list[tuple[bytes, int]] = []  # open folders from the root down
        self._made: set[bytes] = set()  # regular files of this archive, for hard links
        self._seen: set[bytes] = set()
        self.files = self.folders = self.links = self.bytes = self.skipped_count = 0
        self._skipped: list[tuple[str, str]] = []

    def close(self) -> None:
        for _, fd in self._stack:
            os.close(fd)
        os.close(self._root)

    def result(self) -> Extracted:
        return Extracted(
            self.files, self.folders, self.links, self.bytes, tuple(self._skipped), self.skipped_count
        )

    def skip(self, name: bytes, reason: str) -> None:
        self.skipped_count += 1
        if len(self._skipped) < _MOST_SKIPPED:
            self._skipped.append((clean(name, 256), reason))

    def parts(self, name: bytes, what: str = "name") -> list[bytes]:
        """The components of a path below the destination.

        Raises:
            ProtocolViolation: it leaves the destination, or no file system could hold it.
        """
        shown = clean(name, 80)
        if name.startswith(b"/"):
            raise ProtocolViolation(f"the archive has an absolute {what}: {shown}")
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise ProtocolViolation(f"the archive has a {what} that climbs: {shown}")
        if b"\0" in name or len(name) > _MOST_PATH or any(len(part) > _MOST_COMPONENT for part in parts):
            raise ProtocolViolation(f"the archive has an impossible {what}: {shown}")
        if len(parts) > self._limits.depth:
            raise HostLimit(f"the archive is more than {self._limits.depth} folders deep")
        return parts

    def claim(self, parts: list[bytes]) -> None:
        """Every name but a folder's comes once."""
        name = b"/".join(parts)
        if name in self._seen:
            raise ProtocolViolation(f"the archive has an entry twice: {clean(name, 80)}")
        self._seen.add(name)

    def folder(self, parts: list[bytes], mode: int = 0o755) -> int:
        """A descriptor of a folder, made if missing. It stays ours."""
        depth = 0
        while depth < min(len(parts), len(self._stack)) and self._stack[depth][0] == parts[depth]:
            depth += 1
        while len(self._stack) > depth:
            os.close(self._stack.pop()[1])
        for at in range(depth, len(parts)):
            above = self._stack[-1][1] if self._stack else self._root
            # Ours until the end: the archive must not lock us out of a folder that we fill.
            own = (mode if at == len(parts) - 1 else 0o755) & 0o777 | 0o700
            try:
                os.mkdir(parts[at], own, dir_fd=above)
                self.folders += 1
            except FileExistsError:
                pass
            try:
                fd = os.open(parts[at], _FOLDER, dir_fd=above)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                shown = clean(b"/".join(parts[: at + 1]), 80)
                raise ProtocolViolation(
                    f"the archive passes through {shown}, which is not a folder"
                ) from None
            self._stack.append((parts[at], fd))
        return self._stack[-1][1] if self._stack else self._root

    def _room(self, above: int, leaf: bytes, parts: list[bytes]) -> None:
        """Nothing may be where an entry goes; with ``replace``, what was there before is unlinked."""
        try:
            there = os.stat(leaf, dir_fd=above, follow_symlinks=False)
        except FileNotFoundError:
            return
        shown = clean(b"/".join(parts), 80)
        if stat.S_ISDIR(there.st_mode):
            raise ProtocolViolation(f"the archive has a file where a folder is: {shown}")
        if not self._replace:
            raise InvalidRequest(f"{shown} is there already", hint="name an empty folder, or remove it first")
        os.unlink(leaf, dir_fd=above)

    def create(self, parts: list[bytes], mode: int) -> int:
        """A new regular file, open for writing; the caller closes it."""
        self.claim(parts)
        above = self.folder(parts[:-1])
        self._room(above, parts[-1], parts)
        fd = os.open(parts[-1], _CREATE, mode & 0o777 | 0o600, dir_fd=above)
        self.files += 1
        return fd

    def created(self, parts: list[bytes]) -> None:
        """The file is complete: hard links to it are fine."""
        self._made.add(b"/".join(parts))

    def discard(self, parts: list[bytes]) -> None:
        """The file could not be completed."""
        os.unlink(parts[-1], dir_fd=self.folder(parts[:-1]))

    def symlink(self, parts: list[bytes], target: bytes) -> None:
        """A symlink that stays inside, whatever other links the archive has.

        Only ``..`` at the beginning is allowed: those are taken from a real folder. One that comes after a
        name could be taken from wherever another symlink of that name leads.
        """
        above = [part for part in target.split(b"/") if part not in (b"", b".")]
        climbs = 0
        while climbs < len(above) and above[climbs] == b"..":
            climbs += 1
        leaves = target.startswith(b"/") or climbs > len(parts) - 1 or b".." in above[climbs:]
        if not target or b"\0" in target or len(target) > _MOST_PATH or (leaves and not self._any_links):
            self.skip(b"/".join(parts), "a symlink that leaves the folder")
            return
        self.claim(parts)
        folder = self.folder(parts[:-1])
        self._room(folder, parts[-1], parts)
        os.symlink(target, parts[-1], dir_fd=folder)
        self.links += 1

    def hardlink(self, parts: list[bytes], source: list[bytes]) -> None:
        """A second name of a file that this archive made."""
        if b"/".join(source) not in self._made:
            raise ProtocolViolation(
                f"a hard link to what is not in the archive: {clean(b'/'.join(source), 80)}"
            )
        self.claim(parts)
        # The stack serves one folder at a time, so the other is kept open by a descriptor of its own.
        from_fd = os.dup(self.folder(source[:-1]))
        try:
            above = self.folder(parts[:-1])
            self._room(above, parts[-1], parts)
            os.link(source[-1], parts[-1], src_dir_fd=from_fd, dst_dir_fd=above, follow_symlinks=False)
        finally:
            os.close(from_fd)
        self.links += 1


async def _unpack(blocks: _Blocks, tree: _Tree, limits: ArchiveLimits) -> None:
    entries = taken = 0
    extra: dict[bytes, bytes] = {}
    while True:
        block = await blocks.exactly(_BLOCK)
        if not any(block):
            await blocks.drain()
            return
        entries += 1
        # Headers that only announce count as well: they cost time and come before an entry.
        if entries > 3 * limits.entries:
            raise HostLimit(f"the archive has more than {limits.entries} entries")
        header = _parse(block)
        if header.kind in (b"x", b"X", b"L", b"K", b"g"):
            most = _MOST_LONG_NAME if header.kind in (b"L", b"K") else _MOST_PAX
            if header.size > most:
                raise ProtocolViolation("the archive has a name or attributes longer than any")
            data = await blocks.exactly(header.size)
            await blocks.skip(-header.size % _BLOCK)
            if header.kind == b"L":
                extra[b"path"] = data.rstrip(b"\0")
            elif header.kind == b"K":
                extra[b"linkpath"] = data.rstrip(b"\0")
            elif header.kind != b"g":  # what holds for all entries is nothing that we would believe
                extra.update(_records(data))
            continue
        header = _applied(header, extra)
        extra = {}
        if tree.files + tree.folders + tree.links + tree.skipped_count >= limits.entries:
            raise HostLimit(f"the archive has more than {limits.entries} entries", hint="raise the limit")
        taken += header.size
        if taken > limits.bytes:
            raise HostLimit(f"the archive has more than {limits.bytes} bytes", hint="raise the limit")
        await _entry(blocks, tree, header)
        await blocks.skip(-header.size % _BLOCK)


async def _entry(blocks: _Blocks, tree: _Tree, header: _Header) -> None:
    parts = tree.parts(header.name)
    if header.kind in (b"0", b"\0", b"7"):
        if not parts or header.name.endswith(b"/"):
            raise ProtocolViolation("the archive has a file without a name")
        await _file(blocks, tree, header, parts)
        return
    await blocks.skip(header.size)
    if header.kind == b"5":
        tree.folder(parts, header.mode)
    elif header.kind == b"2" and parts:
        tree.symlink(parts, header.target)
    elif header.kind == b"1" and parts:
        tree.hardlink(parts, tree.parts(header.target, "link target"))
    elif header.kind == b"S":
        raise ProtocolViolation("the archive has a sparse file")
    else:
        tree.skip(header.name, "neither a file, a folder nor a link")


async def _file(blocks: _Blocks, tree: _Tree, header: _Header, parts: list[bytes]) -> None:
    fd = tree.create(parts, header.mode)
    try:
        rest = header.size
        while rest:
            data = await blocks.some(min(rest, 1024 * 1024))
            rest -= len(data)
            while len(data):
                data = data[os.write(fd, data) :]
        when = min(max(header.mtime, 0), _LATEST)
        os.utime(fd, (when, when))
    except BaseException:
        os.close(fd)
        tree.discard(parts)
        raise
    os.close(fd)
    tree.bytes += header.size
    tree.created(parts)


def _parse(block: bytes) -> _Header:
    total = sum(block) - sum(block[148:156]) + 8 * 32
    if _number(block[148:156]) != total:
        raise ProtocolViolation("this is no tar archive (a header with a wrong checksum)")
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0]
    # Only ustar has a prefix: GNU keeps times there.
    if block[257:263] == b"ustar\0" and prefix:
        name = prefix + b"/" + name
    return _Header(
        name,
        _number(block[100:108]),
        _number(block[124:136]),
        _number(block[136:148]),
        block[156:157],
        block[157:257].split(b"\0", 1)[0],
    )


def _number(field: bytes) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip(b" ")
    if not text:
        return 0
    if not all(0x30 <= digit <= 0x37 for digit in text):
        raise ProtocolViolation("this is no tar archive (a number that is none)")
    return int(text, 8)


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of a pax header: ``length key=value newline``."""
    found = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        digits = data[at:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = data[space + 1 : at + length]
        if (
            length <= space + 1 - at
            or at + length > len(data)
            or not record.endswith(b"\n")
            or b"=" not in record
        ):
            raise ProtocolViolation("the archive has attributes that are none")
        key, _, value = record[:-1].partition(b"=")
        if key.startswith(b"GNU.sparse."):
            raise ProtocolViolation("the archive has a sparse file")
        if key in (b"path", b"linkpath", b"size", b"mtime"):
            found[key] = value
        at += length
    return found


def _applied(header: _Header, extra: dict[bytes, bytes]) -> _Header:
    if not extra:
        return header
    size, mtime = header.size, header.mtime
    if b"size" in extra:
        if not extra[b"size"].isdigit() or len(extra[b"size"]) > 20:
            raise ProtocolViolation("the archive has a size that is none")
        size = int(extra[b"size"])
    if b"mtime" in extra:
        try:
            mtime = float(extra[b"mtime"][:40])
        except ValueError:
            raise ProtocolViolation("the archive has a time that is none") from None
        if mtime != mtime:
            mtime = 0.0
    return header._replace(
        name=extra.get(b"path", header.name),
        target=extra.get(b"linkpath", header.target),
        size=size,
        mtime=mtime,
    )
