"""Byte streams into the guest: vsock ports behind one unix socket (docs/vsock.md of Firecracker).

Every stream is a connection of its own: ``CONNECT PORT`` and a line break, answered by ``OK PORT`` if
somebody listens inside. The socket lies in the jail, whose owner is the monitor: no link is followed to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
from collections.abc import Callable

from ringfence.model.errors import HostLimit, LinkLost
from ringfence.runtimes.firecracker.api import dial

NAME = "vsock.sock"  # in the jail
CID = 3  # of every guest: each has a host of its own
AGENT, CONTROL = 1024, 1025  # ports inside
TIMEOUT = 5.0  # seconds of one handshake
_PAUSE = 0.02
_OK = re.compile(rb"OK \d{1,10}")
_MOST_ANSWER = 4096


async def connect(jail: str, port: int) -> socket.socket:
    """A stream to a port inside; non-blocking.

    Raises:
        OSError: nobody listens there (``ConnectionError``), or no answer in time (``TimeoutError``).
    """
    sock = dial(jail, NAME)
    try:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT):
            await loop.sock_sendall(sock, f"CONNECT {port}\n".encode())
            answer = b""
            # Byte by byte: what follows the line belongs to the guest's stream.
            while not answer.endswith(b"\n"):
                piece = await loop.sock_recv(sock, 1)
                if not piece or len(answer) > 32:
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens inside")
                answer += piece
        if not _OK.fullmatch(answer[:-1]):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"the answer is {answer!r}")
    except BaseException:
        sock.close()
        raise
    return sock


async def appear(jail: str, port: int, ended: Callable[[], bool], within: float) -> socket.socket:
    """The first connection: return as soon as somebody listens inside.

    Raises:
        ConnectionError: the machine ended before.
        TimeoutError: nobody did in time.
    """
    async with asyncio.timeout(within):
        while True:
            # A handshake of its own deadline may be lost while the guest's driver starts.
            with contextlib.suppress(OSError):
                return await connect(jail, port)
            if ended():
                raise ConnectionResetError(errno.ECONNRESET, "the machine has ended")
            await asyncio.sleep(_PAUSE)


async def call(jail: str, line: str, within: float = 10.0) -> str:
    """One call to the guest's first process (see ``vm.control``): the answer without its ``ok``.

    Raises:
        HostLimit: the guest refused; the message is its own.
        LinkLost: it does not answer in time.
    """
    loop = asyncio.get_running_loop()
    answer = b""
    try:
        async with asyncio.timeout(within):
            sock = await connect(jail, CONTROL)
            try:
                await loop.sock_sendall(sock, line.encode() + b"\n")
                while not answer.endswith(b"\n"):
                    piece = await loop.sock_recv(sock, _MOST_ANSWER)
                    if not piece or len(answer) > _MOST_ANSWER:
                        raise ConnectionResetError(errno.ECONNRESET, "it has ended")
                    answer += piece
            finally:
                sock.close()
    except OSError as error:
        raise LinkLost(f"the guest does not answer {line.split()[0]}: {error or 'in time'}") from error
    text = answer.decode(errors="replace").strip()
    if not text.startswith("ok"):
        raise HostLimit(f"the guest: {text[:200]}")
    return text[2:].strip()
