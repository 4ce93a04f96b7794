"""Printing: errors, notes, tables, JSON. Text that comes from a sandbox is never printed as it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from ringfence.model.errors import RingfenceError


def safe(text: str | bytes) -> str:
    """A hostile name on one line: it can't move the cursor, forge another line or hide characters.

    Unprintable characters (controls, bidirectional overrides, lone bytes of broken UTF-8) become escapes, and
    a backslash is doubled, so that no two names look the same.
    """
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    return printable(text.replace("\\", "\\\\"))


def printable(text: str) -> str:
    """As :func:`safe` for our own sentences: a backslash stays one (names in them are quoted already)."""
    return text if text.isprintable() else "".join(_escape(letter) for letter in text)


def _escape(letter: str) -> str:
    if letter.isprintable():
        return letter
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter)
    number = ord(letter)
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"  # a byte that was not UTF-8
    return short or (f"\\x{number:02x}" if number < 256 else f"\\u{{{number:x}}}")


def note(text: str) -> None:
    """One line about what happened, on stderr."""
    with suppress(OSError, ValueError):  # nobody listens; the exit code says it too
        print("ringfence: " + text, file=sys.stderr, flush=True)


def print_error(error: BaseException, *, as_json: bool) -> None:
    """One message: cause, then remedy. With ``as_json`` the error object on stdout."""
    if isinstance(error, UnicodeEncodeError):
        from ringfence.sdk.failures import not_utf8

        error = not_utf8(error)
    if isinstance(error, RingfenceError):
        value = error.as_dict()
    else:
        value = {
            "code": "internal",
            "message": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            "hint": "this is a fault in Ringfence; RINGFENCE_DEBUG=1 shows where",
            "details": {},
        }
        if isinstance(error, OSError) and error.strerror:
            name = f": {safe(os.fsdecode(error.filename))}" if error.filename else ""
            value = {"code": "os_error", "message": f"{error.strerror}{name}", "hint": "", "details": {}}
    if as_json:
        print_json({"error": value})
    else:
        print_error_object(value)


def print_error_object(value: dict[str, Any]) -> None:
    """An error's ``as_dict``, for people: its message and hint on stderr."""
    if "fields" in (value.get("details") or {}):
        # A request's body is nothing that who typed a command knows of, nor is the service's schema.
        value = value | {"message": str(value["message"]).removeprefix("the body is wrong: ")}
        if "/openapi.json" in str(value["hint"]):
            value["hint"] = "see the command's --help"
    note("\n  ".join(map(printable, str(value["message"]).splitlines())))
    if value["hint"]:
        print(
            "  " + "\n  ".join(map(printable, str(value["hint"]).splitlines())), file=sys.stderr, flush=True
        )


def print_json(value: Any, stream: TextIO | None = None) -> None:
    """One document, one line if not on a terminal. Lone surrogates (broken file names) stay escapes."""
    import json

    stream = sys.stdout if stream is None else stream
    print(json.dumps(value, indent=2 if stream.isatty() else None, default=_plain), file=stream, flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return os.fsdecode(value)
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "__dataclass_fields__"):
        from dataclasses import asdict

        return asdict(value)
    return str(value)


def coloured(stream: TextIO) -> bool:
    """Whether the stream is a terminal that wants more than plain text (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


STYLES = {
    "healthy": "green",
    "held": "green",
    "yes": "green",
    "degraded": "yellow",
    "not measured": "yellow",
    "unavailable": "red",
    "violated": "bold red",
    "no": "red",
    "not held": "bold red",
}


def table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "", stream: TextIO | None = None
) -> None:
    """Rows of anything. Wrapped and coloured on a terminal, aligned plain text elsewhere."""
    stream = sys.stdout if stream is None else stream
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if coloured(stream):
        _rich_table(headers, cells, title, stream)
        return
    if title:
        print(title, file=stream)
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    for row in [list(headers), *cells]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip(), file=stream)
    print(file=stream)


def _rich_table(headers: Sequence[str], cells: list[list[str]], title: str, stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for header in headers:
        shown.add_column(header, overflow="fold")
    for row in cells:
        shown.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    Console(file=stream).print(shown)
