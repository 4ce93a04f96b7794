"""Commands over HTTP: start, list, output by offset, server-sent events, input, signals, kill."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from ringfence.api.calls import Answer, Call
from ringfence.api.commands import (
    bytes_of,
    get_or_start,
    kill_tree,
    signal_of,
    stream_name,
    text_of,
)
from ringfence.api.errors import body_of
from ringfence.api.routing import Routes
from ringfence.api.sse import event, events
from ringfence.api.types import Body, Env, Path, Query, Seconds, Shown, Text
from ringfence.guest.processes import STDOUT, GuestProcess, Output, ProcessSpec, is_id
from ringfence.guest.reports import ProcessInfo
from ringfence.model.errors import GuestRefused, InvalidRequest, NotFound, RingfenceError
from ringfence.model.ids import new_id

routes = Routes("processes")
_BASE = "/v1/sandboxes/{sandbox}/processes"
Word = Annotated[str, Field(max_length=128 * 1024, pattern=r"^[^\x00]*$")]
Offset = Annotated[int, Field(ge=0, lt=2**63)]
_DETACHED_RING = 1024 * 1024


class Start(Body):
    """A command, please: `argv`, or `command` for the shell inside (`sh -c`)."""

    argv: Annotated[tuple[Word, ...], Field(min_length=1, max_length=4096)] | None = None
    command: Word | None = None
    id: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Idempotent: a command that has this id already is returned, not started again.",
    )
    env: Env = Field(default_factory=dict)
    cwd: Path | None = None
    pty: bool = False
    rows: Annotated[int, Field(ge=1, le=65535)] = 24
    columns: Annotated[int, Field(ge=1, le=65535)] = 80
    stdin: str | None = Field(None, description="The whole input. Without it, and `keep_stdin`, it is empty.")
    stdin_encoding: Literal["utf-8", "base64"] = "utf-8"
    keep_stdin: bool = Field(False, description="Keep the input open for later.")
    merge_stderr: bool = False
    as_root: bool = Field(False, description="As the sandbox's own root, where the policy has one.")
    timeout: Seconds | None = Field(None, description="Seconds after which it is killed (cause: deadline).")
    wait: bool = Field(True, description="Answer when it has ended, or after two minutes (then 202).")
    detached: bool = Field(False, description="Nobody need read it: the newest output is kept.")
    keep: Annotated[int, Field(ge=4096, le=16 * 1024 * 1024)] | None = Field(
        None, description="Bytes of output kept a stream (256 KiB; detached 1 MiB)."
    )
    kill_on_disconnect: bool = Field(False, description="Kill it when the waiting client goes away.")
    ttl: Seconds | None = Field(
        None, description="Seconds after its end after which its output is forgotten."
    )

    def spec(self, *, attached: bool) -> ProcessSpec:
        """What the guest is asked for.

        Raises:
            InvalidRequest: neither or both of argv and command.
        """
        if (self.argv is None) == (self.command is None):
            raise InvalidRequest(
                "one of argv and command, please", hint='for example "argv": ["python3", "-V"]'
            )
        argv = self.argv if self.argv is not None else ("sh", "-c", self.command or "")
        detached = self.detached and not attached
        return ProcessSpec(
            argv,
            dict(self.env),
            self.cwd,
            self.id or new_id("p"),
            self.pty,
            self.stdin is not None or self.keep_stdin,
            self.rows,
            self.columns,
            self.merge_stderr,
            detached or not attached,
            self.detached,
            self.as_root,
            self.keep or (_DETACHED_RING if self.detached else None),
        )


class Result(Shown):
    """A command; after its end with how it ended, and the output if it was waited for."""

    id: str
    state: str
    pid: int


class ProcessPage(Shown):
    """Commands that the guest knows; at most 512, ended ones until they are removed."""

    items: list[Result]
    truncated: bool


class OutputQuery(Query):
    """From where, and how much."""

    stdout_offset: int = Field(0, ge=0, lt=2**63)
    stderr_offset: int = Field(0, ge=0, lt=2**63)
    limit: int = Field(1024 * 1024, ge=1, le=8 * 1024 * 1024, description="Most bytes, of both together.")
    wait: float = Field(
        0.0, ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for the first byte."
    )


class StreamQuery(Query):
    """From where."""

    stdout_offset: int = Field(0, ge=0, lt=2**63)
    stderr_offset: int = Field(0, ge=0, lt=2**63)


class SendSignal(Body):
    """A signal, by number or name, to the command's process group, its first process, or its whole tree."""

    signal: Annotated[int, Field(ge=1, le=64)] | Text = "TERM"
    scope: Literal["group", "process"] = "group"


