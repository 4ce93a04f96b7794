"""HTTP/2 from inside: each stream is a request like any other, with an exchange and a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from ringfence.egress.answers import answer
from ringfence.egress.door import Door, Flow, Refused, refused
from ringfence.egress.exchange import Exchange, Request
from ringfence.egress.http1 import HOP, BadMessage, Headers, Incomplete, ResponseHead
from ringfence.egress.names import Host
from ringfence.egress.outward import Upstream
from ringfence.egress.policy import BadPath, normal_path
from ringfence.egress.proxying import SMALL, split_authority
from ringfence.egress.streams import BROKEN, TlsStream
from ringfence.egress.upstream import Unreachable

_STREAMS = 100  # at once
_MOST_HEAD = 64 * 1024
_MOST_RESETS = 200  # streams that a client opens and gives up at once, of one connection
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+", re.ASCII)
_VALUE = re.compile(r"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")
_METHOD = re.compile(r"[A-Z]{1,20}", re.ASCII)
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)


class H2Requests:
    """Serves the requests of one HTTP/2 connection from inside, all for one host."""

    def __init__(self, flow: Flow, stream: TlsStream, fixed: tuple[str, Host, int]) -> None:
        self.flow = flow
        self.door: Door = flow.door
        self.fixed = fixed
        self._stream = stream
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config)
        self._fronts: dict[int, H2Front] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._resets = 0
        self.early = False  # a request was answered before its body had come

    async def serve(self) -> None:
        """Serve until the client leaves, or breaks the protocol."""
        code = h2.settings.SettingCodes
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                code.MAX_CONCURRENT_STREAMS: _STREAMS,
                code.MAX_HEADER_LIST_SIZE: _MOST_HEAD,
                code.ENABLE_PUSH: 0,
            },
        )
        self.h2.initiate_connection()
        try:
            await self.flush()
            while True:
                try:
                    async with asyncio.timeout(None if self._fronts else self.door.network.idle_timeout):
                        data = await self._stream.read()
                except TimeoutError:
                    break
                if not data:
                    break
                try:
                    events = self.h2.receive_data(data)
                except h2.exceptions.ProtocolError as error:
                    await self.flush()
                    if self.early and isinstance(error, h2.exceptions.InvalidBodyLengthError):
                        break  # a client that was refused may spare itself the rest: no fault of its own
                    raise BadMessage(f"HTTP/2 is broken: {type(error).__name__}") from None
                for event in events:
                    self._handle(event)
                if self._resets > _MOST_RESETS:
                    self.h2.close_connection(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
                    await self.flush()
                    break
                await self.flush()
        except BadMessage as error:
            self.flow.record(refused(error.code, str(error)).decision)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def flush(self) -> None:
        """Send what has to be sent."""
        async with self._lock:
            data = self.h2.data_to_send()
            if data:
                await self._stream.write(data)

    def _handle(self, event: Any) -> None:
        number = getattr(event, "stream_id", None)
        front = self._fronts.get(number) if number else None
        if isinstance(event, h2.events.RequestReceived):
            made = H2Front(self, event.stream_id)
            made.ended = event.stream_ended is not None
            self._fronts[event.stream_id] = made
            task = asyncio.get_running_loop().create_task(self._one(made, event))
            made.task = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(event, h2.events.DataReceived) and front is not None:
            front.fed(event.data, event.flow_controlled_length)
        elif isinstance(event, h2.events.StreamEnded) and front is not None:
            front.fed(b"", 0)
        elif isinstance(event, h2.events.StreamReset):
            self._resets += 1
            if front is not None and front.task is not None:
                front.task.cancel()
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            for one in self._fronts.values():
                one.opened.set()

    async def _one(self, front: H2Front, event: h2.events.RequestReceived) -> None:
        """One stream, to its end."""
        flow = Flow(self.door, self.flow.kind, self.flow.peer)
        flow.answered, flow.inspected = self.flow.answered, True
        flow.host, flow.port = self.fixed[1], self.fixed[2]
        await self.door.serve(flow)
        try:
            try:
                request = self._understood(event, ended=event.stream_ended is not None)
            except Refused as error:
                flow.record(error.decision, status=error.status)
                raise
            front.length = request.length
            await Exchange(flow, front, self.door.pool).run(request)
        except (Refused, Unreachable) as error:
            if front.begun:
                self._reset(front)
            else:
                await front.say(error)
        except (*BROKEN, Incomplete, BadMessage, h2.exceptions.ProtocolError):
            self._reset(front)
        except asyncio.CancelledError:
            self._reset(front)
            if flow.cut is None:
                raise
        finally:
            self.door.done(flow)
            self._fronts.pop(front.number, None)
            front.drop()
            with contextlib.suppress(*BROKEN, asyncio.CancelledError):
                await self.flush()

    def _reset(self, front: H2Front) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.reset_stream(front.number, h2.errors.ErrorCodes.CANCEL)

    def _understood(self, event: h2.events.RequestReceived, *, ended: bool) -> Request:
        """The request, held to the same rules as one of HTTP/1.1.

        Raises:
            Refused: it is malformed, or for another host.
        """
        pseudo: dict[str, str] = {}
        headers: Headers = []
        cookies: list[str] = []
        length = 0 if ended else -1
        size = 0
        for raw_name, raw_value in event.headers:
            name, value = bytes(raw_name).decode("latin-1"), bytes(raw_value).decode("latin-1")
            size += len(name) + len(value) + 32
            if name.startswith(":"):
                if name in pseudo or headers:
                    raise refused("bad_request", "a pseudo header twice, or behind a header", 400)
                pseudo[name] = value
                continue
            if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
                raise refused("bad_request", "a malformed header", 400)
            if name in HOP or name == "expect":
                continue
            if name == "content-length":
                if not _DIGITS.fullmatch(value) or length > 0:
                    raise refused("bad_request", "content-length twice, or not a number", 400)
                length = int(value) if not ended else 0
            elif name == "host":
                pseudo.setdefault(":authority", value)
                if value != pseudo[":authority"]:
                    raise refused("host", "host and :authority differ", 421)
            elif name == "cookie":
                cookies.append(value)
            else:
                headers.append((name, value))
        if size > _MOST_HEAD:
            raise refused("head_too_large", f"the head has more than {_MOST_HEAD} bytes", 431)
        if cookies:
            headers.append(("cookie", "; ".join(cookies)))
        scheme, host, port = self.fixed
        method, target = pseudo.get(":method", ""), pseudo.get(":path", "")
        if method == "CONNECT" and ":protocol" in pseudo:  # RFC 8441; our settings don't offer it
            raise refused(
                "upgrade",
                f"{pseudo[':protocol'][:40]!r} over HTTP/2 is not carried",
                501,
                hint="a WebSocket goes through as HTTP/1.1: its client must not insist on HTTP/2",
            )
        if not _METHOD.fullmatch(method) or method == "CONNECT" or pseudo.get(":scheme") != scheme:
            raise refused("bad_request", "a request without a proper method or scheme", 400)
        authority = pseudo.get(":authority", "")
        if split_authority(authority, 443) != (host, port):
            raise refused(
                "host", f"the tunnel is for {host}:{port}, and :authority says {authority[:100]}", 421
            )
        try:
            path, query = ("*", "") if target == "*" else normal_path(target)
        except BadPath as error:
            raise refused("bad_path", f"the path is refused: {error}", 400) from None
        return Request(method, scheme, host, port, path, query, headers, length)


class H2Front:
    """One stream: the client's side of an exchange."""

    def __init__(self, requests: H2Requests, number: int) -> None:
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.speaks_h2 = True
        self.begun = False
        self.length = -1
        self.opened = asyncio.Event()
        self._requests = requests
        self._queue: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue()
        self._unread = 0
        self.ended = False  # the request, body and all

    def fed(self, data: bytes, size: int) -> None:
        """A piece of the body; the empty one is its end. ``size``: what it took of the window."""
        self.ended = self.ended or not (size or data)
        self._unread += size
        self._queue.put_nowait((data, size))

    def drop(self) -> None:
        """Nobody reads the rest: give the window back, for other streams."""
        self._acknowledge(self._unread)

    def _acknowledge(self, size: int) -> None:
        self._unread -= size
        if size:
            with contextlib.suppress(h2.exceptions.ProtocolError, ValueError):
                self._requests.h2.acknowledge_received_data(size, self.number)

    async def pieces(self) -> AsyncIterator[bytes]:
        """See ``Front``."""
        while True:
            try:
                async with asyncio.timeout(self._requests.door.network.idle_timeout):
                    data, size = await self._queue.get()
            except TimeoutError:
                raise Incomplete from None
            if not size and not data:
                return
            if data:
                yield data
            self._acknowledge(size)
            await self._requests.flush()

    async def ready(self) -> bytes | None:
        """See ``Front``."""
        if not 0 < self.length <= SMALL:
            return None
        return b"".join([data async for data in self.pieces()])

    async def start(self, response: ResponseHead) -> None:
        """See ``Front``."""
        self.begun = True
        headers = [(":status", str(response.status))]
        headers += [(name.lower(), value) for name, value in response.headers]
        if response.length > 0 and not any(name == "content-length" for name, _ in headers):
            headers.append(("content-length", str(response.length)))
        self._requests.h2.send_headers(
            self.number, [(a.encode("latin-1"), b.encode("latin-1")) for a, b in headers]
        )
        await self._requests.flush()

    async def piece(self, data: bytes) -> None:
        """See ``Front``: as fast as the client takes it."""
        connection = self._requests.h2
        view = memoryview(data)
        while view:
            window = min(
                connection.local_flow_control_window(self.number), connection.max_outbound_frame_size
            )
            if window <= 0:
                self.opened.clear()
                try:
                    async with asyncio.timeout(self._requests.door.network.idle_timeout):
                        await self.opened.wait()
                except TimeoutError:
                    raise ConnectionResetError("the client does not read") from None
                continue
            connection.send_data(self.number, bytes(view[:window]))
            view = view[window:]
            await self._requests.flush()

    async def finish(self, trailers: Headers) -> None:
        """See ``Front``."""
        if trailers:
            found = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in trailers]
            self._requests.h2.send_headers(self.number, found, end_stream=True)
        else:
            self._requests.h2.end_stream(self.number)
        await self._requests.flush()

    async def switch(self, response: ResponseHead, upstream: Upstream) -> str:
        """WebSockets come over HTTP/1.1."""
        raise Unreachable("no other protocol over HTTP/2", 502, "upgrade")

    async def say(self, error: Refused | Unreachable) -> None:
        """What the proxy itself has to say."""
        response, body = answer(self._requests.door, error)
        self._requests.early = self._requests.early or not self.ended
        with contextlib.suppress(*BROKEN, h2.exceptions.ProtocolError):
            await self.start(response)
            await self.piece(body)
            await self.finish([])
