"""An OCI bundle's ``config.json`` from a :class:`StartSpec`: the wall in the words of the specification.

The root file system lies ready under ``rootfs`` when the runtime starts: the launcher mounted the overlay,
and with ``binds=False`` also what of the host is shown inside, in a mount namespace that only the runtime
sees. What the runtime makes are the namespaces, ``/proc``, ``/dev``, ``/dev/shm`` and ``/run/secrets``, the
limits of each process and the system call filter. A ``sysfs`` is never shown.

Control groups: the node has made them and the launcher has put the runtime into them, so a bundle names none
(``cgroups_path``) unless asked to: a runtime must neither make others nor remove ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from ringfence.model.errors import StartFailed
from ringfence.runtimes.context import TERMINALS
from ringfence.runtimes.contract import Bind, IdMap, StartSpec
from ringfence.runtimes.launching.guestargs import environment
from ringfence.runtimes.launching.steps import (
    MASKED,
    MOST_SECRETS,
    READ_ONLY,
    SECRETS_SIZE,
    agent_capabilities,
    agent_gid,
    per_process_limits,
    shm_limits,
)
from ringfence.runtimes.measuring import capability_names

FOLDER = "oci"  # of a sandbox's folder: where its bundle is
VERSION = "1.0.2"  # of the specification: what runc 1.1, crun 1.8 and runsc all read
_RLIMITS = {4: "RLIMIT_CORE", 6: "RLIMIT_NPROC", 7: "RLIMIT_NOFILE", 8: "RLIMIT_MEMLOCK"}
_SETS = ("bounding", "permitted", "effective", "inheritable", "ambient")
SETPCAP = 1 << 8
_QUIET = ["nosuid", "nodev", "noexec"]
_SECCOMP = "@seccomp@"  # stands for the filter until the text is made

Mount = dict[str, Any]


def document(
    spec: StartSpec,
    *,
    rootfs: str,
    command: Sequence[str],
    maps: tuple[IdMap, ...] | None = None,
    gid_maps: tuple[IdMap, ...] | None = None,
    binds: bool = False,
    mounts: Iterable[Mount] = (),
    cgroups_path: str | None = None,
    cgroup_namespace: bool = True,
    seccomp: bool = True,
) -> dict[str, Any]:
    """The content of ``config.json``, but for the filter, which :func:`text` puts in.

    ``command`` is the guest agent's, with a path inside. ``maps`` and ``gid_maps`` replace the identity's
    where the runtime itself runs in a user namespace and counts in that one's ids. ``binds``: the runtime
    mounts the spec's binds and read-only paths too. ``mounts`` come after all others. ``seccomp=False``: the
    filter is installed by somebody else, who must.
    """
    identity, files = spec.identity, spec.root
    users = identity.maps if maps is None else maps
    groups = (identity.gid_maps or users) if gid_maps is None else gid_maps
    gid = agent_gid(identity)
    held = agent_capabilities(identity)
    kept = list(capability_names(held | SETPCAP if held else 0))
    namespaces = ["pid", "network", "ipc", "uts", "mount", "user", *(["cgroup"] if cgroup_namespace else [])]
    found: dict[str, Any] = {
        "ociVersion": VERSION,
        "hostname": spec.hostname,
        "root": {"path": rootfs, "readonly": files.readonly},
        "process": {
            "terminal": False,
            "user": {"uid": identity.agent_uid, "gid": gid, "umask": 0o022},
            "args": list(command),
            "env": environment(spec),
            "cwd": "/",
            "noNewPrivileges": True,
            # What is inheritable must be in the bounding set here, so the agent empties that set: with
            # SETPCAP, which it then gives up.
            "capabilities": dict.fromkeys(_SETS, kept),
            "rlimits": rlimits(spec),
        },
        "mounts": [
            *_own_mounts(spec),
            *(_binds(files.binds) if binds else ()),
            *(_inside(spec, rootfs) if binds else ()),
            *mounts,
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in namespaces],
            "uidMappings": _mappings(users),
            "gidMappings": _mappings(groups),
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            **({"seccomp": _SECCOMP} if seccomp else {}),
        },
    }
    if cgroups_path is not None:
        found["linux"]["cgroupsPath"] = cgroups_path
    return found


def text(document: dict[str, Any]) -> str:
    """A document as ``config.json`` has it, with the system call filter of this machine.

    Raises:
        KeyError: there is no filter for this machine's architecture.
    """
    if "seccomp" not in document["linux"]:
        return json.dumps(document)
    # The last one: nothing that a policy can say comes after it.
    before, found, after = json.dumps(document).rpartition(f'"{_SECCOMP}"')
    if not found:  # a driver has put in one of its own
        return after
    return before + _seccomp(os.uname().machine) + after


def write(spec: StartSpec, document: dict[str, Any]) -> str:
    """Write the bundle into the sandbox's folder; returns the bundle's folder.

    Raises:
        StartFailed: it can't be written.
    """
    folder = os.path.join(spec.folder, FOLDER)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, "config.json")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text(document))
    except OSError as error:
        raise StartFailed(
            f"the bundle can't be written: {error.filename or folder}: {error.strerror}",
            step="bundle",
            errno=str(error.errno),
        ) from error
    return folder


def remove(folder: str) -> None:
    """Remove the bundle from a sandbox's folder; it may not be there."""
    place = os.path.join(folder, FOLDER)
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(place, "config.json"))
    with contextlib.suppress(OSError):
        os.rmdir(place)


