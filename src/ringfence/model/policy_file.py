"""From marked values to a policy: which keys there are, and what each may hold.

The file's keys are camelCase, the values' fields snake_case; the tables at the end pair them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ringfence.model.errors import InvalidRequest
from ringfence.model.levels import Level
from ringfence.model.mounts import parse_mount
from ringfence.model.policies import API_VERSION, PRESETS, preset, resize
from ringfence.model.policy import SIZES, Door, Mount, Policy, Wall
from ringfence.model.policy_checks import problems
from ringfence.model.policy_network import _NETWORK, _RULE
from ringfence.model.policy_reader import Field, Reader, one_of, values_of
from ringfence.model.yaml_marks import Node, show

__all__ = ["_NETWORK", "_RULE", "Reader", "read"]


def _mount(reader: Reader, node: Node, field: str) -> Mount:
    if isinstance(node.value, str):
        if not node.value.startswith("/"):
            raise reader.error(
                field,
                f"{show(node.value)} is not a mount with an absolute source",
                "write /SRC:/DST or /SRC:/DST:rw",
            )
        try:
            return parse_mount(node.value)
        except InvalidRequest as problem:
            raise reader.error(field, problem.message, problem.hint) from None
    parts = reader.mapping(node, field, ("source", "target", "readOnly"))
    for key in ("source", "target"):
        if key not in parts:
            raise reader.error(
                f"{field}.{key}", "missing", "a mount needs a source on the host and a target inside"
            )
    return Mount(
        reader.text(parts["source"], f"{field}.source"),
        reader.text(parts["target"], f"{field}.target"),
        reader.boolean(parts["readOnly"], f"{field}.readOnly") if "readOnly" in parts else True,
    )


def _mounts(reader: Reader, node: Node, field: str) -> tuple[Mount, ...]:
    return tuple(
        _mount(reader, *item) for item in reader.items(node, field, "[{source: /data, target: /data}]")
    )


def _level(reader: Reader, node: Node, field: str) -> Level:
    return Level(reader.choice(node, field, tuple(level.value for level in Level)))


_ISOLATION: dict[str, Field] = {
    "minimum": ("minimum", _level),
    "runtime": ("runtime", Reader.text),
    "prefer": ("prefer", Reader.texts),
    "allowEmulated": ("allow_emulated", Reader.boolean),
}
_FILESYSTEM: dict[str, Field] = {
    "root": ("root", one_of("overlay", "readonly")),
    "readOnly": ("read_only", Reader.texts),
    "readWrite": ("read_write", Reader.texts),
    "mounts": ("mounts", _mounts),
}
_PROCESS: dict[str, Field] = {
    "user": ("user", Reader.integer),
    "seccomp": ("seccomp", Reader.text),
    "maxProcesses": ("max_processes", Reader.integer),
    "maxOpenFiles": ("max_open_files", Reader.integer),
    "cpuTime": ("cpu_time", Reader.duration),
    "hostFunctions": ("host_functions", Reader.texts),
}
_RESOURCES: dict[str, Field] = {
    "size": ("size", one_of(*SIZES)),
    "cpus": ("cpus", Reader.number),
    "memory": ("memory", Reader.size),
    "disk": ("disk", Reader.size),
    "bandwidth": ("bandwidth", Reader.rate),
    "gpus": ("gpus", Reader.integer),
}
_LIMITS: dict[str, Field] = {
    "timeout": ("timeout", Reader.duration),
    "idle": ("idle", Reader.duration),
    "onIdle": ("on_idle", one_of("pause", "stop")),
    "output": ("output", Reader.size),
    "maxTemplateAge": ("max_template_age", Reader.duration),
}
_AUDIT: dict[str, Field] = {"files": ("files", Reader.boolean), "network": ("network", Reader.boolean)}
_TOP = ("apiVersion", "kind", "metadata", "preset", "isolation", "filesystem", "process", "resources",
        "limits", "network", "audit")  # fmt: skip


def read(root: Node, file: str) -> Policy:
    """The policy that the nodes say, checked."""
    reader = Reader(file)
    reader.lines[""] = root.line
    top = reader.mapping(root, "", _TOP)
    for key, expected in (("apiVersion", API_VERSION), ("kind", "Policy")):
        if key not in top:
            raise reader.error(key, "missing", f"start the file with {key}: {expected}")
        reader.choice(top[key], key, (expected,))
    base = Policy("policy")
    if "preset" in top:
        base = preset(reader.choice(top["preset"], "preset", PRESETS))
    name = base.name
    if "metadata" in top:
        metadata = reader.mapping(top["metadata"], "metadata", ("name",))
        name = reader.text(metadata["name"], "metadata.name") if "name" in metadata else name

    def section(key: str, fields: dict[str, Field]) -> dict[str, Any]:
        return values_of(reader, top[key], key, fields) if key in top else {}

    amounts = section("resources", _RESOURCES)
    bandwidth = amounts.pop("bandwidth", base.wall.resources.bandwidth)
    gpus = amounts.pop("gpus", base.wall.resources.gpus)
    wall = Wall(
        replace(base.wall.isolation, **section("isolation", _ISOLATION)),
        replace(base.wall.filesystem, **section("filesystem", _FILESYSTEM)),
        replace(base.wall.process, **section("process", _PROCESS)),
        replace(resize(base.wall.resources, **amounts), bandwidth=bandwidth, gpus=gpus),
    )
    door = Door(
        replace(base.door.limits, **section("limits", _LIMITS)),
        replace(base.door.network, **section("network", _NETWORK)),
        replace(base.door.audit, **section("audit", _AUDIT)),
    )
    policy = Policy(name, wall, door, base.trust)
    for problem in problems(policy):
        raise reader.error(*problem)
    return policy
