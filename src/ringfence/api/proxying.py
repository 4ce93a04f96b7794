"""HTTP to a port inside: one request, re-framed on both sides.

What came in was parsed by the server and is written anew by h11; what comes back is parsed by h11 and framed
anew by the server. So nobody can smuggle a second request in the disagreement of two parsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import h11

from ringfence.api.calls import Receive, Scope, Send, as_json
from ringfence.api.errors import ClientGone, Internal, body_of, status_of
from ringfence.api.ports import TOKEN_NAME, Admission, Headers, Target, admit, inward, outward
from ringfence.guest.ports import GuestStream
from ringfence.model.errors import (
    DeadlineExceeded,
    GuestError,
    GuestRefused,
    InvalidRequest,
    NotAllowed,
    RingfenceError,
)

if TYPE_CHECKING:
    from ringfence.api.app import Service

_log = logging.getLogger("ringfence.api")
_MOST_HEADERS = 64 * 1024
_PIECE = 65536


async def dial(service: Service, target: Target) -> GuestStream:
    """A connection to the port, if something inside listens there.

    Raises:
        GuestRefused: nothing does. NotFound, WrongState: no sandbox, or it does not run.
    """
    link = await service.control.links.link(target.sandbox)
    try:
        return await link.dial(target.port)
    except GuestRefused as error:
        if error.details.get("errno") == "ECONNREFUSED":
            error.hint = f"nothing in the sandbox listens on port {target.port}"
        raise


class Proxied:
    """One request to a port."""

    def __init__(
        self, service: Service, target: Target, scope: Scope, receive: Receive, send: Send, request_id: str
    ) -> None:
        self.service = service
        self.target = target
        self.scope = scope
        self._receive = receive
        self._send = send
        self.request_id = request_id
        self._started = False

    async def serve(self) -> None:
        """Answer it, whatever happens."""
        try:
            await self._serve()
        except ClientGone:
            return
        except RingfenceError as error:
            await self._tell(error)
        except Exception as error:
            _log.error(
                "%s port %d of %s", self.request_id, self.target.port, self.target.sandbox, exc_info=error
            )
            told = Internal("a fault of the service", hint="the service's log has it under the request's id")
            await self._tell(told)

    async def _tell(self, error: RingfenceError) -> None:
        if self._started:
            # Too late for an answer of ours: without its end the server cuts the connection.
            _log.warning("%s port %d was cut: %s", self.request_id, self.target.port, error.message)
            return
        body = as_json(body_of(error, self.request_id))
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"content-security-policy", b"sandbox"),
            (b"cache-control", b"no-store"),
            (b"x-request-id", self.request_id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": status_of(error), "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _serve(self) -> None:
        admission = admit(self.service, self.target, self.scope)
        if self.target.prefix and any(n == b"service-worker" for n, _ in self.scope["headers"]):
            raise NotAllowed("no service workers here", hint="use the port's own host")
        if admission.way == "query" and not self.target.prefix and self._navigates():
            await self._cookie(admission)
            return
        async with self.service.control.using(self.target.sandbox):
            stream = await dial(self.service, self.target)
            try:
                await self._exchange(stream, admission)
            finally:
                await stream.close()

    def _navigates(self) -> bool:
        headers = dict(self.scope["headers"])
        return self.scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"

    async def _cookie(self, admission: Admission) -> None:
        """A person opens it with the token in the address: it moves to a cookie of this host alone."""
        query = b"?" + admission.query if admission.query else b""
        secure = "; Secure" if self.scope["scheme"] == "https" else ""
        cookie = f"{TOKEN_NAME}={admission.token}; Path=/; HttpOnly; SameSite=Strict{secure}"
        path = b"/" + self.scope["raw_path"].lstrip(b"/")  # never //host
        headers: Headers = [
            (b"location", path + query),
            (b"set-cookie", cookie.encode()),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"0"),
        ]
        await self._send({"type": "http.response.start", "status": 303, "headers": headers})
        await self._send({"type": "http.response.body", "body": b""})

    def _path(self, admission: Admission) -> bytes:
        path: bytes = self.scope["raw_path"]
        if self.target.prefix:
            path = path[len(self.target.prefix.encode()) :]
        path = path if path.startswith(b"/") else b"/" + path
        return path + (b"?" + admission.query if admission.query else b"")

    async def _exchange(self, stream: GuestStream, admission: Admission) -> None:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEADERS)
        secret = self.service.is_key(self.scope["headers"])
        headers = inward(self.scope["headers"], self.target, self.scope, secret=secret)
        headers.append((b"connection", b"close"))
        if any(name == b"transfer-encoding" for name, _ in self.scope["headers"]):
            headers = [pair for pair in headers if pair[0] != b"content-length"]
            headers.append((b"transfer-encoding", b"chunked"))
        try:
            request = h11.Request(
                method=self.scope["method"].encode(), target=self._path(admission), headers=headers
            )
            head = connection.send(request)
        except h11.LocalProtocolError as error:
            raise InvalidRequest(f"this request can't be passed on: {error}") from None
        sending = asyncio.get_running_loop().create_task(self._body(stream, connection, head or b""))
        try:
            await self._answer(stream, connection, sending)
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, RingfenceError, ClientGone):
                await sending

    async def _body(self, stream: GuestStream, connection: h11.Connection, head: bytes) -> None:
        """The request's body; its head goes out with the first piece."""
        gathered = head
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            try:
                if piece := message.get("body", b""):
                    gathered += connection.send(h11.Data(data=piece)) or b""
                if not more:
                    gathered += connection.send(h11.EndOfMessage()) or b""
            except h11.LocalProtocolError as error:
                raise InvalidRequest(f"this body can't be passed on: {error}") from None
            if gathered:
                with contextlib.suppress(GuestRefused):  # it answers without reading: its answer counts
                    await stream.write(gathered)
                gathered = b""
            if not more:
                return

    async def _answer(
        self, stream: GuestStream, connection: h11.Connection, sending: asyncio.Task[None]
    ) -> None:
        events = self._events(stream, connection)
        try:
            first = await self._head(events, sending)
            method = self.scope["method"]
            empty = method == "HEAD" or first.status_code in (204, 304)
            headers = outward(list(first.headers), self.target, self.request_id)
            if first.status_code == 204:
                headers = [pair for pair in headers if pair[0] != b"content-length"]
            self._started = True
            await self._send({"type": "http.response.start", "status": first.status_code, "headers": headers})
            gone = asyncio.get_running_loop().create_task(self._gone(sending))
            try:
                async for event in _until(events, gone):
                    if isinstance(event, h11.Data) and not empty:
                        await self._send(
                            {"type": "http.response.body", "body": bytes(event.data), "more_body": True}
                        )
            finally:
                gone.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await gone
            await self._send({"type": "http.response.body", "body": b""})
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def _gone(self, sending: asyncio.Task[None]) -> None:
        """Return when the client has gone."""
        try:
            await asyncio.shield(sending)
        except ClientGone:
            return
        except RingfenceError:
            await asyncio.Event().wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _head(self, events: AsyncIterator[Any], sending: asyncio.Task[None]) -> h11.Response:
        loop = asyncio.get_running_loop()
        first = loop.create_task(_next(events))
        try:
            # The time begins when the request has been sent: an upload may take as long as it likes.
            await asyncio.wait({first, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                sending.result()
                await asyncio.wait({first}, timeout=self.service.settings.port_timeout)
            if not first.done():
                raise DeadlineExceeded(
                    f"nothing came from port {self.target.port} in time", hint="look at what listens there"
                )
            event = first.result()
        finally:
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await first
        if not isinstance(event, h11.Response):
            raise GuestError(
                f"what listens on port {self.target.port} does not speak HTTP",
                hint="use the tunnel for others",
            )
        return event

    async def _events(self, stream: GuestStream, connection: h11.Connection) -> AsyncIterator[Any]:
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as error:
                raise GuestError(
                    f"port {self.target.port} answered with what is no HTTP: {error}",
                    hint="use the tunnel for other protocols",
                ) from None
            if event is h11.NEED_DATA:
                try:
                    data = await stream.read(_PIECE)
                except GuestRefused:
                    data = b""
                connection.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    raise GuestError("it changed the protocol unasked", hint="look at what listens there")
            elif (
                isinstance(event, h11.EndOfMessage)
                or event is h11.PAUSED
                or isinstance(event, h11.ConnectionClosed)
            ):
                return
            else:
                yield event


async def _next(events: AsyncIterator[Any]) -> Any:
    return await anext(events, None)


async def _until(events: AsyncIterator[Any], gone: asyncio.Task[None]) -> AsyncIterator[Any]:
    """Events, until the client has gone (then ClientGone)."""
    loop = asyncio.get_running_loop()
    while True:
        following = loop.create_task(_next(events))
        try:
            await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise ClientGone
            event = following.result()
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await following
        if event is None:
            return
        yield event
