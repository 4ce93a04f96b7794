"""How the parts of a policy file are read: every mistake names file, line and field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfence.model.errors import InvalidRequest, PolicyError
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


# What a key of the file is called in the value, and who reads it.
Field = tuple[str, Callable[[Reader, Node, str], Any]]


def one_of(*options: str) -> Callable[[Reader, Node, str], Any]:
    """A reader of one of a few words."""
    return lambda reader, node, field: reader.choice(node, field, options)


def values_of(reader: Reader, node: Node, field: str, fields: dict[str, Field]) -> dict[str, Any]:
    """The fields that a mapping sets."""
    parts = reader.mapping(node, field, tuple(fields))
    return {fields[key][0]: fields[key][1](reader, part, f"{field}.{key}") for key, part in parts.items()}
