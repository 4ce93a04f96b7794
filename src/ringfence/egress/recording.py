"""What was said, kept as far as the policy wants: headers, bodies up to a size; also as HAR."""

from __future__ import annotations

import base64
import datetime
import json
import re
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from ringfence.egress.bounded import Patterns
from ringfence.egress.http1 import Headers, ResponseHead
from ringfence.egress.log import ConnectionLog
from ringfence.egress.redaction import Redactor, Redactors

MOST_BODY = 16 * 1024  # bytes kept of each body
_ROTATE = 32 * 1024 * 1024
_PIECE = 128 * 1024


class Taking:
    """One exchange while it goes on."""

    def __init__(self, level: str, method: str, url: str, headers: Headers) -> None:
        self.level = level
        self.method = method
        self.url = url
        self.request_headers = headers
        self.request_body = bytearray()
        self.response_body = bytearray()
        self.request_size = self.response_size = 0
        self.response: ResponseHead | None = None

    def sent(self, data: bytes) -> None:
        """A piece of the request's body."""
        self.request_size += len(data)
        if self.level == "bodies" and len(self.request_body) < MOST_BODY:
            self.request_body += data[: MOST_BODY - len(self.request_body)]

    def received(self, data: bytes) -> None:
        """A piece of the response's body."""
        self.response_size += len(data)
        if self.level == "bodies" and len(self.response_body) < MOST_BODY:
            self.response_body += data[: MOST_BODY - len(self.response_body)]


class Records:
    """The records of all sandboxes: a file each."""

    def __init__(self, folder: Path, redactors: Redactors) -> None:
        self._folder = folder / "records"
        self._redactors = redactors
        self._logs: dict[str, ConnectionLog] = {}

    def write(
        self, sandbox: str, about: dict[str, Any], taken: Taking, patterns: Patterns | None = None
    ) -> None:
        """Keep an exchange."""
        clean = self._redactors.of(str(about.get("project", "")))
        entry: dict[str, Any] = about | {
            "method": taken.method,
            "url": clean.target(taken.url, patterns),
            "request": {
                "headers": clean.headers(taken.request_headers, patterns),
                "size": taken.request_size,
            },
        }
        if taken.response is not None:
            entry["response"] = {
                "status": taken.response.status,
                "reason": taken.response.reason,
                "headers": clean.headers(taken.response.headers, patterns),
                "size": taken.response_size,
            }
        if taken.level == "bodies":
            entry["request"] |= _body(clean, taken.request_body, taken.request_size, patterns)
            entry.get("response", {}).update(_body(clean, taken.response_body, taken.response_size, patterns))
        self.log(sandbox).write(entry)

    def log(self, sandbox: str) -> ConnectionLog:
        """The file of a sandbox."""
        found = self._logs.get(sandbox)
        if found is None:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", sandbox)[:100].lstrip(".") or "_"
            found = self._logs[sandbox] = ConnectionLog(self._folder / f"{name}.jsonl", _ROTATE)
        return found

    def forget(self, sandbox: str) -> None:
        """The sandbox is no more; what was recorded stays."""
        found = self._logs.pop(sandbox, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """Let go of the files."""
        for sandbox in list(self._logs):
            self.forget(sandbox)


def _body(clean: Redactor, data: bytearray, size: int, patterns: Patterns | None) -> dict[str, Any]:
    if not data:
        return {}
    cut = size > len(data)
    try:
        text, encoded = data.decode(), False
    except UnicodeDecodeError as error:
        # A letter that was cut does not make it less of a text.
        encoded = not cut or error.start < len(data) - 3
        text = data.decode("latin-1") if encoded else data[: error.start].decode()
    if cut and (half := clean.begun(text)):
        text = text[:-half]  # what was cut in the middle of a secret must not show its first half
    text = clean.text(text, patterns)
    if not encoded:
        kept: dict[str, Any] = {"body": text}
    else:
        raw = text.encode("latin-1", "replace")
        kept = {"body": base64.b64encode(raw).decode(), "encoding": "base64"}
    return kept | ({"cut": True} if cut else {})


def har(entries: Iterable[dict[str, Any]], version: str = "") -> dict[str, Any]:
    """Records as a HAR 1.2 document; ``version``: of who writes it."""
    found = [_har_entry(entry) for entry in entries if "url" in entry]
    return {"log": _har_head(version) | {"entries": found}}


def har_pieces(log: ConnectionLog, newest: int, version: str = "") -> Generator[bytes, None, None]:
    """The same of the newest so many records, piece by piece: never more than a piece is in memory."""
    piece = b'{"log":' + json.dumps(_har_head(version)).encode()[:-1] + b',"entries":['
    comma = b"\n"
    for entry in log.read(newest):
        if "url" in entry:
            piece += comma + json.dumps(_har_entry(entry), separators=(",", ":")).encode()
            comma = b",\n"
        if len(piece) >= _PIECE:
            yield piece
            piece = b""
    yield piece + b"\n]}}\n"


def _har_head(version: str) -> dict[str, Any]:
    return {"version": "1.2", "creator": {"name": "ringfence", "version": version}}


def _har_entry(entry: dict[str, Any]) -> dict[str, Any]:
    request, response = entry.get("request", {}), entry.get("response", {})
    began = datetime.datetime.fromtimestamp(entry.get("at", 0), datetime.UTC)
    milliseconds = float(entry.get("seconds", 0)) * 1000
    url = str(entry["url"])
    query = [
        {"name": name, "value": value}
        for name, _, value in (part.partition("=") for part in url.partition("?")[2].split("&") if part)
    ]
    sent: dict[str, Any] = {
        "method": entry.get("method", ""), "url": url, "httpVersion": "HTTP/1.1", "cookies": [],
        "headers": _har_headers(request), "queryString": query, "headersSize": -1,
        "bodySize": request.get("size", 0),
    }  # fmt: skip
    if "body" in request:
        sent["postData"] = {"mimeType": _mime(request), "text": request["body"]}
    content: dict[str, Any] = {"size": response.get("size", 0), "mimeType": _mime(response)}
    if "body" in response:
        content["text"] = response["body"]
        if "encoding" in response:
            content["encoding"] = response["encoding"]
    got = {
        "status": response.get("status", 0), "statusText": response.get("reason", ""),
        "httpVersion": "HTTP/1.1", "cookies": [], "headers": _har_headers(response), "content": content,
        "redirectURL": "", "headersSize": -1, "bodySize": response.get("size", 0),
    }  # fmt: skip
    return {
        "startedDateTime": began.isoformat(), "time": milliseconds, "request": sent, "response": got,
        "cache": {}, "timings": {"send": 0, "wait": milliseconds, "receive": 0},
        "_sandbox": entry.get("sandbox"), "_task": entry.get("task"), "_rule": entry.get("rule"),
    }  # fmt: skip


def _har_headers(message: dict[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in message.get("headers", [])]


def _mime(message: dict[str, Any]) -> str:
    return next((value for name, value in message.get("headers", []) if name.lower() == "content-type"), "")
