"""A TCP relay in front of a service that cuts connections when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Relay:
    """``cut()`` resets every connection; ``after``: each is cut after so many bytes, ``cuts`` times."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open: set[asyncio.StreamWriter] = set()
        self.after: int | None = None
        self.cuts = 0  # how many more connections are cut by themselves
        self.done = 0  # how many were
        self.refusing = False
        self.spoil: tuple[bytes, bytes] | None = None  # once, on the way to the client: this becomes that
        self.url = ""

    def cut(self) -> int:
        """Reset every connection; how many there were."""
        found = len(self._open)
        for writer in list(self._open):
            writer.transport.abort()
        return found

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, up_writer}
        try:
            await asyncio.gather(self._copy(reader, up_writer), self._copy(up_reader, writer, count=True))
        except (OSError, ConnectionError):
            pass
        finally:
            for each in (writer, up_writer):
                self._open.discard(each)
                each.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool = False
    ) -> None:
        sent = 0
        while data := await reader.read(16384):
            if count and self.spoil is not None and self.spoil[0] in data:
                data, self.spoil = data.replace(*self.spoil, 1), None
            writer.write(data)
            await writer.drain()
            sent += len(data)
            if count and self.after is not None and sent > self.after and self.cuts > 0:
                self.cuts -= 1
                self.done += 1
                raise ConnectionResetError("the test cuts it")
        with suppress(OSError):
            writer.write_eof()


@asynccontextmanager
async def relay(url: str) -> AsyncIterator[Relay]:
    """One in front of the service at ``url``."""
    parts = urlsplit(url)
    made = Relay(parts.hostname or "", parts.port or 0)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(made.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        made.cut()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
