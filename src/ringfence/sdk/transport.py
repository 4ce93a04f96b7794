"""One service over HTTP and WebSockets: keys, time limits, errors, and repeating what is safe to repeat.

What is repeated, with growing pauses and for ``Settings.retry_for`` seconds at most:

* a connection that could not be made: nothing was sent;
* GET, HEAD, PUT and DELETE, and a POST with an Idempotency-Key, whose connection broke or whose answer says
  that store or node did not answer (503);
* anything that was answered by 429 and Retry-After, if that is within the time: it was not begun. Not so a
  full quota, which others may hold for hours: that is told at once, unless the caller asks for ``room``.

Every other failure is the caller's to judge.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ringfence.model.errors import DeadlineExceeded, RingfenceError, WrongState
from ringfence.sdk import failures
from ringfence.sdk.failures import ServiceUnreachable
from ringfence.sdk.settings import Settings

if TYPE_CHECKING:
    import httpx2
    from websockets.asyncio.client import ClientConnection

CHUNK = 256 * 1024  # bytes of a piece of a body
MESSAGE = 4 * 1024 * 1024  # bytes of a WebSocket message at most; the service sends far smaller ones
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_SAFE = frozenset({"GET", "HEAD", "PUT", "DELETE"})
_CONNECTIONS = 256  # at once, of one client

_Item = TypeVar("_Item")
Body = bytes | AsyncIterable[bytes]


class Retry:
    """When to try again, and how long."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._pause = _FIRST_PAUSE

    def allows(self, after: float | None = None) -> bool:
        """Whether there is time for another try after this pause."""
        return time.monotonic() + (after or 0) < self._until

    async def pause(self, after: float | None = None) -> None:
        """Wait: for as long as the service says, else longer each time and never all at once."""
        # Not for secrets: it only spreads clients that were all cut off at the same moment.
        await asyncio.sleep(after or self._pause * random.uniform(0.5, 1.0))  # noqa: S311
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)


