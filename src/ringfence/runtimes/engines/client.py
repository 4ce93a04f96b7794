"""The engine's HTTP API: a small client for the dozen calls that we need. One connection a call."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import quote, urlencode

from ringfence.model.errors import RuntimeUnavailable
from ringfence.runtimes.engines.endpoints import Endpoint
from ringfence.runtimes.launching.processes import readable

TIMEOUT = 30.0  # seconds for a call that does not say otherwise
_MOST_HEAD = 64 << 10
_MOST_BODY = 16 << 20  # of an answer: we ask for nothing large


class EngineError(Exception):
    """The engine said no. ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Client:
    """Calls of one engine."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def call(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        body: Any = None,
        *,
        within: float | None = TIMEOUT,
    ) -> Any:
        """A call; the answer's JSON, or None if it is empty. ``body`` is sent as JSON.

        Raises:
            EngineError: the engine refused. RuntimeUnavailable: it can't be reached, or hung.
        """
        data = b"" if body is None else json.dumps(body).encode("utf-8", "surrogateescape")
        return await self._call(method, path, query, "application/json", [data], len(data), within)

    async def upload(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None,
        parts: Iterable[bytes],
        *,
        within: float = 600.0,
    ) -> Any:
        """A call with a tar archive of unknown size; ``parts`` are made in a thread."""
        return await self._call(method, path, query, "application/x-tar", parts, None, within)

    async def hijack(self, path: str, query: dict[str, Any]) -> socket.socket:
        """A call that turns its connection into a stream; that stream's first byte is not read yet.

        Raises:
            EngineError: the engine refused. RuntimeUnavailable: it can't be reached.
        """
        sock = await self.endpoint.connect()
        try:
            head = (
                f"POST {_url(path, query)} HTTP/1.1\r\nHost: {self.endpoint.engine}\r\n"
                "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
            )
            await asyncio.get_running_loop().sock_sendall(sock, head.encode())
            async with asyncio.timeout(TIMEOUT):
                status, rest = await _hijacked_head(sock)
            if status not in (101, 200):
                raise EngineError(status, _message(rest) or f"attach answered {status}")
        except TimeoutError:
            sock.close()
            raise self._silent() from None
        except (OSError, ValueError) as error:
            sock.close()
            raise self._broken(error) from error
        except BaseException:
            sock.close()
            raise
        return sock

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None,
        kind: str,
        parts: Iterable[bytes],
        size: int | None,
        within: float | None,
    ) -> Any:
        sock = await self.endpoint.connect()
        try:
            async with asyncio.timeout(within):
                reader, writer = await asyncio.open_connection(sock=sock, limit=_MOST_HEAD)
                try:
                    length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
                    head = f"{method} {_url(path, query)} HTTP/1.1\r\nHost: {self.endpoint.engine}\r\n"
                    head += f"Connection: close\r\nContent-Type: {kind}\r\n{length}\r\n\r\n"
                    writer.write(head.encode())
                    if size is None:
                        await _send_chunks(writer, parts)
                    else:
                        writer.writelines(parts)
                    return await _answer(reader)
                finally:
                    writer.close()
        except TimeoutError:
            raise self._silent() from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise self._broken(error) from error

    def _silent(self) -> RuntimeUnavailable:
        return RuntimeUnavailable(
            f"{self.endpoint.engine} at {self.endpoint.text} does not answer",
            hint="look at the engine's log",
            runtime=self.endpoint.engine,
        )

    def _broken(self, error: Exception) -> RuntimeUnavailable:
        return RuntimeUnavailable(
            f"{self.endpoint.engine} at {self.endpoint.text} broke off: {error or type(error).__name__}",
            hint="look at the engine's log",
            runtime=self.endpoint.engine,
        )


def _url(path: str, query: dict[str, Any] | None) -> str:
    return quote(path) + ("?" + urlencode(query) if query else "")


async def _send_chunks(writer: asyncio.StreamWriter, parts: Iterable[bytes]) -> None:
    stream = iter(parts)
    try:
        while (part := await asyncio.to_thread(next, stream, None)) is not None:
            if not part:  # an empty chunk would be the end
                continue
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    except ConnectionError:
        pass  # the engine has said why before it hung up


async def _answer(reader: asyncio.StreamReader) -> Any:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = _status(lines[0])
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
    }
    body = bytearray()
    if status not in (204, 304):
        async for part in _body(reader, headers):
            body += part
            if len(body) > _MOST_BODY:
                raise ValueError("an answer of more than 16 MiB")
    if status >= 400:
        raise EngineError(status, _message(bytes(body)) or lines[0])
    if not body:
        return None
    if "json" not in headers.get("content-type", "json"):
        return bytes(body)
    try:
        return json.loads(body)
    except ValueError:
        return bytes(body)  # several objects, one a line: progress of a load
    except RecursionError:
        raise ValueError("an answer that nests without end") from None


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            if size > _MOST_BODY:
                raise ValueError("a chunk of more than 16 MiB")
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    if "content-length" in headers:
        size = int(headers["content-length"])
        if size > _MOST_BODY:
            raise ValueError("an answer of more than 16 MiB")
        yield await reader.readexactly(size)
        return
    while part := await reader.read(1 << 16):
        yield part


async def _hijacked_head(sock: socket.socket) -> tuple[int, bytes]:
    """Status and, of an error, the body. Not a byte beyond the head is read from a stream that is ours."""
    loop = asyncio.get_running_loop()
    head = b""
    while b"\r\n\r\n" not in head:
        await readable(sock.fileno())
        seen = sock.recv(_MOST_HEAD, socket.MSG_PEEK)
        if not seen or len(head) > _MOST_HEAD:
            raise ConnectionResetError("no answer")
        end = (head + seen).find(b"\r\n\r\n")
        head += sock.recv(len(seen) if end < 0 else end + 4 - len(head))
    status = _status(head.split(b"\r\n")[0].decode("latin-1"))
    if status in (101, 200):
        return status, b""
    return status, await loop.sock_recv(sock, 1 << 16)


def _status(line: str) -> int:
    words = line.split()
    if len(words) < 2 or not words[0].startswith("HTTP/"):
        raise ValueError("no answer in HTTP")
    return int(words[1])


def _message(body: bytes) -> str:
    start = body.find(b"{")
    if start < 0:
        return body.decode(errors="replace").strip()[:1000]
    try:
        found = json.loads(body[start : body.rfind(b"}") + 1])
    except (ValueError, RecursionError):
        return body.decode(errors="replace").strip()[:1000]
    return str(found.get("message") or found.get("cause") or "")[:1000] if isinstance(found, dict) else ""
