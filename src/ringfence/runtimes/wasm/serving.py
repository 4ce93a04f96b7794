"""The agent's side of the link protocol: links, channels and their flow control, on one epoll loop.

What the host sends is checked as strictly as the native agent does: a wrong frame costs the link it came on.
"""

from __future__ import annotations

import errno
import select

from ringfence.guest import frames
from ringfence.guest.fields import Fields, Value, decode, encode
from ringfence.model.errors import ProtocolViolation
from ringfence.runtimes.wasm.lean import deque, socket, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.runtimes.wasm.worker import Worker

    Handler = Callable[[int], object]

VERSION = 1
MOST_LINKS, MOST_CHANNELS = 64, 1024
HOST_WINDOW = 65_536  # bytes a stream that the host may send before we take them
MOST_WINDOW = 16 << 20
HIGH = 262_144  # bytes that wait for a host's socket before the channels are held back
_MOST_WAITING = 4 << 20  # beyond, answers that nobody reads cost the link
_MOST_CREDIT = 2**40


class Loop:
    """Descriptors, who waits for them, and what is to be done next."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self.deadline: float | None = None  # time.monotonic() at which `run_once` returns at the latest

    def watch(self, descriptor: int, events: int, handler: Handler) -> None:
        """Call ``handler`` with the events. Again for the same descriptor: another set of events."""
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def forget(self, descriptor: int) -> None:
        """Watch it no more."""
        if self._handlers.pop(descriptor, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)

    def soon(self, call: Callable[[], None]) -> None:
        """Call it in this turn, after what is under way."""
        self._soon.append(call)

    def run_once(self) -> None:
        """Wait for events, and handle them."""
        import time

        while self._soon:
            self._soon.popleft()()
        wait = -1.0 if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        for descriptor, events in self._epoll.poll(wait):
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler(events)

    def close(self) -> None:
        """In a forked child: let go of the parent's descriptor."""
        self._epoll.close()


class Channel:
    """One channel. Subclasses override what they take part in; the rest is a violation."""

    takes_input = False
    streams: tuple[int, ...] = ()

    def __init__(self, link: Link, number: int, window: int = frames.MAX_OFFSET) -> None:
        self.link = link
        self.number = number
        self.window = window
        self.credit = dict.fromkeys(self.streams, window)
        self.granted = dict.fromkeys(self.streams, 0)  # sum of all CREDIT
        self.room = HOST_WINDOW  # that the host may still send
        self.position = 0  # of the host's stream 0
        self.input_ended = False
        self.sent_close = False

    def open(self) -> bool:
        """Whether it is still one of the link's."""
        return self.link.channels.get(self.number) is self

    def handle(self, kind: int, payload: memoryview) -> None:
        """One frame of the host."""
        if kind == frames.DATA:
            stream, offset, data = frames.parse_data(payload)
            if stream or not self.takes_input or self.input_ended or offset != self.position:
                raise ProtocolViolation("data that was not to come")
            if len(data) > self.room:
                raise ProtocolViolation("data beyond the credit")
            self.position += len(data)
            self.room -= len(data)
            self.on_data(bytes(data))
        elif kind == frames.CREDIT:
            stream, count = frames.parse_credit(payload)
            if stream not in self.credit:
                raise ProtocolViolation("credit for a stream that does not come")
            if self.granted[stream] + count > _MOST_CREDIT:
                raise ProtocolViolation("an absurd sum of credit")
            self.credit[stream] += count
            self.granted[stream] += count
            self.pump()
        elif kind == frames.EOF:
            stream, offset = frames.parse_eof(payload)
            if stream or not self.takes_input or self.input_ended or offset != self.position:
                raise ProtocolViolation("an end that was not to come")
            self.input_ended = True
            self.on_eof()
        elif kind == frames.CLOSE:
            self.finish()
            self.drop()
        elif kind == frames.ERROR:
            frames.parse_error(payload)
            self.drop()
        else:
            raise ProtocolViolation(f"a frame of type {kind} from a host")

    def grant(self, count: int) -> None:
        """The host may send so much more."""
        if count and self.open() and not self.input_ended:
            self.room += count
            self.link.send(frames.credit_frame(self.number, 0, count))

    def reply(self, fields: list[tuple[int, Value | None]], *, last: bool = False) -> None:
        """The operation succeeded."""
        if self.open():
            self.link.send(frames.frame(self.number, frames.REPLY, encode(fields)))
            if last:
                self.drop()

    def error(self, number: int, text: str = "") -> None:
        """The operation failed; the channel is over."""
        if self.open():
            self.link.send(frames.error_frame(self.number, number, text))
            self.drop()

    def finish(self) -> None:
        """We are done: CLOSE, once. The id is free when the host has said so too."""
        if self.open() and not self.sent_close:
            self.sent_close = True
            self.link.send(frames.close_frame(self.number))

    def drop(self) -> None:
        """The channel is over; also when its link is lost."""
        if self.open():
            del self.link.channels[self.number]
            self.gone()

    # -- for the subclasses

    def on_data(self, data: bytes) -> None:
        """Bytes of stream 0."""

    def on_eof(self) -> None:
        """Stream 0 has ended."""

    def pump(self) -> None:
        """There may be room to send again."""

    def gone(self) -> None:
        """The host is no longer there."""


