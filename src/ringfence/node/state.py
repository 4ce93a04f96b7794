"""The state root: folders, permissions, and who is alive.

::

    <state>/                 0711  (a workload's host user may have to pass through, never to list)
      templates/host-<digest>/     lower layers, shared by all
      disks/                 0700  formatted ext4 images to copy
      ranges/                0700  leases of host uid ranges: symlinks to the leaseholder's name
      nodes/                 0700  one locked file per living node process
      sandboxes/<id>/        0711  journal, guest.sock, disk image
      snapshots/             0711  saved sandboxes (``node.snapshots``)
      spare/                 0700  emptied folders: what was a sandbox's will be one's again

Several node processes share one state root. Each holds an exclusive lock (flock) on its own file in
``nodes/`` for as long as it lives; the kernel gives the lock back when it is killed, however it is
killed. A file there that can be locked belongs to a dead node, and only then is anything of that
node's looked at. So a living owner's sandboxes are never touched, and an open with nothing to sweep
costs one listing.

Folders are moved to and fro instead of made and removed, and their emptied journals with them: rmdir may
wait milliseconds for a disk (ext4 with ``discard`` does), a rename does not; and an ext4 without a journal of
its own looks for a new file's inode among all that were deleted in the last minutes, one by one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.node.troubles import host_limit
from ringfence.runtimes.launching.processes import birth_of, boot_id

_counter = itertools.count()
_FOLDERS = {
    "templates": 0o700,  # folders in it belong to users by their numbers inside, or to everybody
    "disks": 0o700,
    "ranges": 0o700,
    "nodes": 0o700,
    "sandboxes": 0o711,
    "snapshots": 0o711,
    "spare": 0o700,
}
_MOST_SPARE = 64
JOURNAL = "journal"
# linux/fs.h; the size in the number is a long's, what is read and written an int.
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_TOPDIR_FL = 0x00020000


def default_root() -> Path:
    """$RINGFENCE_HOME, else /var/lib/ringfence as root, else the user's XDG state folder."""
    home = os.environ.get("RINGFENCE_HOME")
    if home:
        return Path(os.path.abspath(home))
    if os.geteuid() == 0:
        return Path("/var/lib/ringfence")
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "ringfence"


