"""Tunnels: CONNECT, SOCKS5, and connections that were caught on their way.

A tunnel is not a promise about what goes through it. Its first bytes are looked at: TLS has to name the host
that the tunnel was asked for; HTTP in the clear is judged like any request; anything else needs a rule that
says ``protocol: tcp``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl

from ringfence.egress import hello as tls
from ringfence.egress.door import Flow, Grant, Refused, refused
from ringfence.egress.http1 import Reader
from ringfence.egress.names import Host
from ringfence.egress.policy import Decision
from ringfence.egress.proxying import Requests
from ringfence.egress.relay import relay
from ringfence.egress.streams import BROKEN, Rewound, Stream, TlsStream
from ringfence.egress.upstream import Unreachable

_FIRST_BYTES = 15.0  # seconds that a client may take for its first message
_HTTP = re.compile(rb"[A-Z]{3,10} ")
_MAYBE_HTTP = re.compile(rb"[A-Z]{0,10} ?")


async def through(flow: Flow, stream: Stream, host: Host, port: int, head: bytes = b"") -> None:
    """Serve a tunnel to a host whose client was told that it is open.

    Raises:
        Refused, Unreachable: what goes through it is not allowed; the client has been told if that can be.
    """
    door = flow.door
    decision = door.rules.connect(host, port, "tcp")
    if decision.allowed and door.rules.about(host, port)[0].protocol == "tcp":
        grant = await door.admit(flow, host, port, "tcp")
        flow.protocol = "tcp"
        await _raw(flow, Rewound(stream, head), grant)
        return
    reader = Reader(stream, head)
    kind, found = await _look(reader)
    if kind == "tls" and found is not None:
        flow.protocol = "tls"
        try:
            await _tls(flow, reader, host, port, found)
        except (Refused, Unreachable) as error:
            with contextlib.suppress(*BROKEN):
                await stream.write(tls.alert(49 if isinstance(error, Refused) else 80))
            raise
    elif kind == "http":
        flow.protocol = "http"
        requests = Requests(flow, reader, ("http", host, port))
        await requests.serve()
    else:
        flow.protocol = "tcp"
        grant = await door.admit(flow, host, port, "tcp")
        await _raw(flow, Rewound(stream, reader.take()), grant)


async def _look(reader: Reader) -> tuple[str, tls.Hello | None]:
    """What the first bytes are: tls (with its hello), http, or other."""
    try:
        async with asyncio.timeout(_FIRST_BYTES):
            while True:
                held = reader.peek()
                if held:
                    if held[0] == 22:
                        found = tls.parse(held)
                        if found is not None:
                            return "tls", found
                    elif _HTTP.match(held):
                        return "http", None
                    elif not _MAYBE_HTTP.fullmatch(held):
                        return "other", None
                if not await reader.more():
                    return "other", None
    except tls.NotTls as error:
        raise refused("tls", f"the TLS is refused: {error}") from None
    except TimeoutError:
        raise refused(
            "silent", "the client said nothing: a protocol in which servers begin needs protocol: tcp"
        ) from None


async def _tls(flow: Flow, reader: Reader, host: Host, port: int, hello: tls.Hello) -> None:
    door = flow.door
    if hello.name is None and host.name:
        raise refused("sni", f"TLS for {host} without its name (SNI)")
    if hello.name is not None and (not host.name or door.host(hello.name) != host):
        raise refused("sni", f"the tunnel is for {host}, and TLS asks for {hello.name[:100]}")
    grant = await door.admit(flow, host, port, "tls")
    flow.rule = grant.rule
    patience = door.network.connect_timeout
    if door.tls_mode(flow, host, port) == "inspect":
        await _inspect(flow, reader, host, port)
        return
    proven = await door.engine.upstreams.prove(host, port, grant.addresses, patience, door.spec.project)
    await _raw(flow, Rewound(reader.stream, reader.take()), Grant(host, port, grant.rule, tuple(proven)))


async def _inspect(flow: Flow, reader: Reader, host: Host, port: int) -> None:
    """Be the server to the client, and serve its requests."""
    door = flow.door
    authority = await door.engine.authorities.of(door.spec.sandbox)
    try:
        async with asyncio.timeout(_FIRST_BYTES):
            stream = await TlsStream.server(Rewound(reader.stream, reader.take()), authority.context(host))
    except (ssl.SSLError, TimeoutError) as error:
        # An alert about the certificate is how a client with a pinned one, or one of its own, says no.
        text = str(getattr(error, "reason", None) or error or "it went silent")
        raise refused(
            "client_tls",
            f"the client did not accept the inspected connection ({text[:100]})",
            hint="it has a pinned certificate or a bundle of its own; with tls: pass it goes through unread",
        ) from None
    flow.inspected = True
    try:
        if stream.protocol == "h2":
            from ringfence.egress.http2 import H2Requests

            await H2Requests(flow, stream, ("https", host, port)).serve()
        else:
            await Requests(flow, Reader(stream), ("https", host, port)).serve()
    finally:
        with contextlib.suppress(*BROKEN):
            await stream.close()


async def _raw(flow: Flow, stream: Stream, grant: Grant) -> None:
    door = flow.door
    flow.rule = grant.rule
    outer, address = await door.engine.upstreams.connect(
        grant.host, grant.port, grant.addresses, door.network.connect_timeout, door.spec.project
    )
    flow.address = str(address)
    end, decision = "cut", Decision(True, "allowed", grant.rule)
    try:
        door.engine.begin(door, grant.rule)
        end = await relay(flow, stream, outer, door.network.idle_timeout)
    except Refused as error:  # over budget; the log has it once, here
        decision = error.decision
    finally:
        flow.record(flow.cut or decision, end=end)
        outer.abort() if end != "ended" else await outer.close()
