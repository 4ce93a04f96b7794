"""From a failed step and an errno to an error that names cause and remedy."""

from __future__ import annotations

import errno
import os

from ringfence.model.errors import HostLimit, RingfenceError, StartFailed
from ringfence.runtimes.launching.plan import Plan

_SPENT = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EUSERS, errno.ENOSPC}
_DENIED = {errno.EPERM, errno.EACCES}


def read_sysctl(name: str) -> str | None:
    """A value below /proc/sys, or ``None`` where this kernel has no such switch."""
    try:
        with open(f"/proc/sys/{name}") as file:
            return file.read().strip()
    except OSError:
        return None


def user_namespace_hint() -> str:
    """Why user namespaces may be refused on this host, with the remedy; empty if nothing is known."""
    if read_sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts unprivileged user namespaces here (Ubuntu's default): as root run "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, or give ringfence-launcher an "
            "AppArmor profile with `userns,`, or run the node as root"
        )
    if read_sysctl("kernel/unprivileged_userns_clone") == "0":
        return "as root run `sysctl -w kernel.unprivileged_userns_clone=1`, or run the node as root"
    if read_sysctl("user/max_user_namespaces") == "0":
        return "as root run `sysctl -w user.max_user_namespaces=10000`, or run the node as root"
    return ""


def _hint(step: str, number: int, rootless: bool) -> str:
    if step == "clone" and number == errno.ENOSPC:
        return "a limit of namespaces is reached: raise user.max_*_namespaces, or end other sandboxes"
    if step == "clone" and number == errno.EAGAIN:
        return "the limit of processes is reached (ulimit -u, pids cgroup): raise it, or end other sandboxes"
    if rootless and number in _DENIED and step in ("clone", "maps", "mount", "bind", "write"):
        if hint := user_namespace_hint():
            return hint
        if step == "maps":
            return "newuidmap refused the map: check /etc/subuid and /etc/subgid of this user"
        if step == "mount":
            return "inside another container? It must not mask /proc and must allow mount in user namespaces"
    if step == "clone" and number in _DENIED:
        return (
            user_namespace_hint()
            or "this host forbids new namespaces: run the node as root with CAP_SYS_ADMIN"
        )
    if step == "maps" and number == errno.ENOENT:
        return "newuidmap is missing: install the package uidmap"
    if step == "loop":
        return (
            "the image could not be mounted: is the loop module loaded (`modprobe loop`), is the image whole?"
        )
    if step == "cgroup_join":
        return "the node may not move processes into its cgroup: delegate it, or run without limits by cgroup"
    if step in ("bind", "openat2") and number == errno.ENOENT:
        return "the folder to be shown inside does not exist on the host"
    if step == "bind" and number == errno.ELOOP:
        return "give the real path: a part of it is a symbolic link, or has just become one"
    if number == errno.ENOSYS:
        return "the kernel is too old: Linux 5.19 or later is needed"
    if step == "launcher":
        return "the launcher was killed; the next start makes a new one"
    return ""


def failure(plan: Plan, name: str, index: int, number: int) -> RingfenceError:
    """The error for a failed step. ``name`` is the launcher's, or empty: then the plan's at ``index``."""
    what = plan.names[index] if not name and index < len(plan.names) else name.lower()
    step = what.partition(" ")[0]
    rootless = any(each.startswith("maps") for each in plan.names[:8])
    code = errno.errorcode.get(number, str(number))
    reason = "the process was killed half-way" if number == errno.ECHILD else os.strerror(number)
    kind = HostLimit if number in _SPENT and step in ("clone", "launcher", "mount", "userns") else StartFailed
    return kind(
        f"the wall could not be started: {what}: {reason}",
        hint=_hint(step, number, rootless),
        step=step,
        errno=code,
    )
