"""The node's side of ``placement.local``: a unix socket, who may use it, calls and streams.

Only root, this process's own user and the API's may connect: the kernel says who they are (SO_PEERCRED). A
call whose connection is lost goes on to its end: everything is idempotent, and whoever asked asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ringfence.model.errors import (
    HostLimit,
    InvalidRequest,
    ProtocolViolation,
    RingfenceError,
)
from ringfence.node.troubles import host_limit
from ringfence.placement import wire
from ringfence.placement.calls import Calls
from ringfence.placement.values import VERSION, decode, encode, error_as_json
from ringfence.placement.wire import Connection

MOST_CALLS = 4096  # of one connection at a time
MOST_CONNECTIONS = 256
_CREDENTIALS = struct.Struct("3i")


class Server:
    """Serves one node's calls on one socket."""

    def __init__(self, calls: Calls, greeting: dict[str, Any], uids: frozenset[int]) -> None:
        self._calls = calls
        self._greeting = greeting
        self._uids = uids
        self._sessions: set[Session] = set()
        self._listener: socket.socket | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def listen(self, path: Path, *, owner: int | None = None) -> None:
        """Begin to listen; an old socket there is replaced.

        Args:
            path: of the socket. owner: a uid that it shall belong to, so that this user can connect.

        Raises:
            HostLimit: it can't be made.
        """
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(sock.fileno(), 0o600)  # Linux makes the file with the socket's own mode
            with _short(path) as short:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(short)
                sock.bind(short)
                if owner is not None and owner != os.geteuid():
                    os.chown(short, owner, -1)
            sock.listen(128)
        except OSError as error:
            sock.close()
            raise host_limit(error, f"listen on {path}") from error
        self._listener = sock
        loop.add_reader(sock.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            uid = _CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )[1]
            if uid not in self._uids or len(self._sessions) >= MOST_CONNECTIONS:
                print(f"ringfence node: user {uid} was refused", file=sys.stderr, flush=True)
                sock.close()
                continue
            self._sessions.add(Session(sock, self, self._calls, self._greeting))

    def forget(self, session: Session) -> None:
        """It has ended."""
        self._sessions.discard(session)

    def publish(self, name: str, id: str, data: dict[str, Any]) -> None:
        """Tell all who listen that something happened."""
        for session in list(self._sessions):
            session.tell({"name": name, "id": id, "data": data})

    async def close(self) -> None:
        """Stop listening and hang up. Calls under way are cancelled."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for session in list(self._sessions):
            session.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Session:
    """One connection."""

    def __init__(self, sock: socket.socket, server: Server, calls: Calls, greeting: dict[str, Any]) -> None:
        self._server = server
        self._calls = calls
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._listening: set[int] = set()
        self._inputs: dict[int, Input] = {}
        self._credits: dict[int, asyncio.Semaphore] = {}
        self._connection = Connection(sock, self._frame, self._ended, descriptors=False)
        self._connection.send(wire.RESULT, 0, encode(greeting))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def tell(self, event: dict[str, Any]) -> None:
        """Send what happened to those calls that wait for it."""
        for number in list(self._listening):
            self._connection.send(wire.DATA, number, encode(event))

    def _ended(self, error: Exception | None) -> None:
        self._server.forget(self)
        self._listening.clear()
        for stream in self._inputs.values():
            stream.end(InvalidRequest("the connection ended before the data did"))
        for number, task in list(self._tasks.items()):
            if number in self._credits:  # a stream that nobody reads any more; other work is done to its end
                task.cancel()

    def _frame(self, kind: int, number: int, payload: bytes, descriptor: int | None) -> None:
        if kind == wire.CALL:
            self._call(number, payload)
        elif kind == wire.CANCEL:
            self._listening.discard(number)
            task = self._tasks.get(number)
            if task is not None:
                task.cancel()
        elif kind in (wire.DATA, wire.END):
            stream = self._inputs.get(number)
            if stream is not None:
                stream.put(payload if kind == wire.DATA else None)
        elif kind == wire.CREDIT:
            if number in self._credits:
                self._credits[number].release()
        else:
            raise ProtocolViolation(f"a node gets no frames of kind {kind}")

    def _call(self, number: int, payload: bytes) -> None:
        if number in self._tasks or number in self._listening or len(self._tasks) >= MOST_CALLS:
            raise ProtocolViolation("too many calls at once, or a number twice")
        value = decode(payload)
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict)):
            raise ProtocolViolation("a call is a name and its arguments")
        name, arguments = value
        if name == "happened":
            self._listening.add(number)
            self._connection.send(wire.DATA, number, encode({"name": "listening", "id": "", "data": {}}))
            return
        if name in self._calls.receiving:  # now: its first data may have come in the same read
            self._inputs[number] = Input(self._connection, number)
        task = asyncio.get_running_loop().create_task(self._answer(number, str(name), arguments))
        self._tasks[number] = task
        self._server.tasks.add(task)
        task.add_done_callback(lambda task: self._done(number, task))

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        self._tasks.pop(number, None)
        self._inputs.pop(number, None)
        self._credits.pop(number, None)

    async def _answer(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        descriptor: int | None = None
        try:
            if name in self._calls.sending:
                await self._send_stream(number, self._calls.sending[name](arguments))
                result: Any = None
            elif name in self._calls.receiving:
                result = await self._calls.receiving[name](arguments, self._inputs[number])
            elif name == "connect":
                result, descriptor = None, await self._calls.connect(arguments)
            elif name in self._calls.plain:
                result = await self._calls.plain[name](arguments)
            else:
                raise InvalidRequest(f"a node has no call {name!r}", hint="is it of another version?")
            self._connection.send(wire.RESULT, number, encode(result), descriptor)
        except asyncio.CancelledError:
            error = InvalidRequest("the call was cancelled")
            self._connection.send(wire.ERROR, number, encode(error_as_json(error)))
            raise
        except RingfenceError as error:
            self._connection.send(wire.ERROR, number, encode(error_as_json(error)))
        except Exception as error:  # ours: said once here, and by its kind there
            traceback.print_exc()
            failed = HostLimit(f"the node failed: {type(error).__name__}", hint="its own messages say more")
            self._connection.send(wire.ERROR, number, encode(error_as_json(failed) | {"code": "internal"}))

    async def _send_stream(self, number: int, pieces: AsyncGenerator[bytes, None]) -> None:
        credit = self._credits[number] = asyncio.Semaphore(wire.WINDOW)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                for at in range(0, len(piece), wire.CHUNK):
                    await credit.acquire()
                    self._connection.send(wire.DATA, number, piece[at : at + wire.CHUNK])
                    await self._connection.drain()


class Input:
    """A stream that comes in: pieces, as many on their way as there is credit for."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._pieces: asyncio.Queue[bytes | RingfenceError | None] = asyncio.Queue()
        self._over = False

    def put(self, piece: bytes | None) -> None:
        """A piece came, or the end."""
        if self._pieces.qsize() > wire.WINDOW + 1:
            raise ProtocolViolation("more data than there was credit for")
        self._pieces.put_nowait(piece)

    def end(self, error: RingfenceError) -> None:
        """It won't come any more."""
        self._pieces.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._over:
            piece = await self._pieces.get()
            if isinstance(piece, RingfenceError):
                raise piece
            if piece is None:
                self._over = True
                return
            self._connection.send(wire.CREDIT, self._number)
            yield piece


@contextlib.contextmanager
def _short(path: Path) -> Any:
    """The path in a form that fits a ``sockaddr``."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def greeting_of(service: str, node: str) -> dict[str, Any]:
    """What each connection hears first."""
    return {"ringfence": "node", "version": VERSION, "service": service, "node": node, "pid": os.getpid()}


Plain = Callable[[dict[str, Any]], Awaitable[Any]]
Uids = Sequence[int]
