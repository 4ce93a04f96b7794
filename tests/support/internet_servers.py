"""The servers of the made-up internet: one process in a network namespace of its own. Not a library.

``python internet_servers.py FOLDER``: certificates ``NAME.pem`` (key and chain) in FOLDER,
a zone in ``zone.json``; every request is a line of ``seen.jsonl``. Prints ``ready``; ends with its stdin.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import ssl
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events

BIG = 4 << 20  # bytes of /big


class World:
    """What all servers share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.zone: dict[str, dict[str, Any]] = json.loads((folder / "zone.json").read_text())
        self.seen = open(folder / "seen.jsonl", "a", buffering=1)  # noqa: SIM115 - for as long as it runs
        self.turns: dict[str, itertools.count[int]] = {}

    def note(self, **what: object) -> None:
        """Something arrived."""
        self.seen.write(json.dumps({"at": time.time(), **what}) + "\n")

    def addresses(self, name: str, kind: str) -> list[str] | None:
        """Of a name; None if there is no such name. A list of lists is answered in turn (rebinding)."""
        entry = self.zone.get(name)
        if entry is None:
            return None
        found = entry.get(kind, [])
        if found and isinstance(found[0], list):
            turn = next(self.turns.setdefault(f"{name}/{kind}", itertools.count()))
            found = found[min(turn, len(found) - 1)]
        return list(found)


# -- names


def dns_answer(world: World, data: bytes, over: str) -> bytes:
    """The answer to a question."""
    number, flags = struct.unpack_from(">HH", data)
    labels, at = [], 12
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
        at += 1 + data[at]
    kind, _ = struct.unpack_from(">HH", data, at + 1)
    question = data[12 : at + 5]
    name = ".".join(labels).lower()
    world.note(what="dns", name=name, type=kind, over=over)
    found = world.addresses(name, {1: "A", 28: "AAAA"}.get(kind, "other"))
    records = b""
    for address in found or []:
        import ipaddress

        packed = ipaddress.ip_address(address).packed
        records += b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 0, len(packed)) + packed
    code = 3 if found is None else 0
    head = struct.pack(">HHHHHH", number, 0x8180 | (flags & 0x100) | code, 1, len(found or []), 0, 0)
    return head + question + records


class Dns(asyncio.DatagramProtocol):
    """UDP."""

    def __init__(self, world: World) -> None:
        self.world = world

    def connection_made(self, transport: Any) -> None:
        """Kept."""
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        """A question."""
        with suppress(IndexError, struct.error):
            self.transport.sendto(dns_answer(self.world, data, "udp"), address)


