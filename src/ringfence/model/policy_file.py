"""From marked values to a policy: which keys there are, and what each may hold.

The file's keys are camelCase, the values' fields snake_case; the tables at the end pair them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringfence.model.errors import InvalidRequest, PolicyError
from ringfence.model.levels import Level
from ringfence.model.mounts import parse_mount
from ringfence.model.policies import API_VERSION, PRESETS, preset, resize
from ringfence.model.policy import SIZES, Door, Mount, NetworkRule, Policy, Wall
from ringfence.model.policy_checks import problems
from ringfence.model.quantities import parse_duration, parse_rate, parse_size
from ringfence.model.yaml_marks import Node, error, meant, show

# Words of other tools for what is part of the baseline here: the answer is not "did you mean".
_FIXED = {"privileged", "capabilities", "capadd", "nonewprivileges", "nonewprivs", "hostnetwork", "hostpid",
          "hostipc", "swap", "memoryswap", "apparmor", "selinux", "maskedpaths", "allowprivilegeescalation",
          "securitycontext", "devices", "readonlyrootfs"}  # fmt: skip


class Reader:
    """Turns nodes to values; remembers the line of every field for the checks that come after."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[str, int | None] = {"": None}

    def error(self, field: str, what: str, hint: str = "") -> PolicyError:
        """Points at the field's line, or at that of the nearest field around it which the file has."""
        place = field
        while place not in self.lines:
            place = place.rpartition("[")[0] if place.endswith("]") else place.rpartition(".")[0]
        return error(self.file, self.lines[place], field, what, hint)

    def mapping(self, node: Node, field: str, known: tuple[str, ...]) -> dict[str, Node]:
        """The parts of a mapping by key.

        Raises:
            PolicyError: not a mapping, an unknown key, or a key without a value.
        """
        if not isinstance(node.value, dict):
            raise self.error(
                field, f"{self._kind(node)} where a mapping belongs", f"its keys are {', '.join(known)}"
            )
        prefix = field + "." if field else ""
        for key, line in node.keys.items():
            self.lines[prefix + key] = line
        for key, part in node.value.items():
            if key in known:
                if part.value is None:
                    raise self.error(prefix + key, "has no value", "write one, or remove the key")
                continue
            if key.lower().replace("_", "").replace("-", "") in _FIXED:
                hint = "part of the baseline, which no policy can change"
            else:
                hint = f"known keys are {', '.join(known)}{meant(key, known)}"
            self.lines.setdefault(prefix + key, node.line)
            raise self.error((prefix + key)[:120], "unknown key", hint)
        return node.value

    def items(self, node: Node, field: str, example: str) -> list[tuple[Node, str]]:
        """The parts of a list with their fields."""
        if not isinstance(node.value, list):
            raise self.error(field, f"{self._kind(node)} where a list belongs", f"write {example}")
        result = []
        for index, part in enumerate(node.value):
            self.lines[f"{field}[{index}]"] = part.line
            result.append((part, f"{field}[{index}]"))
        return result

    def text(self, node: Node, field: str) -> str:
        """A word or sentence; a number or boolean is not taken for one."""
        if not isinstance(node.value, str):
            raise self.error(
                field, f"{self._kind(node)} where text belongs", "put it in quotes if it is meant as text"
            )
        return node.value

    def texts(self, node: Node, field: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(self.text(part, place) for part, place in self.items(node, field, "[a, b]"))

    def choice(self, node: Node, field: str, options: tuple[str, ...]) -> Any:
        """One of a few words."""
        if node.value not in options or not isinstance(node.value, str):
            close = meant(node.value, options) if isinstance(node.value, str) else ""
            hint = f"write {options[0]}" if len(options) == 1 else "choose one" + close
            raise self.error(field, f"{self._kind(node)} is not one of {', '.join(options)}", hint)
        return node.value

    def boolean(self, node: Node, field: str) -> bool:
        """``true`` or ``false``."""
        if not isinstance(node.value, bool):
            raise self.error(field, f"{self._kind(node)} where true or false belongs", "write true or false")
        return node.value

    def integer(self, node: Node, field: str) -> int:
        """A whole number."""
        if isinstance(node.value, bool) or not isinstance(node.value, int):
            raise self.error(field, f"{self._kind(node)} where a whole number belongs", "write digits only")
        return node.value

    def number(self, node: Node, field: str) -> float:
        """A number, with or without a fraction."""
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise self.error(field, f"{self._kind(node)} where a number belongs", "write e.g. 2 or 0.5")
        return float(node.value)

    def size(self, node: Node, field: str) -> int:
        """Bytes, from ``2GiB`` or a number."""
        return int(self._quantity(node, field, parse_size, "size"))

    def duration(self, node: Node, field: str) -> float:
        """Seconds, from ``30m`` or a number."""
        return float(self._quantity(node, field, parse_duration, "duration"))

    def rate(self, node: Node, field: str) -> int:
        """Bits a second, from ``10Mbit`` or a number."""
        return int(self._quantity(node, field, parse_rate, "rate"))

    def _quantity(self, node: Node, field: str, read: Callable[[Any], float], what: str) -> float:
        if isinstance(node.value, dict | list | bool):
            raise self.error(
                field, f"{self._kind(node)} where a {what} belongs", "write a number with its unit"
            )
        try:
            return read(node.value)
        except InvalidRequest as problem:
            raise self.error(field, problem.message[:200], problem.hint) from None

    @staticmethod
    def _kind(node: Node) -> str:
        if isinstance(node.value, dict):
            return "a mapping"
        if isinstance(node.value, list):
            return "a list"
        return "nothing" if node.value is None else show(node.value)


_Field = tuple[str, Callable[[Reader, Node, str], Any]]


def _one_of(*options: str) -> Callable[[Reader, Node, str], Any]:
    return lambda reader, node, field: reader.choice(node, field, options)


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


def _ports(reader: Reader, node: Node, field: str) -> tuple[int, ...]:
    return tuple(reader.integer(*item) for item in reader.items(node, field, "[443]"))


def _some(reader: Reader, node: Node, field: str) -> tuple[str, ...]:
    """A list that narrows a rule. An empty one would narrow nothing, which nobody means."""
    found = reader.texts(node, field)
    if not found:
        raise reader.error(field, "is empty", "leave it out to allow all, or name some")
    return found


def _upper(reader: Reader, node: Node, field: str) -> tuple[str, ...]:
    return tuple(method.upper() for method in _some(reader, node, field))


def _inject(reader: Reader, node: Node, field: str) -> dict[str, str]:
    parts = reader.mapping(node, field, ("header", "value"))
    return {key: reader.text(part, f"{field}.{key}") for key, part in parts.items()}


def _rules(reader: Reader, node: Node, field: str) -> tuple[NetworkRule, ...]:
    rules = []
    for part, place in reader.items(node, field, "[{host: api.example.com, ports: [443]}]"):
        values = _values(reader, part, place, _RULE)
        if "host" not in values:
            raise reader.error(f"{place}.host", "missing", "a rule names one host, or *.domain")
        rules.append(NetworkRule(**values))
    return tuple(rules)


def _host(reader: Reader, node: Node, field: str) -> str:
    return reader.text(node, field).lower()


def _level(reader: Reader, node: Node, field: str) -> Level:
    return Level(reader.choice(node, field, tuple(level.value for level in Level)))


_RULE: dict[str, _Field] = {
    "host": ("host", _host),
    "ports": ("ports", _ports),
    "methods": ("methods", _upper),
    "paths": ("paths", _some),
    "inject": ("inject", _inject),
}
_ISOLATION: dict[str, _Field] = {
    "minimum": ("minimum", _level),
    "runtime": ("runtime", Reader.text),
    "prefer": ("prefer", Reader.texts),
    "allowEmulated": ("allow_emulated", Reader.boolean),
}
_FILESYSTEM: dict[str, _Field] = {
    "root": ("root", _one_of("overlay", "readonly")),
    "readOnly": ("read_only", Reader.texts),
    "readWrite": ("read_write", Reader.texts),
    "mounts": ("mounts", _mounts),
}
_PROCESS: dict[str, _Field] = {
    "user": ("user", Reader.integer),
    "seccomp": ("seccomp", Reader.text),
    "maxProcesses": ("max_processes", Reader.integer),
    "maxOpenFiles": ("max_open_files", Reader.integer),
    "cpuTime": ("cpu_time", Reader.duration),
    "hostFunctions": ("host_functions", Reader.texts),
}
_RESOURCES: dict[str, _Field] = {
    "size": ("size", _one_of(*SIZES)),
    "cpus": ("cpus", Reader.number),
    "memory": ("memory", Reader.size),
    "disk": ("disk", Reader.size),
    "bandwidth": ("bandwidth", Reader.rate),
    "gpus": ("gpus", Reader.integer),
}
_LIMITS: dict[str, _Field] = {
    "timeout": ("timeout", Reader.duration),
    "idle": ("idle", Reader.duration),
    "onIdle": ("on_idle", _one_of("pause", "stop")),
    "output": ("output", Reader.size),
    "maxTemplateAge": ("max_template_age", Reader.duration),
}
_NETWORK: dict[str, _Field] = {
    "mode": ("mode", _one_of("none", "egress", "open")),
    "allow": ("allow", _rules),
    "record": ("record", _one_of("none", "metadata", "headers", "bodies")),
}
_AUDIT: dict[str, _Field] = {"files": ("files", Reader.boolean), "network": ("network", Reader.boolean)}
_TOP = ("apiVersion", "kind", "metadata", "preset", "isolation", "filesystem", "process", "resources",
        "limits", "network", "audit")  # fmt: skip


def _values(reader: Reader, node: Node, field: str, fields: dict[str, _Field]) -> dict[str, Any]:
    parts = reader.mapping(node, field, tuple(fields))
    return {fields[key][0]: fields[key][1](reader, part, f"{field}.{key}") for key, part in parts.items()}


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

    def section(key: str, fields: dict[str, _Field]) -> dict[str, Any]:
        return _values(reader, top[key], key, fields) if key in top else {}

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
