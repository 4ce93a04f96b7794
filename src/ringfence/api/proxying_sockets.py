"""WebSockets to a port inside, and the tunnel: any TCP protocol, framed as binary messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import Event
from websockets.protocol import State as WsState
from websockets.uri import parse_uri

from ringfence.api.calls import Receive, Scope, Send
from ringfence.api.ports import Headers, Target, admit, inward
from ringfence.api.proxying import dial
from ringfence.api.sockets import GOING_AWAY, Disconnected, Socket, deny
from ringfence.guest.ports import GuestStream
from ringfence.model.errors import DeadlineExceeded, GuestError, GuestRefused, RingfenceError

if TYPE_CHECKING:
    from ringfence.api.app import Service

_log = logging.getLogger("ringfence.api")
_MOST_MESSAGE = 16 * 1024 * 1024
_SKIP = frozenset({b"host", b"content-length", b"origin"})


class Plain(Socket):
    """A WebSocket that belongs to no route of the table."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        from ringfence.api.routing import Route

        super().__init__(service, scope, receive, send, Route("GET", "", _never), {}, request_id)


async def _never(*_: object) -> None:
    raise AssertionError("not called")


async def proxy(
    service: Service, target: Target, scope: Scope, receive: Receive, send: Send, request_id: str
) -> None:
    """A WebSocket between a client and a port inside; both sides see the other's messages and close."""
    socket = Plain(service, scope, receive, send, request_id)
    try:
        await proxied(socket, target)
    except Disconnected:
        return
    except RingfenceError as error:
        if socket.accepted:
            await socket.close(1011, error.code)
        else:
            await receive()
            await deny(send, error, request_id)


async def proxied(socket: Socket, target: Target) -> None:
    """See :func:`proxy`; errors are raised."""
    service, scope = socket.service, socket.scope
    admission = admit(service, target, scope)
    async with service.control.using(target.sandbox):
        stream = await dial(service, target)
        try:
            path: bytes = scope["raw_path"]
            if target.prefix:
                path = path[len(target.prefix.encode()) :]
            path = path if path.startswith(b"/") else b"/" + path
            if admission.query:
                path += b"?" + admission.query
            inner = _Inner(stream, scope, target, path.decode("ascii"), service)
            async with asyncio.timeout(service.settings.port_timeout):
                await inner.shake()
            await socket.accept(inner.protocol.subprotocol)
            await _pump(socket, inner)
        except TimeoutError:
            raise DeadlineExceeded("the port did not answer the handshake in time") from None
        finally:
            await stream.close()


class _Inner:
    """The side of the sandbox: a client's protocol over a connection of the guest."""

    def __init__(
        self, stream: GuestStream, scope: Scope, target: Target, path: str, service: Service
    ) -> None:
        self.stream = stream
        uri = parse_uri(f"ws://localhost:{target.port}{path}")
        self.protocol = ClientProtocol(
            uri, subprotocols=list(scope.get("subprotocols") or []) or None, max_size=_MOST_MESSAGE
        )
        secret = service.is_key(scope["headers"])
        self.headers: Headers = inward(scope["headers"], target, scope, secret=secret)
        self.origin = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"origin"), None)
        self._early: list[Event] = []
        self._parts: list[bytes] = []
        self._text = False

    async def shake(self) -> None:
        """The opening handshake.

        Raises:
            GuestError: what listens there is no WebSocket.
        """
        request = self.protocol.connect()
        for name, value in self.headers:
            if name == b"host":
                del request.headers["Host"]
                request.headers["Host"] = value.decode("latin-1")
            elif name not in _SKIP:
                request.headers[name.decode("latin-1")] = value.decode("latin-1")
        if self.origin is not None:
            request.headers["Origin"] = self.origin
        self.protocol.send_request(request)
        await self.flush()
        while self.protocol.state is WsState.CONNECTING and self.protocol.handshake_exc is None:
            if not await self.more():
                break
            # What came with the answer to the handshake are messages already.
            events = self.protocol.events_received()
            self._early += [event for event in events if not isinstance(event, Response)]
        if self.protocol.state is not WsState.OPEN:
            raise GuestError(
                "what listens there answers no WebSocket",
                hint="look at the path, and at what it says to HTTP",
            )

    async def more(self) -> bool:
        """Read once; False when there is nothing more to come."""
        try:
            data = await self.stream.read()
        except GuestRefused:
            data = b""
        if data:
            self.protocol.receive_data(data)
        else:
            self.protocol.receive_eof()
        return bool(data)

    async def flush(self) -> None:
        """Write what the protocol has to say."""
        out = b"".join(self.protocol.data_to_send())
        if out:
            with contextlib.suppress(GuestRefused):
                await self.stream.write(out)

    def messages(self) -> list[str | bytes]:
        """Whole messages that have come."""
        found: list[str | bytes] = []
        events, self._early = [*self._early, *self.protocol.events_received()], []
        for event in events:
            if not isinstance(event, Frame) or event.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                continue
            if event.opcode is not Opcode.CONT:
                self._parts, self._text = [], event.opcode is Opcode.TEXT
            self._parts.append(bytes(event.data))
            if sum(map(len, self._parts)) > _MOST_MESSAGE:
                raise GuestError("a message larger than 16 MiB from inside", hint="send smaller ones")
            if event.fin:
                whole = b"".join(self._parts)
                found.append(whole.decode("utf-8", "replace") if self._text else whole)
                self._parts = []
        return found


