"""The runtime contract: a runtime only starts walls.

A driver implements :class:`Runtime`. It starts a wall around the guest agent and opens links to it;
everything users do is spoken over links. Rules that all drivers share (deadlines, idempotence, state
checks) live in ``runtimes.guarding``, so a driver may assume legal calls.

Which call is legal when (``guarding`` enforces it, the conformance suite checks it)::

    state     start connect wait stop destroy stats recover measure
    absent      yes      no   no   no    yes    no      no      no
    running      no     yes  yes  yes    yes   yes     yes     yes
    ended        no      no  yes  yes    yes    no     yes      no
    destroyed    no      no   no  yes    yes    no      no      no

``stop`` and ``destroy`` are idempotent. ``wait`` may be called by several callers at once.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.model.values import dataclass

AGENT_UID = 64999  # the guest agent's own user inside, where the user map has room for it
MAP_SIZE = 65536  # host user ids that one sandbox gets when the node is root


class Health:
    """Values of :attr:`Probe.health`."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # works, with something missing that ``reason`` names
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Probe:
    """What a runtime proved by *running* something. ``remedy`` is a command or sentence for the user."""

    runtime: str
    health: str
    level: Level
    boundary: Boundary
    version: str = ""
    reason: str = ""
    remedy: str = ""
    vulnerabilities: tuple[str, ...] = ()  # known CVEs of this version
    cold_start_ms: float | None = None  # of the probe's own run; orders runtimes by speed


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver can do on this host. A plain value; the committed tables compare with it."""

    rootless: bool = False  # can start walls without being root
    overlay: bool = False  # filesystem.root: overlay with changes readable from the host
    user_zero: bool = False  # process.user: 0 as root of its own user namespace
    mounts: bool = False  # host folders shown inside
    pty: bool = True
    ports: bool = True  # dial and listen inside
    watch: bool = True
    recover: bool = False  # a handle is good after the host process was killed
    disk_limit: bool = False
    pause: bool = False
    disk_snapshot: bool = False
    memory_snapshot: bool = False
    gpu: bool = False
    programs: bool = True  # runs any program of its root; else only what the driver maps
    host_template: bool = (
        True  # takes the ``host`` template; else only one with a disk or an image of its own
    )
    network: tuple[str, ...] = ("none",)
    transparent: bool = False  # network mode egress: connections that ignore proxies reach the door too


@dataclass(frozen=True, slots=True)
class IdMap:
    """One line of a user (and group) map: ``count`` ids from ``inside`` are ``outside`` on the host."""

    inside: int
    outside: int
    count: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the workload and the agent are, inside and on the host. Never uid 0 on the host.

    ``helper``: the maps must be written with newuidmap/newgidmap (rootless with subordinate ids).
    ``capabilities``: bit mask the workload keeps inside its own user namespace; 0 unless user is 0.
    ``gid_maps``: the group map where it differs from the user map (a normal user's group, or /etc/subgid,
    may have other numbers); empty means the same as ``maps``.
    """

    uid: int
    gid: int
    maps: tuple[IdMap, ...]
    agent_uid: int
    helper: bool = False
    capabilities: int = 0
    gid_maps: tuple[IdMap, ...] = ()

    def host_uid(self, inside: int) -> int:
        """The host's number of an id inside.

        Raises:
            KeyError: the id is not mapped.
        """
        for line in self.maps:
            if line.inside <= inside < line.inside + line.count:
                return line.outside + inside - line.inside
        raise KeyError(inside)


@dataclass(frozen=True, slots=True)
class Bind:
    """A host path shown inside. Read-only binds are also nosuid and nodev; so are all others.

    ``idmapped``: owners appear as on the host (root stays root); only for read-only trees when root.
    """

    source: str
    target: str
    read_only: bool = True
    idmapped: bool = False


@dataclass(frozen=True, slots=True)
class Disk:
    """Where writes go. ``tmpfs``: sized, in memory. ``image``: an ext4 image file at ``image``."""

    kind: Literal["tmpfs", "image"]
    size: int
    inodes: int
    image: str | None = None


@dataclass(frozen=True, slots=True)
class RootFs:
    """The sandbox's file system, ready to be mounted.

    ``lowers``: overlay layers, topmost first; each a folder on the host, complete with mount points.
    ``binds`` are laid over the root in order. ``writable`` are the folders that a normal user writes to
    (drivers without overlay put sized tmpfs there). ``read_write``/``read_only`` come from the policy;
    ``read_write`` is what stays writable when ``readonly`` is set.

    ``template`` names the content of ``lowers`` (``host``, or a template's digest): drivers that need it in
    another form (a VM's disk, an engine's image) keep that under this name. ``image``: a container engine's
    own image, in place of ``lowers``. ``env`` and ``workdir`` are the template's defaults for commands; the
    node has put them into the :class:`StartSpec` already.
    """

    lowers: tuple[str, ...]
    binds: tuple[Bind, ...]
    disk: Disk
    readonly: bool = False
    writable: tuple[str, ...] = ("/workspace", "/tmp", "/var/tmp", "/home/agent")  # noqa: S108 - inside
    read_write: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    template: str = "host"
    image: str = ""
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = ""