class SendInput(Body):
    """Input; `eof` ends it."""

    data: str = ""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    eof: bool = False


class Resize(Body):
    """The terminal's size."""

    rows: Annotated[int, Field(ge=1, le=65535)]
    columns: Annotated[int, Field(ge=1, le=65535)]


@routes.post(_BASE, body=Start, answer=Result, status=201, creates=True)
async def start(call: Call, body: Start) -> Answer:
    """Start a command, and wait for its end unless told otherwise.

    Waited for: 200 with exit code, cause, duration and output (the first 4 MiB); after two minutes 202, and
    the command goes on: follow it by its id. `wait: false`: 201 at once.
    """
    commands = call.service.commands
    stdin = None if body.stdin is None else bytes_of(body.stdin, body.stdin_encoding)
    spec = body.spec(attached=body.wait)
    link = await call.control.link(call.principal, call.sandbox)
    process, fresh = await get_or_start(link, spec, (None, None))
    number = process.id
    if not body.wait:
        try:
            if stdin is not None and fresh:
                await _input(call, number, stdin, eof=not body.keep_stdin)
            if body.timeout is not None and fresh:
                await commands.due(call.sandbox, number, "deadline", body.timeout, call.principal.project)
        finally:
            await process.close()
        shown = {"id": number, "state": "running", "pid": process.pid, "started": fresh}
        return Answer(201 if fresh else 200, shown)
    writing: asyncio.Task[None] | None = None
    if stdin is not None and fresh:
        writing = asyncio.get_running_loop().create_task(_feed(process, stdin, eof=not body.keep_stdin))
    try:
        return await _collect(call, process, body)
    finally:
        if writing is not None:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, RingfenceError):
                await writing
        await process.close()


async def _feed(process: GuestProcess, data: bytes, *, eof: bool) -> None:
    with contextlib.suppress(RingfenceError):  # it need not read its input
        await process.write(data)
    if eof:
        await process.close_stdin()


async def _collect(call: Call, process: GuestProcess, body: Start) -> Answer:
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    settings = call.service.settings
    kept: dict[int, list[bytes]] = {1: [], 2: []}
    sizes = {1: 0, 2: 0}
    timed_out = gone = False

    async def follow() -> dict[str, Any]:
        async for piece in call.service.commands.follow(call.principal, call.sandbox, process):
            if isinstance(piece, dict):
                return piece
            room = settings.most_output - sizes[piece.stream]
            if room > 0:
                kept[piece.stream].append(piece.data[:room])
            sizes[piece.stream] += len(piece.data)
        raise NotFound("the command is gone", hint="it was removed")

    async with call.control.using(call.sandbox, call.principal.project):
        following = loop.create_task(follow())
        watching = loop.create_task(call.left()) if body.kill_on_disconnect else None
        try:
            waits = {following} | ({watching} if watching is not None else set())
            limit = settings.most_wait if body.timeout is None else min(body.timeout, settings.most_wait)
            await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                gone = watching is not None and watching.done()
                timed_out = not gone and body.timeout is not None and body.timeout <= limit
                if gone or timed_out:
                    call.service.commands.signalled(call.sandbox, process.id, 9)
                    with contextlib.suppress(GuestRefused):
                        await kill_tree(await call.control.link(call.principal, call.sandbox), process.id)
                    await asyncio.wait({following}, timeout=30)
            end = following.result() if following.done() else None
        finally:
            for task in (following, watching):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task
    shown: dict[str, Any] = {
        "id": process.id,
        "state": "running" if end is None else "exited",
        "pid": process.pid,
        "duration": round(time.perf_counter() - began, 6),
        "truncated": any(size > settings.most_output for size in sizes.values()),
        "timed_out": timed_out,
    }
    for stream in (1, 2):
        told = text_of(b"".join(kept[stream]))
        name = stream_name(stream)
        shown |= {name: told["data"], f"{name}_encoding": told["encoding"], f"{name}_size": sizes[stream]}
    if end is not None:
        if timed_out and end["cause"] in ("killed", "signaled"):
            end = {**end, "cause": "deadline", "detail": f"the command's time of {body.timeout:g} s was over"}
        shown |= end
        if body.ttl is not None:
            await call.service.commands.due(
                call.sandbox, process.id, "forget", body.ttl, call.principal.project
            )
    elif body.timeout is not None:
        rest = max(0.1, body.timeout - (time.perf_counter() - began))
        await call.service.commands.due(call.sandbox, process.id, "deadline", rest, call.principal.project)
    return Answer(200 if end is not None else 202, shown)


