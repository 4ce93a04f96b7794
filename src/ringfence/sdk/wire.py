"""Between the API's JSON and the SDK's values: everything that knows field names of the wire is here.

Read leniently (a field that is missing has its default, one that is unknown is left out), written strictly.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ringfence.model.errors import InvalidRequest
from ringfence.sdk.results import (
    Change,
    CodeError,
    CommandResult,
    ContextInfo,
    FileInfo,
    LogEntry,
    ProcessInfo,
    QueueInfo,
    Rich,
    SandboxInfo,
    SnapshotInfo,
    WatchEvent,
)

Command = str | Sequence[str]
MOST_INLINE = 4 * 1024 * 1024  # bytes of input that go along with the request for a command


def segment(text: str, what: str = "id") -> str:
    """One segment of a path.

    Raises:
        InvalidRequest: it is empty, or would be another path.
    """
    if not text or text in (".", ".."):
        raise InvalidRequest(f"{text!r} is no {what}")
    return quote(text, safe="")


def argv(command: Command) -> list[str]:
    """Text is a line for the shell inside; a sequence is a program and its arguments, untouched.

    >>> argv("echo $HOME"), argv(["echo", "$HOME"])
    (['sh', '-c', 'echo $HOME'], ['echo', '$HOME'])
    """
    words = ["sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
    if not words or not words[0]:
        raise InvalidRequest(
            "a command needs at least one word", hint="for example ['python3', '-V'] or 'python3 -V'"
        )
    return words


def shown(words: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(words)


def data_of(value: Mapping[str, Any], name: str = "data") -> bytes:
    """Bytes in JSON: text, or base64 where ``encoding`` says so."""
    text = value.get(name)
    if text is None:
        return b""
    if value.get("encoding", value.get(f"{name}_encoding")) == "base64":
        return base64.b64decode(text)
    return str(text).encode("utf-8", "surrogateescape")


def sandbox(value: Mapping[str, Any]) -> SandboxInfo:
    """A sandbox's record."""
    end = value.get("end") or {}
    return SandboxInfo(
        id=str(value["id"]),
        state=str(value.get("state", "")),
        runtime=str(value.get("runtime") or ""),
        template=str(value.get("template") or ""),
        pool=str(value.get("pool") or ""),
        labels=dict(value.get("labels") or {}),
        created_at=number(value.get("created_at")) or 0.0,
        started_at=number(value.get("started_at")),
        deadline=number(value.get("deadline")) or None,
        cause=str(value.get("cause") or end.get("cause") or ""),
        detail=str(value.get("detail") or end.get("detail") or ""),
        boundary=value.get("boundary"),
        capabilities=dict(value.get("capabilities") or {}),
        raw=value,
    )


def process(value: Mapping[str, Any]) -> ProcessInfo:
    """A command that the sandbox knows."""
    command = value.get("command") or value.get("argv0") or ""
    return ProcessInfo(
        id=str(value["id"]),
        state=str(value.get("state", "")),
        pid=int(value.get("pid") or 0),
        exit_code=value.get("exit_code"),
        command=command if isinstance(command, str) else shown([str(word) for word in command]),
        started_at=number(value.get("started_at")) or 0.0,
        stdout_end=int(value.get("stdout_end") or value.get("stdout_offset") or 0),
        stderr_end=int(value.get("stderr_end") or value.get("stderr_offset") or 0),
    )


def result(
    value: Mapping[str, Any], stdout: bytes = b"", stderr: bytes = b"", lost: int = 0
) -> CommandResult:
    """How a command ended; output that came on the way is given."""
    cause = str(value.get("cause") or "exited")
    code = value.get("exit_code")
    return CommandResult(
        id=str(value.get("id") or value.get("command_id") or ""),
        exit_code=int(code) if code is not None else None,
        cause=cause,
        stdout_bytes=stdout or data_of(value, "stdout"),
        stderr_bytes=stderr or data_of(value, "stderr"),
        detail=str(value.get("detail") or ""),
        lost=lost,
        timed_out=bool(value.get("timed_out")) or cause == "deadline",
    )


def with_lost(found: CommandResult, lost: int) -> CommandResult:
    """The same, with so many bytes of output missing."""
    from dataclasses import replace

    return replace(found, lost=lost)


def file(value: Mapping[str, Any]) -> FileInfo:
    """A file."""
    return FileInfo(
        path=str(value.get("path", "")),
        type=str(value.get("type", "other")),
        size=int(value.get("size") or 0),
        mode=int(value.get("mode") or 0),
        mtime=number(value.get("mtime")) or 0.0,
        uid=int(value.get("uid") or 0),
        gid=int(value.get("gid") or 0),
        target=value.get("target"),
    )


def event(value: Mapping[str, Any]) -> WatchEvent:
    """A change below a watched folder."""
    return WatchEvent(
        str(value.get("path", "")), str(value.get("kind", "overflow")), bool(value.get("directory"))
    )


def change(value: Mapping[str, Any]) -> Change:
    """A file that differs from the template."""
    return Change(
        str(value.get("path", "")),
        str(value.get("kind", "")),
        str(value.get("type", "file")),
        int(value.get("size") or 0),
        value.get("digest"),
    )