@dataclass(frozen=True, slots=True)
class CgroupPlace:
    """Cgroups that the node made. Paths of ``cgroup.procs`` files, one per hierarchy.

    The agent is put into ``agent``; it puts every workload process into ``work`` through descriptors
    opened by the host. Empty tuples: no cgroup here, limits are polled.
    ``v2_fd_path``: folder for CLONE_INTO_CGROUP where the hierarchy is v2.
    ``opened``: of some of these paths a descriptor for moving a thread, which the node has open for as long
    as the wall stands and nobody else closes.
    """

    agent: tuple[str, ...] = ()
    work: tuple[str, ...] = ()
    v2_fd_path: str | None = None
    opened: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartSpec:
    """Everything a driver needs to start one wall. JSON-able but for nothing: all plain values.

    ``folder`` is the sandbox's own folder on the host (exists, mode 0700 or 0711, owned by the node);
    the driver may keep files there, and the agent's socket is ``folder/guest.sock``.
    ``ephemeral``: the wall must die when the starting host process dies.
    """

    id: str
    folder: str
    hostname: str
    root: RootFs
    identity: Identity
    cgroup: CgroupPlace
    max_processes: int
    max_open_files: int
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/workspace"
    network: str = "none"
    seccomp: str = "default"
    ephemeral: bool = True
    memory: int = 0  # bytes; drivers with own accounting (VMs) use it
    cpus: float = 0
    host_functions: tuple[str, ...] = ()  # `module.name` of what the policy lets a WebAssembly module call
    open_to: tuple[tuple[str, int], ...] = ()  # network mode open: private ranges that are named, a port each
    gpus: int = 0  # whole GPUs; drivers without ``Capabilities.gpu`` are never asked for one


@dataclass(frozen=True, slots=True)
class Handle:
    """An opaque, versioned, JSON-able reference to a started wall. Only its driver reads ``data``.

    ``pid`` is the host's process id of the wall's first process, ``birth`` its start time in clock ticks
    since boot (/proc/PID/stat field 22), ``boot_id`` the boot it belongs to: together they name one
    process for ever.
    """

    runtime: str
    version: int
    id: str
    folder: str
    pid: int
    birth: int
    boot_id: str
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def socket_path(self) -> Path:
        """The agent's listening socket; may be longer than a sockaddr allows (see ``connect``)."""
        return Path(self.folder) / "guest.sock"


@dataclass(frozen=True, slots=True)
class Exit:
    """How the wall's first process ended, as the host saw it.

    ``code`` is 0..255, ``signal`` the number if it was killed; both ``None`` when only its absence is
    known (it was not our child any more). Why is the node's to say: it set the limits.
    """

    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class WallStats:
    """What the driver alone can measure of a wall. Processes include the agent."""

    processes: int
    resident_bytes: int


@runtime_checkable
class Runtime(Protocol):
    """One isolation technology. Instances are cheap; all state is in handles and in the kernel."""

    name: str
    level: Level
    boundary: Boundary

    async def probe(self) -> Probe:
        """Prove by running something that walls can be started here. Never raises; takes < 20 s."""

    def capabilities(self) -> Capabilities:
        """What this driver can do on this host, as this user."""

    async def start(self, spec: StartSpec) -> Handle:
        """Start the wall with the guest agent inside, listening. Returns when a link can be opened.

        Raises:
            StartFailed: a step failed; nothing is left behind.
            Unsupported: the spec asks for what ``capabilities`` denies.
            HostLimit: the host ran out of something.
        """

    async def recover(self, handle: Handle) -> bool:
        """After a restart of the host process: True if the wall still lives (and is watched again)."""

    async def connect(self, handle: Handle) -> socket.socket:
        """A new, independent byte stream to the agent; non-blocking. Any number, any process.

        Raises:
            LinkLost: the wall has ended or the agent does not answer.
        """

    async def wait(self, handle: Handle) -> Exit:
        """Return when the wall's first process has ended."""

    async def stop(self, handle: Handle, grace: float) -> None:
        """Ask the agent's processes to end (SIGTERM), after ``grace`` seconds kill the wall."""

    async def destroy(self, handle: Handle) -> None:
        """Kill the wall at once, whatever its state, and release what the driver holds.

        Raises:
            HostLimit: something is left; the message says what.
        """

    async def stats(self, handle: Handle) -> WallStats:
        """Measured on the host."""

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """The effective boundary, read from the living wall. ``limits`` is filled in by the node."""


@runtime_checkable
class Pausable(Protocol):
    """A driver that can stop a wall's clock of execution and let it go on."""

    async def pause(self, handle: Handle) -> None:
        """Freeze every process of the wall."""

    async def resume(self, handle: Handle) -> None:
        """Let them go on."""


@runtime_checkable
class Layered(Protocol):
    """A driver whose writable layer the host can read while the wall lives (``Capabilities.overlay``)."""

    def open_upper(self, handle: Handle) -> int:
        """A directory descriptor of the overlay's upper layer; survives the wall's end. Caller closes."""


@runtime_checkable
class KnownByName(Protocol):
    """A driver whose walls live elsewhere and can be found without a handle, by the sandbox's id."""

    async def remove_named(self, sandbox: str) -> None:
        """Remove the wall of a start whose node died before it had a handle; there may be none."""


@runtime_checkable
class Snapshotting(Protocol):
    """A driver that can save a wall and start others from what it saved."""

    async def snapshot(self, handle: Handle, folder: str, *, memory: bool = True) -> dict[str, Any]:
        """Save the wall into ``folder`` (made here; nothing is left of it after an error); the wall goes on.

        Every link to the agent ends: commands and their output are kept, and the agent has a new epoch.

        Returns:
            What :meth:`restore` has to know, JSON-able.

        Raises:
            Unsupported: with or without ``memory`` can't be had here.
            HostLimit: the wall or the disk does not allow it; the message says why.
        """

    async def restore(self, spec: StartSpec, folder: str, data: Mapping[str, Any]) -> Handle:
        """Start a wall from a saved one, any number of times; ``spec`` gives it an identity of its own.

        As ``start``: returns when a link can be opened, with the host name and environment of ``spec`` bound.
        ``folder`` must stay while the wall lives.

        Raises:
            InvalidRequest: what was saved is foreign, damaged or does not fit ``spec``; the message says why.
            StartFailed: a step failed; nothing is left behind.
        """
