"""What a call in a context yields: typed, bounded, and made from lines that hostile code may have written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Final

from ringfence.model.values import dataclass

_TEXTS: Final = (
    "text", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "javascript",
)  # fmt: skip
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]*={0,2}\Z")
_BINARY: Final = frozenset({"png", "jpeg", "pdf"})


@dataclass(frozen=True, slots=True)
class Text:
    """Printed text. ``stream``: ``stdout`` or ``stderr``."""

    stream: str
    text: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form: ``{"type": "stdout", "text": …}``."""
        return {"type": self.stream, "text": self.text}


@dataclass(frozen=True, slots=True)
class Result:
    """Something displayed, in all the forms it has; ``main``: the value of the call's last expression.

    ``png``, ``jpeg`` and ``pdf`` are base64. ``data``: columns of a data frame, at most 1,000 of its
    ``rows`` rows. ``chart``: what a Matplotlib figure shows, as data (docs/contexts.md). ``extra``: other
    media types. All of it was written by the sandbox: HTML, SVG and JavaScript are as hostile as the code.
    """

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    json: Any = None
    javascript: str | None = None
    data: Mapping[str, Any] | None = None
    rows: int | None = None
    chart: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    main: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form without what is not there."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"type": "result"} | {
            name: value
            for name, value in shown.items()
            if value is not None and not (name == "extra" and not value)
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """The code raised: the exception's name, its text, its traceback."""

    name: str
    value: str
    traceback: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"type": "error", "name": self.name, "value": self.value, "traceback": self.traceback}


@dataclass(frozen=True, slots=True)
class Finished:
    """The call is over. ``status``: ``ok``, ``error``, ``timeout`` or ``ended`` (the context is gone).

    ``count``: the how-many-th call of its context it was (reported). ``exit_code``: bash only.
    """

    status: str
    count: int = 0
    exit_code: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        shown = {"type": "end", "status": self.status, "count": self.count}
        return shown if self.exit_code is None else shown | {"exit_code": self.exit_code}


ContextEvent = Text | Result | Failure | Finished


@dataclass(frozen=True, slots=True)
class Ran:
    """A whole call: what it printed (each at most the limit that was asked for), displayed, and raised."""

    stdout: str
    stderr: str
    results: tuple[Result, ...]
    error: Failure | None
    status: str
    count: int
    exit_code: int | None = None
    truncated: bool = False

    @property
    def text(self) -> str | None:
        """The value of the last expression as text."""
        return next((result.text for result in self.results if result.main), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "stdout": self.stdout,
            "stderr": self.stderr,
            "results": [result.as_dict() for result in self.results],
            "error": None if self.error is None else self.error.as_dict(),
            "status": self.status,
            "count": self.count,
            "exit_code": self.exit_code,
            "truncated": self.truncated,
        }


def event_of(message: Mapping[str, Any]) -> ContextEvent | None:
    """The event that a kernel's message stands for; ``None`` if it is none that we know."""
    kind = message.get("t")
    if kind in ("stdout", "stderr"):
        text = message.get("s")
        return Text(str(kind), clean(text)) if isinstance(text, str) and text else None
    if kind == "result":
        return _result(message)
    if kind == "error":
        name, value, trace = (message.get(key) for key in ("name", "value", "traceback"))
        return Failure(_text(name)[:1000] or "Error", _text(value), _text(trace))
    if kind == "end":
        return Finished("ok", _count(message.get("n")))
    return None


def _result(message: Mapping[str, Any]) -> Result:
    shown: dict[str, Any] = {}
    for name in _TEXTS:
        item = message.get(name)
        if isinstance(item, str) and (name not in _BINARY or _BASE64.match(item)):
            shown[name] = clean(item)
    for name in ("data", "chart", "extra"):
        item = message.get(name)
        if isinstance(item, dict):
            shown[name] = _scrub(item)
    if message.get("json") is not None:
        shown["json"] = _scrub(message["json"])
    if "rows" in message:
        shown["rows"] = _count(message["rows"])
    return Result(main=message.get("main") is True, **shown)


def _scrub(item: Any, depth: int = 0) -> Any:
    """The same without lone surrogates, which no UTF-8 can say, and not deeper than a reader's stack."""
    if isinstance(item, str):
        return clean(item)
    if depth > 64:
        return None
    if isinstance(item, dict):
        return {clean(key): _scrub(value, depth + 1) for key, value in item.items()}
    if isinstance(item, list):
        return [_scrub(value, depth + 1) for value in item]
    return item


def clean(text: str) -> str:
    """Text that can be encoded: lone surrogates become ``?``."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text(item: object) -> str:
    return clean(item) if isinstance(item, str) else ""


def _count(item: object) -> int:
    return item if isinstance(item, int) and 0 <= item < 2**53 else 0
