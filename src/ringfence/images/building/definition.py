"""The text of a definition: instructions, one after the other, each with its line.

A subset of what Dockerfiles say, with two more instructions::

    FROM python:3.12                  a template of the store; or a source: FROM oci:python:3.12
    ARG VERSION=1                     given with --build-arg
    RUN pip install /src/app          in a sandbox; the result is a layer
    COPY --chown=1000 app /srv/app    from the context folder only
    ENV KEY=value
    USER app
    WORKDIR /srv/app
    LABEL key=value
    ENTRYPOINT ["python3"]
    CMD ["-m", "app"]
    START ["/srv/app/serve"]          started with every sandbox of the template
    READY test -e /tmp/ready          succeeds once that is up
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

LARGEST = 1 << 20  # bytes of a definition
MOST = 500  # instructions
KNOWN = (
    "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "LABEL", "ARG", "SHELL", "START",
    "READY",
)  # fmt: skip
_IGNORED = {
    "EXPOSE": "a sandbox has no network of its own, so there is nothing to expose",
    "STOPSIGNAL": "a sandbox is ended as its policy says",
    "MAINTAINER": "write it as a LABEL",
}
_REFUSED = {
    "ADD": "write COPY: nothing is fetched from a network, and no archive is unpacked, on the way",
    "VOLUME": "a template has no volumes: leave the line out, the folder is part of the template",
    "HEALTHCHECK": "write READY COMMAND: it succeeds once the sandbox is up",
    "ONBUILD": "write the instruction itself in the definition that needs it",
}
_DIRECTIVE = re.compile(r"#\s*([a-z]+)\s*=\s*(\S+)\s*", re.ASCII | re.IGNORECASE)
_HEREDOC = re.compile(r"(?<![^\s])\d*<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2", re.ASCII)


@dataclass(frozen=True, slots=True)
class Heredoc:
    """``<<NAME`` of an instruction. ``quoted``: no variables in it."""

    name: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``line``: its first, from 1. ``rest``: what follows its name and flags."""

    line: int
    name: str
    flags: tuple[tuple[str, str], ...]
    rest: str
    heredocs: tuple[Heredoc, ...] = ()

    @property
    def text(self) -> str:
        """As people wrote it, on one line."""
        flags = "".join(f" --{name}" + (f"={value}" if value else "") for name, value in self.flags)
        return f"{self.name}{flags} {self.rest}".strip()

    def words(self) -> tuple[str, ...] | None:
        """The words of the JSON form (``["a", "b"]``); None if it is written as text."""
        if not self.rest.startswith("["):
            return None
        try:
            value = json.loads(self.rest)
        except ValueError:
            return None
        if not isinstance(value, list) or not all(
            isinstance(word, str) and "\0" not in word for word in value
        ):
            return None
        return tuple(value)


@dataclass(frozen=True, slots=True)
class Definition:
    """A whole definition. ``file`` is for messages. The first of ``instructions`` after ARGs is FROM."""

    file: str
    source: str
    instructions: tuple[Instruction, ...]
    escape: str = "\\"
    notes: tuple[str, ...] = ()


def wrong(file: str, line: int, name: str, message: str, hint: str = "") -> InvalidRequest:
    """The error of one instruction: names file, line and instruction."""
    where = f"{file} line {line}" + (f", {name}" if name else "")
    return InvalidRequest(f"{where}: {message}", hint=hint, file=file, line=line, instruction=name)


