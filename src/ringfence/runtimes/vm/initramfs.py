"""The guest's first file system: a ``newc`` archive with our init, the guest agent and kernel modules.

The kernel unpacks one archive after the other, so a guest gets :func:`base` (the same for all guests of a
kernel, made once) with a small archive behind it that holds :class:`Config` (of this guest alone).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Iterable

from ringfence.model.errors import HostLimit
from ringfence.model.values import dataclass
from ringfence.runtimes.vm import cleaning
from ringfence.runtimes.vm.kernel import Kernel

INIT, AGENT, CONFIG, FILTER = "init", "agent", "config", "filter"  # names in the archive
_CHUNK = 1 << 20
_FORMAT = b"2"  # of what `base` makes from the same parts
# At the end of a signed module: struct module_signature, and a text (Linux: kernel/module/signing.c).
_SIGNED, _SIGNATURE = b"~Module signature appended~\n", struct.Struct(">8xI")


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder (``data`` is None) or a file of an archive. Owner is root, time is 0."""

    name: str
    data: bytes | None = None
    mode: int = 0o755


def archive(entries: Iterable[Entry]) -> bytes:
    """A whole ``newc`` archive, padded so that another may follow."""
    parts = []
    for number, entry in enumerate([*entries, Entry("TRAILER!!!", b"", 0)], start=1):
        name = entry.name.encode() + b"\0"
        data = entry.data or b""
        kind = 0 if entry.name == "TRAILER!!!" else stat.S_IFDIR if entry.data is None else stat.S_IFREG
        fields = (number, kind | entry.mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        parts += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]
    whole = b"".join(parts)
    return whole + bytes(-len(whole) % 512)


def base(kernel: Kernel, init: str, agent: str, folder: str) -> str:
    """The archive that all guests of this kernel begin with; made in ``folder`` if it is not there.

    Raises:
        HostLimit: it can't be written, or a part of it can't be read.
    """
    try:
        programs = {}
        for name, path in ((INIT, init), (AGENT, agent)):
            with open(path, "rb") as file:
                programs[name] = file.read()
        digest = hashlib.sha256(_FORMAT + kernel.digest.encode())
        for content in programs.values():
            digest.update(hashlib.sha256(content).digest())
        target = os.path.join(folder, f"initramfs-{digest.hexdigest()[:32]}")
        if os.path.exists(target):
            cleaning.used(target)
            return target
        entries = [
            Entry(name) for name in ("dev", "proc", "sys", "modules", "lower", "disk", "root", "cgroup")
        ]
        entries += [Entry(name, content) for name, content in programs.items()]
        for path in kernel.modules:
            with open(path, "rb") as file:
                entries.append(Entry(f"modules/{os.path.basename(path)}", unsigned(file.read()), 0o644))
        os.makedirs(folder, mode=0o711, exist_ok=True)
        _write(target, archive(entries))
    except OSError as error:
        raise HostLimit(
            f"the guest's first file system can't be made: {error.filename}: {error.strerror}",
            hint="is the disk of the state root full?",
        ) from error
    return target


def unsigned(module: bytes) -> bytes:
    """A kernel module without its signature, which an emulated guest checks for 20 ms. Whoever hands a guest
    its modules hands it its kernel, too, so there is nothing that the signature could tell it."""
    end = len(module) - len(_SIGNED) - _SIGNATURE.size
    if end < 0 or not module.endswith(_SIGNED):
        return module
    (size,) = _SIGNATURE.unpack_from(module, end)
    return module[: end - size] if size < end else module


def _write(target: str, content: bytes) -> None:
    work = f"{target}.{secrets.token_hex(8)}.new"  # threads may make the same one
    try:
        with open(work, "xb") as file:
            file.write(content)
        os.chmod(work, 0o444)
        os.rename(work, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(work)
        raise


@dataclass(frozen=True, slots=True)
class Config:
    """What the guest's init does, in its own words.

    ``lines``: ``key=value`` in order; the values may hold anything but a zero byte. See ``native/vminit``.
    ``filter``: the workload's system call filter, as ``struct sock_filter``.
    """

    lines: tuple[tuple[str, str], ...]
    filter: bytes = b""

    def encode(self) -> bytes:
        """The archive that holds it."""
        text = b"".join(
            f"{key}={value}".encode("utf-8", "surrogateescape") + b"\0" for key, value in self.lines
        )
        entries = [Entry(CONFIG, text, 0o400)]
        if self.filter:
            entries.append(Entry(FILTER, self.filter, 0o400))
        return archive(entries)


def compose(first: str, config: Config, target: str, owner: int) -> None:
    """Write a guest's initramfs: ``first`` (of :func:`base`) and its own config, readable by ``owner`` alone.

    Raises:
        OSError: it can't be written; nothing is left.
    """
    try:
        with open(first, "rb") as source, open(target, "xb") as file:
            os.fchmod(file.fileno(), 0o400)
            while os.sendfile(file.fileno(), source.fileno(), None, _CHUNK):
                pass
            file.seek(0, os.SEEK_END)
            file.write(config.encode())
            os.fchown(file.fileno(), owner, owner)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(target)
        raise
