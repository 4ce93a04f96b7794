"""What no policy may say, and what it may say but should think about.

These rules hold for every policy, however it was made: from a file, from a preset with command line
options, or in code. Fields are named as in the file (``resources.memory``, ``network.allow[0].host``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ringfence.model.mounts import below, path_problem, target_problem
from ringfence.model.policy import (
    GIB,
    LEAST_MEMORY,
    MIB,
    MOST_GPUS,
    Filesystem,
    Limits,
    Policy,
    Wall,
)
from ringfence.model.policy_network_checks import (
    SECRET,
    Problem,
    between,
    duration_text,
    network_problems,
    size_text,
)

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
_HOST_FUNCTION = r"[A-Za-z0-9_$:/-]+\.[A-Za-z0-9_$:/.-]+"
_MINIMUM = {"untrusted": 3, "controlled": 2, "trusted": 2}


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
    yield from network_problems(policy.door.network)
    yield from _trust(policy)


def secrets(policy: Policy) -> tuple[str, ...]:
    """Names of the secrets that the policy's rules inject, each once, in order."""
    network = policy.door.network
    injected = [rule.inject for rule in network.allow if rule.inject]
    if network.inference is not None and network.inference.inject:
        injected.append(network.inference.inject)
    found = [name for inject in injected for value in inject.values() for name in re.findall(SECRET, value)]
    return tuple(dict.fromkeys(found))


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
    yield from between("process.user", process.user, 0, 60000)
    if process.seccomp != "default":
        yield Problem(
            "process.seccomp",
            f"{process.seccomp!r} is not a system call filter",
            "the filter can't be switched off; write default or leave it out",
        )
    yield from between("process.maxProcesses", process.max_processes, 1, 1_000_000)
    yield from between("process.maxOpenFiles", process.max_open_files, 16, 1_048_576)
    if process.cpu_time is not None:
        yield from between("process.cpuTime", process.cpu_time, 0.1, 365 * DAY, duration_text)
    for name in process.host_functions:
        if not re.fullmatch(_HOST_FUNCTION, name):
            text = f"{name!r} names no function"
            yield Problem("process.hostFunctions", text, "write module.name, as env.log")
    resources = wall.resources
    yield from between("resources.cpus", resources.cpus, 0.01, 1024)
    yield from between("resources.memory", resources.memory, LEAST_MEMORY, 64 * TIB, size_text)
    yield from between("resources.disk", resources.disk, 1 * MIB, 64 * TIB, size_text)
    if resources.bandwidth is not None:
        yield from between("resources.bandwidth", resources.bandwidth, 8_000, 10**12, lambda v: f"{v}bit")
    yield from between("resources.gpus", resources.gpus, 0, MOST_GPUS)


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
    yield from between("limits.timeout", limits.timeout, 0.1, 365 * DAY, duration_text)
    if limits.idle is not None:
        yield from between("limits.idle", limits.idle, 1, 365 * DAY, duration_text)
    yield from between("limits.output", limits.output, 1, TIB, size_text)
    if limits.max_template_age is not None:
        yield from between("limits.maxTemplateAge", limits.max_template_age, 1, 3650 * DAY, duration_text)


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
    if network.learn:
        yield Problem(
            "network.learn",
            f"is not for preset {trust}: while it learns, everything passes",
            "learn with preset trusted, then use the proposal",
        )
    if trust == "untrusted" and network.mode != "none" and secrets(policy):
        with_one = [
            f"network.allow[{number}].inject" for number, rule in enumerate(network.allow) if rule.inject
        ]
        yield Problem(
            with_one[0] if with_one else "network.inference.inject",
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
    outbound = network.mode == "open" or (
        network.mode == "egress" and bool(network.allow or network.inference or network.learn)
    )
    if private and untrusted_input and outbound:
        hosts = [rule.host for rule in network.allow[:3]]
        if network.inference is not None:
            hosts.append(network.inference.upstream)
        where = "anywhere" if network.mode == "open" or network.learn else ", ".join(hosts)
        found.append(
            f"private data ({', '.join(private[:3])}), untrusted input and outbound access ({where}) meet in "
            "one sandbox: whoever can talk the code into it can have the data sent out. Remove one of them."
        )
    if (
        network.mode == "egress"
        and not (network.allow or network.inference or network.learn)
        and (network.on_unknown == "deny")
    ):
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
