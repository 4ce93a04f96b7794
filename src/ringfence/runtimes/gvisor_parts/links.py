"""The agent's socket behind gVisor: made by the agent inside, in a folder that is shown for it alone.

Whoever owns the wall owns that folder: a socket is only dialled through a descriptor that was opened without
following links and checked, so that nobody is led to another socket of the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable

from ringfence.model.errors import LinkLost, StartFailed
from ringfence.runtimes.contract import Handle, StartSpec
from ringfence.runtimes.launching.driver import BACKLOG_TIMEOUT
from ringfence.runtimes.launching.sockets import NAME

FOLDER = "link"  # of a sandbox's folder; inside it is INSIDE
INSIDE = "/.ringfence"
PROGRAM = "agent"  # the agent's binary is shown under this name
_MOST_PAUSE = 0.004


def prepare(spec: StartSpec) -> None:
    """Make the folder: the agent's alone.

    Raises:
        StartFailed: it can't be made.
    """
    folder = os.path.join(spec.folder, FOLDER)
    owner = spec.identity.host_uid(0)
    try:
        remove(spec.folder)
        os.mkdir(folder, 0o700)
        with open(os.path.join(folder, PROGRAM), "xb"):
            pass  # the binary is mounted on it
        os.chown(folder, owner, owner)
    except OSError as error:
        raise StartFailed(
            f"no socket in {spec.folder}: {error.strerror}", step="listen", errno=str(error.errno)
        ) from error


def remove(folder: str) -> None:
    """Remove the socket's folder; it may not be there."""
    place = os.path.join(folder, FOLDER)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(place)


def dial(folder: str) -> socket.socket:
    """A non-blocking connection to the agent of the sandbox in ``folder``.

    Raises:
        OSError: nobody listens, what is there is no socket, or its backlog is full (``BlockingIOError``).
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    place = os.open(os.path.join(folder, FOLDER), flags | os.O_DIRECTORY)
    try:
        found = os.open(NAME, flags, dir_fd=place)
    finally:
        os.close(place)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise OSError(errno.ENOTSOCK, "what the wall put there is no socket")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(f"/proc/self/fd/{found}")
        except BaseException:
            sock.close()
            raise
    finally:
        os.close(found)
    return sock


async def dial_patiently(handle: Handle, alive: Callable[[], bool]) -> socket.socket:
    """The same, waiting a while if the agent is behind with accepting.

    Raises:
        LinkLost: the wall has ended, or nobody accepts.
    """
    pause, deadline = 0.001, time.monotonic() + BACKLOG_TIMEOUT
    while True:
        try:
            return dial(handle.folder)
        except BlockingIOError:
            if time.monotonic() > deadline or not alive():
                raise LinkLost("the guest agent accepts no connections", hint="destroy the sandbox") from None
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)
        except OSError as error:
            raise LinkLost(f"the guest agent can't be reached: {error.strerror}", id=handle.id) from error


async def appear(folder: str, ended: asyncio.Future[int | None]) -> socket.socket:
    """The first connection: return as soon as the agent listens.

    Raises:
        ConnectionError: the wall ended before.
    """
    pause = 0.001
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            return dial(folder)
        # The socket is made by gVisor's file server: the host gives no event that says it listens.
        await asyncio.wait([ended], timeout=pause)
        if ended.done():
            raise ConnectionError(errno.ECONNRESET, "the wall has ended")
        pause = min(pause * 1.5, _MOST_PAUSE)