class StateRoot:
    """An open state root, with this node's lock held. Use :meth:`open`; :meth:`close` gives it back.

    ``owner`` is the name of this node in journals and leases.
    """

    def __init__(self, path: Path, owner: str, lock: int) -> None:
        self.path = path
        self.owner = owner
        self.sandboxes = path / "sandboxes"
        self.templates = path / "templates"
        self.disks = path / "disks"
        self.ranges = path / "ranges"
        self.nodes = path / "nodes"
        self.snapshots = path / "snapshots"
        self.spare = path / "spare"
        self._spare: list[str] = []
        self._lock = lock

    @classmethod
    def open(cls, path: Path | str | None = None) -> StateRoot:
        """Make what is missing, check who owns it, take this node's lock.

        Raises:
            HostLimit: the folder can't be made or written, or somebody else could write to it.
        """
        root = Path(os.path.realpath(path if path is not None else default_root()))
        try:
            _make(root, 0o711)
            for name, mode in _FOLDERS.items():
                _make(root / name, mode)
            _spread(root / "sandboxes")
            owner, lock = _take_lock(root / "nodes")
        except OSError as error:
            raise host_limit(error, f"use the state folder {root}") from error
        return cls(root, owner, lock)

    def folder(self, sandbox: str) -> Path:
        """Where a sandbox keeps its things."""
        return self.sandboxes / sandbox

    def take_folder(self, sandbox: str) -> Path:
        """The new, empty folder of a sandbox.

        Raises:
            InvalidRequest: there is a sandbox of that id.
            HostLimit: it can't be made.
        """
        folder = self.folder(sandbox)
        try:
            if not self._spare:
                self._spare = os.listdir(self.spare)
            while self._spare:
                # rename(2) would replace an empty folder of that name; a living sandbox's is never empty.
                if os.path.lexists(folder):
                    break
                try:
                    os.rename(f"{self.spare}/{self._spare.pop()}", folder)
                except FileNotFoundError:
                    continue  # another node took it
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        break
                    raise
                return folder
            os.mkdir(folder, 0o711)
            os.chmod(folder, 0o711)  # noqa: S103 - the agent's host user passes through, and sees nothing
        except FileExistsError:
            raise InvalidRequest(f"there is a sandbox {sandbox} already", hint="choose another id") from None
        except OSError as error:
            raise host_limit(error, f"make {folder}") from error
        return folder

    def give_folder(self, folder: Path, journal: int = -1) -> None:
        """A sandbox is gone: empty its folder and keep it for another one.

        ``journal``: a descriptor of its journal that is still open. An ext4 allocates and writes what was
        added to a file that had been emptied, as soon as it is closed: emptied before, nothing is written.

        Raises:
            HostLimit: something in it can't be removed.
        """
        try:
            full = len(self._spare) >= _MOST_SPARE
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        import shutil

                        shutil.rmtree(entry.path)
                    elif entry.name == JOURNAL and entry.is_file(follow_symlinks=False) and not full:
                        # An empty one says no more than none.
                        ours = journal >= 0 and os.fstat(journal).st_ino == entry.inode()
                        os.truncate(journal if ours else entry.path, 0)
                    else:
                        os.unlink(entry.path)
            if full:
                os.rmdir(folder)
                return
            name = f"{self.owner}.{next(_counter)}"
            os.rename(folder, f"{self.spare}/{name}")
            self._spare.append(name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise host_limit(error, f"remove {folder}") from error

    def dead_nodes(self) -> dict[str, int]:
        """Names of nodes that died without cleaning up, each with its lock now held by us (a descriptor)."""
        found = {}
        for name in os.listdir(self.nodes):
            if name == self.owner:
                continue
            lock = _try_lock(self.nodes / name)
            if lock is not None:
                found[name] = lock
        return found

    def is_dead(self, name: str) -> bool:
        """Whether the node of that name is dead; also if nobody knows it."""
        lock = _try_lock(self.nodes / name) if name else None
        if lock is not None:
            unlock(lock)
            return True
        return not self.knows(name)

    @contextlib.contextmanager
    def burying(self, name: str) -> Iterator[bool]:
        """While something of that node is taken over: True if it is dead, and nobody else does so now."""
        lock = _try_lock(self.nodes / name) if name else None
        try:
            yield lock is not None or not self.knows(name)
        finally:
            if lock is not None:
                unlock(lock)

    def has_orphans(self) -> bool:
        """Whether there are sandboxes although no node but this one, which is just opening, is known."""
        return os.listdir(self.nodes) == [self.owner] and bool(os.listdir(self.sandboxes))

    def bury(self, name: str, lock: int) -> None:
        """A dead node's things are gone: forget it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.nodes / name)
        unlock(lock)

    def knows(self, name: str) -> bool:
        """Whether that node lives, or is dead and not buried yet."""
        return bool(name) and (self.nodes / name).exists()

    def close(self, *, leave: bool = False) -> None:
        """Give the lock back. ``leave``: sandboxes of ours live on, so the next node shall look for them."""
        if self._lock < 0:
            return
        if not leave:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.nodes / self.owner)
        unlock(self._lock)
        self._lock = -1


def unlock(lock: int) -> None:
    """Give a lock back and close its descriptor.

    Closing alone is not enough: a child of this process that was forked a moment ago and has not executed its
    program yet has a copy, and what it holds is held.
    """
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _make(path: Path, mode: int) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        # The parents of a user's state root may be missing too (~/.local/state).
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode)
            path.chmod(mode)  # whatever the umask
        found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise HostLimit(f"{path} is not a folder", hint="remove it, or point RINGFENCE_HOME elsewhere")
    if found.st_uid != os.geteuid():
        raise HostLimit(
            f"{path} belongs to user {found.st_uid}, not to you (user {os.geteuid()})",
            hint="point RINGFENCE_HOME at a folder of your own",
        )
    if found.st_mode & 0o022:
        raise HostLimit(
            f"{path} can be written by other users: they could change what sandboxes are made of",
            hint=f"chmod go-w {path}",
        )
    if found.st_mode & 0o111 != mode & 0o111:
        path.chmod(mode)


def _spread(path: Path) -> None:
    """Ask the file system to put the folders made here far from each other (``chattr +T``).

    A socket is the one file that each sandbox makes and deletes. Where an ext4 has no journal, it looks for a
    new file's inode among those deleted in the last minutes in the folder's own group, one by one: half a
    millisecond at 200 sandboxes a second while all folders lie in one group. Other file systems know no such
    hint, and don't need it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = int.from_bytes(fcntl.ioctl(folder, _FS_IOC_GETFLAGS, bytes(4)), sys.byteorder)
        if not flags & _FS_TOPDIR_FL:
            fcntl.ioctl(folder, _FS_IOC_SETFLAGS, (flags | _FS_TOPDIR_FL).to_bytes(4, sys.byteorder))
    except OSError:
        pass
    finally:
        os.close(folder)


def _take_lock(nodes: Path) -> tuple[str, int]:
    birth = birth_of(os.getpid())
    while True:
        name = f"{boot_id()[:8]}.{os.getpid()}.{birth}.{next(_counter)}"
        # Another pid namespace may have used the name: O_EXCL, and the next number.
        try:
            lock = os.open(nodes / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Between open and flock somebody may have taken us for dead.
        if os.fstat(lock).st_nlink:
            return name, lock
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    if not os.fstat(lock).st_nlink:
        os.close(lock)
        return None
    return lock
