"""Ports of a sandbox: by host and by path, HTTP, events, WebSocket, tunnel; who may, and what passes."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from support.serving import Serving, eventually

# What runs inside: an HTTP server that says what it got, and can say anything.
SERVER = r"""
import base64, hashlib, json, socketserver, struct, sys, time
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        line = self.rfile.readline().decode().split()
        if not line: return
        heads = []
        while (h := self.rfile.readline().rstrip(b"\r\n")):
            heads.append(h.decode("latin-1").split(": ", 1))
        got = {k.lower(): v for k, v in heads}
        path = line[1]
        w = self.wfile.write
        if path.startswith("/raw/"):
            w(base64.urlsafe_b64decode(path[5:])); return
        if path.startswith("/events"):
            w(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for n in range(3):
                w(b"data: %d\n\n" % n); self.wfile.flush(); time.sleep(0.05)
            return
        if path.startswith("/ws"):
            text = got["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            key = base64.b64encode(hashlib.sha1(text.encode()).digest())
            w(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
            w(b"Sec-WebSocket-Accept: " + key + b"\r\n")
            if "sec-websocket-protocol" in got: w(b"Sec-WebSocket-Protocol: chat\r\n")
            w(b"\r\n")
            def frame(op, data):
                size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data))
                w(bytes([0x80 | op]) + size + data)
            frame(1, json.dumps({"path": path, "headers": heads}).encode())
            while True:
                a = self.rfile.read(2)
                if len(a) < 2: return
                op, n = a[0] & 15, a[1] & 127
                if n == 126: n = struct.unpack(">H", self.rfile.read(2))[0]
                mask = self.rfile.read(4)
                data = bytes(c ^ mask[i % 4] for i, c in enumerate(self.rfile.read(n)))
                frame(op, data)
                if op == 8: return
        body = b""
        if "content-length" in got: body = self.rfile.read(int(got["content-length"]))
        elif "chunked" in got.get("transfer-encoding", ""):
            while (n := int(self.rfile.readline(), 16)):
                body += self.rfile.read(n); self.rfile.readline()
            self.rfile.readline()
        if path.startswith("/long"):
            w(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n"); return
        told = {"method": line[0], "path": path, "headers": heads, "size": len(body)}
        told = json.dumps({**told, "body": body[:100].decode("latin-1")}).encode()
        w(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n" % len(told))
        w(b"Set-Cookie: a=b; Domain=localhost; Path=/\r\nAccess-Control-Allow-Origin: *\r\n")
        w(b"Strict-Transport-Security: max-age=1\r\nKeep-Alive: x\r\n\r\n" + told)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
Server(("127.0.0.1", 8000), Handler).serve_forever()
"""
ECHO = r"""
import socketserver
class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        while (data := self.request.recv(65536)):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
Server(("127.0.0.1", 7000), Handler).serve_forever()
"""
Box = dict[str, Any]


@pytest.fixture(scope="module")
def inside(service: Serving, box: Box) -> Box:
    """The sandbox with its servers up, and a token."""
    for name, code in (("web", SERVER), ("echo", ECHO)):
        body = {"argv": ["python3", "-c", code], "id": name, "wait": False, "detached": True}
        assert service.http.post(f"/v1/sandboxes/{box['id']}/processes", json=body).status_code == 201
    token = service.http.post(f"/v1/sandboxes/{box['id']}/token", json={}).json()["token"]
    made = {**box, "token": token}
    eventually(lambda: by_path(service, made, "/").status_code == 200, "the server is up")
    eventually(
        lambda: "1" in service.run(box["id"], "grep -c ':1B58 .* 0A ' /proc/net/tcp")["stdout"],
        "the echo is up",
    )
    return made


def by_path(
    service: Serving, box: Box, path: str, method: str = "GET", token: bool = True, **options: Any
) -> httpx.Response:
    headers = {**({"x-ringfence-token": box["token"]} if token else {}), **options.pop("headers", {})}
    with service.client() as client:
        return client.request(
            method, f"/v1/sandboxes/{box['id']}/ports/8000{path}", headers=headers, **options
        )


def by_host(
    service: Serving, box: Box, path: str, method: str = "GET", port: int = 8000, **options: Any
) -> httpx.Response:
    place = urlsplit(service.url)
    headers = {"host": f"{port}-{box['id']}.localhost:{place.port}", **options.pop("headers", {})}
    if options.pop("token", True):
        headers["x-ringfence-token"] = box["token"]
    with service.client() as client:
        return client.request(method, path, headers=headers, **options)


def heads(answer: httpx.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.json()["headers"]}


@pytest.mark.parametrize("way", [by_path, by_host])
def test_requests_and_bodies(service: Serving, inside: Box, way: Any) -> None:
    answer = way(service, inside, "/a%20b//c?x=1&y=%2F", "POST", content=b"x" * 300_000)
    assert answer.status_code == 200, answer.text
    got = answer.json()
    assert (got["method"], got["path"], got["size"]) == ("POST", "/a%20b//c?x=1&y=%2F", 300_000)

    def pieces() -> Iterator[bytes]:
        yield b"one"
        yield b"two"

    chunked = way(service, inside, "/", "PUT", content=pieces())
    assert chunked.json()["body"] == "onetwo" and heads(chunked)["transfer-encoding"] == "chunked"
    assert way(service, inside, "/", "HEAD").status_code == 200
    assert way(service, inside, "/", "OPTIONS").json()["method"] == "OPTIONS"


def test_neither_key_nor_token_gets_inside(service: Serving, inside: Box) -> None:
    sent = {
        "authorization": f"Bearer {service.key}", "x-api-key": service.key, "x-forwarded-for": "1.2.3.4",
        "connection": "keep-alive, x-secret", "x-secret": "hop", "te": "trailers", "x-kept": "yes",
        "proxy-authorization": "Basic x", "cookie": f"ringfence_token={inside['token']}; mine=1",
    }  # fmt: skip
    for way in (by_path, by_host):
        answer = way(service, inside, f"/?ringfence_token={inside['token']}&z=1", headers=sent)
        assert answer.status_code == 200
        got = heads(answer)
        assert service.key not in answer.text and inside["token"] not in answer.text
        assert answer.json()["path"] == "/?z=1"
        assert got["x-kept"] == "yes" and got["connection"] == "close"
        assert not got.keys() & {
            "x-secret",
            "te",
            "proxy-authorization",
            "x-forwarded-for",
            "x-api-key",
            "authorization",
        }
        assert got.get("cookie") == (None if way is by_path else "mine=1")
    own = by_path(service, inside, "/", headers={"authorization": "Basic dXNlcjpwdw=="})
    assert heads(own)["authorization"] == "Basic dXNlcjpwdw=="  # the sandbox's own affair


def test_what_comes_out_can_not_reach_beyond_itself(service: Serving, inside: Box) -> None:
    path = by_path(service, inside, "/")
    assert path.headers["content-security-policy"] == "sandbox"
    for name in ("set-cookie", "access-control-allow-origin", "strict-transport-security", "keep-alive"):
        assert name not in path.headers
    host = by_host(service, inside, "/")
    assert host.headers["set-cookie"] == "a=b; Path=/"  # of this host alone
    assert "strict-transport-security" not in host.headers and "content-security-policy" not in host.headers
    assert by_path(service, inside, "/sw.js", headers={"service-worker": "script"}).status_code == 403


def test_events_come_as_they_are_said(service: Serving, inside: Box) -> None:
    with service.client() as client:
        path = f"/v1/sandboxes/{inside['id']}/ports/8000/events"
        with client.stream("GET", path, headers={"x-ringfence-token": inside["token"]}) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            assert [line for line in answer.iter_lines() if line] == ["data: 0", "data: 1", "data: 2"]


def test_tokens(service: Serving, inside: Box) -> None:
    def status(token: str, port: int = 8000) -> int:
        with service.client() as client:
            path = f"/v1/sandboxes/{inside['id']}/ports/{port}/"
            return client.get(path, headers={b"x-ringfence-token": token.encode("latin-1")}).status_code

    def make(**body: Any) -> str:
        return str(service.http.post(f"/v1/sandboxes/{inside['id']}/token", json=body).json()["token"])

    assert status(make(ports=[8000])) == 200
    assert status(make(ports=[9000])) == 401
    assert status(make(ports=[9000]), 9000) == 502  # it may, but nothing listens
    other = service.sandbox()
    foreign = service.http.post(f"/v1/sandboxes/{other['id']}/token", json={}).json()["token"]
    assert status(foreign) == 401
    service.http.delete(f"/v1/sandboxes/{other['id']}")
    short = make(seconds=0.5)
    eventually(lambda: status(short) == 401, "its time passes")
    until, _, rest = inside["token"].partition(".")
    for wrong in (
        "",
        "x",
        service.key,
        inside["token"] + "x",
        f"{until}9.{rest}",
        "rft_..",
        "rft_x.all.y",
        "rft_²." + rest,
    ):
        assert status(wrong) == 401, wrong
    assert by_path(service, inside, "/", token=False).status_code == 401
    keyed = by_path(service, inside, "/", token=False, headers={"authorization": f"Bearer {service.key}"})
    assert keyed.status_code == 401  # the key is for the API
    assert by_host(service, inside, "/", token=False).status_code == 401


def test_the_hosts_of_ports_serve_nothing_else(service: Serving, inside: Box) -> None:
    key = {"authorization": f"Bearer {service.key}"}
    inner = by_host(service, inside, "/v1/sandboxes", headers=key)
    assert inner.json()["path"] == "/v1/sandboxes"  # the sandbox's, not the API's
    port = urlsplit(service.url).port
    with service.client() as client:
        labels = [f"{part}-{inside['id']}" for part in ("0", "99999", "08000", "a.8000", "8000.b")]
        for label in (*labels, "x", "8000-sb-nothing", inside["id"]):
            host = f"{label}.localhost:{port}"
            answer = client.get("/v1/me", headers={"host": host, **key})
            assert answer.status_code == 404, host
        upper = client.get(
            "/x",
            headers={"host": f"8000-{inside['id'].upper()}.LOCALHOST.", "x-ringfence-token": inside["token"]},
        )
        assert upper.status_code == 200


def test_a_browser_gets_a_cookie_that_others_can_not_use(service: Serving, inside: Box) -> None:
    port = urlsplit(service.url).port
    opened = raw(
        service,
        f"GET //evil.example/a?ringfence_token={inside['token']}&b=1 HTTP/1.1\r\nConnection: close\r\n"
        f"Host: 8000-{inside['id']}.localhost:{port}\r\nSec-Fetch-Mode: navigate\r\n\r\n".encode(),
    ).decode()
    assert " 303 " in opened.split("\r\n")[0]
    fields = dict(line.split(": ", 1) for line in opened.split("\r\n\r\n")[0].split("\r\n")[1:])
    assert fields["location"] == "/evil.example/a?b=1"  # a path, not another host
    cookie = fields["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Domain" not in cookie
    have = {"cookie": cookie.split(";")[0]}
    own = f"http://8000-{inside['id']}.localhost:{port}"
    assert by_host(service, inside, "/", token=False, headers=have).status_code == 200
    assert by_host(service, inside, "/", token=False, headers={**have, "origin": own}).status_code == 200
    for other in (
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
        {"origin": f"http://8001-{inside['id']}.localhost:{port}"},
        {"origin": "null"},
    ):
        assert by_host(service, inside, "/", token=False, headers={**have, **other}).status_code == 403, other
    assert by_path(service, inside, "/", token=False, headers=have).status_code == 401  # no cookies there


def raw(service: Serving, request: bytes) -> bytes:
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        sock.sendall(request)
        with contextlib.suppress(ConnectionError):
            return b"".join(iter(lambda: sock.recv(65536), b""))
    return b""


def test_no_request_is_smuggled(service: Serving, inside: Box) -> None:
    head = f"POST /v1/sandboxes/{inside['id']}/ports/8000/ HTTP/1.1\r\nHost: x\r\n"
    head += f"X-Ringfence-Token: {inside['token']}\r\n"
    second = "GET /v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n\r\n"
    for framing in (
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Content-Length: +5\r\n",
        "Content-Length : 5\r\n",
        " Content-Length: 5\r\n",
    ):
        answer = raw(service, f"{head}Connection: close\r\n{framing}\r\n0\r\n\r\n{second}".encode())
        first = answer.split(b"\r\n", 1)[0]
        assert b" 400 " in first, (framing, answer[:200])
        assert answer.count(b"HTTP/1.1 ") == 1, framing
    bare = raw(
        service, f"{head}Connection: close\r\nX-Injected: a\rb: c\r\nContent-Length: 0\r\n\r\n".encode()
    )
    assert b" 400 " in bare.split(b"\r\n", 1)[0]


def say(service: Serving, box: Box, answer: bytes) -> httpx.Response:
    import base64

    return by_path(service, box, "/raw/" + base64.urlsafe_b64encode(answer).decode())


def test_answers_that_are_no_http(service: Serving, inside: Box) -> None:
    for bad in (
        b"SSH-2.0-x\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    ):
        answer = say(service, inside, bad)
        assert answer.status_code == 502, (bad[:40], answer.status_code)
        assert answer.json()["error"]["code"] == "guest_error"
    assert by_path(service, inside, "/long").status_code == 502
    both = say(
        service,
        inside,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    )
    assert both.content == b"hi"  # one length, not two
    early = say(
        service, inside, b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"
    )
    assert early.status_code == 204
    until_close = say(service, inside, b"HTTP/1.0 200 OK\r\n\r\nall of it")
    assert until_close.content == b"all of it"
    with pytest.raises(httpx.RemoteProtocolError):  # cut, so that nobody takes half for all
        say(service, inside, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")


@pytest.mark.parametrize("way", ["path", "host"])
def test_websockets(service: Serving, inside: Box, way: str) -> None:
    base = service.url.replace("http", "ws")
    port = urlsplit(service.url).port
    url = (
        f"{base}/v1/sandboxes/{inside['id']}/ports/8000/ws?q=1"
        if way == "path"
        else f"ws://8000-{inside['id']}.localhost:{port}/ws?q=1"
    )
    options: dict[str, Any] = {} if way == "path" else {"sock": socket.create_connection(("127.0.0.1", port))}
    headers = {"x-ringfence-token": inside["token"], "authorization": f"Bearer {service.key}"}
    with connect(
        url,
        additional_headers=headers,
        subprotocols=["chat", "other"],
        proxy=None,
        open_timeout=60,
        **options,
    ) as ws:  # type: ignore[list-item]
        told = json.loads(ws.recv(60))
        assert told["path"] == "/ws?q=1" and service.key not in str(told) and inside["token"] not in str(told)
        assert ws.subprotocol == "chat"
        ws.send("text é")
        assert ws.recv(60) == "text é"
        ws.send(b"\0bytes")
        assert ws.recv(60) == b"\0bytes"
        ws.close(3456, "bye")
    assert ws.close_code == 3456
    for wrong, status in (({}, 401), ({"x-ringfence-token": "rft_x"}, 401)):
        again = {} if way == "path" else {"sock": socket.create_connection(("127.0.0.1", port))}
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=wrong, proxy=None, open_timeout=60, **again)
        assert refused.value.response.status_code == status
    if way == "path":
        with pytest.raises(InvalidStatus) as refused:
            connect(url.replace("/ws?", "/no?"), additional_headers=headers, proxy=None, open_timeout=60)
        assert refused.value.response.status_code == 502


def test_the_tunnel(service: Serving, inside: Box) -> None:
    url = service.url.replace("http", "ws") + f"/v1/sandboxes/{inside['id']}/tunnel/7000"
    for headers in ({"x-ringfence-token": inside["token"]}, {"authorization": f"Bearer {service.key}"}):
        with connect(url, additional_headers=headers, proxy=None, open_timeout=60) as ws:
            data = bytes(range(256)) * 400
            ws.send(data)
            got = b""
            while len(got) < len(data):
                piece = ws.recv(60)
                assert isinstance(piece, bytes)
                got += piece
            assert got == data
            ws.send(b"")  # the end of our half
            assert ws.recv(60) == b""
    for headers, status in (({}, 401), ({"authorization": "Bearer x"}, 401)):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers, proxy=None, open_timeout=60)
        assert refused.value.response.status_code == status
    nothing = url.replace("/7000", "/7001")
    with pytest.raises(InvalidStatus) as refused:
        connect(
            nothing, additional_headers={"x-ringfence-token": inside["token"]}, proxy=None, open_timeout=60
        )
    assert refused.value.response.status_code == 502
