"""One command in a sandbox, followed over a WebSocket that may be lost and made again.

Every byte of output has an offset. What comes twice is dropped, and after a lost connection we ask from where
we were; so no byte is lost or doubled as long as the sandbox still keeps it (4 MiB a stream; while nobody
reads, the command waits). What was dropped there is counted in :attr:`AsyncProcess.lost`. Input is
counted too: after a reconnect it goes on from where the command had taken it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import (
    DeadlineExceeded,
    GuestRefused,
    LinkLost,
    NodeUnavailable,
    RingfenceError,
    WrongState,
)
from ringfence.sdk import failures, wire
from ringfence.sdk.failures import ServiceUnreachable
from ringfence.sdk.results import STREAMS, CommandResult, Output
from ringfence.sdk.transport import Retry, Transport

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Sink = Callable[[bytes], Any]
_HEAD = struct.Struct(">BQ")  # stream (1 stdout, 2 stderr) and offset of a binary frame
_PIECE = 64 * 1024  # bytes of input a frame
# Bytes of output a stream that the sandbox keeps: all that can be on its way to us in buffers when a
# connection breaks. Taken as it fills, not before.
_RING = 4 * 1024 * 1024
# Bytes of input kept for a reconnect: more than all queues on the way hold (kernels keep up to 10 MiB for
# each connection, and there may be a proxy in between). Taken as it fills.
_BACKLOG = 32 * 1024 * 1024
_PASSING = failures.PASSING | {"guest_error", "link_lost"}


class AsyncProcess:
    """A command. Iterate for its output, or :meth:`wait` for its end; one of them at a time.

    >>> async with AsyncSandbox.create() as sandbox:
    ...     process = await sandbox.start(["sh", "-c", "echo one; sleep 0.1; echo two"])
    ...     async for piece in process:
    ...         print(piece.text, end="")
    ...     print((await process.wait()).exit_code)
    one
    two
    0
    """

    def __init__(self, transport: Transport, path: str, id: str) -> None:
        self.id = id
        self._transport = transport
        self._sandbox = path
        self._path = f"{path}/processes/{wire.segment(id)}"
        self._spec: dict[str, Any] | None = None  # what to start, until it is known to have been
        self._socket: ClientConnection | None = None
        self._lock = asyncio.Lock()
        self._made = 0  # connections so far
        self._pid = 0
        self._reached = {1: 0, 2: 0}
        self._lost = 0
        self._end: Mapping[str, Any] | None = None
        self._input = bytearray()  # sent last, for a reconnect
        self._wrote = False  # any input, from here
        self._sent = 0  # bytes of input so far, with what others wrote before us
        self._given = 0  # of them, what this connection has
        self._closed_input = self._gave_end = False
        self._more, self._moved = asyncio.Event(), asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._rest: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}

    @classmethod
    async def begin(cls, transport: Transport, path: str, spec: Mapping[str, Any]) -> AsyncProcess:
        """Start a command; the same id again is the same command."""
        process = cls(transport, path, str(spec.get("id") or f"p-{uuid.uuid4().hex[:20]}"))
        process._spec = {name: value for name, value in spec.items() if name not in ("id", "stdin")}
        process._spec.setdefault("keep", _RING)
        if spec.get("stdin"):
            process._spec["keep_stdin"] = True
        await process._connected(0)
        return process

    @classmethod
    async def follow(
        cls, transport: Transport, path: str, id: str, stdout: int = 0, stderr: int = 0
    ) -> AsyncProcess:
        """A command that was started before, from these offsets on."""
        process = cls(transport, path, id)
        process._reached = {1: stdout, 2: stderr}
        await process._connected(0)
        return process

    @classmethod
    async def run_at_once(
        cls,
        transport: Transport,
        path: str,
        spec: Mapping[str, Any],
        stdin: bytes | str | None,
        timeout: float | None,
    ) -> CommandResult:
        """Run to the end in one request; over a stream if that takes longer than a request may."""
        number = f"p-{uuid.uuid4().hex[:20]}"
        body = {**spec, "id": number}
        if stdin is not None:
            text, encoding = wire.encoded(stdin)
            body |= {"stdin": text, "stdin_encoding": encoding}
        longest = 150.0 if timeout is None else min(timeout, 120.0) + 30.0
        try:
            value = await transport.call("POST", f"{path}/processes", json=body, timeout=longest)
        except (ServiceUnreachable, NodeUnavailable, LinkLost, DeadlineExceeded):
            # Whether it was started is not known. Its id is: the same id is never started twice.
            more = {**spec, "id": number, "stdin": stdin is not None}
            async with await cls.begin(transport, path, more) as process:
                return await process.communicate(stdin, None, None)
        result = wire.result(value)
        if value.get("state") != "running":
            missing = sum(
                max(0, int(value.get(f"{name}_size") or 0) - len(data))
                for name, data in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes))
            )
            return wire.with_lost(result, missing) if missing else result
        sizes = (int(value.get("stdout_size") or 0), int(value.get("stderr_size") or 0))
        async with await cls.follow(transport, path, number, *sizes) as process:
            process._rest = {1: bytearray(result.stdout_bytes), 2: bytearray(result.stderr_bytes)}
            process._lost = sum(sizes) - len(result.stdout_bytes) - len(result.stderr_bytes)
            return await process.wait()

    # -- what is known of it

    @property
    def pid(self) -> int:
        """Its process number inside (reported)."""
        return self._pid

    @property
    def offsets(self) -> tuple[int, int]:
        """Positions in stdout and stderr after what came so far: where to attach to go on."""
        return self._reached[1], self._reached[2]

    @property
    def lost(self) -> int:
        """Bytes of output that were dropped before we could have them."""
        return self._lost

    @property
    def ended(self) -> bool:
        """Whether its end is known here."""
        return self._end is not None

    # -- output

    def __aiter__(self) -> AsyncProcess:
        return self

    async def __anext__(self) -> Output:
        """The next piece of output.

        Raises:
            ServiceUnreachable: the connection was lost and can't be made again.
        """
        piece = await self._piece()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def wait(self, timeout: float | None = None) -> CommandResult:
        """How it ended; with the output that nobody has iterated over.

        Raises:
            DeadlineExceeded: it has not, within ``timeout`` seconds. It goes on.
        """
        try:
            async with asyncio.timeout(timeout):
                while (piece := await self._piece()) is not None:
                    self._rest[1 if piece.stream == "stdout" else 2] += piece.data
        except TimeoutError:
            raise DeadlineExceeded(
                f"process {self.id} has not ended within {timeout:g} s",
                hint="it goes on; kill it, or wait again",
            ) from None
        assert self._end is not None
        return wire.result(
            {**self._end, "id": self.id}, bytes(self._rest[1]), bytes(self._rest[2]), self._lost
        )

    async def communicate(
        self, stdin: bytes | str | None = None, on_stdout: Sink | None = None, on_stderr: Sink | None = None
    ) -> CommandResult:
        """Give it all of its input, take all of its output, and return how it ended."""
        data = stdin.encode() if isinstance(stdin, str) else stdin

        async def feed() -> None:
            with suppress(WrongState):  # it need not read to the end
                if data:
                    await self.write(data)
                await self.close_stdin()

        feeding = asyncio.ensure_future(feed())
        try:
            while (piece := await self._piece()) is not None:
                stream = 1 if piece.stream == "stdout" else 2
                self._rest[stream] += piece.data
                sink = on_stdout if stream == 1 else on_stderr
                if sink is not None and inspect.isawaitable(answer := sink(piece.data)):
                    await answer
        finally:
            feeding.cancel()
            with suppress(asyncio.CancelledError, RingfenceError):
                await feeding
        return await self.wait()

    async def stdout(self) -> AsyncIterator[bytes]:
        """Only its output, without its errors."""
        async for piece in self:
            if piece.stream == "stdout":
                yield piece.data

    async def _piece(self) -> Output | None:
        while self._end is None:
            made = self._made
            frame = await self._frame(made)
            if frame is None:
                await self._connected(made)
            elif isinstance(frame, bytes):
                stream, offset = _HEAD.unpack_from(frame)
                if (piece := self._taken(stream, offset, frame[_HEAD.size :])) is not None:
                    return piece
            elif (piece := self._told(json.loads(frame))) is not None:
                return piece
        await self.close()
        return None

    async def _frame(self, made: int) -> str | bytes | None:
        """The next message; ``None`` if the connection was lost."""
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            return None
        try:
            return await self._socket.recv()
        except ConnectionClosed:
            return None

    def _taken(self, stream: int, offset: int, data: bytes) -> Output | None:
        """The part of it that is new."""
        if stream not in self._reached:
            return None
        known = self._reached[stream]
        if offset < known:
            data, offset = data[known - offset :], known
        elif offset > known:
            self._lost += offset - known
        if not data:
            return None
        self._reached[stream] = offset + len(data)
        return Output(STREAMS[stream], offset, data)

    def _told(self, frame: Mapping[str, Any]) -> Output | None:
        kind = frame.get("type")
        if kind in ("stdout", "stderr"):  # from a service that speaks no binary frames
            stream = 1 if kind == "stdout" else 2
            return self._taken(stream, int(frame.get("offset") or 0), wire.data_of(frame))
        if kind == "exit":
            self._end = frame
        elif kind == "error" and frame.get("fatal") is not False:
            error = failures.from_object(frame)
            if error.code not in _PASSING:
                raise error  # the others end the connection, and we make a new one
        return None

    # -- input

    async def write(self, data: bytes | str) -> None:
        """Write to its input, as fast as it takes it.

        Raises:
            WrongState: the input was closed, or the command has ended.
        """
        raw = memoryview(data.encode() if isinstance(data, str) else data)
        while raw:
            if self._closed_input or self._end is not None:
                raise WrongState(f"process {self.id} takes no input any more")
            piece = raw[:_PIECE]
            raw = raw[len(piece) :]
            self._wrote = True
            self._input += piece
            self._sent += len(piece)
            if len(self._input) > _BACKLOG:
                del self._input[: len(self._input) - _BACKLOG]
            await self._delivered(lambda: self._given >= self._sent)

    async def close_stdin(self) -> None:
        """End its input. Idempotent."""
        if not self._closed_input and self._end is None:
            self._closed_input = True
            await self._delivered(lambda: self._gave_end)

    async def _delivered(self, done: Callable[[], bool]) -> None:
        """Return when the connection has taken what it is to; made anew if it gets lost."""
        while not done() and self._end is None:
            made, pump = self._made, self._pump
            if pump is None or pump.done():
                await self._connected(made)
                continue
            self._more.set()
            moved = asyncio.ensure_future(self._moved.wait())
            try:
                await asyncio.wait({moved, pump}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()
            self._moved.clear()

    async def _pumping(self, socket: ClientConnection) -> None:
        """Give one connection the input, beside the reading of output: a command that waits for its reader
        does not read.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                while self._given < self._sent:
                    at = self._given - (self._sent - len(self._input))
                    piece = bytes(self._input[at : at + _PIECE])
                    await socket.send(piece)
                    self._given += len(piece)
                    self._moved.set()
                if self._closed_input and not self._gave_end:
                    await socket.send(_EOF)
                    self._gave_end = True
                    self._moved.set()
                self._more.clear()
                await self._more.wait()
        except ConnectionClosed:
            return

    # -- signals

    async def signal(self, signal: int | str, *, scope: str = "group") -> None:
        """Send a signal (``"TERM"``, ``15``) to its ``group`` or to the ``process`` alone.

        Raises:
            GuestRefused: it has ended (ESRCH).
        """
        body = {"signal": signal, "scope": scope}
        await self._transport.call("POST", f"{self._path}/signal", json=body)

    async def kill(self) -> None:
        """SIGKILL to it and all that descends from it. That it has ended is no error."""
        with suppress(GuestRefused):
            await self._transport.call("POST", f"{self._path}/kill", safe=True)

    async def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal its new size."""
        await self._transport.call(
            "POST", f"{self._path}/resize", json={"rows": rows, "columns": columns}, safe=True
        )

    async def remove(self) -> None:
        """Kill it if it runs, and forget its output."""
        await self.close()
        await self._transport.call("DELETE", self._path)

    async def close(self) -> None:
        """Let go of it; it goes on. Idempotent."""
        socket, self._socket = self._socket, None
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        if socket is not None:
            await socket.close()

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    # -- the connection

    async def _connected(self, lost: int) -> None:
        """A new connection in place of the one with this number; whoever comes first makes it."""
        async with self._lock:
            if self._made != lost or self._end is not None:
                return
            await self.close()
            retry = Retry(self._transport.settings.retry_for)
            while True:
                try:
                    await self._connect()
                    self._made += 1
                    return
                except (RingfenceError, EOFError) as error:
                    await self.close()
                    passing = isinstance(error, EOFError) or error.code in _PASSING
                    if not passing or not retry.allows():
                        raise (
                            self._transport.unreachable(error) if isinstance(error, EOFError) else error
                        ) from None
                except BaseException:
                    await self.close()
                    raise
                await retry.pause()

    async def _connect(self) -> None:
        from websockets.exceptions import ConnectionClosed

        first = {
            "type": "execute",
            "command_id": self.id,
            "stdout_offset": self._reached[1],
            "stderr_offset": self._reached[2],
            "binary": True,
            **({"take_input": True} if self._wrote or self._closed_input else {}),
            **(self._spec or {}),
        }
        try:
            text = json.dumps(first, ensure_ascii=False).encode().decode()
        except UnicodeEncodeError as error:
            raise failures.not_utf8(error) from None
        socket = self._socket = await self._transport.connect(f"{self._sandbox}/execute")
        try:
            await socket.send(text)
            answer = json.loads(await socket.recv())
            if answer.get("type") == "error":
                raise failures.from_object(answer)
            self._spec = None
            self._pid = int(answer.get("pid") or 0)
            self._go_on(socket, int(answer.get("stdin_offset") or 0))
        except ConnectionClosed as error:
            raise EOFError(str(error)) from None

    def _go_on(self, socket: ClientConnection, taken: int) -> None:
        """Input goes on from where the command has taken it."""
        if not self._wrote:
            self._sent = taken
        missing = self._sent - taken
        if missing > len(self._input):
            raise LinkLost(
                f"{missing - len(self._input)} bytes of input of process {self.id} were lost on the way",
                hint="start the command again",
            )
        self._given = min(taken, self._sent)
        self._gave_end = False
        self._pump = asyncio.ensure_future(self._pumping(socket))


_EOF = json.dumps({"type": "eof"})
