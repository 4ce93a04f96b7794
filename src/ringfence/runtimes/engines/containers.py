"""What the engine is asked to make: a container from a :class:`StartSpec`, in the words of its API.

The wall is ours, not the engine's default: no network, no capability but what the agent begins with, no
privilege to be gained, a read-only root, sized tmpfs where the workload writes, our masked paths, no swap, no
log. The system call filter is installed by the agent (as with runc: libseccomp takes 50 ms for the same),
and so is the user namespace where the engine gives none: see native/agent/identity.c.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ringfence.model.errors import Unsupported
from ringfence.runtimes.contract import IdMap, StartSpec
from ringfence.runtimes.launching.guestargs import agent_arguments, environment
from ringfence.runtimes.launching.steps import (
    BYTES_PER_INODE,
    MASKED,
    MOST_SECRETS,
    READ_ONLY,
    SECRETS_SIZE,
    agent_capabilities,
    agent_gid,
    per_process_limits,
    shm_limits,
    writable_folders,
)
from ringfence.runtimes.measuring import capability_names

PLACE = "/.ringfence/bin"  # inside: the agent and its filter
CGROUPS = "/.ringfence/cgroup"
LABEL = "dev.ringfence.sandbox"
OWNER = "dev.ringfence.folder"
_RLIMITS = {4: "core", 6: "nproc", 7: "nofile", 8: "memlock"}
_CHOWN, _SETGID, _SETUID, _SETPCAP = 1 << 0, 1 << 6, 1 << 7, 1 << 8
# Options of a tmpfs that Podman does not know. What inodes take of memory counts against the sandbox's.
_FOREIGN = re.compile(r",(?:nr_inodes|uid|gid)=\d+")
_PODMAN_PROCESSES = 32768  # what its service leaves itself
_AGENT_MEMORY, _AGENT_PIDS = 32 << 20, 64  # room for the agent, as in the node's own groups


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides how a container is made. ``nested``: the agent makes its own user namespace."""

    runtime: str  # the OCI runtime; empty: the engine's default
    local: bool  # paths of this machine mean the same to the engine
    nested: bool
    grouped: bool  # the node's cgroups are used
    podman: bool = False


def name_of(sandbox: str) -> str:
    """The container's name: with it, it is found again whatever was lost."""
    return f"ringfence-{sandbox}"


def document(spec: StartSpec, image: str, facts: Facts, volumes: tuple[str, ...] = ()) -> dict[str, Any]:
    """The body of a ``create``. ``volumes``: folders that the image declares to be volumes.

    Raises:
        Unsupported: the spec asks for what an engine can't do.
    """
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "CapAdd": _capabilities(spec, facts),
        "SecurityOpt": ["no-new-privileges", "seccomp=unconfined"],  # the agent's filter follows at once
        "MaskedPaths": [*MASKED, "/sys"],
        "ReadonlyPaths": list(READ_ONLY),
        "PidsLimit": spec.max_processes + _AGENT_PIDS,
        "Tmpfs": _tmpfs(spec, facts, volumes),
        "Mounts": _mounts(spec, facts),
        "Ulimits": _ulimits(spec, facts),
        "Init": False,
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": spec.ephemeral,
        "IpcMode": "none" if not facts.podman else "private",
        "CgroupnsMode": "private",
        "Privileged": False,
        "PublishAllPorts": False,
        "OomScoreAdj": 0,
    }
    if spec.memory:
        host["Memory"] = host["MemorySwap"] = spec.memory + _AGENT_MEMORY
    if spec.cpus:
        host["NanoCpus"] = int(spec.cpus * 1e9) + 100_000_000
    if facts.podman:  # which goes by these options, not by the two lists
        host["SecurityOpt"].append("mask=" + ":".join(host["MaskedPaths"]))
    if facts.runtime:
        host["Runtime"] = facts.runtime
    return {
        "Image": image,
        "Hostname": spec.hostname[:63],
        "User": "0:0",
        "Env": environment(spec),
        "Entrypoint": [f"{PLACE}/ringfence-agent"],
        "Cmd": arguments(spec, facts),
        "WorkingDir": "/",
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": False,
        "OpenStdin": True,
        "StdinOnce": spec.ephemeral,  # then the end of the stream is the end of the sandbox
        "Tty": False,
        # gVisor wants to be given the namespace; without a card either way.
        "NetworkDisabled": not facts.runtime.startswith(("runsc", "io.containerd.runsc")),
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": {LABEL: spec.id, OWNER: spec.folder},
        "HostConfig": host,
    }


def arguments(spec: StartSpec, facts: Facts) -> list[str]:
    """The agent's arguments."""
    identity = spec.identity
    found = [word for word in agent_arguments(spec, "", ()) if not word.startswith("listen=")][1:]
    if facts.grouped and spec.cgroup.work:
        found = [word for word in found if not word.startswith("processes=")] + [f"cgroup={CGROUPS}"]
    found += ["mux=0,1", f"filter={PLACE}/filter"]
    found += ["leave=1"] if spec.ephemeral else []
    if facts.nested:
        found.append("users=" + _map(identity.maps))
        found.append("groups=" + _map(identity.gid_maps or identity.maps))
    if facts.podman:
        found += _given_away(spec, facts)
    held = agent_capabilities(identity)
    found.append(f"as={identity.agent_uid},{agent_gid(identity)}")
    return [*found, f"held={held:x}"]


def outside(spec: StartSpec, facts: Facts, inside: int) -> int:
    """The number that a mount's option has to say for a user inside."""
    return spec.identity.host_uid(inside) if facts.nested else inside


def _map(lines: tuple[IdMap, ...]) -> str:
    return ",".join(f"{line.inside}:{line.outside}:{line.count}" for line in lines)