def log(value: Mapping[str, Any]) -> LogEntry:
    """An event."""
    return LogEntry(
        number(value.get("at")) or 0.0, str(value.get("name", "")), dict(value.get("data") or {}),
        int(value.get("number") or 0),
    )  # fmt: skip


def snapshot(value: Mapping[str, Any]) -> SnapshotInfo:
    """A saved sandbox."""
    return SnapshotInfo(
        name=str(value.get("name") or value.get("id") or ""),
        id=str(value.get("id") or ""),
        kind=str(value.get("kind") or ""),
        runtime=str(value.get("runtime") or ""),
        size=int(value.get("size") or 0),
        created_at=number(value.get("created_at") or value.get("made_at")) or 0.0,
        sandbox=str(value.get("sandbox") or ""),
    )


def queue(value: Mapping[str, Any]) -> QueueInfo:
    """A pool's queue."""
    return QueueInfo(
        str(value.get("pool", "")),
        int(value.get("waiting") or 0),
        float(value.get("oldest_waiting_seconds") or 0.0),
        int(value.get("warm") or 0),
        int(value.get("running") or 0),
    )


def code_error(value: Mapping[str, Any] | None) -> CodeError | None:
    """What code raised."""
    if not value:
        return None
    trace = value.get("traceback") or ""
    text = trace if isinstance(trace, str) else "\n".join(map(str, trace))
    return CodeError(
        str(value.get("name", "Error")), str(value.get("value") or value.get("message") or ""), text
    )


def rich(value: Mapping[str, Any]) -> Rich:
    """One result in all its forms."""
    return Rich(
        text=str(value.get("text") or ""),
        json=value.get("json"),
        data=value.get("data"),
        rows=value.get("rows"),
        chart=value.get("chart"),
        extra=dict(value.get("extra") or {}),
        main=bool(value.get("main")),
        html=value.get("html"),
        markdown=value.get("markdown"),
        svg=value.get("svg"),
        latex=value.get("latex"),
        javascript=value.get("javascript"),
        png=_bytes(value.get("png")),
        jpeg=_bytes(value.get("jpeg")),
        pdf=_bytes(value.get("pdf")),
    )


def _bytes(text: object) -> bytes | None:
    return base64.b64decode(text) if isinstance(text, str) else None


def context(value: Mapping[str, Any]) -> ContextInfo:
    """An interpreter."""
    running = value.get("running", True) is not False
    return ContextInfo(str(value["id"]), str(value.get("language", "")), value.get("cwd"), running)


def number(value: Any) -> float | None:
    """Seconds since the epoch, from a number or an ISO 8601 time."""
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    from datetime import datetime

    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def policy(value: Any) -> Any:
    """A policy as the wire says it: a preset's name, or the document of a policy file."""
    if value is None or isinstance(value, dict | str):
        return value
    if hasattr(value, "to_wire"):
        return value.to_wire()
    from ringfence.model import policies
    from ringfence.model.policy import Policy

    if isinstance(value, Policy):
        return policies.to_dict(value)
    raise InvalidRequest(
        f"policy: {type(value).__name__} is no policy",
        hint="pass a Policy, the name of a preset, or a dictionary",
    )


def command(
    words: Command, *, env: Mapping[str, str] | None, cwd: str | None, timeout: float | None, root: bool
) -> dict[str, Any]:
    """What a command is to be; text is a line for the shell inside."""
    start = filled(env=dict(env) if env else None, cwd=cwd, timeout=timeout, as_root=root or None)
    if isinstance(words, str):
        if not words:
            raise InvalidRequest("a command needs at least one word", hint="for example 'python3 -V'")
        return start | {"command": words}
    return start | {"argv": argv(words)}


def contents(files: Mapping[str, str | bytes]) -> dict[str, Any]:
    """Contents of files as JSON."""
    found: dict[str, Any] = {}
    for name, content in files.items():
        text = content if isinstance(content, str) else None
        if text is None:
            encoded = base64.b64encode(bytes(content)).decode()  # type: ignore[arg-type]
            found[name] = {"content": encoded, "encoding": "base64"}
        else:
            found[name] = text
    return found


def encoded(data: bytes | str) -> tuple[str, str]:
    """Text and how it is encoded."""
    if isinstance(data, str):
        return data, "utf-8"
    try:
        return data.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


def volumes(given: Any) -> list[dict[str, Any]] | None:
    """Volumes to attach: path → volume or name (writable), or the API's own list."""
    if not given:
        return None
    if isinstance(given, Mapping):
        return [
            {"volume": str(getattr(volume, "id", volume)), "path": path, "read_only": False}
            for path, volume in given.items()
        ]
    return [{**each, "volume": str(getattr(each.get("volume"), "id", each.get("volume")))} for each in given]


def port_number(port: int) -> int:
    """A port. Raises InvalidRequest."""
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise InvalidRequest(f"port {port!r} is not 1 to 65535")
    return port


def filled(**values: Any) -> dict[str, Any]:
    """What was given."""
    return {name: value for name, value in values.items() if value is not None}
