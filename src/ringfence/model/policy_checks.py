"""What no policy may say, and what it may say but should think about.

These rules hold for every policy, however it was made: from a file, from a preset with command line
options, or in code. Fields are named as in the file (``resources.memory``, ``network.allow[0].host``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ringfence.model.mounts import below, path_problem, target_problem
from ringfence.model.policy import (
    GIB,
    LEAST_MEMORY,
    MIB,
    MOST_GPUS,
    Filesystem,
    Limits,
    Network,
    NetworkRule,
    Policy,
    Wall,
)
from ringfence.model.quantities import format_duration, format_size

TIB = 1024 * GIB
DAY = 86400.0

# What holds in every sandbox. No key of the policy file reaches it.
BASELINE = (
    "no process of the sandbox is root on the host",
    "no process of the sandbox has a capability on the host",
    "no_new_privs is set",
    "the system call filter is installed",
    "/proc and /sys are masked",
    "processes, memory, disk, output and lifetime are limited, and there is no swap",
    "the AppArmor or SELinux profile is applied where the host has one",
)

# Patterns are compiled where they are first used: most runs read no policy file.
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_RUNTIME = r"[a-z][a-z0-9-]{0,31}"
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY")
_HOST_FUNCTION = r"[A-Za-z0-9_$:/-]+\.[A-Za-z0-9_$:/.-]+"
_URL_PATH = r"/[A-Za-z0-9\-._~!$&'()+,;=:@%/]*\*?"
_HEADER = r"[A-Za-z0-9-]{1,64}"
# Headers that say where a request goes or where it ends: with them a rule could reach past its own host.
_FRAMING = ("host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect",
            "proxy-authorization", "proxy-connection")  # fmt: skip
_SECRET = r"\{\{secret:([A-Za-z0-9][A-Za-z0-9._-]{0,63})\}\}"  # noqa: S105 (a pattern)
_MINIMUM = {"untrusted": 3, "controlled": 2, "trusted": 2}


class Problem(NamedTuple):
    """Why a policy can't be: the field as the file names it, what is wrong, and the remedy."""

    field: str
    what: str
    hint: str


def problems(policy: Policy) -> Iterator[Problem]:
    """Everything that is wrong, in the order of the file."""
    if not re.fullmatch(_NAME, policy.name):
        yield Problem(
            "metadata.name",
            f"{policy.name[:70]!r} is not a name",
            "use up to 63 letters, digits, '.', '_' and '-'",
        )
    yield from _wall(policy.wall)
    yield from _limits(policy.door.limits)
    yield from _network(policy.door.network)
    yield from _trust(policy)


def secrets(policy: Policy) -> tuple[str, ...]:
    """Names of the secrets that the policy's rules inject, each once, in order."""
    found = [
        name
        for rule in policy.door.network.allow
        if rule.inject
        for name in re.findall(_SECRET, rule.inject.get("value", ""))
    ]
    return tuple(dict.fromkeys(found))


def _between(field: str, value: float, low: float, high: float, show: object = str) -> Iterator[Problem]:
    # Written so that NaN, which compares false with everything, is refused.
    if isinstance(value, bool) or not low <= value <= high:
        text = show if callable(show) else str
        yield Problem(field, f"{text(value)} is out of range", f"choose from {text(low)} to {text(high)}")


