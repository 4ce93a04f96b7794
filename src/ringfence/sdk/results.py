"""What calls of the SDK return: frozen values. Fields that a newer service adds are left out, not an error.

Text of a sandbox is hostile: ``CommandResult.stdout`` is decoded with replacement characters and may hold
terminal escapes; the bytes as they were are in ``stdout_bytes``.
"""

from __future__ import annotations

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
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]

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
    """Where a port of the sandbox is reached.

    ``url``: its own origin, ``http://8000-sb-….localhost/``, with WebSockets and cookies of its own.
    ``direct``: the same below the service's address, for programs where such names don't resolve. Send
    ``headers`` with requests to either; ``browser`` is for people: it carries the token.
    """

    port: int
    url: str
    direct: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    token: str = ""
    expires_at: float | None = None

    @property
    def browser(self) -> str:
        """The address with the token in it."""
        return f"{self.url}?ringfence_token={self.token}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server inside a sandbox answered. Hostile bytes."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        """As text; what is not UTF-8 becomes U+FFFD."""
        return self.body.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Rich:
    """Something that code displayed, in all the forms that it has. ``main``: the last expression's value.

    ``data``: columns of a data frame, at most 1,000 of its ``rows`` rows. ``chart``: a Matplotlib figure as
    data. HTML, SVG and JavaScript are as hostile as the code: show them in a page without your cookies.
    """

    text: str = ""
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: bytes | None = None
    jpeg: bytes | None = None
    pdf: bytes | None = None
    latex: str | None = None
    json: Any = None
    javascript: str | None = None
    data: Mapping[str, Any] | None = None
    rows: int | None = None
    chart: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    main: bool = False


@dataclass(frozen=True, slots=True)
class CodeError:
    """What code raised: the exception's name, its text and the traceback, as reported from inside."""

    name: str
    value: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What a piece of code came to. ``status``: ok, error, timeout, or ended (the interpreter is gone)."""

    stdout: str = ""
    stderr: str = ""
    results: Sequence[Rich] = ()
    error: CodeError | None = None
    status: str = "ok"
    count: int = 0
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran to its end and nothing was raised."""
        return self.error is None and self.status == "ok"

    @property
    def text(self) -> str:
        """The last expression's value as text; empty if there is none."""
        return next((rich.text for rich in reversed(self.results) if rich.main), "")

    def check(self) -> CodeResult:
        """The same result, if all went well.

        Raises:
            CommandFailed: the code raised something, or did not come to its end.
        """
        if self.ok:
            return self
        if self.error is None:
            raise CommandFailed(
                f"the code did not end: {self.status}", hint="give it more time with `timeout`"
            )
        raise CommandFailed(
            f"{self.error.name}: {self.error.value}", hint=self.error.traceback[-2000:], name=self.error.name
        )


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """An interpreter that lives in a sandbox."""

    id: str
    language: str
    cwd: str | None = None
    running: bool = True


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
    id: str = ""
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
    boundary: Mapping[str, Any] | None = field(default=None, repr=False)
    capabilities: Mapping[str, Any] = field(default_factory=dict, repr=False)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the whole answer

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
