"""What the kernel's refusals mean for the person in front of the screen."""

from __future__ import annotations

import errno
import os

from ringfence.model.errors import HostLimit

_REMEDIES = {
    errno.ENOSPC: ("the disk is full", "free some space there, or point RINGFENCE_HOME at another disk"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or point RINGFENCE_HOME elsewhere"),
    errno.EROFS: ("the file system is read-only", "point RINGFENCE_HOME at a writable folder"),
    errno.EACCES: ("permission denied", "run as root, or point RINGFENCE_HOME at a folder of your own"),
    errno.EPERM: ("not permitted", "run as root, or point RINGFENCE_HOME at a folder of your own"),
    errno.EMFILE: ("too many open files in this process", "raise the limit with ulimit -n"),
    errno.ENFILE: ("too many open files on this machine", "raise fs.file-max"),
    errno.ENOMEM: ("the kernel is out of memory", "stop something, or ask for smaller sandboxes"),
    errno.EAGAIN: ("the kernel is out of processes or threads", "stop something, or raise ulimit -u"),
    errno.EBUSY: ("it is in use", "see which process uses it, and try again"),
    errno.ENOTDIR: ("a part of the path is not a folder", "point RINGFENCE_HOME at a folder"),
}


def host_limit(error: OSError, doing: str, *, hint: str = "") -> HostLimit:
    """The error as a sentence with cause and remedy. ``doing``: what could not be done, ``"write X"``."""
    cause, remedy = _REMEDIES.get(error.errno or 0, (os.strerror(error.errno or 0), ""))
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return HostLimit(f"can't {doing}: {cause} ({name})", hint=hint or remedy, errno=name)