def _wall(wall: Wall) -> Iterator[Problem]:
    for index, name in enumerate(wall.isolation.prefer):
        if not re.fullmatch(_RUNTIME, name):
            yield Problem(
                f"isolation.prefer[{index}]",
                f"{name!r} is not the name of a runtime",
                "name runtimes as `ringfence doctor` does, e.g. jail",
            )
    if wall.isolation.runtime is not None and not re.fullmatch(_RUNTIME, wall.isolation.runtime):
        yield Problem(
            "isolation.runtime",
            f"{wall.isolation.runtime!r} is not the name of a runtime",
            "name a runtime as `ringfence doctor` does, e.g. jail",
        )
    yield from _filesystem(wall.filesystem)
    process = wall.process
    yield from _between("process.user", process.user, 0, 60000)
    if process.seccomp != "default":
        yield Problem(
            "process.seccomp",
            f"{process.seccomp!r} is not a system call filter",
            "the filter can't be switched off; write default or leave it out",
        )
    yield from _between("process.maxProcesses", process.max_processes, 1, 1_000_000)
    yield from _between("process.maxOpenFiles", process.max_open_files, 16, 1_048_576)
    if process.cpu_time is not None:
        yield from _between("process.cpuTime", process.cpu_time, 0.1, 365 * DAY, _duration)
    for name in process.host_functions:
        if not re.fullmatch(_HOST_FUNCTION, name):
            text = f"{name!r} names no function"
            yield Problem("process.hostFunctions", text, "write module.name, as env.log")
    resources = wall.resources
    yield from _between("resources.cpus", resources.cpus, 0.01, 1024)
    yield from _between("resources.memory", resources.memory, LEAST_MEMORY, 64 * TIB, _size)
    yield from _between("resources.disk", resources.disk, 1 * MIB, 64 * TIB, _size)
    if resources.bandwidth is not None:
        yield from _between("resources.bandwidth", resources.bandwidth, 8_000, 10**12, lambda v: f"{v}bit")
    yield from _between("resources.gpus", resources.gpus, 0, MOST_GPUS)


def _size(value: float) -> str:
    return format_size(int(value)) if value == value and abs(value) < 1e30 else str(value)


def _duration(value: float) -> str:
    return format_duration(value) if 0 <= value < 1e12 else str(value)


def _filesystem(filesystem: Filesystem) -> Iterator[Problem]:
    for key, paths in (("readOnly", filesystem.read_only), ("readWrite", filesystem.read_write)):
        for index, path in enumerate(paths):
            what = path_problem(path)
            if what is not None:
                yield Problem(
                    f"filesystem.{key}[{index}]",
                    f"{path!r} {what}",
                    "write the full path as the sandbox sees it",
                )
            elif key == "readWrite" and (
                path == "/" or any(below(path, top) for top in ("/proc", "/sys", "/dev"))
            ):
                yield Problem(
                    f"filesystem.{key}[{index}]",
                    f"{path!r} can't be writable",
                    "use root: overlay to let the sandbox write where a normal user could",
                )
    both = set(filesystem.read_only) & set(filesystem.read_write)
    if both:
        yield Problem(
            "filesystem.readWrite", f"{min(both)!r} is both read-only and writable", "keep one of the two"
        )
    targets: dict[str, int] = {}
    for index, mount in enumerate(filesystem.mounts):
        field = f"filesystem.mounts[{index}]"
        what = path_problem(mount.source)
        if what is not None:
            yield Problem(f"{field}.source", f"{mount.source!r} {what}", "write the full path on the host")
        what = target_problem(mount.target)
        if what is not None:
            yield Problem(
                f"{field}.target", f"{mount.target!r} {what}", "choose a folder of its own, e.g. /data"
            )
        if mount.target in targets:
            yield Problem(
                f"{field}.target",
                f"{mount.target!r} is the target of mounts[{targets[mount.target]}] too",
                "give each mount its own target",
            )
        targets.setdefault(mount.target, index)


def _limits(limits: Limits) -> Iterator[Problem]:
    yield from _between("limits.timeout", limits.timeout, 0.1, 365 * DAY, _duration)
    if limits.idle is not None:
        yield from _between("limits.idle", limits.idle, 1, 365 * DAY, _duration)
    yield from _between("limits.output", limits.output, 1, TIB, _size)
    if limits.max_template_age is not None:
        yield from _between("limits.maxTemplateAge", limits.max_template_age, 1, 3650 * DAY, _duration)


def _network(network: Network) -> Iterator[Problem]:
    if network.allow and network.mode == "none":
        yield Problem(
            "network.mode",
            "is none, so the rules in allow would never be used",
            "write mode: egress, or remove allow",
        )
    if network.allow and network.mode == "open":
        yield Problem(
            "network.mode",
            "is open, so the rules in allow would not hold",
            "write mode: egress, or remove allow",
        )
    for index, rule in enumerate(network.allow):
        yield from _rule(rule, f"network.allow[{index}]")


