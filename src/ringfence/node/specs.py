"""From a request to what a driver is told, and to what a sandbox is held to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.node import identities
from ringfence.node.cgroups import Group, GroupLimits
from ringfence.node.supervising import Watched
from ringfence.runtimes.contract import Bind, StartSpec

if TYPE_CHECKING:
    from ringfence.model.policy import Network
    from ringfence.model.sandbox import SandboxRequest
    from ringfence.node.service import Node
    from ringfence.runtimes.contract import Capabilities, Disk, Identity, RootFs, Runtime

WORKSPACE = "/workspace"  # where commands start unless the template says otherwise


def group_limits(runtime: Runtime, request: SandboxRequest) -> GroupLimits:
    """What the cgroup of a sandbox on that runtime is held to."""
    size = request.policy.wall.resources
    # Some kernels in user space need several of the host's tasks for one process of the workload.
    driver = getattr(runtime, "driver", runtime)
    tasks = request.policy.wall.process.max_processes * int(getattr(driver, "tasks_per_process", 1))
    # A virtual machine brings a kernel and an emulator along.
    beyond = getattr(driver, "memory_overhead", None)
    return GroupLimits(size.memory + (int(beyond(size.memory)) if beyond else 0), size.cpus, tasks)


def identity(node: Node, number: int | None, user: int) -> Identity:
    """Who a sandbox is on the host, in the range of that number."""
    if number is None:
        return identities.identity_as_user(user, single=node.cgroups.mode in ("v1", "hybrid"))
    return identities.identity_as_root(number, user)


def start_spec(
    name: str,
    folder: Path,
    request: SandboxRequest,
    root: RootFs,
    identity: Identity,
    group: Group,
    *,
    wall: str = "",
) -> StartSpec:
    """What a driver is told. ``wall`` names it if it is not the sandbox's first one."""
    size, process = request.policy.wall.resources, request.policy.wall.process
    if request.policy.door.network.mode == "open":
        root = _with_names(root, folder)
    return StartSpec(
        id=wall or name,
        folder=str(folder),
        hostname=name,
        root=root,
        identity=identity,
        cgroup=group.place(),
        max_processes=process.max_processes,
        max_open_files=process.max_open_files,
        env=_environment(request.policy.door.network.mode) | dict(root.env) | request.env,
        network=request.policy.door.network.mode,
        seccomp=process.seccomp,
        ephemeral=not request.keep,
        memory=size.memory,
        cpus=size.cpus,
        host_functions=process.host_functions,
        workdir=root.workdir or WORKSPACE,
        gpus=size.gpus,
        open_to=_open_to(request.policy.door.network),
    )


def _environment(network: str) -> dict[str, str]:
    """What programs have to know of the network; what a template or a caller says goes before it."""
    if network != "egress":
        return {}
    from ringfence.guest import doors

    return doors.environment()


def _open_to(network: Network) -> tuple[tuple[str, int], ...]:
    if network.mode != "open":
        return ()
    return tuple((rule.host, port) for rule in network.allow for port in rule.ports)


def _with_names(root: RootFs, folder: Path) -> RootFs:
    """The root with a resolver: in network mode open programs ask it themselves."""
    from ringfence.runtimes.networking import RESOLV

    path = folder / "resolv.conf"
    path.write_text(RESOLV)
    path.chmod(0o644)
    return replace(root, binds=(*root.binds, Bind(str(path), "/etc/resolv.conf")))


def limits_of(node: Node, request: SandboxRequest, disk: Disk, has: Capabilities) -> dict[str, str]:
    """How each limit is enforced here (see :class:`EffectiveBoundary`)."""
    enforced = node.cgroups.enforced()
    if request.policy.wall.process.cpu_time is None:
        enforced["cpu_time"] = "none"
    return {
        **enforced,
        "disk": disk.kind if has.disk_limit else "none",
        "output": "host",
        "deadline": "host",
    }


def watched(request: SandboxRequest, deadline: float, limits: dict[str, str]) -> Watched:
    """The limits that the node looks after itself."""
    policy = request.policy
    return Watched(
        deadline=deadline,
        timeout=policy.door.limits.timeout,
        output=policy.door.limits.output,
        cpu_time=policy.wall.process.cpu_time,
        memory=policy.wall.resources.memory if limits["memory"] == "polled" else None,
    )
