"""What calls of the SDK return: frozen values. Fields that a newer service adds are left out, not an error.

Text of a sandbox is hostile: ``CommandResult.stdout`` is decoded with replacement characters and may hold
terminal escapes; the bytes as they were are in ``stdout_bytes``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ringfence.model.errors import RingfenceError
from ringfence.model.values import dataclass

STREAMS = {1: "stdout", 2: "stderr"}


class CommandFailed(RingfenceError):
    """A command ended with another code than 0; raised by ``CommandResult.check()`` only."""

    code = "command_failed"


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes of one stream (``stdout`` or ``stderr``); ``offset`` is the position of the first one."""

    stream: str
    offset: int
    data: bytes

    @property
    def text(self) -> str:
        """As text; what is not UTF-8 becomes U+FFFD. A character may be cut between two pieces."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended, and what it printed.

    ``exit_code``: what a shell would show (128 + N if it died of signal N), ``None`` if it was cut off.
    ``cause``: measured on the host: exited, signaled, killed, out_of_memory, deadline, cpu_time,
    output_limit, idle, node_lost, runtime_crash. ``lost``: bytes of output that nobody kept for us.
    """

    id: str
    exit_code: int | None
    cause: str
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    detail: str = ""
    lost: int = 0
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether the command returned 0."""
        return self.exit_code == 0 and self.cause == "exited"

    @property
    def stdout(self) -> str:
        """As text; what is not UTF-8 becomes U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """As text; what is not UTF-8 becomes U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    def check(self) -> CommandResult:
        """The same result, if the command returned 0.

        Raises:
            CommandFailed: it did not; the end of its errors is in the message.
        """
        if self.ok:
            return self
        end = self.stderr.strip()[-2000:]
        why = f"exit code {self.exit_code}" if self.cause in ("exited", "signaled") else self.cause
        raise CommandFailed(
            f"the command ended with {why}" + (f": {end}" if end else ""),
            hint="" if self.cause in ("exited", "signaled") else f"cause: {self.cause} {self.detail}".strip(),
            exit_code=self.exit_code,
            cause=self.cause,
        )


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A command that the sandbox knows: ``state`` is running, exited or killed."""

    id: str
    state: str
    pid: int = 0
    exit_code: int | None = None
    command: str = ""
    started_at: float = 0.0
    stdout_end: int = 0
    stderr_end: int = 0


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as the sandbox reports it. ``type``: file, directory, symlink, other; ``mtime``: seconds."""

    path: str
    type: str
    size: int = 0
    mode: int = 0
    mtime: float = 0.0
    uid: int = 0
    gid: int = 0
    target: str | None = None

    @property
    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self.type == "directory"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something changed below a watched folder: created, modified, deleted, attributes, moved, or overflow
    (events were lost: look again).
    """

    path: str
    kind: str
    directory: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A path that differs from the template: ``kind`` is added, modified or deleted."""

    path: str
    kind: str
    type: str = "file"
    size: int = 0
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """Where a port of the sandbox is reached. ``url`` has its own origin; send ``headers`` with requests."""

    port: int
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    token: str = ""
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Rich:
    """One result of code in all the forms that it has: MIME type → text, or base64 for images.

    >>> Rich({"text/plain": "42"}).text
    '42'
    """

    data: Mapping[str, Any]
    main: bool = True  # the value of the last expression, not something that was displayed on the way

    @property
    def text(self) -> str:
        """``text/plain``, or an empty string."""
        return str(self.data.get("text/plain", ""))

    @property
    def html(self) -> str | None:
        """``text/html``. Hostile: show it in a page without scripts and without your cookies."""
        found = self.data.get("text/html")
        return None if found is None else str(found)

    @property
    def json(self) -> Any:
        """``application/json``, decoded."""
        return self.data.get("application/json")

    @property
    def png(self) -> bytes | None:
        """``image/png``, as bytes."""
        found = self.data.get("image/png")
        return base64.b64decode(found) if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class CodeError:
    """What code raised: the exception's name, its text and the traceback, as reported from inside."""

    name: str
    value: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What a piece of code came to."""

    stdout: str = ""
    stderr: str = ""
    results: Sequence[Rich] = ()
    error: CodeError | None = None
    count: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing was raised."""
        return self.error is None

    @property
    def text(self) -> str:
        """The last expression's value as text; empty if there is none."""
        return next((rich.text for rich in reversed(self.results) if rich.main), "")

    def check(self) -> CodeResult:
        """The same result, if nothing was raised.

        Raises:
            CommandFailed: the code raised something.
        """
        if self.error is None:
            return self
        raise CommandFailed(
            f"{self.error.name}: {self.error.value}", hint=self.error.traceback[-2000:], name=self.error.name
        )


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event in the life of a sandbox."""

    at: float
    name: str
    data: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A saved sandbox. ``kind``: disk, or memory (with everything that ran)."""

    name: str
    kind: str = ""
    runtime: str = ""
    size: int = 0
    created_at: float = 0.0
    sandbox: str = ""


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox's record as it was when it was asked for."""

    id: str
    state: str
    runtime: str = ""
    template: str = ""
    pool: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: float = 0.0
    started_at: float | None = None
    deadline: float | None = None
    cause: str = ""
    detail: str = ""
    boundary: Mapping[str, Any] | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)  # the whole answer

    @property
    def final(self) -> bool:
        """Whether it has come to its end."""
        return self.state in ("stopped", "failed")


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A pool and who waits for it."""

    pool: str
    waiting: int = 0
    oldest_waiting_seconds: float = 0.0
    warm: int = 0
    running: int = 0
