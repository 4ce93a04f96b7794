"""Requests: each one judged, written anew, sent on, and its answer brought back.

The same code serves plain proxy requests, requests inside a tunnel, and those inside inspected TLS. A
redirect is an answer like any other; the request that a program makes of it is judged as a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ringfence.egress import http1
from ringfence.egress.answers import answer
from ringfence.egress.door import Door, Flow, Refused, refused
from ringfence.egress.exchange import Exchange, Request
from ringfence.egress.http1 import BadMessage, Headers, Incomplete, Reader, RequestHead, ResponseHead
from ringfence.egress.names import BadHost, Host, parse_host
from ringfence.egress.outward import H1Upstream, Upstream
from ringfence.egress.patience import Patience
from ringfence.egress.policy import BadPath, Decision, normal_path
from ringfence.egress.relay import relay
from ringfence.egress.streams import BROKEN, Rewound
from ringfence.egress.upstream import Unreachable

SMALL = 64 * 1024  # bytes of a body that is read before its request goes out
_HEAD_PATIENCE = 30.0  # seconds that a begun head may take


class Requests:
    """Serves the requests of one connection from inside.

    Args:
        fixed: scheme, host and port that every request must be for; ``None`` for a proxy's own port, where
            each request names its own.
    """

    def __init__(self, flow: Flow, reader: Reader, fixed: tuple[str, Host, int] | None = None) -> None:
        self.flow = flow
        self.door: Door = flow.door
        self.reader = reader
        self.fixed = fixed
        self._patience = Patience()

    async def serve(self) -> RequestHead | None:
        """Serve until the client leaves. Returns a CONNECT request if there is one: the caller's to serve."""
        try:
            return await self._serve()
        finally:
            self._patience.close()

    async def _serve(self) -> RequestHead | None:
        while True:
            try:
                head = await self._head()
                if head is None:
                    return None
                if head.method == "CONNECT" and self.fixed is None:
                    return head
                if not await self._one(head):
                    return None
            except BadMessage as error:
                self.flow.record(Decision(False, error.code, None, str(error)), status=error.status)
                await self._say(error)
                return None

    async def _head(self) -> RequestHead | None:
        idle = self.door.network.idle_timeout
        try:
            if not self.reader.held:
                with self._patience(idle):
                    if not await self.reader.more():
                        return None
            if self.reader.has_head:  # came in one piece
                return http1.parse_request(await self.reader.head())
            with self._patience(_HEAD_PATIENCE):
                return http1.parse_request(await self.reader.head())
        except TimeoutError:
            if self.reader.held:
                raise BadMessage("the request's head did not come in time", 408, "slow") from None
            return None
        except Incomplete as error:
            if error.begun:
                raise BadMessage("the request's head ends early") from None
            return None

    async def _say(
        self, error: Refused | Unreachable | BadMessage, keep: bool = False, head_only: bool = False
    ) -> None:
        response, body = answer(self.door, error)
        data, _, _ = http1.write_response(response, keep)
        with contextlib.suppress(*BROKEN):
            await self.reader.stream.write(data if head_only else data + body)

    # -- one request

    async def _one(self, head: RequestHead) -> bool:
        """Serve one request; whether the connection goes on."""
        flow = self.flow
        flow.begin()
        front = _Front(self, head)
        try:
            try:
                scheme, host, port, target = self._destination(head)
                path, query = ("*", "") if target == "*" else self._path(target)
            except Refused as error:
                flow.record(error.decision, method=head.method, status=error.status)
                raise
            request = Request(
                head.method, scheme, host, port, path, query, head.headers, head.length, head.upgrade
            )
            await Exchange(flow, front, self.door.pool).run(request)
            return front.keep
        except (Refused, Unreachable) as error:
            if front.begun:
                return False  # its end is missing: that is how the client knows
            keep = head.keep and (head.length == 0 or front.read)
            await self._say(error, keep, head.method == "HEAD")
            return keep
        except (Incomplete, BadMessage):
            if front.begun or not front.asked:
                return False
            raise

    def _destination(self, head: RequestHead) -> tuple[str, Host, int, str]:
        """Scheme, host, port and origin-form target of a request.

        Raises:
            Refused: it names no host, or two.
        """
        if self.fixed is not None:
            scheme, host, port = self.fixed
            if head.host is None or self._authority(head.host, scheme) != (host, port):
                shown = (head.host or "none")[:100]
                raise refused("host", f"the tunnel is for {host}:{port}, and Host says {shown}", 421)
            if head.target != "*" and not head.target.startswith("/"):
                raise refused("target", "an absolute URL inside a tunnel", 400)
            return scheme, host, port, head.target
        scheme, mark, rest = head.target.partition("://")
        scheme = scheme.lower()
        if not mark or scheme not in ("http", "https"):
            raise refused("target", "this is a proxy: send absolute URLs, or CONNECT", 400)
        authority, slash, path = rest.partition("/")
        if "?" in authority:
            authority, slash, path = authority.partition("?")[0], "/?", rest.partition("?")[2]
        if "@" in authority:
            raise refused("bad_host", "a URL with user info is not let through", 400)
        host, port = self._authority(authority, scheme)
        if head.host is not None and self._authority(head.host, scheme) != (host, port):
            raise refused("host", f"the URL is for {host}:{port}, and Host says {head.host[:100]}", 421)
        return scheme, host, port, (slash or "/") + path

    def _authority(self, text: str, scheme: str) -> tuple[Host, int]:
        return split_authority(text, 443 if scheme == "https" else 80)

    @staticmethod
    def _path(target: str) -> tuple[str, str]:
        try:
            return normal_path(target)
        except BadPath as error:
            raise refused("bad_path", f"the path is refused: {error}", 400) from None


