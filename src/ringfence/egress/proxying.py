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
from ringfence.egress.door import Door, Flow, Grant, Refused, refused
from ringfence.egress.http1 import BadMessage, Incomplete, Reader, RequestHead, ResponseHead
from ringfence.egress.names import Address, BadHost, Host, parse_host
from ringfence.egress.policy import BadPath, Decision, normal_path
from ringfence.egress.relay import relay
from ringfence.egress.streams import BROKEN, Rewound, SocketStream, Stream, TlsStream
from ringfence.egress.upstream import Unreachable

_HEAD_PATIENCE = 30.0  # seconds that a begun head may take
_RETRIES = 2
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "QUERY"})
_SMALL = 64 * 1024


class Upstream:
    """One connection to a server, ready for a request."""

    def __init__(self, stream: Stream, grant: Grant, address: Address, scheme: str) -> None:
        self.stream = stream
        self.reader = Reader(stream)
        self.grant = grant
        self.address = address
        self.scheme = scheme
        self.used = 0

    def fits(self, grant: Grant, scheme: str) -> bool:
        """Whether it may carry a request with this grant."""
        return (
            self.scheme == scheme
            and self.grant.host == grant.host
            and self.grant.port == grant.port
            and self.address in grant.addresses
        )

    async def close(self) -> None:
        """End it."""
        with contextlib.suppress(*BROKEN):
            await self.stream.close()


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
        self.upstream: Upstream | None = None

    async def serve(self) -> RequestHead | None:
        """Serve until the client leaves. Returns a CONNECT request if there is one: the caller's to serve."""
        try:
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
        finally:
            if self.upstream is not None:
                await self.upstream.close()

    async def _head(self) -> RequestHead | None:
        idle = self.door.network.idle_timeout
        try:
            if not self.reader.held:
                async with asyncio.timeout(idle):
                    if not await self.reader.more():
                        return None
            async with asyncio.timeout(_HEAD_PATIENCE):
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
        try:
            scheme, host, port, target = self._destination(head)
            flow.host, flow.port = host, port
            flow.protocol = "tls" if scheme == "https" else "http"
            path, query = ("*", "") if target == "*" else self._path(target)
            flow.method, flow.path = head.method, path
            if head.upgrade and head.upgrade != "websocket":
                raise refused("upgrade", f"an upgrade to {head.upgrade[:40]!r} is not let through", 400)
            grant = await self.door.admit(flow, host, port, flow.protocol, head.method, path)
            flow.rule = grant.rule
            return await self._forward(head, grant, scheme, path + query)
        except (Refused, Unreachable) as error:
            decision = error.decision if isinstance(error, Refused) else Decision(True, "allowed", flow.rule)
            why = {} if isinstance(error, Refused) else {"error": error.code, "reason": str(error)}
            flow.record(decision, method=head.method, path=flow.path, status=error.status, **why)
            keep = head.keep and head.length == 0
            await self._say(error, keep, head.method == "HEAD")
            return keep
        finally:
            flow.method = flow.path = ""

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

    # -- sending it on

    async def _forward(self, head: RequestHead, grant: Grant, scheme: str, target: str) -> bool:
        host = grant.host.bracketed()
        if grant.port != (443 if scheme == "https" else 80):
            host += f":{grant.port}"
        data = http1.write_request(head.method, target, host, head.headers, head.length, head.upgrade)
        if head.expects:
            await self.reader.stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        first = b""
        if 0 < head.length <= _SMALL and self.reader.held >= head.length:
            first = await self.reader.some(head.length)
        whole = head.length == len(first)
        tries = 0
        while True:
            upstream = await self._upstream(grant, scheme)
            fresh = not upstream.used
            upstream.used += 1
            sender: asyncio.Task[None] | None = None
            try:
                await self._send(upstream, data + first)
                if not whole:
                    sender = asyncio.ensure_future(self._send_body(upstream, head.length))
                response = await self._response(upstream, head.method, sender)
            except (*BROKEN, Incomplete, BadMessage) as error:
                self.upstream = None
                await upstream.close()
                await _stop(sender)
                tries += 1
                if whole and tries <= _RETRIES and (not fresh or head.method in _IDEMPOTENT):
                    # A connection that the server had given up meanwhile says nothing about the server.
                    if fresh:
                        await asyncio.sleep(0.1 * 4 ** (tries - 1))
                    continue
                raise Unreachable(
                    f"{grant.host}:{grant.port} broke off: {error or 'no answer'}", 502, "broken"
                ) from None
            except BaseException:
                self.upstream = None
                await upstream.close()
                await _stop(sender)
                raise
            return await self._bring(head, grant, upstream, response, sender)

    async def _upstream(self, grant: Grant, scheme: str) -> Upstream:
        held = self.upstream
        if held is not None:
            if held.fits(grant, scheme):
                return held
            self.upstream = None
            await held.close()
        engine = self.door.engine
        patience = self.door.network.connect_timeout
        stream, address = await engine.upstreams.connect(grant.host, grant.port, grant.addresses, patience)
        self.flow.address = str(address)
        secured: SocketStream | TlsStream = stream
        if scheme == "https":
            secured = await engine.upstreams.secure(stream, grant.host, "http/1.1", patience=patience)
        self.upstream = Upstream(secured, grant, address, scheme)
        return self.upstream

    async def _send(self, upstream: Upstream, data: bytes) -> None:
        bucket = self.door.engine.bucket_out(self.door)
        if bucket is not None:
            await bucket.take(len(data))
        self.flow.out(len(data))
        await upstream.stream.write(data)

    async def _send_body(self, upstream: Upstream, length: int) -> None:
        async for piece in self.reader.body(length):
            await self._send(upstream, http1.chunk(piece) if length == -1 else piece)
        if length == -1:
            await upstream.stream.write(b"0\r\n\r\n")

    async def _response(
        self, upstream: Upstream, method: str, sender: asyncio.Task[None] | None
    ) -> ResponseHead:
        """The head of the answer; one that comes before the request is whole is an answer too."""
        while True:
            reading = asyncio.ensure_future(self._head_of(upstream, method))
            try:
                if sender is not None and not sender.done():
                    await asyncio.wait((reading, sender), return_when=asyncio.FIRST_COMPLETED)
                    if sender.done() and not reading.done():
                        sender.result()  # raises what broke
                response = await reading
            finally:
                if not reading.done():
                    await _stop(reading)
            if response.status >= 200 or response.status == 101:
                return response

    async def _head_of(self, upstream: Upstream, method: str) -> ResponseHead:
        try:
            async with asyncio.timeout(self.door.network.idle_timeout):
                return http1.parse_response(await upstream.reader.head(), method)
        except TimeoutError:
            raise Unreachable(f"{upstream.grant.host} did not answer in time", 504, "timeout") from None

    # -- bringing the answer back

    async def _bring(
        self,
        head: RequestHead,
        grant: Grant,
        upstream: Upstream,
        response: ResponseHead,
        sender: asyncio.Task[None] | None,
    ) -> bool:
        flow = self.flow
        if response.status == 101:
            return await self._switch(head, upstream, response)
        ended = False
        data, chunked, keep = http1.write_response(response, head.keep, head.minor)
        try:
            bucket = self.door.engine.bucket_in(self.door)
            async for piece in self._body(upstream, response):
                if bucket is not None:
                    await bucket.take(len(piece))
                flow.back(len(piece))
                await self.reader.stream.write(data + (http1.chunk(piece) if chunked else piece))
                data = b""
            if chunked:
                data += b"0\r\n\r\n"
            if data:
                await self.reader.stream.write(data)
            ended = True
        except (BadMessage, Incomplete, TimeoutError) as error:
            # The client must see that the answer is not whole: the connection ends without its last piece.
            flow.record(Decision(True, "allowed", grant.rule), method=head.method, path=flow.path,
                        status=response.status, error="broken", reason=str(error))  # fmt: skip
            return False
        finally:
            early = sender is not None and not sender.done()
            await _stop(sender)
            if not ended or early or not response.keep or response.length == -2:
                self.upstream = None
                await upstream.close()
        flow.record(
            Decision(True, "allowed", grant.rule), method=head.method, path=flow.path, status=response.status
        )
        return keep and not early

    async def _body(self, upstream: Upstream, response: ResponseHead) -> AsyncIterator[bytes]:
        pieces = upstream.reader.body(response.length)
        idle = self.door.network.idle_timeout
        while True:
            async with asyncio.timeout(idle):
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
            yield piece

    async def _switch(self, head: RequestHead, upstream: Upstream, response: ResponseHead) -> bool:
        """A WebSocket: both sides agreed, and from here on it is bytes."""
        self.upstream = None
        flow = self.flow
        try:
            names = {name.lower(): value for name, value in response.headers}
            if head.upgrade != "websocket" or "sec-websocket-accept" not in names:
                raise Unreachable("the server switched to a protocol that was not asked for", 502, "upgrade")
            lines = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket"]
            lines += [f"{name}: {value}" for name, value in response.headers]
            await self.reader.stream.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            inner = Rewound(self.reader.stream, self.reader.take())
            outer = Rewound(upstream.stream, upstream.reader.take())
            end = await relay(flow, inner, outer, self.door.network.idle_timeout)
            flow.record(Decision(True, "allowed", flow.rule), method=head.method, path=flow.path, status=101,
                        upgrade="websocket", end=end)  # fmt: skip
        finally:
            await upstream.close()
        return False


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


async def _stop(task: asyncio.Task[object] | asyncio.Task[None] | asyncio.Task[ResponseHead] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
