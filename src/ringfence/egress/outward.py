"""Requests on their way out: one shape for HTTP/1.1 and HTTP/2, and connections that are used again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

from ringfence.egress import http1
from ringfence.egress.http1 import Headers, Reader, ResponseHead
from ringfence.egress.injection import Outgoing
from ringfence.egress.names import Address
from ringfence.egress.patience import Patience
from ringfence.egress.streams import BROKEN, SocketStream, Stream, TlsStream
from ringfence.egress.upstream import Unreachable

if TYPE_CHECKING:
    from ringfence.egress.door import Door, Grant

_MOST_IDLE = 32  # connections that a door keeps for its next requests
_IDLE = 20.0  # seconds that it keeps them
_SMALL = 64 * 1024

Count = Callable[[bytes], None]


class Sending(Protocol):
    """The body of a request."""

    length: int  # -1: not known
    whole: bytes | None  # all of it, if it is there already

    def pieces(self) -> AsyncIterator[bytes]:
        """Its pieces, once."""
        ...


class Upstream(Protocol):
    """One connection to a server, ready for a request."""

    grant: Grant
    address: Address
    scheme: str
    used: int
    trailers: Headers  # of the answer, when its body has ended
    patience: Patience  # for whoever waits for its answer

    async def request(
        self, outgoing: Outgoing, body: Sending, upgrade: str, count: Count, idle: float
    ) -> ResponseHead:
        """Send a request and return the head of its answer.

        Raises:
            OSError and what else streams raise, BadMessage, Incomplete, TimeoutError: it did not work out.
            BodyFailed: the request's body could not be had from whoever sends it.
        """
        ...

    def whole(self, response: ResponseHead) -> bytes | None:
        """All of the answer's body, if it came along with the head: then :meth:`body` is not for use."""
        ...

    def body(self, response: ResponseHead) -> AsyncIterator[bytes]:
        """The pieces of the answer."""
        ...

    async def close(self) -> None:
        """End the connection."""

    @property
    def free(self) -> bool:
        """Whether it may be used for another request."""
        ...


