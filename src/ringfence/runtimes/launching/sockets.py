"""The agent's socket: a listening unix socket in the sandbox's folder, outside the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator

NAME = "guest.sock"
BACKLOG = 64
PATIENCE = 30.0  # seconds that a full backlog is waited for
_LONGEST = 107  # bytes of a path in a sockaddr


@contextlib.contextmanager
def _short_path(folder: str) -> Iterator[str]:
    """A path of the socket that fits a ``sockaddr`` (107 bytes), whatever the folder is called."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


def listener(folder: str) -> socket.socket:
    """A new listening socket at ``folder/guest.sock``, mode 0600; an old one there is replaced.

    Raises:
        OSError: the folder can't be written.
    """
    sock = unbound()
    try:
        listen(sock, folder)
    except BaseException:
        sock.close()
        raise
    return sock


def unbound() -> socket.socket:
    """What :func:`listen` makes a listener of; its descriptor may be given away before."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def listen(sock: socket.socket, folder: str) -> None:
    """Bind ``sock`` to ``folder/guest.sock`` and listen.

    By way of a descriptor however short the path is: the agent, who has this socket, can ask for its name.

    Raises:
        OSError: the folder can't be written.
    """
    with _short_path(folder) as path:
        os.fchmod(sock.fileno(), 0o600)  # Linux makes the file with the socket's own mode
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            os.unlink(path)
            sock.bind(path)
    sock.listen(BACKLOG)


def dial(folder: str) -> socket.socket:
    """A non-blocking connection to the agent that listens in ``folder``.

    Raises:
        OSError: nobody listens, or its backlog is full (``BlockingIOError``).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path = f"{folder}/{NAME}"
        if len(path) <= _LONGEST and path.isascii():
            sock.connect(path)
        else:
            with _short_path(folder) as path:
                sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


async def connect(sock: socket.socket, path: str, within: float = PATIENCE) -> None:
    """Connect a non-blocking unix socket; waits while whoever listens is behind with accepting.

    Not the event loop's ``sock_connect``: a full backlog is no connection on its way, but that one takes it
    for one, and then for one that has come about.

    Raises:
        OSError: nobody listens, or the backlog stays full (``BlockingIOError``).
    """
    pause, end = 0.001, time.monotonic() + within
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)