class Transport:
    """Connections to one service, of one event loop. Close it."""

    def __init__(self, settings: Settings) -> None:
        import httpx2

        self.settings = settings
        self.closed = False
        socket = settings.socket
        limits = httpx2.Limits(
            max_connections=_CONNECTIONS, max_keepalive_connections=64, keepalive_expiry=30
        )
        headers = {"accept": "application/json", "user-agent": _agent()}
        if settings.key:
            headers["authorization"] = f"Bearer {settings.key}"
        # No proxy of the environment for what is on this machine, or ours alone.
        self._client = httpx2.AsyncClient(
            base_url=settings.base,
            headers=headers,
            timeout=httpx2.Timeout(settings.timeout, connect=10.0, pool=settings.timeout),
            transport=httpx2.AsyncHTTPTransport(limits=limits, uds=socket) if socket else None,
            limits=limits,
            trust_env=socket is None and settings.url.startswith("https"),
        )
        self._errors = httpx2
        # httpx2 would take the address of every request apart and put it together again, three times in all.
        self._address = functools.lru_cache(maxsize=512)(
            lambda path: httpx2.URL(f"{settings.base}/{path.lstrip('/')}")
        )

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        self.closed = True
        await self._client.aclose()

    def check(self) -> None:
        """Raises WrongState: it was closed."""
        if self.closed:
            raise WrongState(
                "the connections to the service were closed with the last sandbox that used them",
                hint="Sandbox.connect(id) gets hold of it again",
            )

    async def __aenter__(self) -> Transport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- calls

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        content: Body | None = None,
        key: str = "",
        safe: bool = False,
        once: bool = False,
        timeout: float | None = None,
        room: float = 0.0,
    ) -> Any:
        """One request; the JSON of its answer, ``None`` if it has no body.

        Args:
            method, path: of the request; ``path`` is encoded already.
            json: the body, as JSON; or ``content``: as bytes or pieces of bytes (then it is sent once).
            params: the query; ``None`` values are left out.
            headers: more of them.
            content: see ``json``.
            key: the Idempotency-Key, which makes a POST safe to repeat.
            safe: it may be repeated although it is a POST: doing it twice is doing it once.
            once: it must not be repeated although its method says so (a PUT that appends).
            timeout: seconds without an answer, if not the usual.
            room: seconds for which it is asked again while a quota is full.

        Raises:
            ServiceUnreachable: no answer.
            RingfenceError: what the service answered.
        """
        response = await self.answer(
            method, path, json=json, params=params, headers=headers, content=content, key=key, safe=safe,
            once=once, timeout=timeout, room=room,
        )  # fmt: skip
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise failures.from_response(response.status_code, response.headers, response.content) from None

    async def answer(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        content: Body | None = None,
        key: str = "",
        safe: bool = False,
        once: bool = False,
        timeout: float | None = None,
        room: float = 0.0,
    ) -> httpx2.Response:
        """As :meth:`call`, but the whole answer, its body read."""
        self.check()
        own = dict(headers or {})
        if key:
            own["idempotency-key"] = key
        flows = not (content is None or isinstance(content, bytes))
        repeatable = not (flows or once) and (safe or bool(key) or method in _SAFE)
        retry, full = Retry(self.settings.retry_for), Retry(room)
        while True:
            try:
                response = await self._client.request(
                    method, self._address(path), json=json, params=_given(params),
                    headers=own, content=content,
                    timeout=self._errors.USE_CLIENT_DEFAULT if timeout is None else timeout,
                )  # fmt: skip
            except UnicodeEncodeError as error:
                raise failures.not_utf8(error) from None
            except self._errors.TransportError as error:
                failure = self._translate(error)
                unsent = (
                    isinstance(error, self._errors.ConnectError | self._errors.ConnectTimeout) and not flows
                )
                late = isinstance(error, self._errors.TimeoutException) and not unsent
                if late or not (unsent or repeatable) or not retry.allows():
                    raise failure from _first(error)
                await retry.pause()
                continue
            if response.status_code < 400:
                return response
            failure = failures.from_response(response.status_code, response.headers, response.content)
            patience = full if failure.code == "quota_exceeded" else retry
            if not await _again(failure, patience, repeatable=repeatable, once=flows):
                raise failure

    async def raw(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx2.Response:
        """What a server inside a sandbox answers, whatever it is. The key does not go along."""
        self.check()
        request = self._client.build_request(method, path, headers=dict(headers or {}), content=content)
        if "authorization" not in {name.lower() for name in headers or {}}:
            request.headers.pop("authorization", None)
        try:
            return await self._client.send(request)
        except self._errors.TransportError as error:
            raise self._translate(error) from _first(error)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """An answer whose body is read piece by piece, in any time; its status was checked."""
        self.check()
        try:
            request = self._client.build_request(
                method, path, json=json, params=_given(params), headers=dict(headers or {}),
                timeout=self._errors.Timeout(self.settings.timeout, read=None),
            )  # fmt: skip
            response = await self._client.send(request, stream=True)
        except UnicodeEncodeError as error:
            raise failures.not_utf8(error) from None
        except self._errors.TransportError as error:
            raise self._translate(error) from _first(error)
        try:
            if response.status_code >= 400:
                body = await response.aread()
                raise failures.from_response(response.status_code, response.headers, body)
            yield response
        except self._errors.TransportError as error:
            raise self._translate(error) from _first(error)
        finally:
            await response.aclose()

    async def pages(self, path: str, params: Mapping[str, Any] | None = None) -> AsyncIterator[Any]:
        """Every item of a list, page by page: ``{"items": [...], "next_cursor": text or null}``."""
        asked = dict(params or {})
        while True:
            page = await self.call("GET", path, params=asked)
            for item in page.get("items", ()):
                yield item
            following = page.get("next_cursor")
            if not following:
                return
            asked["cursor"] = following

    # -- WebSockets

    async def connect(self, path: str, params: Mapping[str, Any] | None = None) -> ClientConnection:
        """A WebSocket; the caller closes it.

        Raises:
            ServiceUnreachable: no answer.
            RingfenceError: what the service answered instead.
        """
        from urllib.parse import urlencode

        from websockets.asyncio.client import connect, unix_connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        self.check()
        try:
            query = urlencode({name: str(value) for name, value in _given(params).items()})
        except UnicodeEncodeError as error:
            raise failures.not_utf8(error) from None
        address = self.settings.websocket_base + path + (f"?{query}" if query else "")
        headers = {"authorization": f"Bearer {self.settings.key}"} if self.settings.key else {}
        options: dict[str, Any] = {
            "additional_headers": headers,
            "user_agent_header": _agent(),
            "compression": None,  # bytes of programs, on short ways: not worth the time
            "max_size": MESSAGE,
            "open_timeout": self.settings.timeout,
            "close_timeout": 2,
            "max_queue": 16,
        }
        try:
            if self.settings.socket:
                return await unix_connect(self.settings.socket, address, **options)
            return await connect(address, proxy=True if address.startswith("wss") else None, **options)
        except InvalidStatus as error:
            answer = error.response
            body = bytes(answer.body or b"")
            raise failures.from_response(answer.status_code, dict(_lower(answer.headers)), body) from None
        except (OSError, WebSocketException, TimeoutError) as error:
            raise self.unreachable(error) from error

    def unreachable(self, error: BaseException) -> ServiceUnreachable:
        """The error for a service that does not answer."""
        reason = str(error) or type(error).__name__
        where = self.settings.url
        return ServiceUnreachable(
            f"the service at {where} does not answer: {reason}",
            hint="is `ringfence serve` running there? The address comes from "
            + (self.settings.source or "the caller"),
        )

    def _translate(self, error: Exception) -> RingfenceError:
        if isinstance(error, self._errors.TimeoutException) and not isinstance(
            error, self._errors.ConnectTimeout
        ):
            return DeadlineExceeded(
                f"no answer from {self.settings.url} within {self.settings.timeout:g} s",
                hint="it may still be doing what was asked; give more time with `timeout`",
            )
        return self.unreachable(error)


def _first(error: BaseException) -> BaseException:
    """What began it: libraries wrap one another's errors, and nobody wants to read all of them."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def closing(source: AsyncIterator[_Item]) -> AbstractAsyncContextManager[AsyncIterator[_Item]]:
    """Iterate over it in here: it is closed on the way out, and the connection that it reads with it."""
    return aclosing(cast("AsyncGenerator[_Item, None]", source))


async def _again(failure: RingfenceError, retry: Retry, *, repeatable: bool, once: bool) -> bool:
    """Whether to ask again, after the pause."""
    status = failure.details.get("status")
    wait = failure.details.get("retry_after")
    after = float(wait) if isinstance(wait, int | float) else None
    refused = status == 429 and after is not None and not once
    passing = repeatable and failure.code in failures.PASSING and status in (502, 503)
    if not (refused or passing) or not retry.allows(after):
        return False
    await retry.pause(after if refused else None)
    return True


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in (params or {}).items():
        if value is not None:
            found[name] = str(value).lower() if isinstance(value, bool) else value
    return found


def _lower(headers: Any) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in headers.raw_items()]


def _agent() -> str:
    from ringfence import __version__

    return f"ringfence-python/{__version__}"