async def _input(call: Call, number: str, data: bytes, *, eof: bool) -> None:
    link = await call.control.link(call.principal, call.sandbox)
    # Attached without output: the reader, if there is one, is another.
    process = await link.attach(_id(number), output=False)
    try:
        async with asyncio.timeout(call.service.settings.most_wait):
            await process.write(data)
        if eof:
            await process.close_stdin()
    except TimeoutError:
        raise InvalidRequest("the command does not read its input", hint="send less, or attach") from None
    finally:
        await process.close()


def _id(number: str) -> str:
    if not is_id(number):
        raise NotFound(f"no command {number[:64]!r}", hint="ids are of A-Z a-z 0-9 . _ -")
    return number


def _shown(info: ProcessInfo) -> dict[str, Any]:
    code = info.code if info.signal is None else 128 + info.signal
    return {
        "id": info.id,
        "state": info.state,
        "pid": info.pid,
        "exit_code": code,
        "signal": info.signal,
        "stdout_end": info.stdout,
        "stderr_end": info.stderr,
        "command": info.argv0,
        "started_at": info.started_ns / 1e9,
    }


async def _find(call: Call) -> ProcessInfo:
    number = _id(call.params["process"])
    link = await call.control.link(call.principal, call.sandbox)
    for info in await link.processes():
        if info.id == number:
            return info
    raise NotFound(f"no command {number}", hint="it was never started, or its output was removed")


@routes.get(_BASE, answer=ProcessPage)
async def list_processes(call: Call) -> dict[str, Any]:
    """Commands that the sandbox knows."""
    link = await call.control.link(call.principal, call.sandbox)
    found = await link.processes()
    return {"items": [_shown(info) for info in found], "truncated": found.truncated}


@routes.get(_BASE + "/{process}", answer=Result)
async def show(call: Call) -> dict[str, Any]:
    """One command."""
    return _shown(await _find(call))


@routes.delete(_BASE + "/{process}", status=204)
async def remove(call: Call) -> None:
    """Kill a command with all its children, if it runs, and forget its output."""
    info = await _find(call)
    link = await call.control.link(call.principal, call.sandbox)
    if info.state == "running":
        call.service.commands.signalled(call.sandbox, info.id, 9)
        with contextlib.suppress(GuestRefused):
            await kill_tree(link, info.id)
        process = await link.attach(info.id, output=False)
        try:
            async with asyncio.timeout(30):
                await process.wait()
        finally:
            await process.close()
    await link.remove(info.id)
    await call.service.commands.undue(call.sandbox, info.id)


@routes.post(_BASE + "/{process}/kill", status=204)
async def kill(call: Call) -> None:
    """SIGKILL to a command, its process group and its descendants."""
    info = await _find(call)
    call.service.commands.signalled(call.sandbox, info.id, 9)
    await kill_tree(await call.control.link(call.principal, call.sandbox), info.id)


@routes.post(_BASE + "/{process}/signal", body=SendSignal, status=204)
async def signal(call: Call, body: SendSignal) -> None:
    """Send a signal."""
    number, name = signal_of(body.signal), _id(call.params["process"])
    link = await call.control.link(call.principal, call.sandbox)
    call.service.commands.signalled(call.sandbox, name, number)
    await link.signal(name, number, body.scope)


@routes.post(_BASE + "/{process}/stdin", body=SendInput, status=204)
async def stdin(call: Call, body: SendInput) -> None:
    """Write to a command's input."""
    await _input(call, call.params["process"], bytes_of(body.data, body.encoding), eof=body.eof)