def rlimits(spec: StartSpec) -> list[dict[str, Any]]:
    """The limits of each process, lowered to what this process may set."""
    found = []
    for number, value in per_process_limits(spec):
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        found.append({"type": _RLIMITS[number], "soft": value, "hard": value})
    return found


@lru_cache(maxsize=2)
def _seccomp(machine: str) -> str:
    from ringfence.runtimes.seccomp import export

    return json.dumps(export.to_oci(machine), separators=(",", ":"))


def _mappings(maps: Iterable[IdMap]) -> list[dict[str, int]]:
    return [{"containerID": line.inside, "hostID": line.outside, "size": line.count} for line in maps]


def _own_mounts(spec: StartSpec) -> list[Mount]:
    owner = f"uid={spec.identity.agent_uid}", f"gid={agent_gid(spec.identity)}"
    return [
        _mount("/proc", "proc", _QUIET),
        _mount("/dev", "tmpfs", ["nosuid", "noexec", "mode=755", "size=64k", "ro"]),
        _mount(
            "/dev/pts",
            "devpts",
            ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", f"max={TERMINALS}"],
        ),
        _mount("/dev/shm", "tmpfs", [*_QUIET, "mode=1777", *shm_limits(spec.memory)]),  # noqa: S108
        _mount(
            "/run/secrets",
            "tmpfs",
            [*_QUIET, "mode=755", f"size={SECRETS_SIZE}", f"nr_inodes={MOST_SECRETS}", *owner],
        ),
    ]


def _binds(binds: Iterable[Bind]) -> list[Mount]:
    return [
        {
            "destination": bind.target,
            "type": "bind",
            "source": bind.source,
            "options": ["rbind", "nosuid", "nodev", "ro" if bind.read_only else "rw"],
        }
        for bind in binds
    ]


def _inside(spec: StartSpec, rootfs: str) -> list[Mount]:
    """What of the root file system itself is writable or read-only, where the rest is otherwise."""
    files = spec.root
    bound = {bind.target for bind in files.binds}
    found: list[Mount] = []
    for path in files.read_write if files.readonly else ():
        if path not in bound:
            found += _binds([Bind(rootfs + path, path, read_only=False)])
    for path in files.read_only:
        if path not in bound:
            found += _binds([Bind(rootfs + path, path)])
    return found


def _mount(target: str, kind: str, options: Iterable[str]) -> Mount:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}
