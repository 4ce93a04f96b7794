"""The two ends of ``ringfence bench --egress``: a program, servers outside and client in the sandbox.

Only the standard library, one thread, no event loop in the client: what it costs itself is in every figure.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import ssl
import sys
import time
from typing import Any

NAME = "bench.example.test"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100
WARM = 20  # requests on a connection before the first that counts
_PATIENCE = 120.0  # seconds without any answer


# -- outside


class Http(asyncio.Protocol):
    """Answers every request with the same hundred bytes."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport, self.held = transport, b""

    def data_received(self, data: bytes) -> None:
        """Requests without bodies."""
        self.held += data
        while b"\r\n\r\n" in self.held:
            self.held = self.held.partition(b"\r\n\r\n")[2]
            self.transport.write(ANSWER)


class Sink(asyncio.Protocol):
    """Takes what comes; at its end says how much it was."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport, self.count = transport, 0

    def data_received(self, data: bytes) -> None:
        """Count."""
        self.count += len(data)

    def eof_received(self) -> bool:
        """Say it."""
        self.transport.write(b"%d" % self.count)
        self.transport.close()
        return False


async def serve(pem: str) -> None:
    """Print the ports of an HTTPS server, an HTTP server and a sink, and serve until killed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    loop = asyncio.get_running_loop()
    https = await loop.create_server(Http, "127.0.0.1", 0, ssl=context, backlog=512)
    plain = await loop.create_server(Http, "127.0.0.1", 0, backlog=512)
    sink = await loop.create_server(Sink, "127.0.0.1", 0)
    print(*(one.sockets[0].getsockname()[1] for one in (https, plain, sink)), flush=True)
    await asyncio.Event().wait()


# -- the client; ``plan``: proxy (port of a proxy on loopback, or 0), port, ca (a file, or ""), and how much


def connected(plan: dict[str, Any]) -> socket.socket:
    """A connection as the plan says: straight or through the proxy, in the clear or in TLS."""
    end = time.monotonic() + 30
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", plan["proxy"] or plan["port"]))
            break
        except ConnectionRefusedError:  # a reference that is just starting
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if plan["proxy"]:
        target = f"{NAME}:{plan['port']}"
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = sock.recv(1)
            if not piece:
                raise RuntimeError(f"the tunnel broke off: {answer[:500]!r}")
            answer += piece
        if b" 200 " not in answer:
            raise RuntimeError(f"no tunnel: {answer[:500]!r}")
    if plan["ca"]:
        context = ssl.create_default_context(cafile=plan["ca"])
        sock = context.wrap_socket(sock, server_hostname=NAME)
    return sock


def _asking(plan: dict[str, Any]) -> bytes:
    return f"GET /v1/x HTTP/1.1\r\nHost: {NAME}:{plan['port']}\r\n\r\n".encode()


def requests(plan: dict[str, Any]) -> dict[str, Any]:
    """Requests on ``at_once`` connections, each asking again as soon as it was answered."""
    asking, waiting = _asking(plan), selectors.DefaultSelector()
    times: list[float] = []
    socks = [connected(plan) for _ in range(plan["at_once"])]
    for sock in socks:
        for _ in range(WARM):
            sock.sendall(asking)
            left = len(ANSWER)
            while left:
                left -= len(sock.recv(left)) or _gone()
        sock.setblocking(False)
    began, used = time.perf_counter(), os.times()
    for sock in socks:
        waiting.register(sock, selectors.EVENT_READ, [sock, time.perf_counter(), 0])
        sock.send(asking)
    while len(times) < plan["count"]:
        events = waiting.select(_PATIENCE)
        if not events:
            raise RuntimeError("no answer for two minutes")
        for key, _ in events:
            sock = key.data[0]
            try:
                while key.data[2] < len(ANSWER):
                    key.data[2] += len(sock.recv(65536)) or _gone()
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            times.append((time.perf_counter() - key.data[1]) * 1000)
            key.data[1:] = time.perf_counter(), 0
            sock.send(asking)
    now = os.times()
    cpu = now.user + now.system - used.user - used.system
    return {"times": times, "seconds": time.perf_counter() - began, "cpu": cpu}


def _gone() -> int:
    raise RuntimeError("the connection ended")


def connects(plan: dict[str, Any]) -> dict[str, Any]:
    """A new connection and one request on it, ``count`` times."""
    asking, times = _asking(plan), []
    for _ in range(plan["count"]):
        began = time.perf_counter()
        with connected(plan) as sock:
            sock.sendall(asking)
            left = len(ANSWER)
            while left:
                left -= len(sock.recv(left)) or _gone()
        times.append((time.perf_counter() - began) * 1000)
    return {"times": times}


def upload(plan: dict[str, Any]) -> dict[str, Any]:
    """Send ``megabytes`` to the sink."""
    data = bytes(2**20)
    with connected(plan) as sock:
        began = time.perf_counter()
        for _ in range(plan["megabytes"]):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        got = b""
        while piece := sock.recv(100):
            got += piece
        seconds = time.perf_counter() - began
    if not got or int(got) != plan["megabytes"] * 2**20:
        raise RuntimeError(f"{got!r} of {plan['megabytes']} MiB arrived")
    return {"mb_per_second": plan["megabytes"] * 1.048576 / seconds}


def main(arguments: list[str]) -> None:
    """``serve PEM``, or the name of a client's work and its plan: prints figures as JSON."""
    if arguments[0] == "serve":
        asyncio.run(serve(arguments[1]))
        return
    work = {"requests": requests, "connects": connects, "upload": upload}[arguments[0]]
    print(json.dumps(work(json.loads(arguments[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