def parse(data: bytes, file: str = "Dockerfile") -> Definition:
    """Read a definition.

    Raises:
        InvalidRequest: no text, an unknown instruction, or one in a wrong place; names line and instruction.
    """
    if len(data) > LARGEST:
        raise InvalidRequest(f"{file}: larger than 1 MiB: this is no definition of a template")
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise wrong(file, line, "", "this is not UTF-8", "a definition is a text file") from None
    if "\0" in text:
        raise wrong(
            file, text[: text.index("\0")].count("\n") + 1, "", "a NUL", "a definition is a text file"
        )
    lines = text.splitlines()
    escape = _escape(lines, file)
    notes: list[str] = []
    found: list[Instruction] = []
    for instruction in _instructions(lines, file, escape):
        name, line = instruction.name, instruction.line
        if name in _IGNORED:
            notes.append(f"{file} line {line}: {name} is ignored: {_IGNORED[name]}")
            continue
        if name in _REFUSED:
            raise wrong(file, line, name, "this is not built here", _REFUSED[name])
        if name not in KNOWN:
            raise wrong(file, line, name, "no such instruction", _similar(name))
        begun = any(each.name == "FROM" for each in found)
        if name == "FROM" and begun:
            raise wrong(
                file, line, name, "a definition has one FROM",
                "build each stage as a template of its own, and begin the next with FROM NAME",
            )  # fmt: skip
        if not begun and name not in ("FROM", "ARG"):
            raise wrong(file, line, name, "comes before FROM", "begin with FROM TEMPLATE")
        if not instruction.rest and not instruction.heredocs:
            raise wrong(file, line, name, "nothing follows it", f"write {_EXAMPLES[name]}")
        found.append(instruction)
        if len(found) > MOST:
            raise wrong(file, line, name, f"more than {MOST} instructions")
    if not any(each.name == "FROM" for each in found):
        raise InvalidRequest(f"{file}: there is no FROM", hint="begin with FROM TEMPLATE", file=file)
    return Definition(file, text, tuple(found), escape, tuple(notes))


_EXAMPLES = {
    "FROM": "FROM python:3.12",
    "RUN": "RUN COMMAND",
    "COPY": "COPY SOURCE… DESTINATION",
    "ENV": "ENV KEY=value",
    "USER": "USER app",
    "WORKDIR": "WORKDIR /srv/app",
    "ENTRYPOINT": 'ENTRYPOINT ["python3"]',
    "CMD": 'CMD ["-m", "app"]',
    "LABEL": "LABEL key=value",
    "ARG": "ARG NAME=default",
    "SHELL": 'SHELL ["/bin/bash", "-c"]',
    "START": 'START ["/srv/app/serve"]',
    "READY": "READY COMMAND",
}


def _escape(lines: list[str], file: str) -> str:
    for number, line in enumerate(lines, start=1):
        found = _DIRECTIVE.fullmatch(line.strip())
        if found is None:
            break
        if found[1].lower() == "escape":
            if found[2] not in ("\\", "`"):
                raise wrong(file, number, "", f"the escape character can't be {found[2]!r}", "write \\ or `")
            return found[2]
    return "\\"


def _instructions(lines: list[str], file: str, escape: str) -> Iterator[Instruction]:
    at = 0
    while at < len(lines):
        stripped = lines[at].strip()
        if not stripped or stripped.startswith("#"):
            at += 1
            continue
        first = at + 1
        parts: list[str] = []
        while at < len(lines):
            line = lines[at]
            at += 1
            if parts and (not line.strip() or line.lstrip().startswith("#")):
                continue  # comments and empty lines between the lines of one instruction
            trimmed = line.rstrip()
            more = trimmed.endswith(escape) and not trimmed.endswith(escape * 2)
            parts.append(trimmed[:-1] if more else trimmed)
            if not more:
                break
        if not "".join(parts).strip():
            continue
        name, *following = "".join(parts).split(None, 1)
        name = name.upper()
        flags, rest = _flags("".join(following).strip())
        heredocs: list[Heredoc] = []
        if name in ("RUN", "COPY"):
            for mark in _HEREDOC.finditer(rest):
                body, at = _body(lines, at, mark[3], bool(mark[1]), file, first, name)
                heredocs.append(Heredoc(mark[3], body, bool(mark[2])))
        yield Instruction(first, name, tuple(flags), rest, tuple(heredocs))


def _body(
    lines: list[str], at: int, end: str, tabs: bool, file: str, first: int, name: str
) -> tuple[str, int]:
    body: list[str] = []
    while at < len(lines):
        line = lines[at].lstrip("\t") if tabs else lines[at]
        at += 1
        if line == end:
            return "".join(each + "\n" for each in body), at
        body.append(line)
    raise wrong(file, first, name, f"<<{end} has no end", f"write {end} alone on a line")


def _flags(rest: str) -> tuple[list[tuple[str, str]], str]:
    flags = []
    while found := re.match(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)", rest, re.ASCII):
        flags.append((found[1], found[2] or ""))
        rest = rest[found.end() :]
    return flags, rest


def _similar(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, KNOWN, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known ones: {', '.join(KNOWN)}"
