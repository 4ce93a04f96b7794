"""A server that answers what a test tells it to: for faults that no real service makes at will."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

DROP = "drop"  # take the request, answer nothing, close
Reply = Any


class Scripted:
    """Requests that came (method, path, headers, body), and the answers to give, the last one for ever."""

    def __init__(self, replies: list[Reply]) -> None:
        self.replies = replies
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
                body = await _body(reader, headers)
                self.requests.append((method, path, headers, body))
                reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
                if reply == DROP:
                    return
                status, value, more = (*reply, {})[:3]
                raw = value if isinstance(value, bytes) else json.dumps(value).encode()
                lines = [
                    f"HTTP/1.1 {status} X",
                    f"content-length: {len(raw)}",
                    *(f"{k}: {v}" for k, v in more.items()),
                ]
                writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body
    return await reader.readexactly(int(headers.get("content-length", 0)))


@asynccontextmanager
async def scripted(*replies: Reply) -> AsyncIterator[Scripted]:
    """One such server, on a port of its own."""
    server = Scripted(list(replies))
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(server.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.wait_closed()
