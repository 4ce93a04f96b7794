"""Calls to the guest's first process: what only its kernel can do (clock, names, freezing, counters).

One line each way over a port of its own; no process of the workload may open it. What comes back was said by
the guest: it may lie, so nothing that the host decides by itself rests on it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time

from ringfence.model.errors import HostLimit, LinkLost
from ringfence.runtimes.launching import sockets

NAME = "control.sock"
TIMEOUT = 10.0  # seconds of one call
_MOST = 4096


async def call(folder: str, line: str, within: float = TIMEOUT) -> str:
    """The answer to one line, without its ``ok``.

    Raises:
        HostLimit: the guest refused; the message is its own.
        LinkLost: it does not answer in time.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    loop = asyncio.get_running_loop()
    try:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            async with asyncio.timeout(within):
                await sockets.connect(sock, f"/proc/self/fd/{place}/{NAME}")
                # What a caller before us did not wait for must not be taken for our answer.
                mark = secrets.token_hex(8)
                await loop.sock_sendall(sock, f"echo {mark}\n{line}\n".encode())
                answer = b""
                head = f"ok {mark}\n".encode()
                while head not in answer or not answer.partition(head)[2].endswith(b"\n"):
                    got = await loop.sock_recv(sock, _MOST)
                    if not got or len(answer) > _MOST:
                        raise ConnectionResetError("it has ended")
                    answer += got
        finally:
            os.close(place)
    except (OSError, TimeoutError) as error:
        raise LinkLost(f"the guest does not answer {line.split()[0]}: {error or 'in time'}") from error
    finally:
        sock.close()
    text = answer.partition(head)[2].decode(errors="replace").strip()
    if not text.startswith("ok"):
        raise HostLimit(f"the guest: {text[:200]}")
    return text[2:].strip()


async def wake(folder: str, hostname: str) -> None:
    """Give a restored guest an identity of its own, and the time; then wake its agent."""
    now = time.time_ns()
    for line in (
        f"hostname {hostname}",
        f"machine-id {secrets.token_hex(16)}",
        f"seed {secrets.token_hex(64)}",
        f"clock {now // 10**9} {now % 10**9}",
    ):
        await call(folder, line)
    await call(folder, "wake")
