"""The policy: what a sandbox may do, in two halves.

The *wall* (isolation, file system, process, resources, output) is fixed when the sandbox starts, and
its digest keys a pool. The *door* (env, secrets, network rules, timeouts, audit) is bound later and may
change.
YAML and presets live in ``ringfence.model.policies``; this module has only the values.
"""

from __future__ import annotations

from dataclasses import asdict, field, replace
from typing import Any, Literal

from ringfence.model.levels import Level
from ringfence.model.values import dataclass

MIB = 1024**2
GIB = 1024**3
MOST_GPUS = 64  # of one sandbox: more than any one machine has
LEAST_MEMORY = 16 * MIB  # of a sandbox: a shell, an interpreter and a small program


@dataclass(frozen=True, slots=True)
class Size:
    """CPUs, memory and disk of a named size. Bytes; CPUs may be a fraction."""

    cpus: float
    memory: int
    disk: int


# Disk is half of the memory, so that the default disk is a tmpfs and ENOSPC comes before OOM.
SIZES = {
    "small": Size(1, 1 * GIB, 512 * MIB),
    "medium": Size(2, 4 * GIB, 2 * GIB),
    "large": Size(4, 8 * GIB, 4 * GIB),
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """How strong the wall must be. ``runtime`` names one driver; ``prefer`` orders several."""

    minimum: Level = Level.L2
    runtime: str | None = None
    prefer: tuple[str, ...] = ()
    allow_emulated: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder or file shown inside. ``source`` is absolute on the host, ``target`` inside."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Filesystem:
    """``overlay``: the workload writes where a user could, into a layer of its own.

    ``readonly``: it writes under ``read_write`` only. ``read_only`` paths are read-only in both.
    """

    root: Literal["overlay", "readonly"] = "overlay"
    read_only: tuple[str, ...] = ()
    read_write: tuple[str, ...] = ("/workspace", "/tmp")  # noqa: S108
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """Who the workload is inside, and its per-process limits. ``cpu_time`` is of the whole sandbox."""

    user: int = 1000
    seccomp: Literal["default"] = "default"
    max_processes: int = 256
    max_open_files: int = 1024
    cpu_time: float | None = None  # seconds
    host_functions: tuple[str, ...] = ()  # `module.name`: what a WebAssembly module may call on the host


@dataclass(frozen=True, slots=True)
class Resources:
    """What the whole sandbox may take. Bytes, CPUs, bits a second, whole GPUs. Swap is always off."""

    cpus: float = SIZES["small"].cpus
    memory: int = SIZES["small"].memory
    disk: int = SIZES["small"].disk
    bandwidth: int | None = None
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Ends that the host sets. Seconds and bytes.

    ``max_template_age``: of the template's base since it was last taken from its source; an older one is
    refused at the start. The ``host`` template has no age.
    """

    timeout: float = 30 * 60
    idle: float | None = None
    on_idle: Literal["pause", "stop"] = "pause"
    output: int = 10 * MIB
    max_template_age: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used up before the answer is 429. Every part that is ``None`` is without limit.

    ``rate``: requests a second (a fraction is fine); ``max_bytes`` counts both ways; ``max_spend`` is in the
    unit of the prices: ``price`` for each request, ``token_price`` for each token that an answer reports.
    ``pause``: the sandbox is to be paused when it is over.
    """

    rate: float | None = None
    max_requests: int | None = None
    max_bytes: int | None = None
    max_spend: float | None = None
    price: float = 0.0
    token_price: float = 0.0
    pause: bool = False


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """One allowed destination. Enforced by the egress proxy; see docs/egress.md.

    ``host``: a name, ``*.name``, an address, or a range of addresses (CIDR). ``protocol``: ``None`` for HTTP
    and TLS, ``http``, ``tls``, or ``tcp`` for bytes that nobody looks at. ``tls``: ``pass``, ``inspect``, or
    ``None`` for what the rule and the trust class need. ``addresses``: the name has to resolve into these
    ranges; only so can it lie in a private one.
    """

    host: str
    ports: tuple[int, ...] = (443,)
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    inject: dict[str, str] | None = None
    protocol: Literal["http", "tls", "tcp"] | None = None
    tls: Literal["pass", "inspect"] | None = None
    addresses: tuple[str, ...] = ()
    budget: Budget | None = None
    record: Literal["none", "metadata", "headers", "bodies"] | None = None


@dataclass(frozen=True, slots=True)
class Inference:
    """The named upstream ``http://inference``: requests to a model API, routed and masked by the host.

    ``upstream``: the URL in whose place it stands; ``inject`` as in a rule; ``models``: names that may be
    asked for (none: all); ``mask``: personal data taken out of requests (``email``, ``phone``, ``card``,
    ``iban``, ``ip``, ``ssn``, or a regular expression); ``budget`` as in a rule.
    """

    upstream: str
    inject: dict[str, str] | None = None
    models: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    budget: Budget | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """``none``: loopback only. ``egress``: the proxy's rules. ``open``: for trusted code only.

    ``on_unknown``: what no rule allows is denied, or held up to ``ask_timeout`` seconds for an answer.
    ``learn``: what no rule allows passes, is written down, and becomes a proposal (trusted code only).
    ``redact``: regular expressions whose matches never get into a record. ``connections``: at once. Timeouts
    in seconds: to connect, without a byte (``idle``), for one request (``None``: as long as it takes).
    """

    mode: Literal["none", "egress", "open"] = "none"
    allow: tuple[NetworkRule, ...] = ()
    record: Literal["none", "metadata", "headers", "bodies"] = "metadata"
    on_unknown: Literal["deny", "ask"] = "deny"
    ask_timeout: float = 60.0
    learn: bool = False
    redact: tuple[str, ...] = ()
    budget: Budget | None = None
    inference: Inference | None = None
    connections: int = 256
    connect_timeout: float = 10.0
    idle_timeout: float = 300.0
    total_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """What is kept of a run besides its events."""

    files: bool = False
    network: bool = True


def _canonical(value: Any) -> Any:
    """Equal values in one form: 1.0 CPUs are 1 CPU, and a tuple is the list that JSON makes of it."""
    if isinstance(value, dict):
        return {key: _canonical(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# Fields that a policy had from the first day are in its digest whatever they say; later ones only when they
# are set, so that a policy which says nothing new keeps its digest.
_FIRST_OF_NETWORK = {"mode", "allow", "record"}
_FIRST_OF_RULE = {"host", "ports", "methods", "paths", "inject"}


def _drop_unset(values: dict[str, Any], unset: Network | NetworkRule, first: set[str]) -> None:
    for name in set(values) - first:
        if values[name] == getattr(unset, name):
            del values[name]


def network_of(values: dict[str, Any]) -> Network:
    """A network part from what ``dataclasses.asdict`` made of it, by this version or an older one."""

    def budget(part: dict[str, Any]) -> dict[str, Any]:
        lists = {key: tuple(value) for key, value in part.items() if isinstance(value, list | tuple)}
        spent = part.get("budget")
        return part | lists | {"budget": None if spent is None else Budget(**spent)}

    known = budget(values) | {"allow": tuple(NetworkRule(**budget(rule)) for rule in values["allow"])}
    if values.get("inference") is not None:
        known["inference"] = Inference(**budget(values["inference"]))
    return Network(**known)


def _digest(value: Wall | Policy) -> str:
    # Here and not above: hashlib loads OpenSSL, and not every command needs a digest.
    import hashlib
    import json

    values = asdict(value)
    if isinstance(value, Policy):
        _drop_unset(values["door"]["network"], Network(), _FIRST_OF_NETWORK)
        for rule in values["door"]["network"]["allow"]:
            _drop_unset(rule, NetworkRule(""), _FIRST_OF_RULE)
    text = json.dumps(_canonical(values), sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Wall:
    """The half that is fixed at start."""

    isolation: Isolation = field(default_factory=Isolation)
    filesystem: Filesystem = field(default_factory=Filesystem)
    process: Process = field(default_factory=Process)
    resources: Resources = field(default_factory=Resources)

    def digest(self) -> str:
        """SHA-256 over the canonical JSON form; two walls are the same if and only if it is."""
        return _digest(self)


@dataclass(frozen=True, slots=True)
class Door:
    """The half that is bound at claim time and may change while the sandbox lives."""

    limits: Limits = field(default_factory=Limits)
    network: Network = field(default_factory=Network)
    audit: Audit = field(default_factory=Audit)


@dataclass(frozen=True, slots=True)
class Policy:
    """A named pair of wall and door, the trust class it was made for, and its labels."""

    name: str = "default"
    wall: Wall = field(default_factory=Wall)
    door: Door = field(default_factory=Door)
    trust: Literal["untrusted", "controlled", "trusted"] | None = None

    def digest(self) -> str:
        """SHA-256 over everything in the policy, its name too; independent of the order of keys."""
        return _digest(self)

    def to_dict(self) -> dict[str, Any]:
        """The policy as its file would say it, every field that is set spelled out; JSON-able.

        ``ringfence.model.policies.from_dict`` gives an equal policy back.
        """
        from ringfence.model.policies import to_dict

        return to_dict(self)

    def with_wall(self, **parts: Any) -> Policy:
        """A copy with parts of the wall replaced, e.g. ``with_wall(resources=Resources(...))``."""
        return replace(self, wall=replace(self.wall, **parts))

    def with_door(self, **parts: Any) -> Policy:
        """A copy with parts of the door replaced, e.g. ``with_door(limits=Limits(...))``."""
        return replace(self, door=replace(self.door, **parts))
