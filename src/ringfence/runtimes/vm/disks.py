"""A guest's disks: the template as a read-only erofs (or squashfs) image, and what it writes as ext4.

Template images lie in the *VM store*, ``<state root>/vm``, one a template, made once and never changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator

from ringfence.model.errors import HostLimit, StartFailed, Unsupported
from ringfence.runtimes.contract import RootFs

PROBE = "probe"  # the template of a probe
SMALLEST = 8 << 20  # bytes of a writable disk: below, ext4 has more metadata than room
BYTES_PER_INODE = 8192
_BUILD_TIMEOUT = 600.0  # seconds: a template of many GB on a slow disk
# In a mount namespace of its own.
_MOUNT = 'mount -t overlay -o "ro,lowerdir=$1" ringfence "$2" && shift 2 && exec "$@"'


def store(folder: str) -> str:
    """The VM store of the state root that a sandbox's folder belongs to; made if it is not there.

    Nobody else passes through: who sees a machine's table of mounts knows where its template's image lies.

    Raises:
        HostLimit: it can't be made.
    """
    above, name = os.path.split(os.path.dirname(os.path.abspath(folder)))
    if name != "sandboxes":  # of a probe
        above = os.environ.get("RINGFENCE_HOME", "/var/lib/ringfence")
    path = os.path.join(above, "vm")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if stat.S_IMODE(os.stat(path).st_mode) != 0o700:
            os.chmod(path, 0o700)
    except OSError as error:
        raise HostLimit(f"{path} can't be made: {error.strerror}", hint="see the state root") from error
    return path


def check(root: RootFs) -> None:
    """Refuse what no disk can be made of.

    Raises:
        Unsupported: the ``host`` template, or folders of the host inside.
    """
    if root.template == "host":
        raise Unsupported(
            "a virtual machine can't run on the host's own files",
            hint="choose a template: `ringfence template add debian:bookworm`, then --template bookworm",
            capability="host_template",
        )
    if root.image:
        raise Unsupported(
            f"the image {root.image} is a container engine's",
            hint="import it as a template: `ringfence template add`",
            capability="host_template",
        )
    if root.binds:
        raise Unsupported(
            "a virtual machine is shown no folder of the host",
            hint="copy files in and out instead: --file and --out",
            capability="mounts",
        )


def name_of(root: RootFs) -> str:
    """The name of a template's image: of its digest and of the layers that it is put together from."""
    # A probe's root lies elsewhere each time, and is always the same.
    lowers = () if root.template == PROBE else map(os.path.realpath, root.lowers)
    digest = hashlib.sha256("\0".join((root.template, *lowers)).encode())
    return f"template-{digest.hexdigest()[:40]}"


async def template(root: RootFs, folder: str) -> tuple[str, str]:
    """(path, file system) of the template's image in ``folder`` (a VM store), made if it is not there.

    Raises:
        StartFailed: a layer is missing, or the image can't be made; nothing is left.
        HostLimit: no program for it is installed, or the disk is full.
    """
    made = _made(root, folder)
    return made if made is not None else await asyncio.to_thread(_build, root, folder)


def _made(root: RootFs, folder: str) -> tuple[str, str] | None:
    for kind in ("erofs", "squashfs"):
        path = os.path.join(folder, f"{name_of(root)}.{kind}")
        with contextlib.suppress(OSError):
            os.utime(path)  # used: cleaning takes what was not for the longest time
            return path, kind
    return None