class _Front:
    """An HTTP/1.1 client's side of one exchange."""

    def __init__(self, requests: Requests, head: RequestHead) -> None:
        self._requests = requests
        self._stream = requests.reader.stream
        self._head = head
        self._data = b""
        self._chunked = False
        self.speaks_h2 = False
        self.begun = False
        self.asked = False  # for the body
        self.read = False  # the body, to its end
        self.keep = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """The request's body; a client that waits for a word before it sends one gets it."""
        self.asked = True
        if self._head.expects:
            await self._stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        idle = self._requests.door.network.idle_timeout
        body = self._requests.reader.body(self._head.length)
        while True:
            try:
                async with asyncio.timeout(idle):
                    data = await anext(body)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise Incomplete from None
            yield data
        self.read = True

    async def ready(self) -> bytes | None:
        """See ``Front``."""
        if not 0 < self._head.length <= SMALL:
            return None
        reader = self._requests.reader
        if reader.held >= self._head.length and not self._head.expects:
            self.asked = self.read = True
            return await reader.exactly(self._head.length)
        return b"".join([data async for data in self.pieces()])

    async def start(self, response: ResponseHead) -> None:
        """The head waits for the first piece: both go out in one."""
        keep = self._head.keep and (self._head.length == 0 or self.read)
        self._data, self._chunked, self.keep = http1.write_response(response, keep, self._head.minor)
        self.begun = True

    async def piece(self, data: bytes) -> None:
        """See ``Front``."""
        data, self._data = self._data + (http1.chunk(data) if self._chunked else data), b""
        await self._stream.write(data)

    async def finish(self, trailers: Headers) -> None:
        """See ``Front``."""
        data = self._data + (b"0\r\n\r\n" if self._chunked else b"")
        if data:
            await self._stream.write(data)

    async def switch(self, response: ResponseHead, upstream: Upstream) -> str:
        """A WebSocket: both sides agreed, and from here on it is bytes."""
        names = {name.lower() for name, _ in response.headers}
        if self._head.upgrade != "websocket" or "sec-websocket-accept" not in names:
            raise Unreachable("the server switched to a protocol that was not asked for", 502, "upgrade")
        if not isinstance(upstream, H1Upstream):
            raise Unreachable("no WebSocket over HTTP/2", 502, "upgrade")
        self.begun = True
        lines = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket"]
        lines += [f"{name}: {value}" for name, value in response.headers]
        await self._stream.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        inner = Rewound(self._stream, self._requests.reader.take())
        outer = Rewound(upstream.stream, upstream.reader.take())
        return await relay(self._requests.flow, inner, outer, self._requests.door.network.idle_timeout)


def split_authority(text: str, default: int) -> tuple[Host, int]:
    """Host and port of ``host[:port]``.

    Raises:
        Refused: it is none.
    """
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        host += bracket
        if rest and not rest.startswith(":"):
            raise refused("bad_host", f"{text[:100]!r} is no host", 400)
        port = rest[1:]
    elif ":" in text:
        host, _, port = text.rpartition(":")
        if ":" in host:
            raise refused("bad_host", "an IPv6 address stands in brackets", 400)
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise refused("bad_host", f"{port[:20]!r} is no port", 400)
    try:
        return parse_host(host), int(port) if port else default
    except BadHost as error:
        raise refused("bad_host", f"{text[:100]!r} is no host: {error}", 400) from None
