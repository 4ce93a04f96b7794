"""A node on this machine, over its unix socket.

One connection carries any number of calls. A lost one is dialled anew, and what was under way is asked again
for a few seconds: every call is idempotent. After that: NodeUnavailable.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ringfence.model import errors
from ringfence.model.errors import NodeUnavailable, ProtocolViolation
from ringfence.placement import wire
from ringfence.placement.contract import Capacity, Happened, Placed, PlacedSpec
from ringfence.placement.values import (
    VERSION,
    decode,
    encode,
    placed_from_json,
    spec_as_json,
)
from ringfence.placement.wire import Connection

PATIENCE = 3.0  # seconds that a node may be gone before a call gives up
_GREETING = 20.0  # seconds that a node may take to say who it is
_LARGEST = 256 << 20  # bytes of an answer: a list of a hundred thousand sandboxes
_Result = TypeVar("_Result")


class _Lost(Exception):
    """The connection ended while a call was under way."""


class LocalPlacement:
    """See the contract. ``patience``: seconds that a call waits for a node that is gone to come back."""

    name = "local"

    def __init__(self, socket_path: str | os.PathLike[str], *, patience: float = PATIENCE) -> None:
        self.path = Path(socket_path)
        self.node = ""
        self.service = ""
        self._patience = patience
        self._link: _Link | None = None
        self._dialling: asyncio.Lock = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        """See the contract."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    async def __aenter__(self) -> LocalPlacement:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- calls

    async def _connected(self) -> _Link:
        link = self._link
        if link is not None and not link.ended:
            return link
        async with self._dialling:
            if self._closed:
                raise NodeUnavailable("this placement is closed", hint="open another one")
            if self._link is None or self._link.ended:
                self._link = link = await _Link.dial(self.path)
                self.node, self.service = str(link.greeting.get("node")), str(link.greeting.get("service"))
            return self._link

    async def _call(self, call: str, /, **arguments: Any) -> Any:
        return (await self._ask(call, arguments))[0]

    async def _ask(self, name: str, arguments: dict[str, Any]) -> tuple[Any, int | None]:
        loop = asyncio.get_running_loop()
        until, pause = 0.0, 0.01
        while True:
            try:
                link = await self._connected()
                return await link.call(name, arguments)
            except (_Lost, OSError) as error:
                until = until or loop.time() + self._patience
                if self._closed or loop.time() + pause > until:
                    raise NodeUnavailable(
                        f"the node at {self.path} does not answer: {_reason(error)}",
                        hint="is `ringfence node` (or `ringfence serve`) running?",
                    ) from None
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)

    async def capacity(self) -> Capacity:
        """See the contract."""
        return Capacity(**await self._call("capacity"))

    async def runtimes(self) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return await self._call("runtimes")  # type: ignore[no-any-return]

    async def start(self, spec: PlacedSpec) -> Placed:
        """See the contract."""
        return placed_from_json(await self._call("start", spec=spec_as_json(spec)))

    async def list(self) -> Sequence[Placed]:
        """See the contract."""
        return [placed_from_json(each) for each in await self._call("list")]

    async def get(self, id: str) -> Placed:
        """See the contract."""
        return placed_from_json(await self._call("get", id=id))

    async def measure(self, id: str) -> Mapping[str, Any]:
        """See the contract."""
        return await self._call("measure", id=id)  # type: ignore[no-any-return]

    async def usage(self, id: str) -> Mapping[str, Any]:
        """See the contract."""
        return await self._call("usage", id=id)  # type: ignore[no-any-return]

    async def connect(self, id: str) -> socket.socket:
        """See the contract."""
        _, descriptor = await self._ask("connect", {"id": id})
        if descriptor is None:
            raise ProtocolViolation("the node sent no descriptor")
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        return sock

    async def spent(self, id: str, output: int) -> int:
        """See the contract."""
        return int(await self._call("spent", id=id, output=output))

    async def judge(self, id: str, exit_code: int, *, sent: bool = False) -> Mapping[str, Any]:
        """See the contract."""
        return await self._call("judge", id=id, exit_code=exit_code, sent=sent)  # type: ignore[no-any-return]

    async def bind(
        self,
        id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes] | None = None,
        owner: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        policy: Mapping[str, Any] | None = None,
        deadline: float | None = None,
    ) -> Placed:
        """See the contract."""
        arguments: dict[str, Any] = {"id": id, "env": env, "owner": owner, "labels": labels}
        arguments |= {"policy": policy, "deadline": deadline}
        if secrets is not None:
            arguments["secrets"] = {key: base64.b64encode(each).decode() for key, each in secrets.items()}
        given = {key: each for key, each in arguments.items() if each is not None}
        return placed_from_json(await self._call("bind", **given))

    async def pause(self, id: str) -> None:
        """See the contract."""
        await self._call("pause", id=id)

    async def resume(self, id: str) -> None:
        """See the contract."""
        await self._call("resume", id=id)

    async def snapshot(self, id: str, name: str, kind: str | None = None) -> Mapping[str, Any]:
        """See the contract."""
        return await self._call("snapshot", id=id, name=name, kind=kind)  # type: ignore[no-any-return]

    async def remove_snapshot(self, name: str) -> None:
        """See the contract."""
        await self._call("remove_snapshot", name=name)

    async def reset(self, id: str, *, hold: bool = False) -> Placed:
        """See the contract."""
        return placed_from_json(await self._call("reset", id=id, hold=hold))

    async def bring_up(self, id: str) -> Placed:
        """See the contract."""
        return placed_from_json(await self._call("bring_up", id=id))

    async def changes(self, id: str) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return await self._call("changes", id=id)  # type: ignore[no-any-return]

    async def destroy(self, id: str, *, grace: float = 0.0) -> Mapping[str, Any]:
        """See the contract."""
        return await self._call("destroy", id=id, grace=grace)  # type: ignore[no-any-return]

    async def happened(self) -> AsyncIterator[Happened]:
        """See the contract."""
        pause, known = 0.01, True
        while not self._closed:
            try:
                link = await self._connected()
                async with contextlib.aclosing(link.listen("happened")) as events:
                    async for event in events:
                        pause = 0.01
                        if event["name"] == "listening":
                            known = True
                            yield Happened("back", "")
                        else:
                            yield Happened(event["name"], event["id"], event["data"])
            except (_Lost, OSError, NodeUnavailable):
                if known and not self._closed:
                    known = False
                    yield Happened("lost", "")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    # -- templates and volumes

    async def templates(self) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return await self._call("templates")  # type: ignore[no-any-return]

    async def add_template(self, source: str, name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See the contract."""
        return await self._call(  # type: ignore[no-any-return]
            "add_template", source=source, name=name, options=dict(options)
        )

    async def remove_template(self, name: str) -> None:
        """See the contract."""
        await self._call("remove_template", name=name)

    async def make_volume(self, id: str, quota: int) -> None:
        """See the contract."""
        await self._call("make_volume", id=id, quota=quota)

    async def remove_volume(self, id: str) -> None:
        """See the contract."""
        await self._call("remove_volume", id=id)

    async def volume_size(self, id: str) -> int:
        """See the contract."""
        return int(await self._call("volume_size", id=id))

    async def export_volume(self, id: str) -> AsyncIterator[bytes]:
        """See the contract. Not asked again when the connection is lost in the middle."""
        try:
            link = await self._connected()
            async with contextlib.aclosing(link.receive("export_volume", {"id": id})) as pieces:
                async for piece in pieces:
                    yield piece
        except (_Lost, OSError) as error:
            raise NodeUnavailable(f"the node went away: {_reason(error)}", hint="begin again") from None

    async def import_volume(self, id: str, tar: AsyncIterator[bytes] | Path) -> None:
        """See the contract. Not asked again when the connection is lost in the middle."""
        try:
            link = await self._connected()
            await link.feed("import_volume", {"id": id}, _pieces(tar))
        except (_Lost, OSError) as error:
            raise NodeUnavailable(f"the node went away: {_reason(error)}", hint="begin again") from None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or "the connection was lost"


async def _pieces(tar: AsyncIterator[bytes] | Path) -> AsyncIterator[bytes]:
    if not isinstance(tar, Path):
        async for piece in tar:
            yield piece
        return
    with tar.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, wire.CHUNK):
            yield piece


async def _next(source: AsyncIterator[bytes]) -> bytes | None:
    return await anext(source, None)


async def _unless(answer: asyncio.Future[Any], work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """What the work gives, or None as soon as there is an answer: then nobody needs it any more."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, answer}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _forget(future: asyncio.Future[Any]) -> None:
    """Nobody wants to know what becomes of it."""
    if not future.done():
        future.cancel()
    elif not future.cancelled():
        future.exception()


class _Link:
    """One connection to a node."""

    def __init__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.greeting: dict[str, Any] = {}
        self.ended = False
        self._numbers = itertools.count(1)
        self._hello: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._waiting: dict[int, asyncio.Future[tuple[Any, int | None]]] = {}
        self._streams: dict[int, asyncio.Queue[bytes | None]] = {}
        self._credits: dict[int, asyncio.Semaphore] = {}
        self._connection = Connection(sock, self._frame, self._end, descriptors=True, largest=_LARGEST)

    @classmethod
    async def dial(cls, path: Path) -> _Link:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
        except BaseException:
            sock.close()
            raise
        link = cls(sock)
        try:
            async with asyncio.timeout(_GREETING):
                link.greeting = await link._hello
        except BaseException as error:
            link.close()
            if isinstance(error, TimeoutError):
                raise _Lost("it accepts connections, but does not speak") from None
            raise
        if link.greeting.get("ringfence") != "node" or link.greeting.get("version") != VERSION:
            link.close()
            raise NodeUnavailable(
                f"{path} is no node of this version", hint="run the same Ringfence on both sides"
            )
        return link

    def close(self) -> None:
        self._connection.close()

    def _end(self, error: Exception | None) -> None:
        self.ended = True
        lost = _Lost(str(error) if error is not None else "the connection was closed")
        futures: list[asyncio.Future[Any]] = [self._hello, *self._waiting.values()]
        for future in futures:
            if not future.done():
                future.set_exception(lost)
                future.exception()  # somebody may have stopped waiting
        self._waiting.clear()
        for stream in self._streams.values():
            stream.put_nowait(None)
        for credit in self._credits.values():
            credit.release()

    def _frame(self, kind: int, number: int, payload: bytes, descriptor: int | None) -> None:
        if kind == wire.DATA and number in self._streams:
            self._streams[number].put_nowait(payload)
            return
        if kind == wire.CREDIT:
            if number in self._credits:
                self._credits[number].release()
            return
        if kind == wire.RESULT and number == 0 and not self._hello.done():
            self._hello.set_result(decode(payload))
            return
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            if descriptor is not None:
                os.close(descriptor)
            return
        if kind == wire.RESULT:
            future.set_result((decode(payload), descriptor))
        elif kind == wire.ERROR:
            future.set_exception(errors.from_dict(decode(payload)))
        else:
            raise ProtocolViolation(f"a client gets no frames of kind {kind}")
        if number in self._streams:
            self._streams[number].put_nowait(None)

    def _begin(self, name: str, arguments: dict[str, Any]) -> tuple[int, asyncio.Future[Any]]:
        if self.ended:
            raise _Lost
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._connection.send(wire.CALL, number, encode([name, arguments]))
        return number, future

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[Any, int | None]:
        number, future = self._begin(name, arguments)
        try:
            return await future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self._cancel(number)
            if future.done() and not future.cancelled() and future.exception() is None:
                descriptor = future.result()[1]
                if descriptor is not None:
                    os.close(descriptor)
            raise

    def _cancel(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self._connection.send(wire.CANCEL, number)

    async def listen(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Events until the connection is lost."""
        number = next(self._numbers)
        queue = self._streams[number] = asyncio.Queue()
        try:
            if self.ended:
                raise _Lost
            self._connection.send(wire.CALL, number, encode([name, {}]))
            while (data := await queue.get()) is not None:
                yield decode(data)
            raise _Lost
        finally:
            del self._streams[number]
            self._connection.send(wire.CANCEL, number)

    async def receive(self, name: str, arguments: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """A stream that the node sends."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        number, future = self._begin(name, arguments)
        self._streams[number] = queue
        try:
            while (data := await queue.get()) is not None:
                self._connection.send(wire.CREDIT, number)
                yield data
            await future
        finally:
            del self._streams[number]
            self._cancel(number)
            _forget(future)

    async def feed(self, name: str, arguments: dict[str, Any], pieces: AsyncIterator[bytes]) -> Any:
        """A stream that the node gets."""
        number, future = self._begin(name, arguments)
        credit = self._credits[number] = asyncio.Semaphore(wire.WINDOW)
        source = aiter(pieces)
        try:
            while (piece := await _unless(future, _next(source))) is not None:
                for at in range(0, len(piece), wire.CHUNK):
                    if not await _unless(future, credit.acquire()):
                        break
                    self._connection.send(wire.DATA, number, piece[at : at + wire.CHUNK])
            if not future.done():
                self._connection.send(wire.END, number)
            return (await future)[0]
        finally:
            del self._credits[number]
            self._cancel(number)
            _forget(future)
