"""Read a small YAML file into values that know their line, refusing what a policy has no use for.

YAML can do far more than hold settings: aliases that grow a kilobyte to a gigabyte, tags that name
types, keys given twice, words that turn into booleans. A policy decides what hostile code may do, so
here one text has one meaning: no anchors, aliases, tags, merges or second documents; every key once;
``true`` and ``false`` are the only booleans; numbers are decimal. PyYAML (imported on first use)
supplies the events only, and nothing is built before it is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ringfence.model.errors import PolicyError

MAX_BYTES = 1024**2  # a real policy has a few kilobytes
MAX_NODES = 20_000  # two thousand network rules with all their fields
MAX_DEPTH = 12  # the deepest legal value lies at five

# 18 digits fit 64 bits. A leading zero means octal to some readers and nothing to others: not a number.
_INTEGER = r"[-+]?(0|[1-9][0-9]{0,17})"
_FLOAT = r"[-+]?(0|[1-9][0-9]{0,17})\.[0-9]{1,20}"
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}

Scalar = str | int | float | bool | None


class Node:
    """A value and its 1-based line. ``keys`` has the line of each key if the value is a mapping."""

    __slots__ = ("keys", "line", "value")

    def __init__(self, value: Scalar | list[Node] | dict[str, Node], line: int | None) -> None:
        self.value = value
        self.line = line
        self.keys: dict[str, int | None] = {}


def error(file: str, line: int | None, field: str, what: str, hint: str = "") -> PolicyError:
    """A :class:`PolicyError` whose message starts like a compiler's: file, line, field."""
    place = ":".join(str(part) for part in (file, line) if part is not None)
    return PolicyError(
        f"{place}: {field}: {what}" if field else f"{place}: {what}",
        hint=hint,
        file=file,
        line=line,
        field=field,
    )


def show(value: object) -> str:
    """A value for a message: quoted, and cut where it would flood a terminal."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…" + text[:1]


def wrap(value: Any, depth: int = 0) -> Node:
    """Plain lists, dictionaries and scalars as nodes without lines.

    Raises:
        PolicyError: nested too deep, a key that is no text, or a value of another type.
    """
    if depth > MAX_DEPTH:
        raise error("<policy>", None, "", "nested too deep")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise error("<policy>", None, "", f"the key {show(key)} is not text")
        return Node({key: wrap(part, depth + 1) for key, part in value.items()}, None)
    if isinstance(value, list | tuple):
        return Node([wrap(part, depth + 1) for part in value], None)
    if isinstance(value, str):
        return Node(str(value), None)
    if value is None or isinstance(value, bool | int | float):
        return Node(value, None)
    raise error("<policy>", None, "", f"{show(value)} can't be part of a policy")


def parse(text: str, file: str) -> Node:
    """The one document in ``text``.

    Raises:
        PolicyError: not YAML, or YAML of a kind that policies don't use.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) > MAX_BYTES:
        raise error(
            file, None, "", f"larger than {MAX_BYTES // 1024} KiB", "a policy has a few kilobytes at most"
        )
    try:
        return _build(yaml.parse(text, Loader=loader), file)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        what = problem.problem or problem.context or "not YAML"
        raise error(
            file,
            mark.line + 1 if mark else None,
            "",
            f"not valid YAML: {what}",
            "check indentation, quotes and brackets at this line",
        ) from None
    except yaml.reader.ReaderError as problem:
        line = text.count("\n", 0, problem.position) + 1
        raise error(
            file,
            line,
            "",
            f"not valid YAML: {problem.reason}",
            "remove the control character; write policies in UTF-8",
        ) from None