async def dns_tcp(world: World, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Questions over TCP."""
    with suppress(asyncio.IncompleteReadError, OSError, IndexError, struct.error):
        while True:
            (size,) = struct.unpack(">H", await reader.readexactly(2))
            answer = dns_answer(world, await reader.readexactly(size), "tcp")
            writer.write(struct.pack(">H", len(answer)) + answer)
            await writer.drain()
    writer.close()


# -- HTTP


def respond(
    world: World,
    where: dict[str, object],
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    body: bytes,
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Every server says what it was asked; some paths do more."""
    host = next((value for name, value in headers if name.lower() in ("host", ":authority")), "")
    world.note(
        what="request", method=method, path=path, host=host, headers=headers,
        body=body[:2000].decode("latin-1"), size=len(body), **where,
    )  # fmt: skip
    if where["address"] == "169.254.169.254":
        return 200, [("Content-Type", "text/plain")], b"metadata: AKIAMADEUPKEY secret-credentials\n"
    clean = path.partition("?")[0]
    if clean == "/big":
        return 200, [("Content-Type", "application/octet-stream")], b"x" * BIG
    if clean == "/redirect-to-metadata":
        return 302, [("Location", "http://169.254.169.254/latest/meta-data/")], b""
    if clean == "/redirect-to-attacker":
        return 302, [("Location", "https://evil.attacker.test/stolen")], b""
    static = world.folder / "www" / host.partition(":")[0] / clean.strip("/")
    if clean.endswith("/"):
        static = static / "index.html"
    root = (world.folder / "www").resolve()
    if static.is_file() and static.resolve().is_relative_to(root):
        kind = "text/html" if static.suffix == ".html" else "application/octet-stream"
        kind = "application/json" if static.suffix == ".json" else kind
        return 200, [("Content-Type", kind)], static.read_bytes()
    answer = {
        "method": method, "path": path, "host": host, "headers": dict(headers), "size": len(body),
        "body": body[:4096].decode("latin-1"), **where,
    }  # fmt: skip
    return 200, [("Content-Type", "application/json")], json.dumps(answer).encode()


async def _http1(
    world: World,
    where: dict[str, object],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    begun: bytes = b"",
) -> None:
    while True:
        head = begun + await reader.readuntil(b"\r\n\r\n")
        begun = b""
        lines = head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = [
            (name.strip(), value.strip())
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        ]
        known = {name.lower(): value for name, value in headers}
        if known.get("upgrade", "").lower() == "websocket":
            await _websocket(world, where, path, known, reader, writer)
            return
        if known.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if method == "CONNECT":  # an allowed host that relays: it must never come to that
            world.note(what="relay", target=path, **where)
            writer.write(b"HTTP/1.1 200 relayed\r\n\r\n")
            await writer.drain()
            return
        body = await _body(known, reader)
        status, extra, answer = respond(world, where, method, path, headers, body)
        lines = [f"HTTP/1.1 {status} OK", f"Content-Length: {len(answer)}"]
        lines += [f"{name}: {value}" for name, value in extra]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else answer))
        await writer.drain()
        if known.get("connection", "").lower() == "close":
            return


async def _body(known: dict[str, str], reader: asyncio.StreamReader) -> bytes:
    if "chunked" in known.get("transfer-encoding", "").lower():
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body
    return await reader.readexactly(int(known.get("content-length", "0") or 0))


async def _websocket(
    world: World,
    where: dict[str, object],
    path: str,
    headers: dict[str, str],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Echo of short messages."""
    world.note(what="websocket", path=path, host=headers.get("host", ""), **where)
    magic = headers["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(magic).digest()).decode()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        + f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
    )
    while True:
        first, second = await reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", await reader.readexactly(2))
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(await reader.readexactly(size)))
        if first & 0xF == 8:
            return
        world.note(what="message", text=data.decode("latin-1"), **where)
        head = bytes([first, size]) if size < 126 else bytes([first, 126]) + struct.pack(">H", size)
        writer.write(head + data)
        await writer.drain()


async def _http2(
    world: World, where: dict[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    h2c = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
    h2c.initiate_connection()
    writer.write(h2c.data_to_send())
    asked: dict[int, tuple[list[tuple[str, str]], bytearray]] = {}
    waiting: dict[int, bytes] = {}
    while data := await reader.read(65536):
        for event in h2c.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                asked[event.stream_id] = (list(event.headers), bytearray())
            elif isinstance(event, h2.events.DataReceived):
                asked[event.stream_id][1].extend(event.data)
                h2c.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                headers, body = asked.pop(event.stream_id)
                known = dict(headers)
                status, extra, answer = respond(
                    world, where, known[":method"], known[":path"], headers, bytes(body)
                )
                h2c.send_headers(
                    event.stream_id,
                    [(":status", str(status)), ("content-length", str(len(answer)))]
                    + [(name.lower(), value) for name, value in extra],
                    end_stream=not answer,
                )
                if answer:
                    waiting[event.stream_id] = answer
        for number in list(waiting):
            rest = waiting[number]
            while rest and (room := min(h2c.local_flow_control_window(number), h2c.max_outbound_frame_size)):
                h2c.send_data(number, rest[:room], end_stream=len(rest) <= room)
                rest = rest[room:]
            if rest:
                waiting[number] = rest
            else:
                del waiting[number]
        writer.write(h2c.data_to_send())
        await writer.drain()


async def web(world: World, tls: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection."""
    name = writer.get_extra_info("sockname")
    address = name[0] if isinstance(name, tuple) else "relay"
    where: dict[str, object] = {"address": address, "tls": tls}
    sslobject = writer.get_extra_info("ssl_object")
    if sslobject is not None:
        where |= {"sni": getattr(sslobject, "asked", None), "alpn": sslobject.selected_alpn_protocol()}
    with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError, KeyError):
        if sslobject is not None and sslobject.selected_alpn_protocol() == "h2":
            await _http2(world, where, reader, writer)
        else:
            await _http1(world, where, reader, writer)
    with suppress(OSError, ssl.SSLError):
        writer.close()
        await writer.wait_closed()


