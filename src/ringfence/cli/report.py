"""What is said about a run at its end: the cause in words, the exit code, the JSON document.

The document of ``ringfence run --json`` (one object on stdout; ``null`` where there is nothing to say)::

    id            sandbox id                     runtime, level    what it ran on
    boundary      the effective boundary, measured on the living sandbox; null if it died before
    cause         exited, signaled, killed, out_of_memory, deadline, cpu_time, output_limit, …
    message       the cause in words, with the remedy; "" if the command simply returned
    exit_code     what this program exits with   command_exit_code what a shell would have seen; null: cut off
    usage         cpu_seconds, memory_peak, output_bytes, wall_seconds, measured on the host
    stdout        text, or base64 if it is not UTF-8: stdout_encoding says "utf-8" or "base64"; null if
    stderr        streamed. The same for stderr and stderr_encoding
    changes       with --changes: [{path, kind, type, size, digest}]
    files_out     with --out: [{path, local, bytes, files}]; one that failed has "error" instead
    warnings      what the policy allows and should be thought about
    owner, labels as asked for                   policy_digest     of the wall

An error of Ringfence itself is ``{"error": {code, message, hint, details}}`` instead, exit code 125.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

from ringfence.cli.output import safe
from ringfence.model.errors import GuestRefused, InvalidRequest, RingfenceError
from ringfence.model.levels import Cause
from ringfence.model.policy import Policy
from ringfence.model.quantities import format_duration, format_size
from ringfence.model.sandbox import End, FileChange

DEADLINE, FAILED, NOT_EXECUTABLE, NOT_FOUND, KILLED = 124, 125, 126, 127, 137


class CommandRefused(RingfenceError):
    """The command could not be started: not found (exit code 127), or not executable (126)."""

    code = "command_refused"

    def __init__(self, message: str, *, hint: str, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class Interrupted(RingfenceError):
    """A signal ended us when there was no command to pass it to. ``exit_code`` is what a shell shows;
    ``left``: what became of what we had begun.
    """

    code = "interrupted"

    def __init__(self, number: int, left: str = "the sandbox is gone") -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}; {left}")
        self.exit_code = 128 + number


def refusal(
    error: GuestRefused, argv: tuple[str, ...], workdir: str | None, template: str = ""
) -> RingfenceError:
    """Why the command did not start, in the user's words. ``error`` itself where we know no better."""
    name = safe(argv[0])
    reason = os.strerror(error.errno)
    if "(cwd" in error.message:
        return InvalidRequest(
            f"--workdir {safe(workdir or '')}: {reason}", hint="name a folder that is there inside"
        )
    if "(program" not in error.message:
        return error
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        hint = (
            "a sandbox sees the host's /usr; bring other programs with --file or --mount"
            if template in ("", "host")
            else f"template {safe(template)} has its own files alone; bring others with --file or --mount"
        )
        if "/" in argv[0]:
            hint += " (and their interpreter: the first line of a script names it)"
        return CommandRefused(f"{name}: not found in the sandbox", hint=hint, exit_code=NOT_FOUND)
    hint = "chmod +x it, or name its interpreter: ringfence run -- python3 FILE"
    if error.errno == errno.ENOEXEC:
        reason = "neither a program nor a script with a #! line"
    return CommandRefused(f"{name}: can't be executed: {reason}", hint=hint, exit_code=NOT_EXECUTABLE)


def exit_code(end: End) -> int:
    """What ``ringfence run`` exits with."""
    if end.cause is Cause.DEADLINE:
        return DEADLINE
    if end.cause in (Cause.NODE_LOST, Cause.RUNTIME_CRASH, Cause.START_FAILED):
        return FAILED
    if end.cause in (Cause.EXITED, Cause.SIGNALED, Cause.KILLED) and end.exit_code is not None:
        return end.exit_code
    return KILLED


def command_exit_code(end: End) -> int | None:
    """What a shell would have seen of the command itself; None if it never came to its own end."""
    return None if exit_code(end) in (DEADLINE, FAILED) and end.cause is not Cause.EXITED else end.exit_code


def explain(end: End, policy: Policy) -> str:
    """The cause with its limit and how to raise it; empty if the command simply returned."""
    resources, limits = policy.wall.resources, policy.door.limits
    cpu_time = policy.wall.process.cpu_time
    if end.cause is Cause.EXITED:
        return ""
    if end.cause is Cause.SIGNALED:
        return f"the command died of {_signal_name(end.exit_code)}"
    text = {
        Cause.OUT_OF_MEMORY: f"killed: out of memory (limit {format_size(resources.memory)});"
        " raise it with --memory",
        Cause.DEADLINE: f"killed: deadline (limit {format_duration(limits.timeout)});"
        " raise it with --timeout",
        Cause.CPU_TIME: f"killed: CPU time used up (limit {format_duration(cpu_time or 0)});"
        " raise it with --cpu-time",
        Cause.OUTPUT_LIMIT: f"killed: too much output (limit {format_size(limits.output)});"
        " raise it with --output",
        Cause.IDLE: f"killed: idle for {format_duration(limits.idle or 0)}",
        Cause.KILLED: "killed on request",
        Cause.NODE_LOST: "the node service died, and the sandbox with it",
        Cause.RUNTIME_CRASH: "the sandbox's first process ended without being asked to",
        Cause.START_FAILED: "it was never started",
    }[end.cause]
    if end.cause in (Cause.NODE_LOST, Cause.RUNTIME_CRASH, Cause.START_FAILED):
        return end.detail or text
    return f"{text} ({end.detail})" if end.detail and end.cause is Cause.KILLED else text


def change_lines(changes: list[FileChange]) -> list[str]:
    """One line a change, as ``git status --short`` has it; hostile names can't forge one."""
    letters = {"added": "A", "modified": "M", "deleted": "D"}
    lines = []
    for change in changes:
        size = format_size(change.size) if change.type == "file" and change.kind != "deleted" else ""
        mark = "/" if change.type == "directory" else ""
        digest = (change.digest or "")[:19]
        line = f"{letters.get(change.kind, '?')} {size:>9}  {digest:<19}  {safe(change.path)}{mark}"
        lines.append(line)
    return lines


def captured(data: bytes | None, name: str) -> dict[str, Any]:
    """``name`` and ``name_encoding`` of the document."""
    if data is None:
        return {name: None, name + "_encoding": None}
    try:
        return {name: data.decode(), name + "_encoding": "utf-8"}
    except UnicodeDecodeError:
        from base64 import b64encode

        return {name: b64encode(data).decode(), name + "_encoding": "base64"}


def _signal_name(code: int | None) -> str:
    try:
        return signal.Signals((code or 128) - 128).name
    except ValueError:
        return "a signal"
