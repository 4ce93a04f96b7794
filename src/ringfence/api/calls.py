"""One HTTP request as a handler sees it, and what it may answer besides JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import pydantic_core
from pydantic import BaseModel, ValidationError

from ringfence.api.errors import ClientGone, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from ringfence.model.errors import InvalidRequest

if TYPE_CHECKING:
    from ringfence.api.app import Service
    from ringfence.api.routing import Route
    from ringfence.control.service import Control
    from ringfence.control.tenancy import Principal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

Raw = bytes  # where a method has that name
_Result = TypeVar("_Result")
_LONGEST_KEY = 200
_MOST_QUERY = 64  # parameters of one query
JSON = b"application/json"


class Answer:
    """Status, headers and a body: bytes, something to be JSON, or a stream of bytes."""

    __slots__ = ("body", "first", "headers", "status", "stream")

    def __init__(
        self,
        status: int = 200,
        body: Any = b"",
        *,
        headers: Mapping[str, str] | None = None,
        stream: AsyncIterator[bytes] | None = None,
        media: str | None = None,
    ) -> None:
        self.status = status
        self.headers = dict(headers or {})
        if media is not None:
            self.headers["content-type"] = media
        self.stream = stream
        self.first = b""  # of the stream, once it has begun
        self.body = body


class Request:
    """What HTTP requests and WebSockets have in common."""

    def __init__(
        self, service: Service, scope: Scope, route: Route, params: dict[str, str], request_id: str
    ) -> None:
        self.service = service
        self.scope = scope
        self.route = route
        self.params = params
        self.request_id = request_id
        self.headers: dict[str, str] = headers_of(scope)
        self.principal: Principal = None  # type: ignore[assignment]  # set before a handler with a scope

    @property
    def control(self) -> Control:
        """The orchestrator."""
        return self.service.control

    @property
    def query(self) -> dict[str, list[str]]:
        """The query's parameters.

        Raises:
            InvalidRequest: more than 64 of them, or not UTF-8.
        """
        return query_of(self.scope)

    def argument(self, name: str, default: str = "") -> str:
        """One parameter of the query."""
        values = self.query.get(name)
        return values[0] if values else default

    @property
    def sandbox(self) -> str:
        """The sandbox's id in the path."""
        return self.params["sandbox"]