class Link:
    """One connection of a host process."""

    def __init__(self, worker: Worker, sock: socket) -> None:
        self.worker = worker
        self.sock = sock
        self.channels: dict[int, Channel] = {}
        self._parser = frames.FrameParser()
        self._out: deque[memoryview] = deque()
        self._waiting = 0
        self._highest = 0
        self._greeted = False
        self._closing = False
        self.alive = True
        sock.setblocking(False)
        worker.loop.watch(sock.fileno(), select.EPOLLIN, self._ready)

    @property
    def full(self) -> bool:
        """So much waits for the socket that nobody should add more."""
        return self._waiting >= HIGH

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if self.alive and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._receive()

    def _receive(self) -> None:
        try:
            count = self.sock.recv_into(self._parser.space())
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            return
        try:
            for channel, kind, payload in self._parser.advance(count):
                self._frame(channel, kind, payload)
                if not self.alive or self._closing:
                    return
        except ProtocolViolation:
            self.close()

    def _frame(self, number: int, kind: int, payload: memoryview) -> None:
        if not self._greeted:
            self._hello(number, kind, payload)
        elif number == 0:
            if kind == frames.PING and len(payload) <= 64:
                self.send(frames.frame(0, frames.PONG, bytes(payload)))
            elif kind != frames.PONG:
                raise ProtocolViolation("a frame on channel 0")
        elif kind == frames.OPEN:
            self._open(number, payload)
        else:
            channel = self.channels.get(number)
            if channel is not None:
                channel.handle(kind, payload)
            elif number > self._highest or not number & 1:
                raise ProtocolViolation("a channel that was never opened")

    def _hello(self, number: int, kind: int, payload: memoryview) -> None:
        if number or kind != frames.HELLO:
            raise ProtocolViolation("no HELLO")
        fields = decode(payload)
        if fields.raw(1, b"") != frames.MAGIC or fields.number(2, 0) < 1 or len(fields.raw(3, b"")) != 16:
            raise ProtocolViolation("no HELLO")
        self._greeted = True
        worker = self.worker
        answer = [
            (1, frames.MAGIC),
            (2, VERSION),
            (3, fields.raw(3)),
            (5, worker.epoch),
            (6, worker.instance),
            (7, worker.version),
            (8, MOST_CHANNELS),
        ]
        self.send(frames.frame(0, frames.HELLO, encode(answer)))

    def _open(self, number: int, payload: memoryview) -> None:
        if not number & 1 or number in self.channels:
            raise ProtocolViolation("a channel id that is taken or not the host's")
        operation, rest = frames.parse_u16(payload, "an OPEN")
        fields = decode(rest)
        self._highest = max(self._highest, number)
        if len(self.channels) >= MOST_CHANNELS:
            self.send(frames.error_frame(number, errno.EMFILE, "too many channels"))
            return
        try:
            self.worker.operate(self, number, operation, fields)
            return
        except ProtocolViolation as error:  # a field of the wrong form
            failure, text = errno.EINVAL, error.message
        except OSError as error:
            failure, text = error.errno or errno.EIO, error.strerror or ""
        channel = self.channels.get(number)
        if channel is not None:
            channel.error(failure, text)
        else:
            self.send(frames.error_frame(number, failure, text))

    def add(self, channel: Channel) -> None:
        """A channel begins."""
        self.channels[channel.number] = channel

    def answer(self, number: int, fields: list[tuple[int, Value | None]]) -> None:
        """REPLY to an operation that is over with it."""
        self.send(frames.frame(number, frames.REPLY, encode(fields)))

    def send(self, data: bytes) -> None:
        """Send, or keep until the socket takes it."""
        if not self.alive:
            return
        self._out.append(memoryview(data))
        self._waiting += len(data)
        if self._waiting > _MOST_WAITING:
            self.close()
        elif len(self._out) == 1:
            self._flush()

    def _flush(self) -> None:
        was_full = self.full
        try:
            while self._out:
                piece = self._out[0]
                count = self.sock.send(piece)
                self._waiting -= count
                if count < len(piece):
                    self._out[0] = piece[count:]
                else:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._closing and not self._out:
            self.close()
            return
        events = select.EPOLLIN | (select.EPOLLOUT if self._out else 0)
        self.worker.loop.watch(self.sock.fileno(), events, self._ready)
        if was_full and not self.full:
            for channel in list(self.channels.values()):
                self.worker.loop.soon(channel.pump)

    def end(self) -> None:
        """Close as soon as everything is sent."""
        self._closing = True
        if not self._out:
            self.close()

    def close(self) -> None:
        """Close now. Processes live on."""
        if not self.alive:
            return
        self.alive = False
        self.worker.loop.forget(self.sock.fileno())
        self.sock.close()
        self.worker.links.discard(self)
        for channel in list(self.channels.values()):
            channel.drop()


def listener(worker: Worker, sock: socket) -> Handler:
    """Takes connections; the 65th is closed."""
    sock.setblocking(False)

    def ready(_: int) -> None:
        try:
            made, _address = sock.accept()
        except OSError:
            return
        if len(worker.links) >= MOST_LINKS:
            made.close()
        else:
            worker.links.add(Link(worker, made))

    return ready


def window_of(fields: Fields, tag: int) -> int:
    """A window that the host asks for."""
    return fields.number(tag, 262_144, most=MOST_WINDOW)
