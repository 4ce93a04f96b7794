"""One connection between a placement's client and a node: frames in both directions, descriptors in one.

A frame is nine bytes (length of the payload, kind, number of the call; big-endian) and its payload. A frame
whose kind has :data:`WITH_DESCRIPTOR` set carries one open file (SCM_RIGHTS). Both ends work on the event
loop's readiness, not on its streams, which can't pass descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from ringfence.model.errors import ProtocolViolation, RingfenceError

HEADER = struct.Struct("!IBI")
CALL, RESULT, ERROR, DATA, END, CANCEL, CREDIT = range(1, 8)
WITH_DESCRIPTOR = 0x80
LARGEST = 8 << 20  # bytes of one payload
CHUNK = 128 << 10  # bytes of one piece of a stream
WINDOW = 16  # pieces of a stream that may be on their way
MOST_WAITING = 64 << 20  # bytes that a peer may leave unread before we believe it dead
_ENOUGH = 256 << 10  # bytes waiting to be sent above which a sender should wait
_AT_ONCE = 256 << 10
_CONTROL = socket.CMSG_SPACE(4 * 4)


class Connection:
    """A connected, non-blocking unix stream socket, which it owns. Made on the running loop.

    ``on_frame(kind, number, payload, descriptor)`` gets each frame (a descriptor is the callee's to close);
    what it raises ends the connection. ``on_end(error)`` is called once. ``descriptors``: whether the peer
    may send any; those of others are never received.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[int, int, bytes, int | None], None],
        on_end: Callable[[Exception | None], None],
        *,
        descriptors: bool,
        largest: int = LARGEST,
    ) -> None:
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._descriptors = descriptors
        self._largest = largest
        self._loop = asyncio.get_running_loop()
        self._input = bytearray()
        self._received: deque[int] = deque()
        self._output: deque[tuple[memoryview, int | None]] = deque()
        self._waiting = 0
        self._drained: asyncio.Future[None] | None = None
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    # -- sending

    def send(self, kind: int, number: int, payload: bytes = b"", descriptor: int | None = None) -> None:
        """Send a frame, or queue it. A descriptor is closed when it is sent, or can't be any more."""
        if self.closed:
            if descriptor is not None:
                os.close(descriptor)
            return
        if descriptor is not None:
            kind |= WITH_DESCRIPTOR
        frame = memoryview(HEADER.pack(len(payload), kind, number) + payload)
        self._output.append((frame, descriptor))
        self._waiting += len(frame)
        if self._waiting > MOST_WAITING:
            self.close(ProtocolViolation("the peer does not read what it asked for"))
        elif len(self._output) == 1:
            self._flush()

    async def drain(self) -> None:
        """Return when little waits to be sent."""
        while self._waiting > _ENOUGH and not self.closed:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def _flush(self) -> None:
        try:
            while self._output:
                frame, descriptor = self._output[0]
                if descriptor is not None:
                    sent = socket.send_fds(self._sock, [frame], [descriptor])
                    os.close(descriptor)
                else:
                    sent = self._sock.send(frame)
                self._waiting -= sent
                if sent < len(frame):
                    self._output[0] = (frame[sent:], None)
                else:
                    self._output.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(error)
            return
        if self._output:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._sock.fileno())
        if self._waiting <= _ENOUGH:
            self._release()

    def _release(self) -> None:
        waiter, self._drained = self._drained, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- receiving

    def _readable(self) -> None:
        try:
            if self._descriptors:
                # Not socket.recv_fds: before Python 3.12 it drops the flags, and children would inherit them.
                data, control, flags, _ = self._sock.recvmsg(_AT_ONCE, _CONTROL, socket.MSG_CMSG_CLOEXEC)
                for level, kind, payload in control:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        whole = len(payload) - len(payload) % 4
                        self._received.extend(memoryview(payload[:whole]).cast("i"))
                if flags & socket.MSG_CTRUNC:
                    raise ProtocolViolation("descriptors of the peer were lost: too many open files?")
            else:
                data = self._sock.recv(_AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, RingfenceError) as error:
            self.close(error)
            return
        if not data:
            self.close(None)
            return
        self._input += data
        try:
            self._parse()
        except RingfenceError as error:
            self.close(error)

    def _parse(self) -> None:
        at, size = 0, HEADER.size
        while not self.closed and len(self._input) - at >= size:
            length, kind, number = HEADER.unpack_from(self._input, at)
            if length > self._largest:
                raise ProtocolViolation(f"a frame of {length} bytes: at most {self._largest}")
            end = at + size + length
            if len(self._input) < end:
                break
            payload = bytes(self._input[at + size : end])
            at = end
            descriptor = None
            if kind & WITH_DESCRIPTOR:
                if not self._received:
                    raise ProtocolViolation("a descriptor was announced and did not come")
                descriptor = self._received.popleft()
            self._on_frame(kind & ~WITH_DESCRIPTOR, number, payload, descriptor)
        if at:
            del self._input[:at]

    # -- the end

    def close(self, error: Exception | None = None) -> None:
        """End the connection. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for descriptor in (*self._received, *(d for _, d in self._output if d is not None)):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._received.clear()
        self._output.clear()
        self._waiting = 0
        self._release()
        self._on_end(error)