def contexts(folder: Path) -> ssl.SSLContext:
    """One that picks the certificate by name: the address's own where there is no name."""
    made: dict[str, ssl.SSLContext] = {}
    for path in folder.glob("certificates/*.pem"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        context.set_alpn_protocols(["h2", "http/1.1"])
        made[path.stem] = context

    def choose(sslobject: Any, name: str | None, _: ssl.SSLContext) -> None:
        sslobject.asked = name
        if name in made:
            sslobject.context = made[name]

    for context in made.values():
        context.sni_callback = choose
    return made["default"]


async def echo(world: World, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A database, or whatever speaks plain TCP."""
    with suppress(OSError):
        while data := await reader.read(65536):
            world.note(
                what="tcp", data=data[:200].decode("latin-1"), address=writer.get_extra_info("sockname")[0]
            )
            writer.write(data)
            await writer.drain()
    writer.close()


class Udp(asyncio.DatagramProtocol):
    """Whatever comes by UDP (QUIC, a tunnel) is noted and answered."""

    def __init__(self, world: World, port: int) -> None:
        self.world, self.port = world, port

    def connection_made(self, transport: Any) -> None:
        """Kept."""
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        """Noted."""
        self.world.note(what="udp", port=self.port, data=data[:200].decode("latin-1"))
        self.transport.sendto(b"heard:" + data, address)


async def main() -> None:
    """Everything, until stdin ends."""
    world = World(Path(sys.argv[1]))
    loop = asyncio.get_running_loop()
    tls = contexts(world.folder)
    kept: list[Any] = []
    for resolver in json.loads((world.folder / "resolvers.json").read_text()):
        kept.append(await loop.create_datagram_endpoint(lambda: Dns(world), (resolver, 53)))
        kept.append(await asyncio.start_server(lambda r, w: dns_tcp(world, r, w), resolver, 53))
    for address in json.loads((world.folder / "hosts.json").read_text()):
        kept.append(await asyncio.start_server(lambda r, w: web(world, False, r, w), address, 80))
        kept.append(await asyncio.start_server(lambda r, w: web(world, True, r, w), address, 443, ssl=tls))
        kept.append(await asyncio.start_server(lambda r, w: web(world, True, r, w), address, 8443, ssl=tls))
        kept.append(await asyncio.start_server(lambda r, w: echo(world, r, w), address, 5432))
        for port in (443, 4000):
            kept.append(
                await loop.create_datagram_endpoint(lambda p=port: Udp(world, p), (address, port))  # type: ignore[misc]
            )
    relay = (world.folder / "relay").read_text()
    kept.append(await asyncio.start_unix_server(lambda r, w: web(world, False, r, w), "\0" + relay))
    kept.append(await asyncio.start_server(lambda r, w: web(world, False, r, w), "127.0.0.1", 7777))
    print("ready", flush=True)
    gone = asyncio.Event()
    loop.add_reader(0, gone.set)
    await gone.wait()


if __name__ == "__main__":
    asyncio.run(main())
