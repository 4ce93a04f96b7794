"""The ASGI application: finds the route, says who asks, calls the handler, tells the outcome.

Plain ASGI over one table of routes: a call costs a walk through a tree and the parsing of what it brought,
so that nearly all of a short command's 4 ms belongs to the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import pkgutil
import re
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ringfence.api import idempotency, routes
from ringfence.api.calls import (
    JSON,
    Answer,
    Call,
    Receive,
    Request,
    Scope,
    Send,
    as_json,
    headers_of,
    parse_query,
)
from ringfence.api.commands import Commands
from ringfence.api.errors import ClientGone, Internal, MethodNotAllowed, body_of, retry_after, status_of
from ringfence.api.metrics import Metrics
from ringfence.api.routing import Dispatcher, Route, Routes
from ringfence.api.signing import Signer
from ringfence.api.sockets import GOING_AWAY, Disconnected, Socket, deny
from ringfence.model.errors import (
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    RingfenceError,
)
from ringfence.model.ids import new_id

if TYPE_CHECKING:
    from ringfence.api.settings import Settings
    from ringfence.control.service import Control
    from ringfence.control.tenancy import Principal, Tenancy

_log = logging.getLogger("ringfence.api")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_MOST_SEGMENTS = 64


def tables() -> list[Routes]:
    """Every table of routes: modules of ``ringfence.api.routes`` that have ``routes``, by name."""
    found = []
    for module in sorted(pkgutil.iter_modules(routes.__path__), key=lambda m: m.name):
        loaded = importlib.import_module(f"{routes.__name__}.{module.name}")
        if isinstance(table := getattr(loaded, "routes", None), Routes):
            found.append(table)
    return found


def make_app(control: Control, tenancy: Tenancy, settings: Settings) -> Service:
    """The API over an orchestrator and what knows keys: an ASGI application."""
    return Service(control, tenancy, settings)


class Service:
    """The application, and what handlers share."""

    def __init__(self, control: Control, tenancy: Tenancy, settings: Settings) -> None:
        from ringfence.api.ports import PortHosts

        self.control = control
        self.tenancy = tenancy
        self.settings = settings
        self.signer = Signer(settings.secret)
        self.dispatcher = Dispatcher(table.table for table in tables())
        self.metrics = Metrics()
        self.commands = Commands(self)
        self.hosts = PortHosts(self)
        self.draining = asyncio.Event()
        self.digests: OrderedDict[tuple[str, str, str], str] = OrderedDict()  # sandbox, path, ETag: SHA-256
        self._openapi: bytes | None = None

    @property
    def openapi(self) -> bytes:
        """The OpenAPI 3.1 description."""
        if self._openapi is None:
            from ringfence.api.openapi import describe

            self._openapi = as_json(describe(self.dispatcher.routes))
        return self._openapi

    async def ready(self) -> bool:
        """Whether store and placement answer, within a few seconds."""
        try:
            async with asyncio.timeout(5):
                await self.control.store.counter("ready")
                await self.control.placement.capacity()
        except (RingfenceError, TimeoutError):
            return False
        return True

    async def changed(self, sandbox: str, revision: int) -> None:
        """Return when a sandbox's row may have changed since this revision, or after some seconds."""
        core = self.control.core
        with core.changes_of(sandbox) as event:
            if (await core.get(sandbox)).revision != revision:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await event.wait()

    def is_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether Authorization carries what looks like a key of ours."""
        return any(
            name == b"authorization" and (b"rf_" in value or b"rft_" in value) for name, value in headers
        )

    def base_url(self, call: Request) -> str:
        """What clients call us: as the operator says, else as this one did."""
        if self.settings.public_url:
            return self.settings.public_url.rstrip("/")
        scheme = {"ws": "http", "wss": "https"}.get(call.scope["scheme"], call.scope["scheme"])
        return f"{scheme}://{call.headers.get('host', 'localhost')}"

    def templates_changed(self) -> None:
        """Names of templates may mean others now."""
        self.control.pools.templates_changed()

    async def sweep(self) -> None:
        """What any API process has to do every second or so: ends of commands, old idempotency keys."""
        await self.commands.sweep()
        await idempotency.forget(self.control.store)

    async def close(self) -> None:
        """End what runs in the background. Idempotent."""
        await self.commands.close()

    def drain(self) -> None:
        """Tell long streams to end: clients reconnect to whoever comes after us."""
        self.draining.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        kind = scope["type"]
        if kind == "http":
            await self._http(scope, receive, send)
        elif kind == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await _lifespan(receive, send)

    # -- HTTP

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request_id = _request_id(scope)
        route: Route | None = None
        call: Call | None = None
        status = 0
        try:
            try:
                if (port := self.hosts.match(scope)) is not None:
                    await self.hosts.http(port, scope, receive, send, request_id)
                    return
                route, params = self._find(scope, scope["method"])
                call = Call(self, scope, receive, send, route, params, request_id)
                await self._admit(call)
                answer = await self._answer(call)
                if answer is not None and answer.stream is not None:
                    answer.first = await anext(answer.stream, b"")  # what fails at once is still an answer
            except ClientGone:
                return
            except RingfenceError as error:
                answer = self._error(error, scope, request_id)
            except Exception as error:
                answer = self._fault(error, scope, request_id)
            if answer is None:
                return  # the handler spoke for itself
            status = answer.status
            await self._deliver(answer, scope, send, request_id)
        finally:
            self.metrics.request(route, status, time.perf_counter() - began)

    def _find(self, scope: Scope, key: str) -> tuple[Route, dict[str, str]]:
        raw = scope["raw_path"].decode("ascii", "replace")
        segments = raw.split("/")[1:]
        if len(segments) > _MOST_SEGMENTS and not (len(segments) > 4 and segments[3] == "ports"):
            raise NotFound("no such path", hint="/openapi.json has all of them")
        if "%" in raw:
            segments = [unquote(part, errors="surrogateescape") for part in segments]
        if len(segments) > 1 and not segments[-1] and (len(segments) < 4 or segments[3] != "ports"):
            segments.pop()  # a slash at the end means nothing
        found = self.dispatcher.find("GET" if key == "HEAD" else key, segments)
        if found.route is not None:
            return found.route, found.params
        if found.methods and found.methods != ("WEBSOCKET",):
            told = ", ".join(m for m in found.methods if m != "WEBSOCKET")
            raise MethodNotAllowed(f"this path does not take {key}", hint=f"it takes {told}", allow=told)
        if found.methods:
            raise MethodNotAllowed("this path is a WebSocket", hint="connect with ws://", allow="GET")
        raise NotFound("no such path", hint="/openapi.json has all of them")

    async def _admit(self, request: Request) -> None:
        """Who asks, and whether that may be.

        Raises:
            NotAuthenticated, NotAllowed, RateLimited.
        """
        scope = request.route.scope
        if scope in ("", "token"):
            return
        request.principal = await self.authenticate(request.headers)
        allow(request.principal, scope)
        await self.tenancy.admit_request(request.principal)

    async def authenticate(self, headers: dict[str, str]) -> Principal:
        """The principal of a key in ``Authorization: Bearer`` or ``X-API-Key``."""
        return await self.tenancy.authenticate(secret_of(headers))

    async def _answer(self, call: Call) -> Answer | None:
        route = call.route
        arguments: list[Any] = []
        raw = b""
        if route.body is not None and route.body != "stream":
            raw = call.raw = await call.bytes(route.most)
            arguments.append(await call.json(route.body, raw))
        if route.query is not None:
            arguments.append(parse_query(route.query, call.query))
        elif route.scope not in ("", "token") and (unknown := sorted(call.query)):
            raise InvalidRequest(
                f"the parameter {unknown[0][:80]!r} is unknown here", hint="see /openapi.json"
            )
        key = call.headers.get("idempotency-key")
        if key is not None and route.creates:
            return await self._once(call, key, raw, arguments)
        return _as_answer(await route.handler(call, *arguments), route)

    async def _once(self, call: Call, key: str, raw: bytes, arguments: list[Any]) -> Answer:
        async def work() -> tuple[int, bytes]:
            answer = _as_answer(await call.route.handler(call, *arguments), call.route)
            assert answer is not None, "a create answers with JSON"
            return answer.status, answer.body if isinstance(answer.body, bytes) else as_json(answer.body)

        place = " ".join((call.route.name, *call.params.values()))
        request = raw + b"\0" + call.scope["query_string"]
        (status, body), again = await idempotency.once(
            self.control.store, call.principal.project, place, key, request, work, self.control.core.task
        )
        headers = {"idempotent-replayed": "true"} if again else {}
        return Answer(status, body, headers=headers, media="application/json")

    def _error(self, error: RingfenceError, scope: Scope, request_id: str) -> Answer:
        status = status_of(error)
        if status >= 500 and error.code != "unsupported":
            _log.warning(
                "%s %s %s: %s: %s", request_id, scope["method"], scope["path"], error.code, error.message
            )
        headers: dict[str, str] = {}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        if status == 405:
            headers["allow"] = str(error.details.get("allow", ""))
        if (wait := retry_after(error)) is not None:
            headers["retry-after"] = str(wait)
        if status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not going to be read
        return Answer(status, body_of(error, request_id), headers=headers)

    def _fault(self, error: Exception, scope: Scope, request_id: str) -> Answer:
        _log.error("%s %s %s failed", request_id, scope.get("method", "WS"), scope["path"], exc_info=error)
        told = Internal("a fault of the service", hint="the service's log has it under the request's id")
        return Answer(500, body_of(told, request_id))

    async def _deliver(self, answer: Answer, scope: Scope, send: Send, request_id: str) -> None:
        headers = [(b"x-request-id", request_id.encode()), (b"cache-control", b"no-store")]
        headers += [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in answer.headers.items()
        ]
        headers.append((b"x-content-type-options", b"nosniff"))
        if answer.stream is not None:
            await self._stream(answer, headers, scope, send, request_id)
            return
        body = answer.body
        if not isinstance(body, bytes):
            body = as_json(body)
        if body and "content-type" not in answer.headers:
            headers.append((b"content-type", JSON))
        if answer.status != 204 and "content-length" not in answer.headers:
            headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(
        self, answer: Answer, headers: list[tuple[bytes, bytes]], scope: Scope, send: Send, request_id: str
    ) -> None:
        assert answer.stream is not None
        stream = answer.stream
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.first, "more_body": True})
            async for piece in stream:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ClientGone:
            return
        except (RingfenceError, ConnectionAbortedError) as error:
            # Too late for another answer: without its end the server cuts the connection.
            _log.warning("%s %s was cut: %s", request_id, scope["path"], error)
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                with contextlib.suppress(RingfenceError):
                    await close()

    # -- WebSocket

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        socket: Socket | None = None
        try:
            if (port := self.hosts.match(scope)) is not None:
                await self.hosts.websocket(port, scope, receive, send, request_id)
                return
            route, params = self._find(scope, "WEBSOCKET")
            socket = Socket(self, scope, receive, send, route, params, request_id)
            await self._admit(socket)
            await route.handler(socket)
            await socket.close()
        except (Disconnected, ClientGone):
            return
        except RingfenceError as error:
            await self._fail(error, socket, receive, send, request_id)
        except asyncio.CancelledError:
            if socket is not None:
                await socket.close(GOING_AWAY, "reload")
            raise
        except Exception as error:
            self._fault(error, scope, request_id)
            told = Internal("a fault of the service", hint="the service's log has it under the request's id")
            await self._fail(told, socket, receive, send, request_id)

    async def _fail(
        self, error: RingfenceError, socket: Socket | None, receive: Receive, send: Send, request_id: str
    ) -> None:
        if socket is not None:
            await socket.fail(error)
            return
        await receive()
        await deny(send, error, request_id)


def allow(principal: Principal, scope: str) -> None:
    """Whether a key's scopes take in one: admin takes in run, run takes in read.

    Raises:
        NotAllowed: they don't.
    """
    order = ("read", "run", "admin")
    if not any(order.index(had) >= order.index(scope) for had in principal.scopes if had in order):
        raise NotAllowed(f"this needs a key with the scope {scope}", hint="ask who administrates your keys")


def secret_of(headers: dict[str, str]) -> str:
    """The key that a request carries.

    Raises:
        NotAuthenticated: none.
    """
    if authorization := headers.get("authorization"):
        kind, _, secret = authorization.partition(" ")
        if kind.lower() == "bearer" and secret.strip():
            return secret.strip()
    elif secret := headers.get("x-api-key", ""):
        return secret
    raise NotAuthenticated(
        "no key",
        hint="send the header Authorization: Bearer KEY; `ringfence login` or RINGFENCE_API_KEY does it",
    )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = str(value.decode("latin-1"))
            return text if _REQUEST_ID.fullmatch(text) else new_id("req")
    return new_id("req")


def _as_answer(value: Any, route: Route) -> Answer | None:
    if isinstance(value, Answer) or value is SPOKEN:
        return value if isinstance(value, Answer) else None
    if value is None:
        return Answer(204)
    return Answer(route.status, value)


SPOKEN = object()  # a handler that has sent its answer itself


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return


__all__ = ["SPOKEN", "Service", "allow", "headers_of", "make_app", "secret_of", "tables"]
