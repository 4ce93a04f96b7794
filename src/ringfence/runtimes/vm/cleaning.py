"""What in a VM store is of use: disks of templates that exist, and what was made of today's programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection

_MADE_OF_PROGRAMS = ("initramfs-", "vmlinux-", "vmm-")


def keeper(folder: str, templates: Collection[str], *, busy: bool) -> Callable[[str], bool]:
    """Says by its name whether something in ``folder`` (a VM store) is of use.

    ``templates``: names of :func:`ringfence.runtimes.vm.disks.name_of`. ``busy``: machines may run, and
    QEMU's roots are left alone. Of first file systems, kernels and QEMU's roots the one that was used last is
    kept: another is made when it is needed, in moments.
    """
    newest: dict[str, tuple[float, str]] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            for prefix in _MADE_OF_PROGRAMS:
                if entry.name.startswith(prefix):
                    with contextlib.suppress(OSError):
                        found = (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                        newest[prefix] = max(newest.get(prefix, found), found)

    def kept(name: str) -> bool:
        if name.startswith("template-"):
            return name.partition(".")[0] in templates
        for prefix in _MADE_OF_PROGRAMS:
            if name.startswith(prefix):
                return (busy and prefix == "vmm-") or newest.get(prefix, (0.0, name))[1] == name
        return True

    return kept


def used(path: str) -> None:
    """Note that something in the VM store was used just now."""
    with contextlib.suppress(OSError):
        os.utime(path)
