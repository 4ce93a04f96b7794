"""One WebSocket as a handler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic_core

from ringfence.api.calls import Receive, Request, Scope, Send, as_json
from ringfence.api.errors import body_of, status_of
from ringfence.model.errors import InvalidRequest, RingfenceError

if TYPE_CHECKING:
    from ringfence.api.app import Service
    from ringfence.api.routing import Route

NORMAL, GOING_AWAY, POLICY, FAULT = 1000, 1001, 1008, 1011


class Disconnected(Exception):
    """The other side is gone; ``code`` is its close code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Socket(Request):
    """A WebSocket of a route. Sending waits while the client takes no more: the back-pressure."""

    def __init__(
        self,
        service: Service,
        scope: Scope,
        receive: Receive,
        send: Send,
        route: Route,
        params: dict[str, str],
        request_id: str,
    ) -> None:
        super().__init__(service, scope, route, params, request_id)
        self._receive = receive
        self._send = send
        self.accepted = False
        self.closed = False

    async def accept(
        self, subprotocol: str | None = None, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """Say yes. Before that, an error is an HTTP answer; after it, a frame and a close."""
        message = await self._receive()
        if message["type"] != "websocket.connect":
            raise Disconnected(1006)
        named = [(b"x-request-id", self.request_id.encode()), *(headers or [])]
        await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": named})
        self.accepted = True

    async def receive(self) -> str | bytes:
        """The next message.

        Raises:
            Disconnected: there is none.
        """
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self.closed = True
            raise Disconnected(int(message.get("code") or 1005))
        text: str | None = message.get("text")
        return text if text is not None else bytes(message["bytes"])

    async def receive_json(self) -> dict[str, Any]:
        """The next message, which must be a JSON object.

        Raises:
            InvalidRequest: it is none. Disconnected.
        """
        raw = await self.receive()
        try:
            value = pydantic_core.from_json(raw)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise InvalidRequest("a frame that is no JSON object", hint="see docs/PROTOCOL.md")
        return value

    async def send_json(self, value: Any) -> None:
        """Send a frame of text. Raises Disconnected."""
        await self._deliver({"type": "websocket.send", "text": as_json(value).decode()})

    async def send(self, data: str | bytes) -> None:
        """Send a frame. Raises Disconnected."""
        key = "text" if isinstance(data, str) else "bytes"
        await self._deliver({"type": "websocket.send", key: data})

    async def _deliver(self, message: dict[str, Any]) -> None:
        if self.closed:
            raise Disconnected(1005)
        try:
            await self._send(message)
        except (OSError, RuntimeError) as error:
            self.closed = True
            raise Disconnected(1006) from error

    async def close(self, code: int = NORMAL, reason: str = "") -> None:
        """End it. Idempotent."""
        if self.accepted and not self.closed:
            self.closed = True
            try:
                await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})
            except (OSError, RuntimeError):
                return

    async def fail(self, error: RingfenceError) -> None:
        """Tell an error: as the HTTP answer to the handshake, else as a frame and a close."""
        if self.closed:
            return
        if self.accepted:
            shown = body_of(error, self.request_id)["error"]
            try:
                await self.send_json({"type": "error", "error_type": shown["code"], **shown})
                await self.close(FAULT if status_of(error) >= 500 else POLICY, error.code)
            except Disconnected:
                return
            return
        self.closed = True
        await self._receive()
        await deny(self._send, error, self.request_id)


async def deny(send: Send, error: RingfenceError, request_id: str) -> None:
    """Answer a handshake with an error instead of 101."""
    body = as_json(body_of(error, request_id))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    await send({"type": "websocket.http.response.start", "status": status_of(error), "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