def _build(root: RootFs, folder: str) -> tuple[str, str]:
    for lower in root.lowers:
        if not os.path.isdir(lower):
            raise StartFailed(f"the layer {lower} is missing", step="template", errno="ENOENT")
    kind, program = _maker()
    path = os.path.join(folder, f"{name_of(root)}.{kind}")
    with _locked(folder, name_of(root)):  # several sandboxes of a new template: one makes it
        if os.path.exists(path):
            return path, kind
        work = os.path.join(folder, f".{os.path.basename(path)}.new")
        view = os.path.join(folder, f".{os.path.basename(path)}.view")
        with contextlib.suppress(OSError):
            os.unlink(work)
        try:
            source = root.lowers[0]
            prefix: list[str] = []
            if len(root.lowers) > 1:
                os.makedirs(view, exist_ok=True)
                source = view
                layers = ":".join(_escaped(lower) for lower in root.lowers)
                prefix = [
                    "unshare",
                    "--mount",
                    "--propagation",
                    "private",
                    "sh",
                    "-c",
                    _MOUNT,
                    "sh",
                    layers,
                    view,
                ]
            if kind == "erofs":
                command = [program, "-T0", "-U", "00000000-0000-0000-0000-000000000000", work, source]
            else:
                options = [
                    "-comp",
                    "zstd",
                    "-Xcompression-level",
                    "1",
                    "-noappend",
                    "-no-progress",
                    "-all-time",
                    "0",
                ]
                command = [program, source, work, *options]
            _call([*prefix, *command])
            os.chmod(work, 0o444)
            os.rename(work, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(work)
            with contextlib.suppress(OSError):
                os.rmdir(view)
    return path, kind


def _maker() -> tuple[str, str]:
    for kind, name in (("erofs", "mkfs.erofs"), ("squashfs", "mksquashfs")):
        program = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
        if program is not None:
            return kind, program
    raise HostLimit("a template's disk needs mkfs.erofs or mksquashfs", hint="apt-get install erofs-utils")


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BUILD_TIMEOUT,
            errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartFailed(f"the template's disk can't be made: {error}", step="template") from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        text = words[-1] if words else str(done.returncode)
        if "No space left" in done.stderr or "ENOSPC" in done.stderr:
            raise HostLimit(f"the template's disk can't be made: {text}", hint="free some space")
        raise StartFailed(f"the template's disk can't be made: {text}", step="template")


@contextlib.contextmanager
def _locked(folder: str, name: str) -> Iterator[None]:
    descriptor = os.open(os.path.join(folder, f".{name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _escaped(path: str) -> str:
    return os.path.realpath(path).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def writable(folder: str, target: str, size: int, inodes: int, owner: int) -> None:
    """Make the disk of one guest at ``target``: a sparse copy of a formatted, empty image in ``folder``.

    Raises:
        HostLimit: the disk of the host is full, or mkfs.ext4 is missing.
    """
    size = max(size, SMALLEST) + 4095 & ~4095
    try:
        copy(_formatted(folder, size, inodes), target)
        os.chmod(target, 0o600)
        os.chown(target, owner, owner)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(target)
        raise HostLimit(
            f"the disk {target} can't be made: {error.strerror}", hint="free some space on the host"
        ) from error


def _formatted(folder: str, size: int, inodes: int) -> str:
    path = os.path.join(folder, f"ext4-{size}-{inodes}.img")
    if os.path.exists(path):
        return path
    program = shutil.which("mkfs.ext4") or shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
    if program is None:
        raise HostLimit("a guest's disk needs mkfs.ext4", hint="apt-get install e2fsprogs")
    with _locked(folder, os.path.basename(path)):
        if os.path.exists(path):
            return path
        work = os.path.join(folder, f".{os.path.basename(path)}.new")
        try:
            with open(work, "wb") as file:
                os.truncate(file.fileno(), size)
            # With a journal: a snapshot of a disk in use has to be a sound file system.
            options = ["-q", "-F", "-m", "0", "-b", "4096", "-N", str(inodes), "-O", "^resize_inode"]
            if size < 64 << 20:
                options += ["-J", "size=4"] if size >= 32 << 20 else ["-O", "^has_journal"]
            _call([program, *options, "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", work])
            os.rename(work, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(work)
    return path


def copy(source: str, target: str) -> None:
    """Copy a disk, holes and all; by reference where the file system can do that. The copy is its maker's
    alone to read.

    ``source`` may lie in a folder that a machine's monitor can write: a link or a pipe in its place is
    neither followed nor waited for.

    Raises:
        OSError: no room, ``source`` is no file, or ``target`` exists; what was written stays.
    """
    with open(source, "rb", opener=_opened) as old, open(target, "xb", opener=_made_ours) as new:
        found = os.fstat(old.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file", source)
        size = found.st_size
        try:
            fcntl.ioctl(new.fileno(), 0x40049409, old.fileno())  # FICLONE
            return
        except OSError:
            os.truncate(new.fileno(), size)
        at = 0
        while at < size:
            try:
                start = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:  # only a hole is left
                return
            at = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            os.lseek(new.fileno(), start, os.SEEK_SET)
            while start < at:
                sent = os.sendfile(new.fileno(), old.fileno(), start, at - start)
                if sent == 0:
                    break
                start += sent


def _opened(path: str, flags: int) -> int:
    # Not following a link, nor waiting for the other end of a pipe.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _made_ours(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
