"""Attacks in an emulated machine, and what must come of each: all in one machine, since starts are slow.

Only where the answer is of the wall's making: files, ids, descriptors and rights inside. The system call
filter is the jail's, and what lies behind the kernel is another machine's.
"""

from __future__ import annotations

# name: (outcome, note)
MACHINES: dict[str, tuple[str, str]] = {
    "own-program-runs": ("succeeded", "the control of the path: a payload runs"),
    "read-passwd": ("different", "the template's own"),
    "read-shadow": ("denied:EACCES", "the template's own, and not the workload's to read"),
    "read-ssh-key": ("invisible", ""),
    "read-host-file": ("invisible", ""),
    "write-host-file": ("invisible", ""),
    "other-roots": ("denied:EACCES+invisible", ""),
    "open-descriptors": ("nothing-open", ""),
    "host-environment": ("invisible", ""),
    "proc-sys": ("denied:EACCES+invisible", ""),
    "sys-files": ("invisible", ""),
    "masked-proc": ("denied:EACCES+empty+invisible", ""),
    "ringfence-folder-read": ("denied:EACCES", ""),
    "overlay-whiteout": ("denied:EPERM", ""),
}
