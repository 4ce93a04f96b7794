"""QEMU's machine protocol: one call, one answer, over the socket that QEMU listens on.

QEMU serves one caller at a time, so a connection is made for a few calls and given up again. Behind that
socket is a process that a hostile guest may have taken over: answers are bounded, and so is their time.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from ringfence.model.errors import HostLimit, LinkLost
from ringfence.runtimes.launching import sockets

NAME = "qmp.sock"
_MOST = 1 << 20  # bytes of one answer
TIMEOUT = 10.0  # seconds of one call
_NO_ANSWER = (OSError, TimeoutError, ValueError, RecursionError, AttributeError, KeyError, TypeError)


class Qmp:
    """A connection: ``async with await Qmp.open(folder) as qmp: await qmp.call("stop")``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    @classmethod
    async def open(cls, folder: str, within: float = TIMEOUT) -> Self:
        """Dial the machine of the sandbox in ``folder``.

        Raises:
            LinkLost: nobody listens, or does not answer in time.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        made = cls(sock)
        try:
            place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                async with asyncio.timeout(within):
                    await sockets.connect(sock, f"/proc/self/fd/{place}/{NAME}")
                    await made._line()  # the greeting
                    await made.call("qmp_capabilities")
            finally:
                os.close(place)
        except (OSError, TimeoutError, HostLimit, ValueError) as error:
            sock.close()
            raise LinkLost(
                f"the virtual machine does not answer: {error}", hint="destroy the sandbox"
            ) from error
        except BaseException:
            sock.close()
            raise
        return made

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next caller in."""
        self._sock.close()

    async def call(
        self, command: str, *, fds: Sequence[int] = (), within: float = TIMEOUT, **arguments: Any
    ) -> Any:
        """The answer to a command; descriptors go along with it.

        Raises:
            HostLimit: the machine refuses; the message is its own.
            LinkLost: it has ended, or does not answer in time.
        """
        request: dict[str, Any] = {"execute": command}
        if arguments:
            request["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
        text = json.dumps(request).encode() + b"\n"
        try:
            async with asyncio.timeout(within):
                if fds:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    self._sock.sendmsg([text], rights)  # short: it fits an empty socket
                else:
                    await asyncio.get_running_loop().sock_sendall(self._sock, text)
                while True:
                    answer = json.loads(await self._line())
                    if "return" in answer:
                        return answer["return"]
                    if "error" in answer:
                        raise HostLimit(f"QEMU, {command}: {str(answer['error'].get('desc', '?'))[:300]}")
        except _NO_ANSWER as error:
            raise LinkLost(f"the virtual machine does not answer {command}: {error}") from error

    async def _line(self) -> bytes:
        loop = asyncio.get_running_loop()
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MOST:
                raise ValueError("an answer without an end")
            got = await loop.sock_recv(self._sock, 65536)
            if not got:
                raise ConnectionResetError("it has ended")
            self._buffer += got
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line
