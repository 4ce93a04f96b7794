"""What must never be written down: known secrets, placeholders, and whatever a policy's patterns find."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

from ringfence.egress.bounded import MARK, Patterns
from ringfence.egress.http1 import Headers
from ringfence.egress.secrets import PLACEHOLDER

_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key",
                      "x-auth-token", "x-amz-security-token", "x-goog-api-key", "x-csrf-token"})  # fmt: skip
# What we say ourselves: a secret that reads like it must not hide who did something, and what became of it.
_OURS = frozenset(
    {"event", "id", "sandbox", "project", "decision", "code", "via", "protocol", "scope", "limit"}
)
_NAMES = re.compile("key|token|secret|password|signature|credential|auth", re.I)
_END = re.compile(r"[#\s]")
_LEAST = 4  # letters of a secret that is looked for: shorter ones would turn records into marks
_MOST_KNOWN, _MOST_BYTES = 1000, 1024 * 1024  # of one project
_MOST_PROJECTS = 1000
_HOLE = "\ue000"  # where something was, until all was looked for: a mark is not looked through


class Redactor:
    """Knows the secrets of one project that were used in this process."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, ...]] = {}
        self._bytes = 0
        self._forms: tuple[str, ...] = ()

    def learn(self, values: Iterable[str]) -> None:
        """These are secrets, in every form in which they travel."""
        new = [value for value in values if len(value) >= _LEAST and value not in self._known]
        if not new:
            return
        for value in new:
            encoded = base64.b64encode(value.encode()).decode()
            self._known[value] = (value, quote(value, safe=""), quote_plus(value), encoded)
            self._bytes += len(value)
        while len(self._known) > _MOST_KNOWN or (self._bytes > _MOST_BYTES and len(self._known) > 1):
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._bytes -= len(oldest)
        forms = {form for known in self._known.values() for form in known}
        self._forms = tuple(sorted(forms, key=lambda form: (-len(form), form)))

    def text(self, text: str, patterns: Patterns | None = None) -> str:
        """The text without them."""
        found = [form for form in self._forms if form in text]
        if found:
            for form in found:
                text = text.replace(form, _HOLE)
            text = text.replace(_HOLE, MARK)
        if "rfsecret0" in text.lower():
            text = PLACEHOLDER.sub(MARK, text)
        return patterns.mark(text) if patterns else text

    def finds(self, text: str) -> bool:
        """Whether one is in a text, or in what it was made of."""
        return any(form in text for form in self._forms) or "rfsecret0" in text.lower()

    def begun(self, text: str) -> int:
        """How many letters at the end of a text that was cut may be the beginning of one of them."""
        longest = 0
        for form in self._forms:
            at = max(0, len(text) - len(form) + 1)
            while (at := text.find(form[:_LEAST], at)) >= 0:
                if form.startswith(text[at:]):
                    longest = max(longest, len(text) - at)
                    break
                at += 1
        return longest

    def target(self, target: str, patterns: Patterns | None = None) -> str:
        """A URL's path and query without them, and without what looks like a credential in the query."""
        path, mark, query = target.partition("?")
        return self.text(path + mark + "&".join(map(_quiet, query.split("&"))), patterns)

    def headers(self, headers: Headers, patterns: Patterns | None = None) -> list[list[str]]:
        """Headers without them; those that carry credentials have no value at all."""
        return [
            [name, MARK if name.lower() in _HEADERS else self.text(value, patterns)]
            for name, value in headers
        ]

    def values(self, value: Any, patterns: Patterns | None = None) -> Any:
        """A JSON-able value without them. What we say ourselves (who, what became of it) stays."""
        if isinstance(value, str):
            return self.text(value, patterns)
        if isinstance(value, int | float) or value is None:
            return value
        if isinstance(value, dict):
            return {
                key: part if key in _OURS and isinstance(part, str) else self.values(part, patterns)
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.values(part, patterns) for part in value]
        return value


def _quiet(pair: str) -> str:
    """``name=value`` without the value, if the name says that it is a credential."""
    if "=" not in pair:
        return pair
    parts = pair.split("=")
    for number, part in enumerate(parts[:-1]):
        # A second question mark is a letter to some servers, and to others another beginning.
        name = part if number == 0 else part.rpartition("?")[2] if "?" in part else ""
        if _NAMES.search(name):
            end = _END.search(pair, len("=".join(parts[: number + 1])))
            return "=".join(parts[: number + 1]) + "=" + MARK + ("" if end is None else pair[end.start() :])
    return pair


class Redactors:
    """One for each project: nobody's secrets are looked for in what others did."""

    def __init__(self) -> None:
        self._by_project: dict[str, Redactor] = {}

    def of(self, project: str) -> Redactor:
        """The project's."""
        found = self._by_project.pop(project, None) or Redactor()
        self._by_project[project] = found  # now the newest
        if len(self._by_project) > _MOST_PROJECTS:
            del self._by_project[next(iter(self._by_project))]
        return found


class Starring:
    """Takes secrets out of a body that streams by, with as many stars in their place: its length stays.

    So a server that echoes what it is sent does not tell a sandbox the credential that it was sent.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms: dict[bytes, None] = {}
        for value in values:
            if len(value) >= _LEAST:
                raw = value.encode()
                for form in (raw, quote(value, safe="").encode(), base64.b64encode(raw).rstrip(b"=")):
                    forms[form] = None
        ordered = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, ordered))) if ordered else None
        self._forms = ordered
        self._keep = max(map(len, ordered), default=1) - 1
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may go on now."""
        if self._pattern is None:
            return data
        data = self._pattern.sub(lambda match: b"*" * len(match[0]), self._held + data)
        # Only what may be the beginning of a secret waits: a stream of events goes on as it comes.
        for size in range(min(self._keep, len(data)), 0, -1):
            if any(form.startswith(data[-size:]) for form in self._forms):
                self._held = data[-size:]
                return data[:-size]
        self._held = b""
        return data

    def end(self) -> bytes:
        """What is left."""
        data, self._held = self._held, b""
        return data

    def text(self, text: str) -> str:
        """A header's value."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: b"*" * len(match[0]), text.encode("latin-1")).decode("latin-1")
