"""Plain requests, tunnels and SOCKS through the door: what passes, and every trick that must not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from ringfence.egress import upstream as upstream_module
from ringfence.egress.resolver import parse_answer, query
from support.doors import LOCAL, LocalDoor, Names, Origin, local_door


def allowed(port: int, **more: Any) -> dict[str, Any]:
    return {"allow": [{"host": "api.example.test", "ports": [port], "addresses": LOCAL} | more]}


@pytest.fixture(autouse=True)
def _resolves(names: Names) -> None:
    names.add("api.example.test", "127.0.0.1")
    names.add("evil.example.test", "127.0.0.1")


async def test_request_is_forwarded_clean_and_logged(folder: Path, names: Names, plain: Origin) -> None:
    async with local_door(folder, allowed(plain.port), names, task="t-1", project="p-1") as door:
        code, out, err = await door.curl(
            "-d", "hello", "-H", "Proxy-Authorization: x", "-H", "X-Kept: 1",
            f"http://API.example.test.:{plain.port}/a?b=c",
        )  # fmt: skip
        assert code == 0, err
        assert out.startswith("HTTP/1.1 200 ")
        [head] = plain.requests
        assert head.startswith(b"POST /a?b=c HTTP/1.1\r\nHost: api.example.test:%d\r\n" % plain.port)
        assert b"X-Kept: 1" in head and b"Proxy" not in head and b"Connection" not in head
        assert plain.bodies == [b"hello"]
        await door.idle()
        [line] = door.log()
        expected = {"sandbox": "sb-test", "task": "t-1", "project": "p-1", "host": "api.example.test", "status": 200,  # noqa: E501
                    "method": "POST", "path": "/a", "decision": "allowed", "protocol": "http"}  # fmt: skip
        assert expected.items() <= line.items()
        assert line["sent"] > 5 and line["received"] > 10 and line["address"] == "127.0.0.1"


async def test_refusal_is_readable(folder: Path, names: Names, plain: Origin) -> None:
    async with local_door(folder, allowed(plain.port), names) as door:
        _, out, _ = await door.curl(f"http://evil.example.test:{plain.port}/")
        assert out.startswith("HTTP/1.1 403 ")
        error = json.loads(out.split("\r\n\r\n")[-1])["error"]
        assert error["code"] == "egress_denied" and error["details"]["code"] == "no_rule"
        assert "evil.example.test" in error["message"] and "network.allow" in error["hint"]
        assert not plain.connections and names.asked == []  # not even its name was asked for
        [event] = door.events
        assert event["event"] == "egress.denied" and event["host"] == "evil.example.test"


async def test_many_requests_on_one_connection_are_judged_one_by_one(
    folder: Path, names: Names, plain: Origin
) -> None:
    async with local_door(folder, allowed(plain.port, paths=["/ok/*"]), names) as door:
        base = f"http://api.example.test:{plain.port}"
        _, out, _ = await door.curl(f"{base}/ok/1", f"{base}/no", f"{base}/ok/2")
        assert [plain.requests[n].split(b" ")[1] for n in range(2)] == [b"/ok/1", b"/ok/2"]
        assert plain.connections == 1 and len(plain.requests) == 2 and out.count("egress_denied") == 1


HOSTS = [
    "evil.example.test", "127.0.0.1", "2130706433", "0x7f.1", "0177.1", "[::1]", "[::ffff:127.0.0.1]", "localhost",  # noqa: E501
    "api.example.test.evil.example.test", "xapi.example.test", "api.example.test@evil.example.test",
    "evil.example.test%23api.example.test", "api%2eexample%2etest", "0",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("way", ["absolute", "connect", "socks"])
async def test_no_other_host_is_reached(
    folder: Path, names: Names, plain: Origin, host: str, way: str
) -> None:
    names.add("api.example.test.evil.example.test", "127.0.0.1")
    names.add("localhost", "127.0.0.1")
    async with local_door(folder, allowed(plain.port), names) as door:
        if way == "absolute":
            got = await door.raw(
                f"GET http://{host}:{plain.port}/ HTTP/1.1\r\nHost: api.example.test:{plain.port}\r\n"
                "Connection: close\r\n\r\n".encode()
            )
            assert got.split(b" ")[1] in (b"400", b"403", b"421")
        elif way == "connect":
            target = f"{host}:{plain.port}"
            got = await door.raw(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            assert got.split(b" ")[1] in (b"400", b"403")
        else:
            name = host.encode()
            hello = b"\x05\x01\x00\x05\x01\x00\x03" + bytes([len(name)]) + name + plain.port.to_bytes(2)
            got = await door.raw(hello, "socks")
            assert got[:4] == b"\x05\x00\x05\x02"
        assert not plain.connections
        await door.idle()
        assert all(line["decision"] == "denied" for line in door.log())


@pytest.mark.parametrize("way", ["absolute", "connect", "socks"])
async def test_the_allowed_host_is_reached_every_way(
    folder: Path, names: Names, plain: Origin, way: str
) -> None:
    """The control of the tests above."""
    async with local_door(folder, allowed(plain.port), names) as door:
        request = (
            f"GET / HTTP/1.1\r\nHost: api.example.test:{plain.port}\r\nConnection: close\r\n\r\n".encode()
        )
        target = f"api.example.test:{plain.port}"
        if way == "absolute":
            request = request.replace(b"GET /", f"GET http://{target}/".encode())
            got = await door.raw(request)
        elif way == "connect":
            got = await door.raw(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode() + request)
            assert got.startswith(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            got = await door.raw(
                b"\x05\x01\x00\x05\x01\x00\x03\x10api.example.test" + plain.port.to_bytes(2) + request,
                "socks",
            )
            assert got.startswith(b"\x05\x00\x05\x00\x00\x01")
        assert b"HTTP/1.1 200 OK" in got and len(plain.requests) == 1


async def test_plain_http_inside_a_tunnel_is_judged(folder: Path, names: Names, plain: Origin) -> None:
    async with local_door(folder, allowed(plain.port, methods=["GET"], paths=["/ok"]), names) as door:
        target = f"api.example.test:{plain.port}"
        tunnel = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
        for method, path, host, status in (
            ("GET", "/no", target, b"403"),
            ("POST", "/ok", target, b"403"),
            ("GET", "/ok", f"evil.example.test:{plain.port}", b"421"),
            ("GET", f"http://evil.example.test:{plain.port}/ok", target, b"400"),
            ("CONNECT", f"evil.example.test:{plain.port}", target, b"400"),
            ("GET", "/ok", target, b"200"),
        ):
            request = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            got = await door.raw((tunnel + request).encode())
            assert got.split(b"\r\n\r\n")[1].split(b" ")[1] == status, (method, path, host)
        assert len(plain.requests) == 1


async def test_bytes_that_are_neither_http_nor_tls_need_a_rule_that_says_so(
    folder: Path, names: Names
) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"banner\n")
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    hello = f"CONNECT api.example.test:{port} HTTP/1.1\r\nHost: api.example.test:{port}\r\n\r\n".encode()
    async with server:
        async with local_door(folder, allowed(port), names) as door:
            got = await door.raw(hello + b"\x00\x01binary", eof=True)
            assert got == b"HTTP/1.1 200 Connection established\r\n\r\n"
            await door.idle()
            assert [line["code"] for line in door.log()] == ["protocol"]
        async with local_door(folder, allowed(port, protocol="tcp"), names) as door:
            got = await door.raw(hello + b"\x00\x01binary", eof=True)
            assert got.endswith(b"\r\n\r\nbanner\n\x00\x01binary")


async def test_rebinding_meets_the_address_that_was_judged(folder: Path, plain: Origin) -> None:
    """The first answer is harmless, the second one is not: nothing is ever resolved twice for one connection."""  # noqa: E501
    names = Names()
    names.add("rebind.example.test", "127.0.0.1")
    names.add("rebind.example.test", "127.0.0.2")
    rule = {"host": "rebind.example.test", "ports": [plain.port], "addresses": ["127.0.0.1"]}
    async with local_door(folder, {"allow": [rule]}, names) as door:
        code, out, _ = await door.curl(f"http://rebind.example.test:{plain.port}/")
        assert code == 0 and " 200 " in out
        assert names.asked == ["rebind.example.test"]
        door.engine.upstreams.resolver._kept.clear()  # type: ignore[attr-defined]
        _, out, _ = await door.curl(f"http://rebind.example.test:{plain.port}/")
        assert " 403 " in out and "127.0.0.2 (loopback)" in out
        assert len(plain.requests) == 1


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254", "64:ff9b::a9fe:a9fe"]
)
async def test_names_that_lie_in_special_ranges_are_refused(folder: Path, address: str) -> None:
    names = Names()
    names.add("inside.example.test", address)
    async with local_door(folder, {"allow": [{"host": "inside.example.test", "ports": [80]}]}, names) as door:
        _, out, _ = await door.curl("http://inside.example.test/latest/meta-data/")
        assert " 403 " in out and '"code": "address"' in out
        await door.idle()
        assert door.log()[0]["code"] == "address"


async def test_redirect_is_an_answer_and_its_target_is_judged(
    folder: Path, names: Names, plain: Origin
) -> None:
    plain.response = (
        b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest/\r\nContent-Length: 0\r\n\r\n"
    )
    async with local_door(folder, allowed(plain.port), names) as door:
        _, out, _ = await door.curl("-L", f"http://api.example.test:{plain.port}/")
        assert out.startswith("HTTP/1.1 302 ") and "HTTP/1.1 403 " in out
        await door.idle()
        assert sorted(line["decision"] for line in door.log()) == ["allowed", "denied"]


SMUGGLED = [
    "POST {url} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil",  # noqa: E501
    "POST {url} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nContent-Length: 40\r\n\r\nabcdGET /evil HTTP/1.1",  # noqa: E501
    "POST {url} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",  # noqa: E501
    "POST {url} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\n\r\n",  # noqa: E501
    "POST {url} HTTP/1.1\r\nHost: {host}\r\nX: y\r\n Transfer-Encoding: chunked\r\n\r\n",
    "GET {url} HTTP/1.1\r\nHost: {host}\r\nX: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "GET {url} HTTP/1.1\r\nHost: {host}\r\nHost: evil.example.test\r\n\r\n",
    "GET {url} HTTP/1.1\r\nHost: evil.example.test\r\n\r\n",
    "GET {url}\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("message", SMUGGLED)
async def test_smuggling_shapes_reach_nobody(folder: Path, names: Names, plain: Origin, message: str) -> None:
    async with local_door(folder, allowed(plain.port), names) as door:
        host = f"api.example.test:{plain.port}"
        got = await door.raw(message.format(url=f"http://{host}/", host=host).encode(), eof=True)
        assert got.split(b" ")[1] in (b"400", b"421", b"501")
        assert got.count(b"HTTP/1.1 ") == 1
        assert not plain.requests


async def test_a_bad_chunk_never_becomes_a_request(folder: Path, names: Names, plain: Origin) -> None:
    async with local_door(folder, allowed(plain.port), names) as door:
        host = f"api.example.test:{plain.port}"
        head = f"POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        got = await door.raw(head + b"5\r\nhello\r\nzz\r\nGET /evil HTTP/1.1\r\nHost: x\r\n\r\n", eof=True)
        assert got.startswith(b"HTTP/1.1 400 ")
        assert not plain.bodies
        got = await door.raw(head + b"5\r\nhello\r\n0\r\n\r\n", eof=True)
        assert got.startswith(b"HTTP/1.1 200 ")  # the control
        assert plain.bodies == [b"hello"]


async def test_responses_that_could_be_read_in_two_ways_are_not_passed_on(
    folder: Path, names: Names, plain: Origin
) -> None:
    async with local_door(folder, allowed(plain.port), names) as door:
        url = f"http://api.example.test:{plain.port}/"
        for response in (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
            b"HTTP/1.1 200 OK\r\nX: y\r\n folded\r\nContent-Length: 0\r\n\r\n",
            b"nonsense\r\n\r\n",
        ):
            plain.response = response
            _, out, _ = await door.curl("-d", "x", url)
            assert " 502 " in out.split("\r\n")[0]
        plain.response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        _, out, _ = await door.curl(url)
        assert out.endswith("hi")


async def test_oversized_and_slow_heads(folder: Path, names: Names, plain: Origin) -> None:
    slow = folder / "slow"
    slow.mkdir()
    async with local_door(slow, allowed(plain.port) | {"idleTimeout": 1}, names) as door:
        assert await door.raw(b"") == b""  # a silent one is hung up on
    async with local_door(folder, allowed(plain.port), names) as door:
        url = f"http://api.example.test:{plain.port}/"
        _, out, _ = await door.curl("-H", "X: " + "a" * 70_000, url)
        assert " 431 " in out.split("\r\n")[0]
        _, out, _ = await door.curl(url)
        assert " 200 " in out


async def test_no_more_connections_than_allowed(folder: Path, names: Names, plain: Origin) -> None:
    async with local_door(folder, allowed(plain.port) | {"connections": 3}, names) as door:
        held = [await asyncio.open_connection("127.0.0.1", door.ports["http"]) for _ in range(3)]
        async with asyncio.timeout(60):
            while len(door.door.flows) < 3:
                await asyncio.sleep(0.01)
        assert await door.raw(b"GET / HTTP/1.1\r\n\r\n") == b""
        async with asyncio.timeout(60):
            while not (lines := door.log()):
                await asyncio.sleep(0.01)
        assert [line["code"] for line in lines] == ["connections"]
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        await door.idle()
        _, out, _ = await door.curl(f"http://api.example.test:{plain.port}/")
        assert " 200 " in out


async def test_update_reaches_open_connections(folder: Path, names: Names) -> None:
    ready, gone = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready.set()
        await reader.read(100)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rules = allowed(port, protocol="tcp")
    async with server, local_door(folder, rules, names) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.ports["http"])
        writer.write(
            f"CONNECT api.example.test:{port} HTTP/1.1\r\nHost: api.example.test:{port}\r\n\r\nx".encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(60):
            await ready.wait()
        more = {"mode": "egress", "allow": [*rules["allow"], {"host": "other.example.test"}]}
        assert door.door.update(more) == 0  # what still may, goes on
        with pytest.raises(Exception, match="host"):
            door.door.update({"mode": "egress", "allow": [{"ports": [1]}]})
        assert door.door.rules.connect(
            door.door.host("other.example.test"), 443
        ).allowed  # the old rules hold
        assert door.door.update({"mode": "egress", "allow": [{"host": "other.example.test"}]}) == 1
        async with asyncio.timeout(60):
            assert await reader.read() == b""
            await gone.wait()
        writer.close()
        await door.idle()
        assert door.log()[-1]["decision"] == "denied" and door.log()[-1]["code"] == "no_rule"
        _, out, _ = await door.curl(f"http://api.example.test:{port}/")
        assert " 403 " in out


async def test_names_inside_are_made_up_and_nothing_is_asked_outside(folder: Path, names: Names) -> None:
    rules = {"allow": [{"host": "api.example.test"}, {"host": "*.cdn.example.test"}]}
    async with local_door(folder, rules, names) as door:
        ask = door.served.name

        def addresses(name: str, kind: int = 1) -> list[str]:
            answered = ask(query(name, kind, 7))
            assert answered is not None
            return [str(one) for one in parse_answer(answered, kind)]

        [first] = addresses("API.example.test")
        assert first.startswith("198.1") and addresses("api.example.test") == [first]
        assert door.served.names.name(first) == "api.example.test"
        assert addresses("x.cdn.example.test") != [first]
        assert addresses("api.example.test", 28) == []
        for name in ("evil.example.test", "c2VjcmV0.api.example.test", "cdn.example.test", "com"):
            answered = ask(query(name, 1, 7))
            assert answered is not None and answered[3] & 15 == 3
        assert ask(b"\0\1nonsense") is None
        txt = ask(query("api.example.test", 16, 7))
        assert txt is not None and txt[6:8] == b"\0\0"
        got = await door.raw(
            len(query("api.example.test", 1, 7)).to_bytes(2) + query("api.example.test", 1, 7),
            "names",
            eof=True,
        )
        assert [str(one) for one in parse_answer(got[2:], 1)] == [first]
        assert names.asked == []


async def test_websocket_and_other_upgrades(folder: Path, names: Names) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Upgrade: websocket" in head and b"Sec-WebSocket-Key: k" in head
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: x\r\n\r\nfirst"
        )
        writer.write(await reader.readexactly(5))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, local_door(folder, allowed(port, paths=["/ws"]), names) as door:

        def request(path: str, upgrade: str) -> bytes:
            host = f"api.example.test:{port}"
            return (
                f"GET http://{host}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n"  # noqa: E501
                "Sec-WebSocket-Key: k\r\nSec-WebSocket-Version: 13\r\n\r\nhello"
            ).encode()

        got = await door.raw(request("/ws", "websocket"))
        assert got.startswith(b"HTTP/1.1 101 ") and got.endswith(b"\r\n\r\nfirsthello")
        assert (await door.raw(request("/other", "websocket"), eof=True)).startswith(b"HTTP/1.1 403 ")
        assert (await door.raw(request("/ws", "h2c"), eof=True)).startswith(b"HTTP/1.1 400 ")
        await door.idle()
        [line] = [line for line in door.log() if line.get("status") == 101]
        assert line["received"] >= 10 and line["upgrade"] == "websocket"


async def test_retries_breaker_and_an_answer_that_breaks_off(
    folder: Path, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_module, "_REST", (600.0, 600.0))  # no busy machine is slower than that
    calls = 0

    async def flaky(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/cut" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        elif calls % 3 == 0:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(flaky, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with local_door(folder, allowed(port), names) as door:
        url = f"http://api.example.test:{port}"
        async with server:
            _, out, _ = await door.curl(f"{url}/")
            assert out.endswith("ok") and calls == 3  # idempotent: tried again, with a pause
            _, out, _ = await door.curl("-d", "x", f"{url}/")
            assert " 502 " in out and calls == 4  # not so a POST
            code, out, _ = await door.curl(f"{url}/cut")
            assert code == 18 and out.endswith("half")  # curl: transfer closed with outstanding data
        for _ in range(8):
            _, out, _ = await door.curl(f"{url}/")
        assert " 503 " in out and "circuit_open" in out
        breaker = door.engine.upstreams.breakers["", "api.example.test", port]
        assert breaker.state == "open"
        monkeypatch.setattr(breaker, "until", 0.0)
        assert breaker.state == "half-open"
        server = await asyncio.start_server(flaky, "127.0.0.1", port)
        async with server:
            _, out, _ = await door.curl(f"{url}/")
            assert " 503 " not in out and breaker.state == "closed"
    assert upstream_module._FAILURES == 5


async def test_socks_other_than_connect(folder: Path, names: Names, plain: Origin) -> None:
    async with local_door(folder, allowed(plain.port), names) as door:
        for command in (2, 3):  # listen, UDP
            got = await door.raw(b"\x05\x01\x00\x05%c\x00\x01\x7f\0\0\1\0\x50" % command, "socks")
            assert got[:4] == b"\x05\x00\x05\x07"
        assert await door.raw(b"\x04\x01\0\x50\x7f\0\0\1\0", "socks") == b""
        assert await door.raw(b"\x05\x01\x02", "socks") == b"\x05\xff"
        with socket.socket() as quiet:
            quiet.connect(("127.0.0.1", door.ports["socks"]))
        await door.idle()
        assert not plain.connections


async def flood(door: LocalDoor, url: str) -> None:
    results = await asyncio.gather(
        *(
            door.raw(f"GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            for _ in range(200)
        )
    )
    assert all(b"421" in got or b"403" in got or not got for got in results)


async def test_a_flood_leaves_nothing_behind(folder: Path, names: Names, plain: Origin) -> None:
    import os

    async with local_door(folder, allowed(plain.port), names) as door:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await flood(door, f"http://evil.example.test:{plain.port}/")
        await door.idle()
        _, out, _ = await door.curl(f"http://api.example.test:{plain.port}/")
        assert " 200 " in out
        await door.idle()
        async with asyncio.timeout(60):
            while len(os.listdir("/proc/self/fd")) > before + 4:  # an idle connection, the log
                await asyncio.sleep(0.01)


async def test_refusals_do_not_fill_the_log(
    folder: Path, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ringfence.egress.log._REFUSALS", (3.0, 0.0)
    )  # no new ones while a busy machine waits
    async with local_door(folder, {}, names) as door:
        request = b"GET http://evil.example.test/ HTTP/1.1\r\nHost: evil.example.test\r\n\r\n"
        await door.raw(request * 60, eof=True)
        await door.idle()
        lines = door.log()
        assert len(lines) == len(door.events) == 3
        door.engine.closed(door.door, forget=False)
        assert door.log()[-1]["left_out"] == 57 and door.log()[-1]["sandbox"] == "sb-test"