def _rule(rule: NetworkRule, field: str) -> Iterator[Problem]:
    what, hint = _host_problem(rule.host)
    if what:
        yield Problem(f"{field}.host", f"{rule.host[:80]!r} {what}", hint)
    if not rule.ports:
        yield Problem(f"{field}.ports", "is empty, so the rule allows nothing", "name ports, as in [443]")
    for number, port in enumerate(rule.ports):
        yield from _between(f"{field}.ports[{number}]", port, 1, 65535)
    for number, method in enumerate(rule.methods):
        if method not in _METHODS:
            yield Problem(
                f"{field}.methods[{number}]",
                f"{method[:30]!r} is not an HTTP method",
                f"use {', '.join(_METHODS)}; leave methods out to allow all",
            )
    for number, path in enumerate(rule.paths):
        if (
            not re.fullmatch(_URL_PATH, path)
            or ".." in path.split("/")
            or re.search(r"%(?![0-9A-Fa-f]{2})", path)
        ):
            yield Problem(
                f"{field}.paths[{number}]",
                f"{path[:80]!r} is not a URL path",
                "start with /, leave out query and fragment; * may stand at the end only, as in /v1/*",
            )
    if rule.inject is not None:
        yield from _inject(rule, f"{field}.inject")


def _inject(rule: NetworkRule, field: str) -> Iterator[Problem]:
    inject = rule.inject or {}
    for key in ("header", "value"):
        if not isinstance(inject.get(key), str):
            yield Problem(
                f"{field}.{key}", "is missing", 'write {header: NAME, value: "Bearer {{secret:NAME}}"}'
            )
            return
    for key in sorted(set(inject) - {"header", "value"}):
        yield Problem(f"{field}.{key[:40]}", "is not known", "inject has header and value only")
    header, value = inject["header"], inject["value"]
    if not re.fullmatch(_HEADER, header):
        yield Problem(f"{field}.header", f"{header[:70]!r} is not the name of a header", "e.g. Authorization")
    elif header.lower() in _FRAMING:
        yield Problem(
            f"{field}.header",
            f"{header} can't be injected: it says where a request goes or ends",
            "inject credentials only, e.g. Authorization",
        )
    rest = re.sub(_SECRET, "", value)
    if not re.search(_SECRET, value):
        # The value isn't shown: it may be the secret itself.
        yield Problem(
            f"{field}.value",
            "names no secret",
            "write {{secret:NAME}} where the secret belongs; it never stands in a policy itself",
        )
    elif "{{" in rest or "}}" in rest:
        yield Problem(
            f"{field}.value",
            "has braces that are no {{secret:NAME}}",
            "a secret's name has letters, digits, '.', '_' and '-', no spaces",
        )
    if not all(32 <= ord(letter) < 127 for letter in value):
        yield Problem(f"{field}.value", "has characters that a header can't carry", "use printable ASCII")
    if rule.host.startswith("*."):
        yield Problem(
            f"{field}",
            "would send the secret to any host under a wildcard",
            f"name the host that may have it, e.g. api{rule.host[1:]}",
        )


def _host_problem(host: str) -> tuple[str, str]:
    """What is wrong with a rule's host, and the remedy; two empty strings if nothing is."""
    if host == "*":
        return "allows every host", "name hosts, or, for trusted code only, write mode: open without allow"
    if "://" in host:
        return "is a URL", "write the host name only; ports and paths have fields of their own"
    if "/" in host:
        return "has a path", "write the host name only and the path in paths"
    if _is_address(host):
        return "", ""
    if ":" in host:
        return "has a port", "write the host name only and the port in ports"
    if not host.isascii():
        return "is not ASCII", "write the xn-- form of the name"
    if host != host.lower():
        return "has capital letters", f"write {host.lower()}"
    name = host[2:] if host.startswith("*.") else host
    if "*" in name:
        return "has a wildcard that is not the left-most label", "write *.example.com"
    labels = name.split(".")
    if len(name) > 253 or not all(re.fullmatch(_LABEL, label) for label in labels) or labels[-1].isdigit():
        return "is not a host name", "write a name such as api.example.com, or an address"
    return "", ""


