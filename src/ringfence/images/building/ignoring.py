"""``.dockerignore``: what of the context is not there for a build."""

from __future__ import annotations

import posixpath
import re

from ringfence.model.errors import InvalidRequest

NAME = ".dockerignore"
LARGEST = 1 << 20
_MOST = 10_000


class Ignored:
    """The patterns of a ``.dockerignore``; the last one that fits decides."""

    def __init__(self, text: str = "") -> None:
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            pattern = line.strip()
            if not pattern or pattern.startswith("#"):
                continue
            keep = pattern.startswith("!")
            pattern = posixpath.normpath(pattern.lstrip("!").strip()).lstrip("/")
            if pattern in ("", "."):
                continue
            try:
                self._rules.append((re.compile(translate(pattern) + r"(?:/.*)?", re.DOTALL), keep))
            except (re.error, ValueError):
                raise InvalidRequest(
                    f"{NAME} line {number}: {line.strip()[:100]!r} is no pattern",
                    hint="as in *.log or build/",
                ) from None
            if len(self._rules) > _MOST:
                raise InvalidRequest(f"{NAME}: more than {_MOST} patterns")

    def __contains__(self, path: str) -> bool:
        """Whether a path (relative, with slashes) is left out."""
        for pattern, keep in reversed(self._rules):
            if pattern.fullmatch(path):
                return not keep
        return False

    @property
    def exceptions(self) -> bool:
        """Whether something in a folder that is left out may be there all the same."""
        return any(keep for _, keep in self._rules)


def translate(pattern: str) -> str:
    """A regular expression of a pattern: ``*`` and ``?`` stay in one part of a path, ``**`` does not.

    Raises:
        ValueError: a bracket is not closed.
    """
    out = ""
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        at += 1
        if letter == "*":
            if pattern[at : at + 1] == "*":
                at += 1
                if pattern[at : at + 1] == "/":
                    at += 1
                    out += "(?:.*/)?"
                else:
                    out += ".*"
            else:
                out += "[^/]*"
        elif letter == "?":
            out += "[^/]"
        elif letter == "[":
            end = pattern.find("]", at + 2 if pattern[at : at + 1] == "^" else at + 1)
            if end < 0:
                raise ValueError("a bracket is not closed")
            inner = pattern[at:end].replace("\\", "\\\\").replace("[", "\\[")
            out += f"(?!/)[{inner}]"
            at = end + 1
        elif letter == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(letter)
    return out
