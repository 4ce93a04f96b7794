"""Messages between the proxy process and those who command it: JSON behind its length, and descriptors.

A descriptor travels with the first byte of its message. The socket is private (0700 folder, or inherited),
and both ends are ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from ringfence.model.errors import InvalidRequest

MOST = 4 * 1024 * 1024  # bytes of one message
Handler = Callable[[dict[str, Any], list[int]], None]


class Messages:
    """One end. ``on_message`` gets each message with its descriptors; ``on_end`` hears once of the end."""

    def __init__(self, sock: socket.socket, on_message: Handler, on_end: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_end = on_message, on_end
        self._held = bytearray()
        self._descriptors: deque[int] = deque()
        self._outgoing: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: dict[str, Any], *descriptors: int) -> None:
        """Send a message. Its descriptors are closed when they are sent, or can't be.

        Raises:
            InvalidRequest: it is too long, and no answer (in whose place an error is sent).
        """
        if self.closed:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        data = json.dumps(message | ({"descriptors": len(descriptors)} if descriptors else {})).encode()
        if len(data) > MOST:  # the other end would hang up, and with it every door
            for descriptor in descriptors:
                os.close(descriptor)
            if "result" not in message:
                raise InvalidRequest("that is too much for one message to the egress proxy")
            error = InvalidRequest("the egress proxy has more to say than one message holds").as_dict()
            data, descriptors = json.dumps({"number": message["number"], "error": error}).encode(), ()
        self._outgoing.append((len(data).to_bytes(4) + data, descriptors))
        if self._sender is None:
            self._sender = self._loop.create_task(self._send())

    @property
    def waiting(self) -> int:
        """Messages that the other end has not taken yet."""
        return len(self._outgoing)

    async def flushed(self) -> None:
        """Return when everything was sent."""
        if self._sender is not None:
            await asyncio.shield(self._sender)

    async def _send(self) -> None:
        try:
            while self._outgoing:
                data, descriptors = self._outgoing[0]
                if descriptors:
                    while True:
                        try:
                            sent = socket.send_fds(self._sock, [data], list(descriptors))
                            break
                        except BlockingIOError:
                            await self._writable()
                    data = data[sent:]
                self._outgoing.popleft()
                for descriptor in descriptors:
                    os.close(descriptor)
                if data:
                    await self._loop.sock_sendall(self._sock, data)
        except OSError:
            self._finish()
        finally:
            self._sender = None

    async def _writable(self) -> None:
        waiter = self._loop.create_future()
        self._loop.add_writer(self._sock.fileno(), lambda: None if waiter.done() else waiter.set_result(None))
        try:
            await waiter
        finally:
            if not self.closed:
                self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 65536, 16)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        for number in descriptors:  # before Python 3.12 recv_fds drops the flag that says so
            os.set_inheritable(number, False)
        self._descriptors.extend(descriptors)
        self._held += data
        if not data:
            self._finish()
            return
        while len(self._held) >= 4:
            size = int.from_bytes(self._held[:4])
            if size > MOST:
                self._finish()
                return
            if len(self._held) < 4 + size:
                return
            try:
                message = json.loads(self._held[4 : 4 + size])
                count = message.pop("descriptors", 0)
                own = [self._descriptors.popleft() for _ in range(count)]
            except (ValueError, AttributeError, IndexError, TypeError):
                self._finish()
                return
            del self._held[: 4 + size]
            self._on_message(message, own)
            if self.closed:
                return

    def _finish(self) -> None:
        if not self.closed:
            self.close()
            self._on_end()

    def close(self) -> None:
        """End it. Idempotent."""
        if self.closed:
            return
        self.closed = True
        # Both, before the number is somebody else's: what waits for room is cancelled a moment later only.
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        if self._sender is not None:
            self._sender.cancel()
        for _, descriptors in self._outgoing:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._outgoing.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._sock.close()