def _is_address(host: str) -> bool:
    if not (host[:1].isdigit() or ":" in host):
        return False
    import ipaddress

    try:
        # Only the shortest form: "010.0.0.1" and "::ffff:0:1" have meanings that readers disagree on.
        return str(ipaddress.ip_address(host)) == host and "%" not in host
    except ValueError:
        return False


def _trust(policy: Policy) -> Iterator[Problem]:
    """What a preset does not let its policies change."""
    trust, wall, network = policy.trust, policy.wall, policy.door.network
    if trust is None:
        return
    least = _MINIMUM[trust]
    if wall.isolation.minimum.rank < least:
        yield Problem(
            "isolation.minimum",
            f"{wall.isolation.minimum.value} is weaker than preset {trust} allows",
            f"write L{least} or more, or start from another preset",
        )
    if trust == "trusted":
        return
    if network.mode == "open":
        yield Problem(
            "network.mode",
            f"open is not for preset {trust}",
            "write mode: egress and name the hosts, or start from preset trusted",
        )
    if wall.process.user == 0:
        yield Problem(
            "process.user",
            f"0 is not for preset {trust}, which drops all capabilities",
            "use another user, or start from preset trusted",
        )
    for index, mount in enumerate(wall.filesystem.mounts):
        if trust == "untrusted":
            yield Problem(
                f"filesystem.mounts[{index}]",
                "preset untrusted shows no host files",
                "send files through the API (--file, --out), or start from preset controlled",
            )
        elif not mount.read_only:
            yield Problem(
                f"filesystem.mounts[{index}].readOnly",
                "preset controlled has read-only mounts only",
                "write readOnly: true and take results out through the API, or start from preset trusted",
            )
    if trust == "untrusted" and network.mode != "none" and secrets(policy):
        index = next(number for number, rule in enumerate(network.allow) if rule.inject)
        yield Problem(
            f"network.allow[{index}].inject",
            "untrusted code would act with a secret of yours: private "
            "data, untrusted input and outbound access meet",
            "remove inject, or start from controlled",
        )


def warnings(policy: Policy) -> list[str]:
    """Sentences about what is allowed but worth a thought. Empty for most policies."""
    found = []
    network = policy.door.network
    private = [f"the host's {mount.source}" for mount in policy.wall.filesystem.mounts]
    private += [f"the secret {name}" for name in secrets(policy)]
    # Input can be trusted only where somebody vouched for the code *and* it reads nothing from strangers.
    untrusted_input = policy.trust != "trusted" or network.mode == "open"
    outbound = network.mode == "open" or (network.mode == "egress" and bool(network.allow))
    if private and untrusted_input and outbound:
        where = "anywhere" if network.mode == "open" else ", ".join(rule.host for rule in network.allow[:3])
        found.append(
            f"private data ({', '.join(private[:3])}), untrusted input and outbound access ({where}) meet in "
            "one sandbox: whoever can talk the code into it can have the data sent out. Remove one of them."
        )
    if network.mode == "egress" and not network.allow:
        found.append("network.mode is egress but no host is allowed: nothing can be reached.")
    for rule in network.allow:
        if rule.host.startswith("*.") and "." not in rule.host[2:]:
            found.append(f"network rule {rule.host} allows a whole top-level domain.")
        if rule.inject and any(port == 80 for port in rule.ports):
            found.append(f"the secret for {rule.host} would travel in the clear on port 80.")
    if policy.wall.process.user == 0:
        found.append("process.user is 0: the workload is root of its own user namespace (never of the host).")
    if policy.wall.isolation.minimum.rank < 2 and policy.trust != "trusted":
        found.append("isolation.minimum is L1: code runs in-process; run only code that you trust.")
    return found
