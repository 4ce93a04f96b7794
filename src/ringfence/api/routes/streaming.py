"""Commands over a WebSocket: start or attach, both streams by offset, input, resize, signals.

See docs/PROTOCOL.md, "The WebSocket of commands"; the golden transcripts in tests/golden/ws are examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import struct
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ringfence.api.calls import parse_query, wrong
from ringfence.api.commands import bytes_of, get_or_start, kill_tree, signal_of, stream_name, text_of
from ringfence.api.errors import body_of
from ringfence.api.routes.processes import Start, StreamQuery
from ringfence.api.routing import Routes
from ringfence.api.sockets import GOING_AWAY, Disconnected, Socket
from ringfence.api.types import Body, Seconds, Text
from ringfence.guest.processes import GuestProcess, Output, is_id
from ringfence.model.errors import GuestRefused, InvalidRequest, NotFound, RingfenceError

routes = Routes("streaming")
SUBPROTOCOL = "ringfence.v1"
_BINARY = struct.Struct(">BQ")  # stream (1 stdout, 2 stderr), offset; the bytes follow
_FIRST = 30.0  # seconds until the first frame
_SETTLE, _SETTLES = 0.05, 100  # seconds between two looks at what input was taken, looks at most
_WINDOW = 16  # frames of input that wait for the command
_END = object()


class Execute(Start):
    """The first frame of `execute`: a command, or the id of one that was started before."""

    type: Literal["execute"] = "execute"
    command_id: str | None = Field(None, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    stdout_offset: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stderr_offset: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    idle_timeout_seconds: Seconds | None = Field(
        None, description="Seconds without any client after which it is killed."
    )
    ttl_seconds: Seconds | None = None
    take_input: bool = Field(
        False,
        description="This client alone writes from now on: others are told to reconnect (1001), and what of "
        "their input the command has not taken is dropped.",
    )
    binary: bool = Field(False, description="Output as binary frames: stream, offset, bytes.")


class _Frame(Body):
    """A frame of the client."""

    type: Literal["input", "eof", "resize", "signal", "kill", "ping"]
    data: str = ""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    rows: Annotated[int, Field(ge=1, le=65535)] = 24
    columns: Annotated[int, Field(ge=1, le=65535)] = 80
    signal: Annotated[int, Field(ge=1, le=64)] | Text = "TERM"
    scope: Literal["group", "process"] = "group"


@routes.websocket("/v1/sandboxes/{sandbox}/execute")
async def execute(socket: Socket) -> None:
    """Start a command, or attach to it if its id is known, and stream it."""
    await socket.control.links.touch(socket.sandbox, socket.principal.project)
    await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope.get("subprotocols", ()) else None)
    try:
        async with asyncio.timeout(_FIRST):
            first = await socket.receive_json()
    except TimeoutError:
        raise InvalidRequest("no first frame", hint='{"type": "execute", "command": "…"}') from None
    asked = _parse(Execute, first)
    if asked.command_id is not None and asked.id is None:
        asked = asked.model_copy(update={"id": asked.command_id})
    offsets = (asked.stdout_offset, asked.stderr_offset)
    if asked.take_input and asked.id is not None:
        await socket.service.commands.evict(socket.sandbox, asked.id)
    link = await socket.control.link(socket.principal, socket.sandbox)
    if asked.argv is None and asked.command is None:
        if asked.id is None:
            raise InvalidRequest("neither a command nor a command_id", hint='"command": "…"')
        process, fresh = await _attach(socket, asked.id, offsets), False
    else:
        process, fresh = await get_or_start(link, asked.spec(attached=True), offsets)
    if asked.take_input and not fresh:
        process = await _alone(socket, process, offsets)
    session = _Session(socket, process, asked.binary)
    if fresh:
        session.kill_on_disconnect = asked.kill_on_disconnect
        session.ttl = asked.ttl_seconds or asked.ttl
        session.idle = asked.idle_timeout_seconds
        session.timeout = asked.timeout
        if asked.stdin is not None:
            await session.inputs.put(bytes_of(asked.stdin, asked.stdin_encoding))
            if not asked.keep_stdin:
                await session.inputs.put(None)
    await session.run(fresh)


@routes.websocket("/v1/sandboxes/{sandbox}/processes/{process}/attach", query=StreamQuery)
async def attach(socket: Socket) -> None:
    """Attach to a command by its id, from offsets on."""
    query: Any = parse_query(StreamQuery, socket.query)
    process = await _attach(socket, socket.params["process"], (query.stdout_offset, query.stderr_offset))
    try:
        await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope.get("subprotocols", ()) else None)
    except BaseException:
        await process.close()
        raise
    await _Session(socket, process, binary=False).run(fresh=False)


async def _attach(
    socket: Socket, number: str, offsets: tuple[int | None, int | None], *, alone: bool = False
) -> GuestProcess:
    if not is_id(number):
        raise NotFound(f"no command {number[:64]!r}", hint="ids are of A-Z a-z 0-9 . _ -")
    link = await socket.control.link(socket.principal, socket.sandbox)
    return await link.attach(number, *offsets, alone=alone)


async def _alone(
    socket: Socket, process: GuestProcess, offsets: tuple[int | None, int | None]
) -> GuestProcess:
    """Attached anew, as the only one that writes: from its `stdin_offset` on, whatever others (another
    process of the service that has not noticed yet that its client is gone) still send.
    """
    await process.close()
    try:
        return await _attach(socket, process.id, offsets, alone=True)
    except GuestRefused as error:
        if error.errno != errno.EINVAL:  # a guest of before
            raise
    return await _settled(socket, await _attach(socket, process.id, offsets), offsets)


async def _settled(
    socket: Socket, process: GuestProcess, offsets: tuple[int | None, int | None]
) -> GuestProcess:
    """Attached anew until its input stands still: what a process of ours that was killed had sent to the
    guest before is under way still, and counts as taken. (Those that live were told to stop.)
    """
    for _ in range(_SETTLES):
        before = process.stdin_offset
        await process.close()
        await asyncio.sleep(_SETTLE)
        process = await _attach(socket, process.id, offsets)
        if process.stdin_offset == before:
            break
    return process


def _parse(model: type[Body], value: dict[str, Any]) -> Any:
    import pydantic_core

    try:
        return model.model_validate_json(pydantic_core.to_json(value))
    except ValidationError as error:
        raise wrong(error, "the frame") from None


class _Session:
    """One client of one command."""

    def __init__(self, socket: Socket, process: GuestProcess, binary: bool) -> None:
        self.socket = socket
        self.process = process
        self.binary = binary
        self.kill_on_disconnect = False
        self.ttl: float | None = None
        self.idle: float | None = None
        self.timeout: float | None = None
        # Bounded: a command that does not read its input stops the client, as a full pipe would.
        self.inputs: asyncio.Queue[bytes | None] = asyncio.Queue(_WINDOW)
        self.evicted = process.displaced  # another client takes the input over
        self._timed_out = False
        self._ended = False

    async def run(self, fresh: bool) -> None:
        """Until the command has ended, or the client has gone."""
        socket, process = self.socket, self.process
        commands = socket.service.commands
        commands.joined(socket.sandbox, process.id, self)
        loop = asyncio.get_running_loop()
        jobs: list[asyncio.Task[Any]] = []
        gone = False
        try:
            if not fresh:
                await commands.undue_idle(socket.sandbox, process.id)
            elif self.timeout is not None:
                await commands.due(
                    socket.sandbox, process.id, "deadline", self.timeout, socket.principal.project
                )
            started = {"type": "started", "command_id": process.id, "pid": process.pid, "fresh": fresh}
            started["stdin_offset"] = process.stdin_offset  # where a client that was cut off goes on
            await socket.send_json(started)
            async with socket.control.using(socket.sandbox, socket.principal.project):
                jobs = [
                    loop.create_task(self._outputs()),
                    loop.create_task(self._frames()),
                    loop.create_task(socket.service.draining.wait()),
                    loop.create_task(self.evicted.wait()),
                    loop.create_task(self._feed()),
                ]
                await asyncio.wait(jobs[:4], return_when=asyncio.FIRST_COMPLETED)
                outputs, frames, draining = jobs[:3]
                if outputs.done():
                    outputs.result()
                elif frames.done():
                    frames.result()
                elif draining.done():
                    await socket.close(GOING_AWAY, "reload")
        except Disconnected:
            gone = True
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            # Before anybody hears that we are gone: who attaches next is told what input was taken.
            await process.close()
            await self._leave(gone)
            if self.evicted.is_set():
                await socket.close(GOING_AWAY, "reload")

    async def _leave(self, gone: bool) -> None:
        socket, number = self.socket, self.process.id
        commands = socket.service.commands
        last = commands.left(socket.sandbox, number, self)
        if self._ended:
            if self.ttl is not None:
                await commands.due(socket.sandbox, number, "forget", self.ttl, socket.principal.project)
            return
        if not last:
            return
        if gone and self.kill_on_disconnect:
            commands.signalled(socket.sandbox, number, 9)
            with contextlib.suppress(RingfenceError):
                await kill_tree(await socket.control.link(socket.principal, socket.sandbox), number)
        elif self.idle is not None:
            await commands.due(socket.sandbox, number, "kill", self.idle, socket.principal.project)

    async def _outputs(self) -> None:
        socket = self.socket
        following = socket.service.commands.follow(socket.principal, socket.sandbox, self.process)
        try:
            async for piece in following:
                if isinstance(piece, Output):
                    if self.binary:
                        await socket.send(_BINARY.pack(piece.stream, piece.offset) + piece.data)
                    else:
                        told = {
                            "type": stream_name(piece.stream),
                            "offset": piece.offset,
                            **text_of(piece.data),
                        }
                        await socket.send_json(told)
                else:
                    self._ended = True
                    await socket.send_json({"type": "exit", **piece})
                    await socket.close()
        finally:
            await following.aclose()  # type: ignore[attr-defined]

    async def _frames(self) -> None:
        while True:
            raw = await self.socket.receive()
            if isinstance(raw, bytes):
                await self.inputs.put(raw)
                continue
            try:
                await self._frame(raw)
            except GuestRefused as error:
                # A signal that came too late, no terminal: told, and the stream goes on.
                shown = body_of(error, self.socket.request_id)["error"]
                await self.socket.send_json(
                    {"type": "error", "error_type": error.code, "fatal": False, **shown}
                )

    async def _frame(self, raw: str) -> None:
        try:
            frame = _Frame.model_validate_json(raw)
        except ValidationError as error:
            raise wrong(error, "the frame") from None
        socket, process = self.socket, self.process
        if frame.type == "input":
            await self.inputs.put(bytes_of(frame.data, frame.encoding))
        elif frame.type == "eof":
            await self.inputs.put(None)
        elif frame.type == "resize":
            await process.resize(frame.rows, frame.columns)
        elif frame.type == "ping":
            await socket.send_json({"type": "pong"})
        else:
            link = await socket.control.link(socket.principal, socket.sandbox)
            number = 9 if frame.type == "kill" else signal_of(frame.signal)
            socket.service.commands.signalled(socket.sandbox, process.id, number)
            if frame.type == "kill":
                await kill_tree(link, process.id)
            else:
                await link.signal(process.id, number, frame.scope)

    async def _feed(self) -> None:
        while True:
            data = await self.inputs.get()
            try:
                if data is None:
                    await self.process.close_stdin()
                else:
                    await self.process.write(data)
            except RingfenceError:
                continue  # it has ended, or its input is closed: the exit frame tells the rest