@routes.post(_BASE + "/{process}/resize", body=Resize, status=204)
async def resize(call: Call, body: Resize) -> None:
    """Tell a command's terminal its size."""
    link = await call.control.link(call.principal, call.sandbox)
    process = await link.attach(_id(call.params["process"]), output=False)
    try:
        await process.resize(body.rows, body.columns)
    finally:
        await process.close()


@routes.get(_BASE + "/{process}/output", query=OutputQuery)
async def output(call: Call, query: OutputQuery) -> dict[str, Any]:
    """Output by offset: what is there, and after the end how it ended. `lost`: bytes that nobody kept."""
    info = await _find(call)
    link = await call.control.link(call.principal, call.sandbox)
    asked = (query.stdout_offset, query.stderr_offset)
    ends = (info.stdout, info.stderr)
    starts = tuple(min(offset, end) for offset, end in zip(asked, ends, strict=True))
    process = await link.attach(info.id, *starts)
    meter = call.service.commands.meter(call.sandbox)
    shown: dict[str, Any] = {"id": info.id}
    kept: dict[int, list[bytes]] = {1: [], 2: []}
    first: dict[int, int] = {}
    reached = {1: process.offsets[0], 2: process.offsets[1]}
    room = query.limit
    wait = query.wait if starts == ends and info.state == "running" else 30.0
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                async for piece in process:
                    data = piece.data[: min(room, await meter.take(min(room, len(piece.data))))]
                    first.setdefault(piece.stream, piece.offset)
                    kept[piece.stream].append(data)
                    reached[piece.stream] = piece.offset + len(data)
                    room -= len(data)
                    there = info.state == "running" and all(
                        reached[s] >= end for s, end in zip((1, 2), ends, strict=True)
                    )
                    if room <= 0 or there or len(data) < len(piece.data):
                        break
        ended = process.exit is not None and room > 0
        if ended:
            shown |= await call.service.commands.end(call.principal, call.sandbox, process)
    finally:
        await process.close()
    shown["state"] = "exited" if ended else info.state
    for stream, asked_for in zip((1, 2), asked, strict=True):
        begins = first.get(stream, reached[stream])
        lost = max(0, begins - asked_for)
        shown[stream_name(stream)] = {
            "offset": begins,
            "next_offset": reached[stream],
            "lost": lost,
            **text_of(b"".join(kept[stream])),
        }
    return shown


@routes.get(_BASE + "/{process}/stream", query=StreamQuery, answer="text/event-stream")
async def stream(call: Call, query: StreamQuery) -> Answer:
    """Output as server-sent events: `stdout`, `stderr`, then `exit`. An event's id is where to go on
    (`Last-Event-ID`). Reading moves nothing: any number may.
    """
    number = _id(call.params["process"])
    offsets = (query.stdout_offset, query.stderr_offset)
    if last := call.headers.get("last-event-id"):
        try:
            one, two = (int(part) for part in last.split("-"))
            offsets = (max(0, one), max(0, two))
        except ValueError:
            raise InvalidRequest("a Last-Event-ID of another stream", hint="leave it out") from None
    link = await call.control.link(call.principal, call.sandbox)
    process = await link.attach(number, *offsets)
    return events(call, _events(call, process, list(process.offsets)))


async def _events(call: Call, process: GuestProcess, at: list[int]) -> AsyncIterator[bytes]:
    commands = call.service.commands
    following = commands.follow(call.principal, call.sandbox, process)
    try:
        async with call.control.using(call.sandbox, call.principal.project):
            yield event("started", {"command_id": process.id, "pid": process.pid}, id=f"{at[0]}-{at[1]}")
            async for piece in following:
                if isinstance(piece, Output):
                    at[0 if piece.stream == STDOUT else 1] = piece.offset + len(piece.data)
                    told = {"offset": piece.offset, **text_of(piece.data)}
                    yield event(stream_name(piece.stream), told, id=f"{at[0]}-{at[1]}")
                else:
                    yield event("exit", piece, id=f"{at[0]}-{at[1]}")
    except RingfenceError as error:
        yield event("error", body_of(error, call.request_id)["error"])
    finally:
        await following.aclose()  # type: ignore[attr-defined]
        await process.close()
