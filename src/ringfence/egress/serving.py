"""What listens inside a sandbox, served: the HTTP proxy, SOCKS5, caught connections, names."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress

from ringfence.egress import tunnel
from ringfence.egress.answers import answer
from ringfence.egress.dns import MadeUpNames
from ringfence.egress.door import Door, Flow, Refused, refused
from ringfence.egress.http1 import BadMessage, Incomplete, Reader, write_response
from ringfence.egress.inference import NAME
from ringfence.egress.keys import SecretsUnavailable
from ringfence.egress.names import Host
from ringfence.egress.policy import Decision
from ringfence.egress.proxying import Requests, split_authority
from ringfence.egress.streams import BROKEN, Stream
from ringfence.egress.upstream import Unreachable

_SOCKS_PATIENCE = 15.0  # seconds for its greetings


class Served:
    """Everything that one door serves."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.names = MadeUpNames()

    async def connection(self, kind: str, stream: Stream, peer: object = None) -> None:
        """Serve one connection to its end, whatever happens: ``http``, ``socks``, ``caught`` or ``names``."""
        flow = Flow(self.door, kind, peer)
        await self.door.serve(flow)
        try:
            if whose := await self.door.crowded(flow):
                raise refused("connections", f"too many connections of {whose} at once", 429)
            await getattr(self, "_" + kind)(flow, stream)
        except (Refused, Unreachable) as error:
            self._note(flow, error)
        except (*BROKEN, Incomplete, BadMessage, TimeoutError):
            pass  # whoever it was has gone
        except SecretsUnavailable as error:
            self._note(flow, Unreachable(error.message, 503, error.code))
        except asyncio.CancelledError:
            if flow.cut is None and not self.door.closed:
                raise
            if flow.cut is not None and flow.protocol == "http":
                flow.record(flow.cut)
        finally:
            self.door.done(flow)
            with contextlib.suppress(*BROKEN):
                await stream.close()

    @staticmethod
    def _note(flow: Flow, error: Refused | Unreachable) -> None:
        if isinstance(error, Refused):
            flow.record(error.decision, status=error.status)
        else:
            flow.record(Decision(True, "allowed", flow.rule), error=error.code, reason=str(error))

    # -- HTTP proxy

    async def _http(self, flow: Flow, stream: Stream) -> None:
        reader = Reader(stream)
        head = await Requests(flow, reader).serve()
        if head is None:
            return
        flow.kind = "connect"
        try:
            host, port = split_authority(head.target, 0)
            if not port:
                raise refused("bad_host", "CONNECT without a port", 400)
            if head.host is not None and split_authority(head.host, port) != (host, port):
                raise refused("host", f"CONNECT is for {host}:{port}, and Host says {head.host[:100]}", 421)
            if head.length:
                raise refused("bad_request", "CONNECT with a body", 400)
            await self._open(flow, host, port)
        except (Refused, Unreachable) as error:
            response, body = answer(self.door, error)
            with contextlib.suppress(*BROKEN):
                await stream.write(write_response(response, False)[0] + body)
            raise
        await stream.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await tunnel.through(flow, stream, host, port, reader.take())

    async def _open(self, flow: Flow, host: Host, port: int) -> None:
        """Whether a tunnel may be promised."""
        flow.host, flow.port = host, port
        if self.door.guard is not None and host.name == NAME:
            return  # each request is judged by the guard
        grant = await self.door.admit(flow, host, port)
        flow.rule = grant.rule

    # -- SOCKS5

    async def _socks(self, flow: Flow, stream: Stream) -> None:
        reader = Reader(stream)
        async with asyncio.timeout(_SOCKS_PATIENCE):
            version, count = await reader.exactly(2)
            if version != 5:
                return
            methods = await reader.exactly(count)
            if 0 not in methods:
                await stream.write(b"\x05\xff")
                return
            await stream.write(b"\x05\x00")
            version, command, _, kind = await reader.exactly(4)
            if kind == 1:
                text = str(ipaddress.IPv4Address(await reader.exactly(4)))
            elif kind == 4:
                text = f"[{ipaddress.IPv6Address(await reader.exactly(16))}]"
            elif kind == 3:
                size = (await reader.exactly(1))[0]
                text = (await reader.exactly(size)).decode("latin-1")
            else:
                await stream.write(_socks_reply(8))
                return
            port = int.from_bytes(await reader.exactly(2))
        if version != 5 or command != 1:
            await stream.write(_socks_reply(7))
            raise refused("socks", "SOCKS5 is for TCP connections only (no UDP, no listening)")
        try:
            host = self._real(self.door.host(text))
            await self._open(flow, host, port)
        except Refused:
            await stream.write(_socks_reply(2))
            raise
        except Unreachable:
            await stream.write(_socks_reply(4))
            raise
        await stream.write(_socks_reply(0))
        await tunnel.through(flow, stream, host, port, reader.take())

    # -- caught on the way

    async def _caught(self, flow: Flow, stream: Stream) -> None:
        destination = getattr(flow.peer, "destination", None)
        if destination is None:
            raise refused("caught", "nobody sent this connection here")
        address, port = destination
        host = self._real(self.door.host(address))
        await self._open(flow, host, port)
        await tunnel.through(flow, stream, host, port)

    def _real(self, host: Host) -> Host:
        """The name behind a made-up address."""
        if host.address is None or host.address.version != 4:
            return host
        name = self.names.name(str(host.address))
        return host if name is None else Host(name)

    # -- names

    async def _names(self, flow: Flow, stream: Stream) -> None:
        """DNS over TCP."""
        reader = Reader(stream)
        while True:
            async with asyncio.timeout(self.door.network.idle_timeout):
                size = int.from_bytes(await reader.exactly(2))
                answered = self.name(await reader.exactly(size))
            if answered is None:
                return
            await stream.write(len(answered).to_bytes(2) + answered)

    def name(self, message: bytes) -> bytes | None:
        """The answer to one DNS message."""
        return self.names.answer(self.door, message)


def _socks_reply(code: int) -> bytes:
    return bytes((5, code, 0, 1)) + bytes(6)
