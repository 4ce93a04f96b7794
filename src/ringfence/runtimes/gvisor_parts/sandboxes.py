"""How runsc is started, and what it started: the plan, the bundle, the processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ringfence.runtimes.context import DEVICE_LINKS, DEVICES, RuntimeContext
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.gvisor_parts import links
from ringfence.runtimes.launching import readied
from ringfence.runtimes.launching.driver import EXIT_FILE
from ringfence.runtimes.launching.guestargs import agent_arguments
from ringfence.runtimes.launching.plan import (
    BIND_FLAT,
    BIND_IDMAP,
    BIND_MAKE,
    BIND_NOEXEC,
    BIND_READONLY,
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUTS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    NOBODY,
    Plan,
    id_maps,
)
from ringfence.runtimes.launching.steps import add_cgroups, agent_capabilities
from ringfence.runtimes.measuring import capability_names, children
from ringfence.runtimes.oci import bundle

if TYPE_CHECKING:
    from ringfence.runtimes.gpu.cdi import Edits

_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWTIME | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
# All up to AUDIT_READ, over the sandbox's own user namespace: runsc drops what it does not need.
_CAPABILITIES = (1 << 38) - 1
_STATE_SIZE = "mode=0700,size=16m"
MEMORY = f"{readied.STATE}/memory"  # the image that a wall is restored from
_TMP = {
    "destination": "/tmp",  # noqa: S108
    "type": "bind",
    "source": f"{readied.ROOT}/tmp",  # noqa: S108
    "options": ["bind", "rw", "nosuid", "nodev"],
}
# Never kvm: there are hosts where a guest hangs in it. Files that the policy shows are the host's to change.
OPTIONS = (
    "--platform=systrap",
    "--network=none",
    "--host-uds=create",
    "--overlay2=none",
    "--file-access=shared",
    "--ignore-cgroups",
    "--oci-seccomp",
    "--net-raw=false",
    "--watchdog-action=panic",
)


NVPROXY = "--nvproxy=true"  # the sentry checks and passes on calls to NVIDIA's driver


def running(name: str) -> list[str]:
    """The verb that starts a wall."""
    return ["run", "--bundle", "{bundle}", name]


def as_seen(spec: StartSpec) -> StartSpec:
    """The spec with the agent as user 0 of gVisor's kernel: there only that one can hold capabilities.

    On the host it is the first id of the sandbox's range, like everything of this wall.
    """
    return replace(spec, identity=replace(spec.identity, agent_uid=0))


def restoring(name: str) -> list[str]:
    """The verb that starts a wall from an image."""
    return ["restore", "--bundle", "{bundle}", "--image-path", MEMORY, name]


def document(spec: StartSpec, gpus: Edits | None = None) -> dict[str, Any]:
    """The bundle: gVisor's kernel counts in the ids of the sandbox's user namespace, and makes no other."""
    spec = as_seen(spec)
    arguments = list(agent_arguments(spec, f"{links.INSIDE}/guest.sock", ()))
    found = bundle.document(
        spec,
        rootfs=readied.ROOT,
        command=[f"{links.INSIDE}/{links.PROGRAM}", *arguments[1:]],
        # An empty /tmp gVisor would put into its own memory: not ours to see or to bound.
        mounts=[_TMP],
        cgroup_namespace=False,
    )
    linux, process = found["linux"], found["process"]
    linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "user"]
    del linux["uidMappings"], linux["gidMappings"]
    linux["seccomp"] = call_filter(os.uname().machine)
    # Of gVisor's kernel alone: a program of user 0 gets what its bounding set has, and a restored copy gets
    # a host name of its own (SYS_ADMIN). The agent empties that set (SETPCAP); commands keep nothing of it.
    kept = [*capability_names(agent_capabilities(spec.identity) | bundle.SETPCAP), "CAP_SYS_ADMIN"]
    process["capabilities"] = dict.fromkeys(process["capabilities"], kept)
    # What is read-only is mounted so on the host's side; gVisor would not let anything under it be written.
    found["root"]["readonly"] = False
    limits = [each for each in process["rlimits"] if each["type"] != "RLIMIT_NPROC"]
    # gVisor's kernel counts the workload's processes; the host's pids group sees the sentry's threads.
    limits.append({"type": "RLIMIT_NPROC", "soft": spec.max_processes, "hard": spec.max_processes})
    process["rlimits"] = limits
    for mount in found["mounts"]:
        if mount["destination"] == "/dev":
            # gVisor refuses O_CREAT below what is read-only, also of what is there: no shell could write to
            # /dev/null. The folder is root's, so nobody else makes files in it. (And runsc makes a GPU's
            # nodes after it has mounted that.)
            mount["options"] = [option for option in mount["options"] if option != "ro"]
    if gpus is not None:
        from ringfence.runtimes.gpu import handing

        linux["devices"] = handing.oci_devices(gpus)
    return found


@lru_cache(maxsize=1)
def call_filter(machine: str) -> dict[str, Any]:
    """What of gVisor's kernel the workload may not call: the calls that our filter answers with EPERM
    whatever their arguments, and clone with a new namespace.

    Not the whole filter: gVisor's compiler can't take it, and odd calls end in gVisor's kernel. Not clone3:
    gVisor's filter knows no other answer than EPERM, with which the C library makes no threads at all.
    """
    from ringfence.runtimes.seccomp import export

    whole = export.to_oci(machine)
    denied = [
        entry
        for entry in whole["syscalls"]
        if entry["action"] == "SCMP_ACT_ERRNO" and ("args" not in entry or entry["names"] == ["clone"])
    ]
    for entry in denied:
        entry["names"] = [name for name in entry["names"] if name != "sethostname"]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": whole["architectures"],
        "syscalls": denied,
    }


def remove_bundle(folder: str) -> None:
    """Remove what :func:`plan` wrote."""
    bundle.remove(folder)


def plan(
    context: RuntimeContext,
    program: str,
    spec: StartSpec,
    verb: Sequence[str],
    *,
    silence: int,
    words: int,
    opened: list[int],
    memory: str = "",
    gpus: Edits | None = None,
) -> Plan:
    """The steps from nothing to a running runsc; writes the bundle. ``memory``: of an image to restore.

    ``gpus``: runsc opens their nodes itself and checks every call to them (nvproxy).
    """
    identity = spec.identity
    first = identity.host_uid(0)
    folder = bundle.write(spec, document(spec, gpus))
    for path in (folder, os.path.join(folder, "config.json")):
        os.chown(path, first, first)
    made = Plan()
    made.add("CLONE", _NAMESPACES)
    lines = [(line.inside, line.outside, line.count) for line in identity.maps]
    made.add("USERNS", id_maps(lines, lines))
    if not spec.ephemeral:
        made.add("KEEP")
    made.add("EXIT_FILE", os.path.join(spec.folder, EXIT_FILE))
    add_cgroups(made, spec, opened)  # the whole of it into the sandbox's own groups
    made.add("UNSHARE", CLONE_NEWCGROUP)
    own = (
        (os.path.join(spec.folder, links.FOLDER), links.INSIDE, BIND_NOEXEC | BIND_FLAT | BIND_MAKE),
        (context.agent, f"{links.INSIDE}/{links.PROGRAM}", BIND_READONLY | BIND_IDMAP),
    )
    readied.add_root(made, spec, root=context.root, own=own)
    if gpus is not None:
        _add_devices(made, gpus)
    # The sandbox's own root reads its bundle and keeps runsc's state here.
    quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC
    made.add("MOUNT", "state", readied.STATE, "tmpfs", quiet, f"{_STATE_SIZE},uid={first},gid={first}")
    made.add("MKDIR", f"{readied.STATE}/bundle", 0o700, first, first)
    made.add("BIND", folder, f"{readied.STATE}/bundle", BIND_READONLY | BIND_NOEXEC)
    if memory:
        made.add("MKDIR", MEMORY, 0o700, first, first)
        made.add("BIND", memory, MEMORY, BIND_READONLY | BIND_IDMAP | BIND_NOEXEC)
    made.add("USERNS_ENTER")
    made.add("WRITE", "/proc/sys/user/max_user_namespaces", "8")
    made.add("NO_NEW_PRIVS")
    made.add("BECOME", 0, 0, 1, _CAPABILITIES)
    for number, descriptor in {0: silence, 1: words, 2: words}.items():
        made.add("FD", made.fd(descriptor), number)
    if spec.ephemeral:
        made.add("DEATH_SIGNAL", 9)
    made.add("UMASK", 0o022)
    arguments = [word.replace("{bundle}", f"{readied.STATE}/bundle") for word in verb]
    options = OPTIONS if gpus is None else (*OPTIONS, NVPROXY)
    for text in (program, "--root", readied.STATE, *options, *arguments):
        made.add("ARG", text)
    for text in ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/"):
        made.add("ENV", text)
    made.add("EXEC", program)
    return made


def _add_devices(made: Plan, gpus: Edits) -> None:
    """A ``/dev`` that runsc sees with the GPUs' nodes in it, since it looks for them there by name."""
    made.add("MOUNT", "dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k")
    for name, (major, minor) in DEVICES.items():
        made.add("MKNOD", f"/dev/{name}", 0o20666, major, minor)
    for name, target in DEVICE_LINKS.items():
        made.add("SYMLINK", target, f"/dev/{name}")
    for folder in sorted({os.path.dirname(node.path) for node in gpus.nodes} - {"/dev"}):
        made.add("MKDIR", folder, 0o755, NOBODY, NOBODY)
    for node in gpus.nodes:
        made.add("MKNOD", node.path, 0o20666, node.major, node.minor)


def sentry(monitor: int) -> int | None:
    """The pid of gVisor's kernel below ``runsc run``; None if it has ended."""
    for pid in children(monitor):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"boot" in file.read().split(b"\0"):
                return pid
    return None


def upper(monitor: int) -> str:
    """The upper layer, as the host's root reaches it."""
    return f"/proc/{monitor}/root{readied.DISK}/upper"
