"""Policies as people write them: the YAML file, the presets, and the way there and back.

A file is read in three steps, and each speaks of file, line and field: YAML to marked values
(``yaml_marks``), marked values to a :class:`Policy` (``policy_file``), and the rules that hold for every
policy (``policy_checks``). PyYAML is imported when a file is loaded, not before.

See docs/policy.md for every key.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ringfence.model.errors import InvalidRequest, NotFound
from ringfence.model.levels import Level
from ringfence.model.mounts import check_mounts, parse_mount
from ringfence.model.policy import (
    MIB,
    SIZES,
    Audit,
    Door,
    Isolation,
    Limits,
    Network,
    Policy,
    Resources,
    Wall,
)
from ringfence.model.policy_checks import BASELINE, problems, secrets, warnings
from ringfence.model.yaml_marks import error, meant, parse, read_text, show, wrap

__all__ = [
    "API_VERSION", "BASELINE", "PRESETS", "check", "check_mounts", "find", "from_dict", "load",
    "network_from_dict", "network_to_dict", "parse_mount", "preset", "resize", "secrets", "to_dict",
    "warnings",
]  # fmt: skip

API_VERSION = "ringfence/v1"
PRESETS = ("untrusted", "controlled", "trusted")


def preset(name: str) -> Policy:
    """One of :data:`PRESETS`.

    * ``untrusted``: own kernel (L3), no network, no host files, a short life, files recorded.
    * ``controlled``: L2, no network until hosts are named, read-only mounts only, files recorded.
    * ``trusted``: L2, open network; limits and the file system's isolation hold.

    Raises:
        NotFound: no such preset.
    """
    if name == "untrusted":
        return Policy(
            name, Wall(Isolation(Level.L3)), Door(Limits(timeout=600.0), audit=Audit(files=True)), "untrusted"
        )
    if name == "controlled":
        return Policy(name, door=Door(audit=Audit(files=True)), trust="controlled")
    if name == "trusted":
        return Policy(name, door=Door(network=Network("open")), trust="trusted")
    raise NotFound(
        f"there is no preset {show(name)}", hint=f"presets are {', '.join(PRESETS)}{meant(name, PRESETS)}"
    )


def load(source: str | os.PathLike[str], *, file: str | None = None) -> Policy:
    """A policy from a file, or from its text.

    Args:
        source: a path; or text, which is told from a path by its line breaks.
        file: the name that errors show for text.

    Raises:
        PolicyError: the file can't be read, or says something wrong; ``details`` has ``file``, ``line``
            and ``field``.
    """
    from ringfence.model.policy_file import read

    if isinstance(source, str) and "\n" in source:
        return read(parse(source, file or "<policy>"), file or "<policy>")
    path = os.fspath(source)
    return read(parse(read_text(path), path), path)


def find(name: str) -> Policy:
    """What ``--policy NAME`` means: a preset of this name, else a file.

    Raises:
        PolicyError: as :func:`load`.
    """
    if name in PRESETS:
        return preset(name)
    if not os.path.exists(name):
        hint = f"presets are {', '.join(PRESETS)}{meant(name, PRESETS)}"
        raise error(name, None, "", "no such preset or policy file", hint)
    return load(os.path.abspath(name) if "\n" in name else name)


def from_dict(values: dict[str, Any]) -> Policy:
    """The policy that :func:`to_dict`, or a file with these values, says.

    Raises:
        PolicyError: as :func:`load`, without a line.
    """
    from ringfence.model.policy_file import read

    return read(wrap(values), "<policy>")


def check(policy: Policy, file: str | None = None) -> Policy:
    """The same policy, if it is valid; for policies that options or code have changed.

    Raises:
        PolicyError: the first thing that is wrong.
    """
    for problem in problems(policy):
        raise error(file or "policy", None, problem.field, problem.what, problem.hint)
    return policy


def resize(
    base: Resources,
    size: str | None = None,
    cpus: float | None = None,
    memory: int | None = None,
    disk: int | None = None,
) -> Resources:
    """``base`` with a named size, then single amounts, put over it. Bytes.

    A disk that nobody chose shrinks with the memory, to half of it: then it still fits in memory and is
    full (ENOSPC) before the memory is.

    Raises:
        InvalidRequest: no such size.
    """
    if size is not None:
        if size not in SIZES:
            raise InvalidRequest(
                f"there is no size {show(size)}",
                hint=f"sizes are {', '.join(SIZES)}{meant(size, tuple(SIZES))}",
            )
        named = SIZES[size]
        base = replace(base, cpus=named.cpus, memory=named.memory, disk=named.disk)
    if disk is None and memory is not None:
        disk = max(min(base.disk, memory // 2), MIB)
    return replace(
        base,
        cpus=base.cpus if cpus is None else cpus,
        memory=base.memory if memory is None else memory,
        disk=base.disk if disk is None else disk,
    )


def to_dict(policy: Policy) -> dict[str, Any]:
    """The policy as its file would say it, in plain numbers; what is not set is left out."""
    wall, door = policy.wall, policy.door
    result: dict[str, Any] = {"apiVersion": API_VERSION, "kind": "Policy", "metadata": {"name": policy.name}}
    if policy.trust is not None:
        result["preset"] = policy.trust
    result["isolation"] = {
        "minimum": wall.isolation.minimum.value,
        "runtime": wall.isolation.runtime,
        "prefer": list(wall.isolation.prefer),
        "allowEmulated": wall.isolation.allow_emulated,
    }
    result["filesystem"] = {
        "root": wall.filesystem.root,
        "readOnly": list(wall.filesystem.read_only),
        "readWrite": list(wall.filesystem.read_write),
        "mounts": [
            {"source": mount.source, "target": mount.target, "readOnly": mount.read_only}
            for mount in wall.filesystem.mounts
        ],
    }
    result["process"] = {
        "user": wall.process.user,
        "seccomp": wall.process.seccomp,
        "maxProcesses": wall.process.max_processes,
        "maxOpenFiles": wall.process.max_open_files,
        "cpuTime": wall.process.cpu_time,
        "hostFunctions": list(wall.process.host_functions),
    }
    resources = wall.resources
    result["resources"] = {
        "cpus": resources.cpus,
        "memory": resources.memory,
        "disk": resources.disk,
        "bandwidth": resources.bandwidth,
        "gpus": resources.gpus or None,
    }
    limits = door.limits
    result["limits"] = {
        "timeout": limits.timeout,
        "idle": limits.idle,
        "onIdle": limits.on_idle,
        "output": limits.output,
        "maxTemplateAge": limits.max_template_age,
    }
    result["network"] = network_to_dict(door.network)
    result["audit"] = {"files": door.audit.files, "network": door.audit.network}
    for section in ("isolation", "process", "resources", "limits"):
        result[section] = {key: value for key, value in result[section].items() if value is not None}
    return result


def network_to_dict(network: Network) -> dict[str, Any]:
    """The ``network`` part of :func:`to_dict`: mode, allow and record, and whatever else is set."""
    from ringfence.model.policy_network import to_dict as write

    return write(network)


def network_from_dict(values: dict[str, Any]) -> Network:
    """The ``network`` part of a policy file, checked by itself.

    Raises:
        PolicyError: as :func:`load`, without a line.
    """
    whole = {"apiVersion": API_VERSION, "kind": "Policy", "network": values}
    return from_dict(whole).door.network
