"""What the kernel's refusals mean while a template is made."""

from __future__ import annotations

import errno
import os

from ringfence.model.errors import HostLimit

_REMEDIES = {
    errno.ENOSPC: (
        "the disk is full",
        "free some space (`ringfence template gc` removes what nothing uses), or point RINGFENCE_HOME"
        " elsewhere",
    ),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or point RINGFENCE_HOME elsewhere"),
    errno.EROFS: ("the file system is read-only", "point RINGFENCE_HOME at a writable folder"),
    errno.EACCES: ("permission denied", "run as root, or point RINGFENCE_HOME at a folder of your own"),
    errno.EPERM: ("not permitted", "run as root, or point RINGFENCE_HOME at a folder of your own"),
    errno.EMFILE: ("too many open files in this process", "raise the limit with ulimit -n"),
    errno.EIO: ("the disk gives an error", "see what the kernel's log says about it"),
}


def host_limit(error: OSError, doing: str) -> HostLimit:
    """The error as a sentence with cause and remedy. ``doing``: what could not be done, ``"write X"``."""
    cause, remedy = _REMEDIES.get(error.errno or 0, (os.strerror(error.errno or 0), ""))
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return HostLimit(f"can't {doing}: {cause} ({name})", hint=remedy, errno=name)
