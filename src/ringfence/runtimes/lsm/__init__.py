"""AppArmor and SELinux: a further layer, where the host has one.

Belongs here: finding out what is there, the profile or label that a wall gets, loading it. Does not belong
here: the layers that every host has (namespaces, seccomp, Landlock).

What is applied, and where:

* AppArmor, as root: the jail's first process enters Ringfence's own profile at its exec; an engine on this
  machine (docker, podman) is told to use it. Programs that build the wall themselves (bubblewrap, nsjail,
  runc, crun, runsc) see no ``/sys`` of the host and so no AppArmor: there it is not applied, and the measured
  boundary says so.
* SELinux: an engine is told the type for containers and a pair of categories. No other runtime changes its
  label: walls stay in the domain of the node.
"""

from __future__ import annotations

import os

from ringfence.model.values import dataclass

NONE, APPARMOR, SELINUX = "", "apparmor", "selinux"


@dataclass(frozen=True, slots=True)
class Found:
    """The host's module that labels processes. ``reason`` says why it can't be used, with ``remedy``."""

    module: str
    usable: bool
    detail: str = ""
    reason: str = ""
    remedy: str = ""


def detect(*, root: str = "/", privileged: bool | None = None) -> Found:
    """Look, without changing anything. ``root``: the host's file system; tests have one of their own."""
    active = _text(root, "sys/kernel/security/lsm").split(",")
    as_root = os.geteuid() == 0 if privileged is None else privileged
    if APPARMOR in active:
        from ringfence.runtimes.lsm import apparmor

        reason, remedy = apparmor.lacking(root=root, privileged=as_root)
        detail = "enabled" if not reason else "present"
        return Found(APPARMOR, not reason, detail, reason, remedy)
    if SELINUX in active:
        enforcing = _text(root, "sys/fs/selinux/enforce")
        if enforcing == "1":
            return Found(SELINUX, True, "enforcing")
        reason = "it is permissive: it logs and forbids nothing" if enforcing == "0" else "it is not mounted"
        return Found(SELINUX, False, "present", reason, "setenforce 1")
    return Found(NONE, False, "", "neither AppArmor nor SELinux is in this kernel")


def _text(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
            return file.read().strip("\0\n ")
    except OSError:
        return ""