class BodyFailed(Exception):
    """The client did not send the body that it promised; ``error`` says how."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class H1Upstream:
    """HTTP/1.1: one request after another."""

    def __init__(
        self, stream: Stream, socket: SocketStream, grant: Grant, address: Address, scheme: str
    ) -> None:
        self.stream = stream
        self.reader = Reader(stream)
        self.grant = grant
        self.address = address
        self.scheme = scheme
        self.used = 0
        self.trailers: Headers = []
        self.patience = Patience()
        self.clean = True
        self._socket = socket
        self._sender: asyncio.Task[None] | None = None

    @property
    def free(self) -> bool:
        """Whether it may be used for another request: also the server has not hung up, or said more."""
        return self.clean and not self.reader.held and not self._socket.stirred

    async def request(
        self, outgoing: Outgoing, body: Sending, upgrade: str, count: Count, idle: float
    ) -> ResponseHead:
        """See :class:`Upstream`."""
        self.clean = False
        whole = body.whole
        length = body.length if whole is None else len(whole)
        data = http1.write_request(
            outgoing.method, outgoing.target, outgoing.host, outgoing.headers, length, upgrade
        )
        if whole is not None and len(whole) <= _SMALL:
            count(data + whole)
            await self.stream.write(data + whole)
            return await self._answer(outgoing.method, idle)
        count(data)
        await self.stream.write(data)
        self._sender = asyncio.ensure_future(self._send(body, count))
        try:
            return await self._answer(outgoing.method, idle)
        except BaseException:
            await self._stop_sending()
            raise

    async def _send(self, body: Sending, count: Count) -> None:
        chunked = body.length == -1 and body.whole is None
        pieces = body.pieces()
        while True:
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                break
            except Exception as error:
                raise BodyFailed(error) from error
            data = http1.chunk(piece) if chunked else piece
            count(data)
            await self.stream.write(data)
        if chunked:
            await self.stream.write(b"0\r\n\r\n")

    async def _answer(self, method: str, idle: float) -> ResponseHead:
        while True:
            response = await self._head(method, idle)
            if response.status >= 200 or response.status == 101:
                return response

    async def _head(self, method: str, idle: float) -> ResponseHead:
        """An answer may come before the request is whole; a body that breaks off ends the wait for one."""
        if self._sender is None or self._sender.done():
            with self.patience(idle):
                return http1.parse_response(await self.reader.head(), method)
        reading = asyncio.ensure_future(self.reader.head())
        try:
            await asyncio.wait((reading, self._sender), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                self._sender.result()  # raises what broke
                async with asyncio.timeout(idle):
                    await asyncio.wait((reading,))
            return http1.parse_response(await reading, method)
        finally:
            if not reading.done():
                reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def whole(self, response: ResponseHead) -> bytes | None:
        """See :class:`Upstream`."""
        if self._sender is not None or not 0 <= response.length <= self.reader.held:
            return None
        self.clean = response.keep
        return self.reader.cut(response.length)

    async def body(self, response: ResponseHead) -> AsyncIterator[bytes]:
        """See :class:`Upstream`."""
        async for piece in self.reader.body(response.length):
            yield piece
        early = self._sender is not None and not self._sender.done()
        await self._stop_sending()
        self.clean = response.keep and response.length != -2 and not early

    async def _stop_sending(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def close(self) -> None:
        """See :class:`Upstream`."""
        self.clean = False
        self.patience.close()
        await self._stop_sending()
        with contextlib.suppress(*BROKEN):
            await self.stream.close()


class Pool:
    """The idle connections of one door. Never shared between sandboxes."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._idle: list[tuple[Upstream, asyncio.TimerHandle]] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, grant: Grant, scheme: str, *, fresh: bool = False, h2: bool = False) -> Upstream:
        """A connection for a request with this grant.

        Raises:
            Unreachable: none could be made.
        """
        if not fresh:
            for entry in reversed(self._idle):
                upstream, timer = entry
                if (
                    upstream.scheme == scheme
                    and upstream.grant.host == grant.host
                    and upstream.grant.port == grant.port
                    and upstream.address in grant.addresses
                ):
                    self._idle.remove(entry)
                    timer.cancel()
                    if upstream.free:
                        return upstream
                    self._end(upstream)
                    break
        engine = self._door.engine
        patience = self._door.network.connect_timeout
        project = self._door.spec.project
        stream, address = await engine.upstreams.connect(
            grant.host, grant.port, grant.addresses, patience, project
        )
        secured: SocketStream | TlsStream = stream
        if scheme == "https":
            # HTTP/2 is offered where the client speaks it too: some of what it can has no other form.
            offered = ("h2", "http/1.1") if h2 else ("http/1.1",)
            secured = await engine.upstreams.secure(stream, grant.host, *offered, patience=patience)
            if secured.protocol == "h2":
                from ringfence.egress.http2_out import H2Upstream

                return await H2Upstream.over(secured, stream, grant, address)
        return H1Upstream(secured, stream, grant, address, scheme)

    def put(self, upstream: Upstream) -> None:
        """Keep a connection for the next request, if it can be kept."""
        if not upstream.free or self._door.closed or len(self._idle) >= _MOST_IDLE:
            self._end(upstream)
            return
        timer = asyncio.get_running_loop().call_later(_IDLE, self._expire, upstream)
        self._idle.append((upstream, timer))

    def _expire(self, upstream: Upstream) -> None:
        self._idle = [entry for entry in self._idle if entry[0] is not upstream]
        self._end(upstream)

    def _end(self, upstream: Upstream) -> None:
        task = asyncio.get_running_loop().create_task(upstream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def drop(self) -> None:
        """End all idle connections: the rules have changed."""
        idle, self._idle = self._idle, []
        for upstream, timer in idle:
            timer.cancel()
            self._end(upstream)

    async def close(self) -> None:
        """End them all, and wait for it."""
        self.drop()
        if self._closing:
            await asyncio.wait(list(self._closing), timeout=3.0)


__all__ = ["BodyFailed", "H1Upstream", "Outgoing", "Pool", "Sending", "Unreachable", "Upstream"]
