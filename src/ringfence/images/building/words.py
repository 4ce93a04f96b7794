"""Words of a definition: quotes, escapes and variables, as Dockerfiles have them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_DEEPEST = 10  # defaults in defaults
_LARGEST = 1 << 20  # characters of an expanded line: variables can double one another


class BadWords(ValueError):
    """The text makes no sense; says why."""


def expand(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """The text with quotes taken off and variables put in, as one word.

    Raises:
        BadWords: a quote or brace is not closed, or an unknown form of a variable.
    """
    return " ".join(split(text, variables, escape, one=True))


def split(
    text: str, variables: Mapping[str, str] | None, escape: str = "\\", *, one: bool = False
) -> list[str]:
    """Words, separated by blanks outside of quotes. ``variables``: None leaves them as they are.

    What a variable holds is never split. ``one``: blanks divide nothing.

    Raises:
        BadWords: see :func:`expand`.
    """
    return _Splitter(text, variables, escape, one, 0).words()


class _Splitter:
    def __init__(
        self, text: str, variables: Mapping[str, str] | None, escape: str, one: bool, depth: int
    ) -> None:
        if depth > _DEEPEST:
            raise BadWords("variables are nested too deep")
        self._text = text
        self._variables = variables
        self._escape = escape
        self._one = one
        self._depth = depth
        self._at = 0
        self._size = 0

    def words(self) -> list[str]:
        found: list[str] = []
        word: list[str] | None = None
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter.isspace() and not self._one:
                if word is not None:
                    found.append("".join(word))
                word = None
                self._at += 1
                continue
            word = [] if word is None else word
            if letter == "'":
                end = self._text.find("'", self._at + 1)
                if end < 0:
                    raise BadWords("a ' is not closed")
                word.append(self._text[self._at + 1 : end])
                self._at = end + 1
            elif letter == '"':
                self._at += 1
                word.append(self._quoted())
            else:
                word.append(self._letter(""))
        if word is not None:
            found.append("".join(word))
        return found

    def _quoted(self) -> str:
        parts: list[str] = []
        while self._at < len(self._text):
            if self._text[self._at] == '"':
                self._at += 1
                return "".join(parts)
            parts.append(self._letter('"'))
        raise BadWords('a " is not closed')

    def _letter(self, quote: str) -> str:
        letter = self._text[self._at]
        self._at += 1
        if letter == self._escape and self._at < len(self._text):
            following = self._text[self._at]
            if quote and following not in (quote, "$", self._escape):
                return letter  # inside of quotes only these are escaped
            self._at += 1
            return following
        if letter == "$" and self._variables is not None:
            value = self._variable()
            self._size += len(value)
            if self._size > _LARGEST:
                raise BadWords("with its variables it is larger than 1 MiB")
            return value
        return letter

    def _variable(self) -> str:
        assert self._variables is not None
        if self._text[self._at : self._at + 1] != "{":
            found = _NAME.match(self._text, self._at)
            if found is None:
                return "$"
            self._at = found.end()
            return self._variables.get(found[0], "")
        end = self._closing()
        inner, self._at = self._text[self._at + 1 : end], end + 1
        found = _NAME.match(inner)
        if found is None:
            raise BadWords(f"${{{inner}}} names no variable")
        name, rest = found[0], inner[found.end() :]
        value = self._variables.get(name)
        if not rest:
            return value or ""
        given = bool(value) if rest.startswith(":") else value is not None
        operator, default = rest.lstrip(":")[:1], rest.lstrip(":")[1:]
        if rest.startswith("::") or operator not in ("-", "+", "?"):
            raise BadWords(
                f"${{{inner}}}: known forms are ${{A}}, ${{A:-else}}, ${{A:+then}} and ${{A:?why}}"
            )
        if operator == "?" and not given:
            raise BadWords(f"{name} is not set" + (f": {default}" if default else ""))
        if given == (operator != "+"):
            return value or ""
        if operator == "+" and not given:
            return ""
        return "".join(_Splitter(default, self._variables, self._escape, True, self._depth + 1).words())

    def _closing(self) -> int:
        depth = 0
        at = self._at
        while at < len(self._text):
            letter = self._text[at]
            if letter == self._escape:
                at += 1
            elif letter == "{":
                depth += 1
            elif letter == "}":
                depth -= 1
                if not depth:
                    return at
            at += 1
        raise BadWords("a ${ is not closed")
