"""The three standard streams, passed through without ever blocking the event loop.

A blocked write must not stop the loop: the deadline and the signals are served by it. Setting O_NONBLOCK on
an inherited stream would set it for the shell and everybody else who holds it, so pipes and terminals are
*opened again* through ``/proc/self/fd`` and only our own description is non-blocking. Where that is refused
(another user's terminal after ``su``) we write what a ready pipe takes for certain: 4,096 bytes a time.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator

CHUNK = 65536
PIPE_BUF = 4096  # a pipe that polls as writable takes this much without blocking (pipe(7))


class Sink:
    """Where output goes. ``broken``: the reader went away; what is written from then on is dropped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self.written = 0
        self._mine, self._kind = _open_again(descriptor, os.O_WRONLY)
        self._socket = socket.socket(fileno=os.dup(descriptor)) if self._kind == "socket" else None
        self._waiting: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """Write everything, in the reader's time. Does not raise for a reader that went away.

        Raises:
            OSError: the stream is a file and its disk is full, or the like.
        """
        view = memoryview(data)
        if self._kind == "shared" and not self.broken:
            await self._writable()
        while view and not self.broken:
            try:
                count = self._send(view)
            except BlockingIOError:
                await self._writable()
                continue
            except OSError as error:
                # EIO: the terminal hung up. EBADF: we were started with the stream closed.
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.EBADF, errno.ENXIO):
                    raise
                self.broken = True
                return
            self.written += count
            view = view[count:]
            if view and self._kind == "shared":
                await self._writable()

    def abandon(self) -> None:
        """Drop what could not be written yet, and everything after it."""
        self.broken = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Close our own description; the inherited descriptor stays open."""
        if self._socket is not None:
            self._socket.close()
        if self._mine != self.descriptor:
            os.close(self._mine)

    def _send(self, view: memoryview) -> int:
        if self._socket is not None:
            return self._socket.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return os.write(self._mine, view[:PIPE_BUF] if self._kind == "shared" else view)

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        waiting = self._waiting
        try:
            loop.add_writer(self._mine, _wake, waiting)
        except PermissionError:
            return  # epoll refuses files and /dev/null: they never block
        try:
            await waiting
        finally:
            loop.remove_writer(self._mine)
            self._waiting = None


class Source:
    """Standard input. Iterate over its bytes; ends at its end."""

    def __init__(self, descriptor: int = 0) -> None:
        self.descriptor = descriptor
        self.terminal = _is_terminal(descriptor)
        self._mine, self._kind = _open_again(descriptor, os.O_RDONLY)
        self._waiting: asyncio.Future[None] | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._kind != "file" and not await self._readable():
                return
            try:
                data = os.read(self._mine, CHUNK)
            except BlockingIOError:
                continue
            except OSError:  # EIO: the terminal is gone, or we are in its background; EBADF: there is none
                return
            if not data:
                return
            yield data

    def resume(self) -> None:
        """Look again whether the terminal is ours to read: we were continued after a stop."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Close our own description."""
        if self._mine != self.descriptor:
            os.close(self._mine)

    async def _readable(self) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            self._waiting = loop.create_future()
            # A read from the background of a terminal would stop us (SIGTTIN): wait for SIGCONT instead.
            ours = not self.terminal or _in_foreground(self.descriptor)
            if ours:
                try:
                    loop.add_reader(self._mine, _wake, self._waiting)
                except PermissionError:
                    return True  # a file or /dev/null
                except (OSError, ValueError):
                    return False
            try:
                await self._waiting
            finally:
                if ours:
                    loop.remove_reader(self._mine)
                self._waiting = None
            if not self.terminal or _in_foreground(self.descriptor):
                return True


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _open_again(descriptor: int, access: int) -> tuple[int, str]:
    """A non-blocking description of our own and ``own``; else the given one and file, socket or shared."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return descriptor, "file"  # closed: the first read or write says so
    if stat.S_ISREG(mode):
        return descriptor, "file"  # a second description would have an offset of its own
    if stat.S_ISSOCK(mode):
        return descriptor, "socket"
    flags = access | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags), "own"
    except OSError:
        return descriptor, "shared"


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _in_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True  # not our controlling terminal: nobody stops us for reading it
