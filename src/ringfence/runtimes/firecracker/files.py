"""Files in a machine's jail, which its monitor can write: nothing that it made there is followed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from ringfence.runtimes.vm import disks


def mode(path: str) -> int:
    """The mode of a file itself; 0 if there is none."""
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def give(source: str, target: str) -> None:
    """Show a file in a jail: by another name of it, or a copy where that can't be.

    Raises:
        OSError: neither could be made.
    """
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        disks.copy(source, target)
        os.chmod(target, 0o444)


def unlink(folder: str, names: Iterable[str]) -> None:
    """Remove what is there of these."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
