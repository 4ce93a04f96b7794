"""What an attack is, what its positive control is, and how outcomes are written.

Outcomes are short words: ``succeeded``; ``denied:EPERM`` and the like; ``invisible`` (no such thing here);
``different`` (another thing of that name); ``no-effect`` (the call worked, its aim was missed);
``contained:ENOSPC``, ``contained:out_of_memory`` … for bombs. Several ways tried at once are joined by ``+``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WALLS = (
    "jail/root",
    "jail/user",
    "jail/user+ids",
    "bubblewrap/root",
    "bubblewrap/user",
    "bubblewrap/user+ids",
    "nsjail/root",
    "nsjail/user",
    "nsjail/user+ids",
    "runc/root",
    "runc/user+ids",  # without ids there is no such wall: runc wants user 0 mapped
    "crun/root",
    "crun/user",
    "crun/user+ids",
    "docker/root",
    "podman/root",
    "gvisor/root",  # a normal user has no wall of gVisor yet
)
# Their root file system, ids and filter are the jail's: what is said of it holds for them if nothing else is.
LIKE_JAIL = ("nsjail", "runc", "crun")


@dataclass(frozen=True, slots=True)
class Control:
    """The same attempt where the protection is off: a plain child of the test, on the host.

    What it would touch is in ``namespaces`` made for it (names of ``unshare``); ``before`` is shell run in
    there first. ``limits`` are rlimits and ``cgroup`` the limits of a small cgroup (root): both so that a
    bomb which works harms nothing. ``root_only``: the reason why a normal user can't have this control.
    ``unprivileged``: run by a normal user even if the test is root.
    """

    namespaces: tuple[str, ...] = ()
    before: str = ""
    args: tuple[str, ...] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    cgroup: Mapping[str, int] = field(default_factory=dict)
    outcome: str = "succeeded"
    root_only: str = ""
    unprivileged: bool = False
    descriptor: str = ""  # a folder that is left open in the child
    absent: str = ""  # the outcome on kernels that are built without what is attacked


@dataclass(frozen=True, slots=True)
class NoControl:
    """The control can't be had here, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Attack:
    """One payload with arguments, and what must come of it behind each wall.

    ``args`` may name things of the stage in braces: ``{decoy}``, ``{victim}`` … ``expect`` maps wall names to
    outcomes (see :func:`row`). ``limits``: the sandbox's. ``judge``: who has the last word when the payload
    says that it worked: ``victim`` (is the host process alive?), ``agent`` (does it still serve?), or both.
    ``fake``: the outcome behind the fake wall, which hides nothing: a second control through the same path.
    ``note`` explains an outcome that looks bad. ``deviations``: walls (or ``user`` and the like) where the
    expected outcome is known not to be had yet, and why: strict expected failures.
    """

    name: str
    payload: str
    args: tuple[str, ...]
    expect: Mapping[str, str]
    control: Control | NoControl
    limits: Mapping[str, int] = field(default_factory=dict)
    judge: str = ""
    fake: str = ""
    note: str = ""
    pty: bool = False
    mounts: tuple[tuple[str, str], ...] = ()
    deviations: Mapping[str, str] = field(default_factory=dict)

    def deviation(self, wall: str) -> str:
        """Why the outcome behind this wall is known to be another; empty if it is not."""
        runtime, who = wall.split("/")
        for name, reason in self.deviations.items():
            if name in (runtime, who, wall, who.split("+")[0], f"{runtime}/{who.split('+')[0]}"):
                return reason
        return ""


def row(outcome: str, **others: str) -> dict[str, str]:
    """One outcome for every wall, but for those named: ``jail_user="…"``, ``bubblewrap="…"``.

    A name means the walls of that runtime, of that kind of caller (``user`` includes ``user+ids``), or one.
    """
    result = dict.fromkeys(WALLS, outcome)
    for key, value in sorted(others.items(), key=_particular):
        name = key.replace("_ids", "+ids").replace("_", "/")
        matched = [wall for wall in WALLS if name in (wall, wall.split("/")[0], wall.split("/")[1])]
        if name.endswith("user"):
            end = name + "+ids" if "/" in name else "/user+ids"
            matched += [wall for wall in WALLS if wall.endswith(end)]
        assert matched, key
        for wall in matched:
            result[wall] = value
            runtime, who = wall.split("/")
            for other in LIKE_JAIL if runtime == "jail" else ():
                if f"{other}/{who}" in result:
                    result[f"{other}/{who}"] = value
    return result


def _particular(pair: tuple[str, str]) -> tuple[int, int]:
    """Callers before runtimes, the jail before those like it, a runtime before one wall of it."""
    name = pair[0]
    rank = 0 if name.startswith(("root", "user")) else 1 if name.startswith("jail") else 2
    return rank, name.count("_")