def read_text(path: str) -> str:
    """The file's text; never more than a policy may have, whatever the path leads to.

    Raises:
        PolicyError: it can't be read, is too large or not UTF-8.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or "is not a path"
        raise error(
            path, None, "", f"can't be read: {reason}", "give the path of a file that you may read"
        ) from None
    if len(data) > MAX_BYTES:
        raise error(
            path, None, "", f"larger than {MAX_BYTES // 1024} KiB", "a policy has a few kilobytes at most"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise error(path, line, "", "not UTF-8 text", "save the file as UTF-8") from None


def meant(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` if one of the known words is close, else nothing."""
    import difflib

    close = difflib.get_close_matches(word[:64], list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _Open:
    """A list or mapping whose end has not come yet."""

    __slots__ = ("key", "key_line", "node", "path")

    def __init__(self, node: Node, path: str) -> None:
        self.node = node
        self.path = path
        self.key: str | None = None
        self.key_line: int = 0

    def child_path(self) -> str:
        if isinstance(self.node.value, list):
            return f"{self.path}[{len(self.node.value)}]"
        return f"{self.path}.{self.key}" if self.path else str(self.key)


def _build(events: Iterable[Any], file: str) -> Node:
    """Nodes from parser events, with a stack of our own: depth costs memory here, never the C stack."""
    root: Node | None = None
    stack: list[_Open] = []
    count = documents = 0
    for event in events:
        kind = type(event).__name__
        line = event.start_mark.line + 1
        if kind == "DocumentStartEvent":
            documents += 1
            if documents > 1:
                raise error(file, line, "", "a second document starts here", "keep one policy in one file")
            continue
        if kind in ("StreamStartEvent", "StreamEndEvent", "DocumentEndEvent"):
            continue
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            stack.pop()
            continue
        count += 1
        path = stack[-1].child_path() if stack else ""
        if count > MAX_NODES or len(stack) >= MAX_DEPTH:
            what = "too many values" if count > MAX_NODES else "nested too deep"
            raise error(file, line, "", what, f"at most {MAX_NODES} values, {MAX_DEPTH} deep")
        _refuse_features(event, kind, file, line, path)
        top = stack[-1] if stack else None
        if top is not None and isinstance(top.node.value, dict) and top.key is None:
            _begin_key(top, event, kind, file, line)
            continue
        if kind == "ScalarEvent":
            node = Node(_resolve(event.value) if event.implicit[0] else event.value, line)
        else:
            node = Node({} if kind == "MappingStartEvent" else [], line)
        if top is None:
            root = node
        elif isinstance(top.node.value, list):
            top.node.value.append(node)
        elif isinstance(top.node.value, dict) and top.key is not None:
            top.node.value[top.key] = node
            top.node.keys[top.key] = top.key_line
            top.key = None
        if kind != "ScalarEvent":
            stack.append(_Open(node, path))
    if root is None:
        raise error(file, 1, "", "the file is empty", "start with apiVersion: ringfence/v1 and kind: Policy")
    return root


def _refuse_features(event: Any, kind: str, file: str, line: int, path: str) -> None:
    if kind == "AliasEvent" or event.anchor is not None:
        mark = "*" if kind == "AliasEvent" else "&"
        raise error(
            file,
            line,
            path,
            f"anchors and aliases ({mark}{show(event.anchor)[1:-1]}) are not allowed",
            "write the value out where it is used",
        )
    if event.tag is not None:
        raise error(file, line, path, f"the tag {show(event.tag)} is not allowed", "write the plain value")


def _begin_key(top: _Open, event: Any, kind: str, file: str, line: int) -> None:
    """Take a scalar as the key of the mapping on top of the stack."""
    if kind != "ScalarEvent":
        raise error(file, line, top.path, "a key must be a plain word", "write name: value")
    key = event.value
    if key == "<<" and event.implicit[0]:
        raise error(file, line, top.path, "merging with << is not allowed", "write the values out")
    if key in top.node.keys:
        raise error(
            file,
            line,
            f"{top.path}.{key}" if top.path else key,
            f"given twice, first in line {top.node.keys[key]}",
            "keep one of the two",
        )
    top.key, top.key_line = key, line


def _resolve(text: str) -> Scalar:
    """What an unquoted word means."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if re.fullmatch(_INTEGER, text):
        return int(text)
    if re.fullmatch(_FLOAT, text):
        return float(text)
    return text
