"""What must never be written down: known secrets, placeholders, and whatever a policy's patterns find."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

from ringfence.egress.http1 import Headers
from ringfence.egress.secrets import PLACEHOLDER

MARK = "[redacted]"
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key",
                      "x-auth-token", "x-amz-security-token", "x-goog-api-key", "x-csrf-token"})  # fmt: skip
_QUERY = re.compile(
    r"([?&](?:[^=&]*(?:key|token|secret|password|signature|credential|auth)[^=&]*)=)[^&#\s]*", re.I
)
_LEAST = 4  # letters of a secret that is looked for: shorter ones would turn records into marks
_MOST_KNOWN = 1000


class Redactor:
    """Knows the secrets that were used in this process."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._pattern: re.Pattern[str] | None = None
        self._bytes: re.Pattern[bytes] | None = None

    def learn(self, values: Iterable[str]) -> None:
        """These are secrets, in every form in which they travel."""
        new = [value for value in values if len(value) >= _LEAST and value not in self._known]
        if not new:
            return
        for value in new:
            self._known[value] = None
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        forms: dict[str, None] = {}
        for value in self._known:
            raw = value.encode()
            for form in (value, quote(value, safe=""), quote_plus(value), base64.b64encode(raw).decode()):
                forms[form] = None
        longest_first = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._bytes = re.compile(b"|".join(re.escape(form.encode()) for form in longest_first))

    def text(self, text: str, patterns: Iterable[re.Pattern[str]] = ()) -> str:
        """The text without them."""
        if self._pattern is not None:
            text = self._pattern.sub(MARK, text)
        if "rfsecret0" in text.lower():
            text = PLACEHOLDER.sub(MARK, text)
        for pattern in patterns:
            text = pattern.sub(MARK, text)
        return text

    def finds(self, text: str, patterns: Iterable[re.Pattern[str]] = ()) -> bool:
        """Whether there is anything to take out of a text, or what it was made of."""
        return (
            (self._pattern is not None and self._pattern.search(text) is not None)
            or "rfsecret0" in text.lower()
            or any(pattern.search(text) for pattern in patterns)
        )

    def target(self, target: str, patterns: Iterable[re.Pattern[str]] = ()) -> str:
        """A URL's path and query without them, and without what looks like a credential in the query."""
        return self.text(_QUERY.sub(r"\1" + MARK, target), patterns)

    def headers(self, headers: Headers, patterns: Iterable[re.Pattern[str]] = ()) -> list[list[str]]:
        """Headers without them; those that carry credentials have no value at all."""
        return [
            [name, MARK if name.lower() in _HEADERS else self.text(value, patterns)]
            for name, value in headers
        ]

    def values(self, value: Any, patterns: Iterable[re.Pattern[str]] = ()) -> Any:
        """A JSON-able value without them."""
        if isinstance(value, str):
            return self.text(value, patterns)
        if isinstance(value, int | float) or value is None:
            return value
        if isinstance(value, dict):
            return {key: self.values(part, patterns) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(part, patterns) for part in value]
        return value


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
