"""Ports of a sandbox from outside: addresses with tokens for HTTP, and tunnels for everything else."""

from __future__ import annotations

import asyncio
import contextlib

from ringfence.model.errors import InvalidRequest, RingfenceError
from ringfence.sdk.transport import Transport

_CHUNK = 64 * 1024


class AsyncTunnel:
    """A local TCP port whose connections lead to a port inside. Close it, or use ``async with``.

    >>> async with AsyncSandbox.create() as sandbox:
    ...     server = await sandbox.start("python3 -m http.server 8000")
    ...     async with await sandbox.tunnel(8000) as tunnel:
    ...         print(tunnel.host, tunnel.port > 0)
    127.0.0.1 True
    """

    def __init__(self, transport: Transport, path: str, inside: int) -> None:
        self._transport = transport
        self._path = f"{path}/tunnel/{inside}"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._host = ""
        self._port = 0
        self._failure: RingfenceError | None = None

    @classmethod
    async def open(cls, transport: Transport, path: str, inside: int, host: str, port: int) -> AsyncTunnel:
        """Listen. Raises InvalidRequest: the local port can't be had."""
        tunnel = cls(transport, path, inside)
        try:
            tunnel._server = await asyncio.start_server(tunnel._accept, host, port)
        except OSError as error:
            raise InvalidRequest(
                f"{host}:{port}: {error.strerror}", hint="another local port, or 0 for any"
            ) from None
        tunnel._host, tunnel._port = tunnel._server.sockets[0].getsockname()[:2]
        return tunnel

    @property
    def host(self) -> str:
        """The address that it listens on."""
        return self._host

    @property
    def port(self) -> int:
        """The local port."""
        return self._port

    @property
    def failure(self) -> RingfenceError | None:
        """Why the last connection that could not be made was not; ``None`` if all could."""
        return self._failure

    async def close(self) -> None:
        """End it and all of its connections. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

    async def __aenter__(self) -> AsyncTunnel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._tasks.add(task)

        def done(_: object) -> None:
            self._tasks.discard(task)
            if not writer.transport.is_closing():  # it was cancelled before it began
                writer.transport.abort()

        task.add_done_callback(done)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            socket = await self._transport.connect(self._path)
        except BaseException as error:
            writer.transport.abort()
            if not isinstance(error, RingfenceError):
                raise
            self._failure = error
            return

        async def outward() -> None:
            while data := await reader.read(_CHUNK):
                await socket.send(data)
            await socket.send(b"")  # an empty message ends one half, as FIN does

        async def inward() -> None:
            while data := await socket.recv():
                writer.write(data if isinstance(data, bytes) else data.encode())
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        halves = [asyncio.ensure_future(outward()), asyncio.ensure_future(inward())]
        try:
            with contextlib.suppress(ConnectionClosed, ConnectionError):
                await asyncio.gather(*halves)
        finally:
            for half in halves:
                half.cancel()
            writer.close()  # before anything that a cancellation may cut short
            try:
                await asyncio.gather(*halves, return_exceptions=True)
                await socket.close()
            finally:
                socket.transport.abort()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
