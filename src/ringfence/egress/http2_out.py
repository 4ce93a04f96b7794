"""HTTP/2 to a server. A connection carries one request at a time; several requests have several."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from ringfence.egress.http1 import HOP, BadMessage, Headers, Incomplete, ResponseHead
from ringfence.egress.injection import Outgoing
from ringfence.egress.names import Address
from ringfence.egress.outward import BodyFailed, Count, Sending
from ringfence.egress.patience import Patience
from ringfence.egress.streams import BROKEN, SocketStream, TlsStream

if TYPE_CHECKING:
    from ringfence.egress.door import Grant

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+", re.ASCII)
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_MOST_HEAD = 128 * 1024


class H2Upstream:
    """See ``outward.Upstream``."""

    def __init__(self, stream: TlsStream, socket: SocketStream, grant: Grant, address: Address) -> None:
        self.grant = grant
        self.address = address
        self.scheme = "https"
        self.used = 0
        self.trailers: Headers = []
        self.patience = Patience()
        self._stream = stream
        self._socket = socket
        config = h2.config.H2Configuration(client_side=True, header_encoding=None)
        self._h2 = h2.connection.H2Connection(config)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._window = asyncio.Event()
        self._number = 0
        self._head: ResponseHead | None = None
        self._pieces: list[tuple[bytes, int]] = []
        self._ended = False
        self._error: BaseException | None = None
        self._goaway = False
        self._reader: asyncio.Task[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._clean = True

    @classmethod
    async def over(
        cls, stream: TlsStream, socket: SocketStream, grant: Grant, address: Address
    ) -> H2Upstream:
        """Begin HTTP/2 over TLS.

        Raises:
            OSError and what else streams raise.
        """
        made = cls(stream, socket, grant, address)
        made._h2.local_settings.enable_push = 0
        made._h2.initiate_connection()
        await made._flush()
        made._reader = asyncio.get_running_loop().create_task(made._read())
        return made

    @property
    def free(self) -> bool:
        """Whether another request may go over it."""
        return self._clean and self._error is None and not self._goaway and self._number < 2**30

    async def _flush(self) -> None:
        async with self._lock:
            data = self._h2.data_to_send()
            if data:
                await self._stream.write(data)

    async def _read(self) -> None:
        try:
            while True:
                data = await self._stream.read()
                if not data:
                    raise ConnectionResetError("the server hung up")
                for event in self._h2.receive_data(data):
                    self._handle(event)
                await self._flush()
                self._changed.set()
                self._window.set()
        except (*BROKEN, h2.exceptions.ProtocolError, BadMessage) as error:
            self._error = error if isinstance(error, OSError) else ConnectionResetError(str(error))
        finally:
            self._changed.set()
            self._window.set()

    def _handle(self, event: Any) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self._goaway = True
        if getattr(event, "stream_id", None) != self._number:
            if isinstance(event, h2.events.DataReceived):
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            return
        if isinstance(event, h2.events.ResponseReceived):
            self._head = _understood(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            self.trailers = _headers(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            self._pieces.append((event.data, event.flow_controlled_length))
        elif isinstance(event, h2.events.StreamEnded):
            self._ended = True
        elif isinstance(event, h2.events.StreamReset) and not self._ended:
            self._error = ConnectionResetError("the server gave the request up")

    async def request(
        self, outgoing: Outgoing, body: Sending, upgrade: str, count: Count, idle: float
    ) -> ResponseHead:
        """See ``outward.Upstream``."""
        if upgrade:
            raise BadMessage("no upgrade over HTTP/2")
        self._clean = False
        self._head, self._pieces, self._ended, self.trailers = None, [], False, []
        self._number = self._h2.get_next_available_stream_id()
        fields = [(":method", outgoing.method), (":scheme", "https"), (":authority", outgoing.host),
                  (":path", outgoing.target)]  # fmt: skip
        fields += [(name.lower(), value) for name, value in outgoing.headers]
        if any(name == "content-type" and value.startswith("application/grpc") for name, value in fields):
            fields.append(("te", "trailers"))
        whole = body.whole
        if whole:
            fields.append(("content-length", str(len(whole))))
        elif whole is None and body.length > 0:
            fields.append(("content-length", str(body.length)))
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        count(b"".join(name + value for name, value in encoded))
        self._h2.send_headers(self._number, encoded, end_stream=whole == b"")
        await self._flush()
        if whole != b"":
            self._sender = asyncio.ensure_future(self._send(body, count))
        async with asyncio.timeout(idle):
            while self._head is None:
                await self._wait()
        return self._head

    async def _wait(self) -> None:
        """Return when something has changed; raises what went wrong meanwhile."""
        if self._error is not None:
            raise self._error
        if self._sender is not None and self._sender.done() and not self._sender.cancelled():
            self._sender.result()
        waiting = [asyncio.ensure_future(self._changed.wait())]
        if self._sender is not None and not self._sender.done():
            waiting.append(self._sender)  # type: ignore[arg-type]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting[0].cancel()
        self._changed.clear()

    async def _send(self, body: Sending, count: Count) -> None:
        pieces = body.pieces()
        while True:
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                break
            except Exception as error:
                raise BodyFailed(error) from error
            count(piece)
            view = memoryview(piece)
            while view:
                window = min(
                    self._h2.local_flow_control_window(self._number), self._h2.max_outbound_frame_size
                )
                if window <= 0:
                    if self._error is not None:
                        raise self._error
                    self._window.clear()
                    await self._window.wait()
                    continue
                self._h2.send_data(self._number, bytes(view[:window]))
                view = view[window:]
                await self._flush()
        self._h2.end_stream(self._number)
        await self._flush()

    def whole(self, response: ResponseHead) -> bytes | None:
        """See ``outward.Upstream``: what has come stays where its window is kept."""
        return None

    async def body(self, response: ResponseHead) -> AsyncIterator[bytes]:
        """See ``outward.Upstream``."""
        while True:
            while self._pieces:
                data, size = self._pieces.pop(0)
                if data:
                    yield data
                if size:
                    with contextlib.suppress(h2.exceptions.ProtocolError, ValueError):
                        self._h2.acknowledge_received_data(size, self._number)
                    await self._flush()
            if self._ended:
                break
            if self._error is not None:
                raise Incomplete
            await self._wait()
        sent = self._sender is None or self._sender.done()
        await self._stop_sending()
        self._clean = sent

    async def _stop_sending(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def close(self) -> None:
        """See ``outward.Upstream``."""
        self._clean = False
        self.patience.close()
        await self._stop_sending()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        with contextlib.suppress(*BROKEN, h2.exceptions.ProtocolError):
            self._h2.close_connection()
            async with asyncio.timeout(1.0):
                await self._flush()
                await self._stream.close()
        self._socket.abort()


def _headers(fields: Any) -> Headers:
    found: Headers = []
    size = 0
    for raw_name, raw_value in fields:
        name, value = bytes(raw_name).decode("latin-1"), bytes(raw_value).decode("latin-1")
        size += len(name) + len(value)
        if name.startswith(":"):
            continue
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or size > _MOST_HEAD:
            raise BadMessage("a malformed header", 502)
        if name not in HOP:
            found.append((name, value))
    return found


def _understood(fields: Any) -> ResponseHead:
    status = next((bytes(value) for name, value in fields if bytes(name) == b":status"), b"")
    if not re.fullmatch(rb"[1-9][0-9]{2}", status):
        raise BadMessage("a response without a status", 502)
    headers = _headers(fields)
    lengths = [value for name, value in headers if name == "content-length"]
    kept = [(name, value) for name, value in headers if name != "content-length"]
    length = int(lengths[0]) if len(lengths) == 1 and re.fullmatch("[0-9]{1,18}", lengths[0]) else -1
    code = int(status)
    if code < 200 or code in (204, 304):
        length = 0
    return ResponseHead(code, "", kept, length, True)