async def _pump(socket: Socket, inner: _Inner) -> None:
    loop = asyncio.get_running_loop()

    async def outward() -> None:
        while True:
            for message in inner.messages():
                await socket.send(message)
            await inner.flush()  # pongs, and the answer to a close
            if inner.protocol.close_expected() or inner.protocol.state is not WsState.OPEN:
                return
            if not await inner.more():
                for message in inner.messages():
                    await socket.send(message)
                return

    async def inward_() -> None:
        while True:
            message = await socket.receive()
            if isinstance(message, str):
                inner.protocol.send_text(message.encode())
            else:
                inner.protocol.send_binary(message)
            await inner.flush()

    out = loop.create_task(outward())
    into = loop.create_task(inward_())
    draining = loop.create_task(socket.service.draining.wait())
    try:
        await asyncio.wait({out, into, draining}, return_when=asyncio.FIRST_COMPLETED)
        if into.done():
            error = into.exception()
            code = error.code if isinstance(error, Disconnected) else 1011
            with contextlib.suppress(ProtocolError, InvalidHandshake, RingfenceError):
                if inner.protocol.state is WsState.OPEN:
                    inner.protocol.send_close(code if 1000 <= code < 1004 or 3000 <= code < 5000 else 1001)
                    await inner.flush()
            if error is not None:
                raise error
        elif out.done():
            out.result()
            code = inner.protocol.close_code or 1005
            given = code if 1000 <= code < 1004 or 3000 <= code < 5000 else 1011
            await socket.close(1000 if code == 1005 else given, inner.protocol.close_reason or "")
        else:
            await socket.close(GOING_AWAY, "reload")
    finally:
        for task in (out, into, draining):
            task.cancel()
        await asyncio.gather(out, into, draining, return_exceptions=True)


async def tunnel(socket: Socket, target: Target) -> None:
    """Bytes of one TCP connection as binary messages; an empty message ends a half, as FIN does."""
    async with socket.control.using(target.sandbox):
        stream = await dial(socket.service, target)
        await socket.accept()
        loop = asyncio.get_running_loop()

        async def outward() -> None:
            while data := await stream.read():
                await socket.send(data)
            await socket.send(b"")

        async def inward_() -> None:
            while True:
                data = await socket.receive()
                if isinstance(data, str):
                    data = data.encode()
                if data:
                    await stream.write(data)
                else:
                    await stream.eof()

        out, into = loop.create_task(outward()), loop.create_task(inward_())
        draining = loop.create_task(socket.service.draining.wait())
        try:
            await asyncio.wait({out, into, draining}, return_when=asyncio.FIRST_COMPLETED)
            if into.done() and not isinstance(into.exception(), Disconnected):
                into.result()
            if out.done():
                out.result()
                # The other half may go on: a client that only reads now ends it by closing.
                await asyncio.wait({into, draining}, timeout=socket.service.settings.port_timeout,
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            await socket.close(GOING_AWAY if draining.done() else 1000)
        except GuestRefused:
            await socket.close(1011, "reset")
        finally:
            for task in (out, into, draining):
                task.cancel()
            await asyncio.gather(out, into, draining, return_exceptions=True)
            await stream.close()