def _capabilities(spec: StartSpec, facts: Facts) -> list[str]:
    if facts.nested:
        mask = _SETUID | _SETGID  # to map ids; in its own namespace it has what it needs
    else:
        mask = agent_capabilities(spec.identity) | _SETUID | _SETGID | _SETPCAP
    if facts.podman:
        mask |= _CHOWN
    return [name.removeprefix("CAP_") for name in capability_names(mask)]


def _ulimits(spec: StartSpec, facts: Facts) -> list[dict[str, Any]]:
    found = []
    for number, value in per_process_limits(spec):
        # Counted by user: the agent gives the workload its own limit (``processes=``).
        if _RLIMITS[number] != "nproc":
            found.append({"Name": _RLIMITS[number], "Soft": value, "Hard": value})
    if facts.podman and facts.local:
        # It would raise this to more than its service has, which root without CAP_SYS_RESOURCE may not.
        ours = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        hard = _PODMAN_PROCESSES if ours == resource.RLIM_INFINITY else min(ours, _PODMAN_PROCESSES)
        found.append({"Name": "nproc", "Soft": hard, "Hard": hard})
    return found


def _tmpfs(spec: StartSpec, facts: Facts, volumes: tuple[str, ...]) -> dict[str, str]:
    uid, gid = outside(spec, facts, spec.identity.uid), spec.identity.gid
    if facts.nested:
        gid = _host_gid(spec)
    agent = outside(spec, facts, spec.identity.agent_uid)
    copy = ",notmpcopyup" if facts.podman else ""
    quiet = "rw,nosuid,nodev,noexec" + copy
    found = {}
    bound = {bind.target for bind in spec.root.binds}
    for path in volumes:  # an engine would keep them on its disk, without a limit
        if path not in bound:
            found[path] = f"{quiet},size=64k,mode=0555"
    for path, size, mode in writable_folders(spec.root):
        inodes = max(16, size // BYTES_PER_INODE)
        mine = f",uid={uid},gid={gid}" if mode == "0755" else ""
        found[path] = f"rw,exec,nosuid,nodev{copy},size={size},nr_inodes={inodes},mode={mode}{mine}"
    for path in spec.root.read_only:
        if path not in bound and any(path.startswith(other + "/") for other in found):
            found[path] = f"ro,nosuid,nodev,noexec{copy},size=4k"
    found["/run/secrets"] = (
        f"{quiet},size={SECRETS_SIZE},nr_inodes={MOST_SECRETS},mode=0755,uid={agent},gid={agent}"
    )
    found["/dev/shm"] = f"{quiet},mode=1777,{','.join(shm_limits(spec.memory))}"  # noqa: S108
    if facts.podman:
        found = {path: _FOREIGN.sub("", options) for path, options in found.items()}
    return found


def _given_away(spec: StartSpec, facts: Facts) -> Iterator[str]:
    """``own=`` arguments of the agent: owners of mounts, where the engine knows no such option."""
    for path, options in _tmpfs(spec, replace(facts, podman=False), ()).items():
        owner = re.search(r",uid=(\d+),gid=(\d+)", options)
        if owner is not None:
            yield f"own={owner[1]}:{owner[2]}:{path}"


def _host_gid(spec: StartSpec) -> int:
    for line in spec.identity.gid_maps or spec.identity.maps:
        if line.inside <= spec.identity.gid < line.inside + line.count:
            return line.outside + spec.identity.gid - line.inside
    return 0


def _mounts(spec: StartSpec, facts: Facts) -> list[dict[str, Any]]:
    found = []
    if spec.root.binds and not facts.local:
        raise Unsupported(
            f"{spec.root.binds[0].source} can't be shown: the engine is on another machine",
            hint="use a template or an image of the engine, without mounts of this host",
            capability="mounts",
        )
    for bind in spec.root.binds:
        found.append(
            {
                "Type": "bind",
                "Source": bind.source,
                "Target": bind.target,
                "ReadOnly": bind.read_only,
                "BindOptions": {"Propagation": "rprivate"},
            }
        )
    if facts.grouped:
        for number, path in enumerate(spec.cgroup.work):
            found.append({"Type": "bind", "Source": path, "Target": f"{CGROUPS}/{number}", "ReadOnly": False})
    # A volume, so that files can be put into it whatever the root is; it goes with the container.
    found.append({"Type": "volume", "Target": PLACE, "VolumeOptions": {"NoCopy": True}})
    return found


def check(spec: StartSpec) -> None:
    """Refuse what no engine can do.

    Raises:
        Unsupported: it is asked for.
    """
    if spec.network == "open":
        raise Unsupported(
            "no open network here", hint="use network mode none or egress", capability="network"
        )
    if spec.root.disk.kind != "tmpfs":
        raise Unsupported(
            "the disk of an engine's sandbox is memory",
            hint="ask for a disk of at most half of the memory, or use the jail runtime",
            capability="disk_limit",
        )


def layers(spec: StartSpec) -> tuple[str, ...]:
    """The layers that make the image, topmost first: without mount points that this sandbox alone has, which
    the engine makes itself."""
    own = os.path.join(spec.folder, "")
    return tuple(layer for layer in spec.root.lowers if not layer.startswith(own))


def unlimited(info: dict[str, Any]) -> bool:
    """Whether it is a rootless engine that ignores limits: on version 1, or where nothing is delegated."""
    if not (info.get("Rootless") or "name=rootless" in " ".join(map(str, info.get("SecurityOptions") or []))):
        return False
    return (
        str(info.get("CgroupVersion", "1")) == "1"
        or info.get("CgroupDriver") == "none"
        or info.get("MemoryLimit") is False
    )
