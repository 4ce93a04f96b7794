"""HTTP/2 on both sides of inspected TLS, with Node's server, curl's client, and a client that plays tricks."""  # noqa: E501

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest

from support.doors import LOCAL, LocalDoor, Names, Origin, TestAuthority, local_door

SERVER = """
const http2 = require('http2'), fs = require('fs');
const pem = fs.readFileSync(process.argv[1]);
const server = http2.createSecureServer({key: pem, cert: pem});
server.on('stream', (stream, headers) => {
  let size = 0, first = null;
  stream.on('error', () => {});
  stream.on('data', piece => { size += piece.length; first = first || piece; });
  stream.on('end', () => {
    const path = headers[':path'];
    stream.respond({':status': 200, 'x-path': path, 'x-secret': headers['authorization'] || 'none'},
                   {waitForTrailers: true});
    stream.on('wantTrailers', () => stream.sendTrailers({'grpc-status': '0'}));
    if (path.startsWith('/big')) stream.end(Buffer.alloc(300000, 120));
    else stream.end(`h2 ${headers[':method']} ${size} ${headers['cookie'] || ''}`);
  });
});
server.listen(0, '127.0.0.1', () => console.log(server.address().port));
"""


@pytest.fixture(scope="module")
def node(authority: TestAuthority) -> Iterator[int]:
    """The port of an HTTP/2 server for api.example.test."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node is not installed")
    authority.server("api.example.test")
    pem = max(authority.folder.glob("api.example.test-*.pem"), key=lambda path: path.stat().st_mtime_ns)
    with subprocess.Popen([program, "-e", SERVER, str(pem)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def rules(port: int, **more: Any) -> dict[str, Any]:
    return {
        "allow": [{"host": "api.example.test", "ports": [port], "addresses": LOCAL, "tls": "inspect"} | more]
    }


@pytest.fixture(autouse=True)
def _resolves(names: Names) -> None:
    names.add("api.example.test", "127.0.0.1")


async def test_both_sides_speak_http2(
    folder: Path, names: Names, node: int, authority: TestAuthority
) -> None:
    network = rules(node, methods=["GET", "POST"], paths=["/ok*", "/big*"],
                    inject={"bearer": "{{secret:key}}"})  # fmt: skip
    async with local_door(folder, network, names, authority.file) as door:
        await door.engine.secrets.put("", "key", "secret-of-h2")
        base, ca = f"https://api.example.test:{node}", await door.ca()
        code, out, err = await door.curl(
            "--http2", "--cacert", ca, "-H", "Cookie: a=1", f"{base}/ok?x=1", f"{base}/no"
        )
        assert code == 0, err
        assert out.count("HTTP/2 200") == 1 and "h2 GET 0 a=1" in out and "x-path: /ok?x=1" in out
        assert "HTTP/2 403" in out and "/no is not among" in out
        assert "secret-of-h2" not in out and "x-secret: Bearer ************" in out
        body = folder / "body"
        body.write_bytes(b"y" * 400_000)
        code, out, err = await door.curl("--http2", "--cacert", ca, "--data-binary", f"@{body}", f"{base}/ok")
        assert "h2 POST 400000" in out, err
        code, out, err = await door.curl("--http2", "--cacert", ca, f"{base}/big")
        assert "x" * 300_000 in out and "grpc-status: 0" in out, err
        code, out, err = await door.curl("--http1.1", "--cacert", ca, f"{base}/ok")
        assert "502" in out or "HTTP/1.1 200" in out  # Node without allowHTTP1 refuses; the proxy says so
        await door.idle()
        assert [line["status"] for line in door.log()][:4] == [200, 403, 200, 200]


async def test_parallel_streams_and_trailers(
    folder: Path, names: Names, node: int, authority: TestAuthority
) -> None:
    async with local_door(folder, rules(node), names, authority.file) as door:
        async with client(door, node) as connection:
            for _ in range(30):
                connection.ask([(":method", "GET"), (":path", "/big")])
            answers = await connection.answers(30)
        assert all(one["status"] == "200" and one["size"] == 300_000 for one in answers.values())
        assert all(one["trailers"] == {"grpc-status": "0"} for one in answers.values())


class Client:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        self.reader, self.writer, self.port = reader, writer, port
        config = h2.config.H2Configuration(
            client_side=True,
            header_encoding="latin-1",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()

    def ask(self, fields: list[tuple[str, str]], *, end: bool = True, body: bytes = b"") -> int:
        known = dict(fields)
        head = [(":method", known.get(":method", "GET")), (":scheme", known.get(":scheme", "https")),
                (":authority", known.get(":authority", f"api.example.test:{self.port}")),
                (":path", known.get(":path", "/"))]  # fmt: skip
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(
            number,
            head + [pair for pair in fields if not pair[0].startswith(":")],
            end_stream=end and not body,
        )
        if body:
            self.h2.send_data(number, body, end_stream=end)
        return number

    async def answers(self, count: int) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        async with asyncio.timeout(60):
            while sum(one.get("ended", False) for one in found.values()) < count:
                self.writer.write(self.h2.data_to_send())
                data = await self.reader.read(65536)
                if not data:
                    break
                for event in self.h2.receive_data(data):
                    one = found.setdefault(getattr(event, "stream_id", 0) or 0, {"size": 0, "body": b""})
                    if isinstance(event, h2.events.ResponseReceived):
                        one["status"] = dict(event.headers)[":status"]
                    elif isinstance(event, h2.events.DataReceived):
                        one["size"] += len(event.data)
                        one["body"] += event.data[:1000]
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, h2.events.TrailersReceived):
                        one["trailers"] = dict(event.headers)
                    elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                        one["ended"] = True
                    elif isinstance(event, h2.events.ConnectionTerminated):
                        one["gone"] = event.error_code
                self.writer.write(self.h2.data_to_send())
        found.pop(0, None)
        return found


@contextlib.asynccontextmanager
async def client(door: LocalDoor, port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.ports["http"])
    target = f"api.example.test:{port}"
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    context = ssl.create_default_context(cafile=await door.ca())
    context.set_alpn_protocols(["h2"])
    await writer.start_tls(context, server_hostname="api.example.test")
    try:
        yield Client(reader, writer, port)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


TRICKS: list[tuple[list[tuple[str, str]], str]] = [
    ([(":authority", "evil.example.test")], "421"),
    ([(":authority", "api.example.test@evil.example.test")], "400"),
    ([("host", "evil.example.test")], "421"),
    ([(":scheme", "http")], "400"),
    ([(":method", "CONNECT")], "400"),
    ([(":method", "get")], "400"),
    ([(":path", "/ok/../admin")], "400"),
    ([(":path", "/ok/%2e%2e/admin")], "400"),
    ([(":path", "http://evil.example.test/")], "400"),
    ([(":path", "/admin")], "403"),
    ([("x", "a\r\nTransfer-Encoding: chunked")], "400"),
    ([("x y", "a")], "400"),
    ([("x", "a" * 70_000)], "431"),
]


async def test_tricks(folder: Path, names: Names, authority: TestAuthority) -> None:
    """Towards a server of HTTP/1.1: where a header that became two would be a smuggled request."""
    origin = await Origin().start(authority.server("api.example.test"))
    async with local_door(folder, rules(origin.port, paths=["/ok*"]), names, authority.file) as door:
        for fields, status in TRICKS:
            async with client(door, origin.port) as connection:
                fields = fields if any(name == ":path" for name, _ in fields) else [*fields, (":path", "/ok")]
                connection.ask(fields)
                answers = await connection.answers(1)
            got = {one.get("status") for one in answers.values()}
            assert got in ({status}, {None}, set()), (fields, answers)  # or the library hung up itself
            assert not origin.requests, fields
        async with client(door, origin.port) as connection:
            connection.ask([(":method", "POST"), (":path", "/ok"), ("content-length", "5")], body=b"hello")
            connection.ask([(":method", "POST"), (":path", "/ok")], body=b"hello")
            answers = await connection.answers(2)
        assert {one["status"] for one in answers.values()} == {"200"}  # the control
        assert origin.bodies == [b"hello", b"hello"]
        async with client(door, origin.port) as connection:  # a length that is a lie
            connection.ask([(":method", "POST"), (":path", "/ok"), ("content-length", "50")], body=b"hello")
            await connection.answers(1)
        assert len(origin.bodies) == 2
    await origin.stop()


async def test_a_websocket_over_http2_is_refused_and_over_http1_goes_through(
    folder: Path, names: Names, authority: TestAuthority
) -> None:
    """RFC 8441: not offered, and who asks for it all the same gets an answer; nothing of it gets out."""
    seen: list[bytes] = []

    async def socket_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: x\r\n\r\nfirst"
            )
            await writer.drain()
        writer.close()

    context = authority.server("api.example.test")
    server = await asyncio.start_server(socket_server, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with local_door(folder, rules(port, paths=["/ws"]), names, authority.file) as door:
        for more in ([(":protocol", "websocket")], [(":protocol", "connect-udp")]):
            async with client(door, port) as connection:
                number = connection.h2.get_next_available_stream_id()
                head = [(":method", "CONNECT"), *more, (":scheme", "https"), (":path", "/ws"),
                        (":authority", f"api.example.test:{port}")]  # fmt: skip
                connection.h2.send_headers(number, head)
                (answer,) = (await connection.answers(1)).values()
                assert connection.h2.remote_settings.enable_connect_protocol == 0  # not offered
            assert answer["status"] == "501"
            assert json.loads(answer["body"])["error"]["details"]["code"] == "upgrade"
        await door.idle()
        assert seen == []
        assert {line["code"] for line in door.log()} == {"upgrade"}
        reader, writer = await asyncio.open_connection("127.0.0.1", door.ports["http"])
        target = f"api.example.test:{port}"
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        trusting = ssl.create_default_context(cafile=await door.ca())
        trusting.set_alpn_protocols(["http/1.1"])
        await writer.start_tls(trusting, server_hostname="api.example.test")
        writer.write(
            f"GET /ws HTTP/1.1\r\nHost: {target}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Key: k\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        async with asyncio.timeout(60):
            got = await reader.readuntil(b"first")
        assert got.startswith(b"HTTP/1.1 101 ")
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
        await door.idle()
    server.close()
    await server.wait_closed()
    assert len(seen) == 1 and seen[0].startswith(b"GET /ws ")


async def test_rapid_resets_end_the_connection(folder: Path, names: Names, authority: TestAuthority) -> None:
    origin = await Origin().start(authority.server("api.example.test"))
    async with local_door(folder, rules(origin.port), names, authority.file) as door:
        async with client(door, origin.port) as connection:
            for _ in range(400):
                connection.h2.reset_stream(connection.ask([(":path", "/ok")], end=False))
            await connection.answers(1)
            assert connection.reader.at_eof()
        await door.idle()
    await origin.stop()
