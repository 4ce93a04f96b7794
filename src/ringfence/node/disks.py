"""Where a sandbox's writes go: memory while that can't be what runs out, else an image file.

A tmpfs is charged to the sandbox's memory. With a disk of at most half of the memory the writer gets
ENOSPC long before the kernel has to kill somebody. A larger disk is an ext4 image, mounted through a loop
device by the driver (root only). Images are copies of one formatted, almost empty image a size, so that no
start waits for mkfs. Their blocks are reserved on the host: what is promised inside can't run out outside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
from pathlib import Path

from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.model.policy import Resources
from ringfence.model.quantities import format_size
from ringfence.node.state import StateRoot
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import Disk

SMALLEST = 1 << 20  # bytes of disk: less than a megabyte is a mistake
SMALLEST_IMAGE = 8 << 20  # below, ext4 has more metadata than room
BYTES_PER_INODE = 8192  # of a disk's size: half of ext4's usual 16 KiB; small files are usual here
MOST_INODES = 1 << 20  # of a tmpfs, each 1 KiB of kernel memory that the sandbox's limit pays for
LEAST_INODES = 1024
HOST_RESERVE = 256 << 20  # bytes of the host's disk that no sandbox is ever promised
_LOOP_CLR_FD = 0x4C01


def choose(resources: Resources, *, root: bool) -> str:
    """``tmpfs`` or ``image``.

    Raises:
        InvalidRequest: the size is impossible.
        HostLimit: it would have to be an image, and only root can mount one.
    """
    if resources.disk < SMALLEST:
        raise InvalidRequest(
            f"a disk of {format_size(resources.disk)} is too small",
            hint=f"ask for {format_size(SMALLEST)} or more",
        )
    if resources.disk <= resources.memory // 2:
        return "tmpfs"
    if not root:
        raise HostLimit(
            f"a disk of {format_size(resources.disk)} is more than half of the memory "
            f"({format_size(resources.memory)}), so it has to be an image, and only root can mount one",
            hint=f"ask for a disk of {format_size(resources.memory // 2)} or less, or for more memory, "
            "or run as root",
        )
    return "image"


def prepare(state: StateRoot, folder: Path, resources: Resources, *, root: bool) -> Disk:
    """The disk of one sandbox; an image is ``folder/disk.img``.

    Raises:
        InvalidRequest, HostLimit: see :func:`choose`; or the host's disk is full, or mkfs.ext4 is missing.
    """
    inodes = max(LEAST_INODES, min(MOST_INODES, resources.disk // BYTES_PER_INODE))
    if choose(resources, root=root) == "tmpfs":
        return Disk("tmpfs", resources.disk, inodes)
    size = max(resources.disk, SMALLEST_IMAGE) + 4095 & ~4095
    target = folder / "disk.img"
    try:
        _copy_image(_formatted(state, size, inodes), target, size)
    except OSError as error:
        with contextlib.suppress(OSError):
            target.unlink()
        raise host_limit(
            error,
            f"reserve {format_size(size)} for a sandbox's disk in {folder}",
            hint="free some space there, ask for a smaller disk, or point RINGFENCE_HOME at another disk",
        ) from error
    return Disk("image", size, inodes, str(target))


def _formatted(state: StateRoot, size: int, inodes: int) -> Path:
    path = state.disks / f"ext4-1-{size}-{inodes}.img"
    if path.exists():
        return path
    import shutil  # late, as ctypes below: `ringfence run` seldom comes here and starts sooner without them

    program = shutil.which("mkfs.ext4") or shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
    if program is None:
        raise HostLimit(
            f"a disk of {format_size(size)} needs mkfs.ext4, which is not on this host",
            hint="install e2fsprogs, or ask for a disk of at most half of the memory",
        )
    work = state.disks / f".{path.name}.{state.owner}"
    try:
        with open(work, "xb") as file:
            os.truncate(file.fileno(), size)
        # No journal: nothing outlives the wall. No reserved blocks: its user is not root.
        command = [
            program, "-q", "-F", "-m", "0", "-b", "4096", "-N", str(inodes),
            "-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0",
            str(work),
        ]  # fmt: skip
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise HostLimit(f"mkfs.ext4 failed: {done.stderr.strip()[-300:]}", hint="see if the disk is full")
        os.rename(work, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            work.unlink()
    return path


def _copy_image(source: Path, target: Path, size: int) -> None:
    """Copy what is not a hole, and reserve the rest."""
    with open(source, "rb") as old, open(target, "xb") as new:
        os.fchmod(new.fileno(), 0o600)
        _reserve(new.fileno(), size)
        at = 0
        while True:
            try:
                start = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            at = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            os.lseek(new.fileno(), start, os.SEEK_SET)
            while start < at:
                start += os.sendfile(new.fileno(), old.fileno(), start, at - start)


def _reserve(file: int, size: int) -> None:
    # Looked up first: a reservation that fails half-way has taken all there was from everybody for a moment.
    space = os.fstatvfs(file)
    if space.f_bavail * space.f_frsize < size + HOST_RESERVE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # Not os.posix_fallocate: where the file system can't, glibc would write zeros for minutes.
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    if libc.fallocate(file, 0, 0, size) == 0:
        return
    number = ctypes.get_errno()
    os.truncate(file, 0)
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    os.truncate(file, size)


def loop_devices(below: Path) -> dict[str, str]:
    """Loop devices whose backing file lies below a folder: device name → file."""
    found = {}
    try:
        names = [name for name in os.listdir("/sys/block") if name.startswith("loop")]
    except OSError:
        return {}
    for name in names:
        try:
            with open(f"/sys/block/{name}/loop/backing_file") as file:
                backing = file.read().strip()
        except OSError:
            continue
        if backing.startswith(str(below) + "/"):
            found[name] = backing
    return found


def detach(device: str) -> bool:
    """Let a loop device go. False: the kernel would not (it is still mounted somewhere)."""
    try:
        file = os.open(f"/dev/{device}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.ioctl(file, _LOOP_CLR_FD)
    except OSError as error:
        return error.errno == errno.ENXIO
    finally:
        os.close(file)
    return True
