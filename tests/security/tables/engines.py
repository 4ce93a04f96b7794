"""Where a wall of a container engine answers otherwise than the jail. Each with a note where it needs one."""

from __future__ import annotations

ENGINES: dict[str, tuple[str, str]] = {
    # The writable folders are tmpfs of a namespace that the workload has no right over: refused earlier.
    "set-user-id-made-inside": ("denied:EPERM", ""),
    "become-another": ("denied:EPERM", ""),
    "agent-socket": ("denied:EACCES+invisible", ""),
}
