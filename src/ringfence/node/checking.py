"""What this host can do and what it lacks: the data of ``ringfence doctor``.

Each check looks, tries where looking proves nothing, and says what follows. None changes the host, none
takes longer than a second. Programs with known holes are judged by version; the tables name their source.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ringfence.node import cgroups, identities
from ringfence.runtimes.context import privileged
from ringfence.runtimes.vulnerabilities import vulnerabilities

GOOD, DEGRADED, MISSING = "good", "degraded", "missing"
_CLONE_NEWUSER = 0x10000000
_LANDLOCK_CREATE_RULESET = 444
_MOUNT_SETATTR = 442
_OLDEST = (5, 19)  # overlay over idmapped layers; before it no wall as root


class Check(NamedTuple):
    """One thing looked at. ``state``: good, degraded (works, with ``meaning``), missing."""

    name: str
    state: str
    value: str
    meaning: str = ""
    remedy: str = ""


class Program(NamedTuple):
    """A program of another project that is on the PATH, and the holes its version is known for."""

    name: str
    path: str
    version: str
    vulnerabilities: tuple[str, ...]


def host() -> list[Check]:
    """Every check of the kernel and of what this user may do."""
    return [
        kernel(),
        user_namespaces(),
        cgroup_check(),
        landlock(),
        seccomp(),
        idmapped_mounts(),
        overlay(),
        loop_devices(),
        subordinate_ids(),
        security_module(),
        swap(),
    ]


def rootless_losses() -> list[str]:
    """What a node that is not root can't do. Sentences."""
    losses = [
        "every sandbox shares your own user id on the host; the wall alone separates them from each other",
        "a disk larger than half of the memory is refused: only root can mount an image",
        "no idmapped mounts: files on mounts belong to you inside and outside",
    ]
    if cgroups.detect(user=os.geteuid() or 65534).mode == "none":
        losses.append(
            "without a delegated cgroup memory is polled, CPU is not shared out, processes count by user"
        )
    return losses


def kernel() -> Check:
    """The kernel's version."""
    release = platform.release()
    numbers = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    if numbers < _OLDEST:
        return Check(
            "kernel", MISSING, release, "Linux 5.19 or later is needed: overlay over idmapped layers",
            "boot a newer kernel",
        )  # fmt: skip
    return Check("kernel", GOOD, release)


def user_namespaces() -> Check:
    """Whether this user may make user namespaces; tried in a child. Knows the distributions' switches."""
    name = "user namespaces"
    number = _try_in_child(lambda libc: int(libc.unshare(_CLONE_NEWUSER)))
    as_root = " (root does not need them to be open to everybody)" if os.geteuid() == 0 else ""
    restricted = _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1"
    remedy = ""
    if restricted:
        meaning = (
            "AppArmor lets an ordinary program make a user namespace but gives it no capability there "
            "(kernel.apparmor_restrict_unprivileged_userns = 1, Ubuntu 23.10 and later)"
        )
        remedy = (
            "run as root; or give the launcher a profile with `userns,`; or "
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
        return Check(
            name, DEGRADED if os.geteuid() == 0 else MISSING, "restricted", meaning + as_root, remedy
        )
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        meaning = "only root may make user namespaces (kernel.unprivileged_userns_clone = 0, Debian's switch)"
        remedy = "run as root, or: sysctl -w kernel.unprivileged_userns_clone=1"
        return Check(name, MISSING if number else DEGRADED, "closed to users", meaning + as_root, remedy)
    if _sysctl("user/max_user_namespaces") == "0":
        return Check(
            name, MISSING, "none allowed", "user.max_user_namespaces is 0",
            "sysctl -w user.max_user_namespaces=10000",
        )  # fmt: skip
    if number:
        code = errno.errorcode.get(number, str(number))
        return Check(
            name, MISSING, code, f"unshare(CLONE_NEWUSER) fails: {os.strerror(number)}",
            "in a container: allow it in its seccomp profile; else see user.max_user_namespaces",
        )  # fmt: skip
    return Check(name, GOOD, f"{_sysctl('user/max_user_namespaces') or '?'} allowed")


def cgroup_check() -> Check:
    """Which cgroups this user has."""
    found = cgroups.detect()
    if found.mode == "none":
        return Check("cgroups", MISSING, "none", f"limits are polled: {found.reason}", found.remedy)
    value = f"{found.mode}: {', '.join(name for name in found.roots if name != 'unified')}"
    if found.reason:
        return Check("cgroups", DEGRADED, value, found.reason, found.remedy)
    return Check("cgroups", GOOD, value)


def landlock() -> Check:
    """Landlock's ABI version."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version > 0:
        return Check("landlock", GOOD, f"abi {version}")
    code = errno.errorcode.get(ctypes.get_errno(), "?")
    meaning = "one layer less: mounts and namespaces alone keep files apart"
    remedy = "boot with lsm=landlock,…" if code == "EOPNOTSUPP" else "Linux 5.13 or later with Landlock"
    return Check("landlock", DEGRADED, f"absent ({code})", meaning, remedy)


def seccomp() -> Check:
    """Whether filters can be installed."""
    actions = _sysctl("kernel/seccomp/actions_avail") or ""
    if "errno" in actions:
        return Check("seccomp", GOOD, "filter")
    return Check(
        "seccomp", MISSING, "absent", "no sandbox starts without its filter", "CONFIG_SECCOMP_FILTER"
    )


def idmapped_mounts() -> Check:
    """mount_setattr with MOUNT_ATTR_IDMAP; as a normal user only whether the call is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_MOUNT_SETATTR, -1, None, 0, None, ctypes.c_size_t(0))
    if ctypes.get_errno() == errno.ENOSYS:
        return Check("idmapped mounts", MISSING, "absent", "no wall as root", "Linux 5.19 or later")
    return Check("idmapped mounts", GOOD, "available" if privileged() else "root only")