class Call(Request):
    """One HTTP request."""

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
        self._read = False
        self.raw = b""  # the JSON body as it came

    def idempotency_key(self) -> str:
        """The Idempotency-Key; empty if there is none.

        Raises:
            InvalidRequest: it can't be one.
        """
        key = self.headers.get("idempotency-key")
        if key is None:
            return ""
        check_key(key)
        return key

    @property
    def method(self) -> str:
        """GET, POST …"""
        return str(self.scope["method"])

    def length(self) -> int | None:
        """What Content-Length says."""
        text = self.headers.get("content-length")
        return int(text) if text is not None and text.isascii() and text.isdigit() else None

    async def stream(self, most: int | None = None) -> AsyncIterator[bytes]:
        """The body, piece by piece.

        Raises:
            PayloadTooLarge: more than ``most`` bytes. RequestTimeout: nothing came for a while.
            ClientGone: the connection ended before the body.
        """
        self._read = True
        total = 0
        if most is not None and (self.length() or 0) > most:
            raise _too_large(most)
        while True:
            try:
                async with asyncio.timeout(self.service.settings.body_timeout):
                    message = await self._receive()
            except TimeoutError:
                raise RequestTimeout(
                    "nothing more of the body came", hint="send it without long pauses"
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            if piece:
                total += len(piece)
                if most is not None and total > most:
                    raise _too_large(most)
                yield piece
            if not message.get("more_body"):
                return

    async def bytes(self, most: int) -> bytes:
        """The whole body. Raises what :meth:`stream` raises."""
        pieces = [piece async for piece in self.stream(most)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def trailer(self, name: str) -> str | None:
        """A header, or one that came after the body (read it to its end first)."""
        if (value := self.headers.get(name)) is not None:
            return value
        raw = name.encode()
        for key, text in self.scope["headers"]:
            if key == raw:
                return str(text.decode("latin-1"))
        return None

    async def json(self, model: type[BaseModel], raw: Raw | None = None) -> BaseModel:
        """The body as a model.

        Raises:
            InvalidRequest: no JSON, unknown or wrong fields, by name. UnsupportedMediaType.
        """
        media = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if raw is None:
            raw = await self.bytes(self.route.most)
        if media != "application/json" and (media or raw):
            raise UnsupportedMediaType(
                f"a body of type {media or 'unknown'}; this route takes application/json",
                hint="send it as JSON with the header Content-Type: application/json",
            )
        try:
            return model.model_validate_json(raw or b"{}")
        except ValidationError as error:
            raise wrong(error, "the body") from None

    async def gone(self) -> None:
        """Return when the client has gone (its body must have been read)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def left(self) -> None:
        """As :meth:`gone`, and also when the client has ended its half of the connection: nearly always it
        has closed it wholly, which can't be told apart before something is sent.
        """
        whole = self._read
        while (message := await self._receive())["type"] != "http.disconnect":
            if not message.get("more_body"):
                if whole:
                    return
                whole = True

    async def while_there(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of work that is ended when the client has :meth:`left`.

        Raises:
            ClientGone: it has.
        """
        loop = asyncio.get_running_loop()
        doing, gone = loop.create_task(work), loop.create_task(self.left())
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise ClientGone
        finally:
            for task in (doing, gone):
                task.cancel()
            await asyncio.gather(doing, gone, return_exceptions=True)


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"a body of more than {most} bytes", hint="send less, or a file", most=most)


def check_key(key: str) -> None:
    """Raise InvalidRequest unless this can be an Idempotency-Key."""
    if not 1 <= len(key) <= _LONGEST_KEY or not key.isascii() or not key.isprintable():
        raise InvalidRequest(
            f"an Idempotency-Key of 1 to {_LONGEST_KEY} printable ASCII characters, please",
            hint="a random UUID is a good one",
        )


def headers_of(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name; of repeated ones the first, so that a later one can't replace it."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


def query_of(scope: Scope) -> dict[str, list[str]]:
    """The query's parameters. Raises InvalidRequest."""
    raw = scope["query_string"]
    if not raw:
        return {}
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            max_num_fields=_MOST_QUERY,
            errors="surrogateescape",  # file names need not be UTF-8
        )
    except ValueError:
        raise InvalidRequest(
            f"the query can't be read: not ASCII, or more than {_MOST_QUERY} parameters",
            hint="percent-encode it",
        ) from None
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def parse_query(model: type[BaseModel], query: dict[str, list[str]]) -> BaseModel:
    """The query as a model: fields that are lists take every value, others one.

    Raises:
        InvalidRequest: unknown, repeated or wrong parameters, by name.
    """
    values: dict[str, Any] = {}
    for name, given in query.items():
        field = model.model_fields.get(name)
        if field is not None and "tuple" in str(field.annotation):
            values[name] = given
        elif len(given) > 1:
            raise InvalidRequest(f"the parameter {_short(name)} more than once", hint="give it once")
        else:
            values[name] = given[0]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise wrong(error, "the query") from None


def wrong(error: ValidationError, where: str) -> InvalidRequest:
    """What pydantic found, in words: every field by name."""
    fields = []
    for found in error.errors(include_url=False, include_context=False, include_input=False)[:20]:
        name = ".".join(_short(str(part)) for part in found["loc"])
        kind = found["type"]
        if kind == "extra_forbidden":
            problem = "unknown field"
        elif kind == "json_invalid":
            problem = found["msg"]
        else:
            problem = found["msg"][:1].lower() + found["msg"][1:]
        fields.append({"field": name, "problem": problem})
    first = fields[0]
    told = f"{first['field']}: {first['problem']}" if first["field"] else first["problem"]
    more = f" (and {len(fields) - 1} more)" if len(fields) > 1 else ""
    return InvalidRequest(
        f"{where} is wrong: {told}{more}", hint="see /openapi.json for what it takes", fields=fields
    )


def _short(text: str) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text[:80])
    return text.encode("utf-8", "replace").decode()


def as_json(value: Any) -> bytes:
    """Anything a handler may return, as JSON; ``?`` for what is not UTF-8 in names of files."""
    try:
        return pydantic_core.to_json(value, fallback=_fallback)
    except (pydantic_core.PydanticSerializationError, UnicodeEncodeError):
        return pydantic_core.to_json(_utf8(pydantic_core.to_jsonable_python(value, fallback=_fallback)))


def _fallback(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_utf8(k): _utf8(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_utf8(v) for v in value]
    return value
