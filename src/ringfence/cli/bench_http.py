"""A small HTTP/1.1 client for measuring: one connection, nothing between us and the bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

_PIECE = 256 * 1024


class Connection:
    """One keep-alive connection. Only what our own servers answer is understood."""

    def __init__(self, host: str, port: int, key: str = "") -> None:
        self._host, self._port = host, port
        self._key = f"authorization: Bearer {key}\r\n" if key else ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> Connection:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2 * _PIECE)
        self._writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def close(self) -> None:
        """Let go. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def call(self, method: str, path: str, body: Any = None, headers: str = "") -> tuple[int, Any]:
        """A request with JSON in and out: status and document."""
        raw = b"" if body is None else json.dumps(body).encode()
        more = headers + ("content-type: application/json\r\n" if raw else "")
        status, data = await self.send(method, path, raw, more)
        return status, json.loads(data) if data else None

    async def send(self, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, bytes]:
        """A request: status and body."""
        size = await self._begin(method, path, body, headers)
        status, length = size
        reader = self._reader
        assert reader is not None
        if length is not None:
            return status, await reader.readexactly(length)
        return status, b"".join([piece async for piece in self._chunks()])

    async def drain(self, path: str, headers: str = "") -> tuple[int, int]:
        """A GET whose body is read and thrown away: status and size."""
        status, length = await self._begin("GET", path, b"", headers)
        reader = self._reader
        assert reader is not None
        size = 0
        if length is None:
            async for piece in self._chunks():
                size += len(piece)
            return status, size
        while size < length:
            piece = await reader.read(min(_PIECE, length - size))
            if not piece:
                raise ConnectionError("the body was cut off")
            size += len(piece)
        return status, size

    async def _begin(self, method: str, path: str, body: bytes, headers: str) -> tuple[int, int | None]:
        if self._writer is None:
            await self.open()
        reader, writer = self._reader, self._writer
        assert reader is not None
        assert writer is not None
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n{self._key}{headers}"
        head += f"content-length: {len(body)}\r\n\r\n"
        if len(body) <= _PIECE:
            writer.write(head.encode() + body)
        else:
            writer.write(head.encode())
            view = memoryview(body)
            for at in range(0, len(view), _PIECE):
                writer.write(view[at : at + _PIECE])
                await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length: int | None = 0
        for line in answer.split("\r\n")[1:]:
            name, _, value = line.partition(":")
            if name == "content-length":
                length = int(value)
            elif name == "transfer-encoding":
                length = None
        return int(answer.split(" ", 2)[1]), length

    async def _chunks(self) -> Any:
        reader = self._reader
        assert reader is not None
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
