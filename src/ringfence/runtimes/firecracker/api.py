"""Firecracker's API: JSON over HTTP/1.1 on a unix socket (its src/firecracker/swagger/firecracker.yaml).

Only the calls that a machine without a network card needs. The server is the virtual machine monitor, which a
hostile guest may have taken over: answers are bounded, and only their status and ``fault_message`` are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import stat
from collections.abc import Mapping
from typing import Any

from ringfence.model.errors import LinkLost, RingfenceError

TIMEOUT = 10.0  # seconds of one call; creating or loading a snapshot has its own
MOST_HEAD, MOST_BODY = 16 << 10, 1 << 20
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |$)")
_LENGTH = re.compile(rb"^content-length:\s*(\d{1,9})\s*$", re.IGNORECASE | re.MULTILINE)


class Refused(RingfenceError):
    """Firecracker answered a call with a fault. ``message`` has its words, ``details`` the status."""

    code = "start_failed"


def dial(folder: str, name: str) -> socket.socket:
    """A non-blocking connection to a socket in a folder that the monitor can write: no link is followed.

    Raises:
        OSError: nobody listens, or what is there is no socket.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    place = os.open(folder, flags | os.O_DIRECTORY)
    try:
        found = os.open(name, flags, dir_fd=place)
    finally:
        os.close(place)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise ConnectionRefusedError("what is there is no socket")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(f"/proc/self/fd/{found}")
        except BaseException:
            sock.close()
            raise
    finally:
        os.close(found)
    return sock


class Api:
    """One machine's API: ``folder`` is the root of its jail, ``name`` the socket there."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder
        self.name = name

    async def put(self, path: str, body: Mapping[str, Any], *, within: float = TIMEOUT) -> None:
        """Configure or act.

        Raises:
            Refused: it said no, and why.
            LinkLost: it ended, or does not answer in time, or says what is no answer.
        """
        await self._call("PUT", path, body, within)

    async def patch(self, path: str, body: Mapping[str, Any], *, within: float = TIMEOUT) -> None:
        """Change a running machine. Raises: as :meth:`put`."""
        await self._call("PATCH", path, body, within)

    async def get(self, path: str, *, within: float = TIMEOUT) -> dict[str, Any]:
        """What it says of itself. Raises: as :meth:`put`."""
        answer = await self._call("GET", path, None, within)
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise LinkLost(f"Firecracker answers GET {path} with what is no object")
        return found

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, within: float) -> bytes:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(within):
                reader, writer = await asyncio.open_unix_connection(
                    sock=dial(self.folder, self.name), limit=MOST_HEAD
                )
                writer.write(_request(method, path, body))
                await writer.drain()
                status, answer = await _answer(reader)
        except TimeoutError:
            raise LinkLost(f"Firecracker does not answer {method} {path} within {within:g} s") from None
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            raise LinkLost(f"Firecracker ended, or is none, at {method} {path}: {error}") from error
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        if not 200 <= status < 300:
            raise Refused(f"Firecracker refuses {method} {path}: {fault(answer)}", status=status, call=path)
        return answer


def _request(method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
    content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"\r\n" + content


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = _STATUS.match(head), _LENGTH.search(head)
    if status is None:
        raise ValueError("no HTTP")
    number = int(status.group(1))
    size = int(length.group(1)) if length and number != 204 else 0
    if size > MOST_BODY:
        raise ValueError(f"an answer of {size} bytes")
    return number, await reader.readexactly(size) if size else b""


def fault(answer: bytes) -> str:
    """The words of a refusal: at most 300 printable characters."""
    text: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        text = json.loads(answer)
    if isinstance(text, dict):
        text = text.get("fault_message")
    words = text if isinstance(text, str) else answer.decode(errors="replace")
    return (
        "".join(letter if letter.isprintable() else " " for letter in words)[:300].strip()
        or "no reason given"
    )
