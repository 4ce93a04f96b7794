"""The server's edge: uvicorn's protocols with limits on what a client may send before we know who it is.

Heads have a size, a number of fields and a time; a client that has closed its sending half gets its answer;
what can't be parsed is answered in the documented shape.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

HEAD_TIME = 10.0  # seconds from the connection, or a request's first byte, to the end of its head
HEAD_SIZE = 32 * 1024
HEAD_FIELDS = 128
TRAILERS = 8 * 1024


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    head_time = HEAD_TIME

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._taken = 0  # bytes of the head, or of trailers
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came; it has little time to say what it wants."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """It went."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_time, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_head:
            self.refuse(408, "request_timeout", "the head of the request took too long")
        elif not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self.parser is None or self.transport.is_closing():
            return
        within = self._in_head
        super().data_received(data)
        if within and self._in_head and self.parser is not None:
            self._taken += len(data)
            if self._taken > HEAD_SIZE:
                self.refuse(431, "headers_too_large", f"a head of more than {HEAD_SIZE} bytes")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = True
        self._taken = 0
        self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field, or, after the head, a trailer."""
        self._taken += len(name) + len(value)
        if len(self.headers) >= HEAD_FIELDS or self._taken > (HEAD_SIZE if self._in_head else TRAILERS):
            raise ValueError("too many fields")  # the parser says no for us
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._disarm()
        self._in_head = False
        self._taken = 0
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            self.cycle.send = _Answering(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """A piece of the body. uvicorn adds it to what nobody took yet; to nothing, it need not be copied."""
        if self.cycle is not None:
            held = self.cycle.body
            if not held:
                self.cycle.body = b""  # type: ignore[assignment]
            elif isinstance(held, bytes):
                self.cycle.body = bytearray(held)  # many small pieces grow in place
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        super().on_message_complete()
        self._taken = 0

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. It may still want its answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            if self._in_head:
                self.refuse(400, "invalid_request", "the request ended within its head")
            return False
        if cycle.more_body:
            return False  # it never will be whole
        cycle.keep_alive = False
        cycle.message_event.set()  # who asks whether the client is still there hears of it
        return True

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self.refuse(400, "invalid_request", "this is no HTTP that can be understood")

    def refuse(self, status: int, code: str, message: str) -> None:
        """Answer and hang up, unless an answer is under way."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = json.dumps(
                {"error": {"code": code, "message": message, "hint": "", "details": {}}}
            ).encode()
            self.transport.write(
                b"".join(
                    [
                        STATUS_LINE.get(status, b"HTTP/1.1 400 Bad Request\r\n"),
                        b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
                        b"connection: close\r\n\r\n",
                        body,
                    ]
                )
            )
        self.transport.close()


class _Answering:
    """An answer's way out. One that does not wait for all of the request says that it hangs up afterwards.

    uvicorn does so then: nobody reads the rest. The next request may be there before the answer has ended.
    """

    __slots__ = ("_cycle", "_send")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send

    def __call__(self, message: Any) -> Coroutine[Any, Any, None]:
        if not self._cycle.response_started:
            if self._cycle.more_body:
                self._cycle.keep_alive = False
            self._cycle.__dict__.pop("send", None)  # no ring for the collector
        return self._send(message)


class SocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket. Messages are bounded by the configuration; reading stops while one waits."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It went; uvicorn counts on being told once."""
        if self in self.connections:
            super().connection_lost(exc)