def overlay() -> Check:
    """Whether the kernel has overlayfs (it may still be a module that loads itself)."""
    kinds = Path("/proc/filesystems").read_text(errors="replace").split()
    if "overlay" in kinds:
        return Check("overlayfs", GOOD, "available")
    return Check("overlayfs", DEGRADED, "not loaded", "it loads itself where modules may", "modprobe overlay")


def loop_devices() -> Check:
    """Needed for disks larger than half of the memory."""
    if not os.path.exists("/dev/loop-control"):
        return Check(
            "loop devices", DEGRADED, "absent", "no disk larger than half of the memory", "modprobe loop"
        )
    if not privileged():
        return Check("loop devices", DEGRADED, "root only", "no disk larger than half of the memory")
    if not (shutil.which("mkfs.ext4") or os.path.exists("/usr/sbin/mkfs.ext4")):
        return Check(
            "loop devices", DEGRADED, "no mkfs.ext4", "no disk larger than half of the memory",
            "install e2fsprogs",
        )  # fmt: skip
    return Check("loop devices", GOOD, "available")


def subordinate_ids() -> Check:
    """newuidmap and /etc/subuid: what lets a rootless sandbox have more than one user."""
    name = "subordinate ids"
    if privileged():
        taken = len(identities.taken_ranges())
        return Check(name, GOOD, f"root: {identities.RANGES - taken} ranges of 65,536 host user ids")
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        return Check(
            name, DEGRADED, "no newuidmap", "the guest agent and the workload share one user inside",
            "install uidmap (Debian) or shadow-utils",
        )  # fmt: skip
    if not identities.identity_as_user(1000).helper:
        user = os.geteuid()
        return Check(
            name, DEGRADED, "no range", "the guest agent and the workload share one user inside",
            f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $(id -un {user})",
        )  # fmt: skip
    return Check(name, GOOD, "newuidmap with a range")


def security_module() -> Check:
    """AppArmor or SELinux: an extra layer where the host has one."""
    from ringfence.runtimes import lsm

    name, found = "security module", lsm.detect()
    if found.usable:
        return Check(name, GOOD, f"{found.module} {found.detail}")
    less = "one layer less; the others don't depend on it"
    if found.module:
        return Check(name, DEGRADED, found.module, f"not applied: {found.reason}: {less}", found.remedy)
    return Check(name, DEGRADED, "absent", less)


def swap() -> Check:
    """Swap of the host; a sandbox never has any."""
    lines = (_read("/proc/swaps") or "").splitlines()[1:]
    if not lines:
        return Check("swap", GOOD, "none")
    found = cgroups.detect()
    if found.mode in ("none", "hybrid", "v1") and not os.path.exists(
        f"{found.roots.get('memory', '/nowhere')}/memory.memsw.limit_in_bytes"
    ):
        return Check(
            "swap", DEGRADED, f"{len(lines)} device(s)",
            "swap of a sandbox can't be limited here: it may swap instead of being killed",
            "boot with swapaccount=1, or use cgroup v2",
        )  # fmt: skip
    return Check("swap", GOOD, f"{len(lines)} device(s), switched off for sandboxes")


_PROGRAMS = (
    "bwrap", "nsjail", "runc", "crun", "runsc", "docker", "podman", "firecracker", "jailer",
    "qemu-system-x86_64",
)  # fmt: skip


def programs() -> list[Program]:
    """Programs on the PATH that runtimes can use, with version and known holes. Each is asked once."""
    found = []
    for name in _PROGRAMS:
        path = shutil.which(name)
        if path is None:
            continue
        version = version_of(path)
        found.append(Program(name, path, version, vulnerabilities(name, version)))
    return found


def version_of(path: str) -> str:
    """What ``--version`` says: the first thing in it that looks like a version; empty if it won't say."""
    try:
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5,
            errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\d+\.\d+(?:\.\d+)?(?:[-~+][0-9A-Za-z.]+)?", done.stdout or done.stderr)
    return match.group() if match else ""


def _sysctl(name: str) -> str | None:
    return _read(f"/proc/sys/{name}")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _try_in_child(call: Callable[[ctypes.CDLL], int]) -> int:
    """The errno of a call made in a forked child; 0 if it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if pid == 0:
        ok = call(libc) == 0
        os._exit(0 if ok else min(255, ctypes.get_errno()) or 255)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
