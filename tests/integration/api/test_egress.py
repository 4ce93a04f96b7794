"""A sandbox of the service with one door: what the policy names passes, nothing else does."""

from __future__ import annotations

import os
import signal
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import Serving, eventually, serving

pytest.importorskip("h2")


class _Web(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nbeyond")


@pytest.fixture(scope="module")
def web() -> Iterator[int]:
    """A server on this machine's loopback: beyond the door."""
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Web) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def doors() -> Iterator[Serving]:
    with serving() as made:
        yield made


# Loopback is left out of proxies by NO_PROXY, which programs inside may change as they like.
ASK = (
    "import os, urllib.request as u\n"
    "for n in ('no_proxy', 'NO_PROXY'): os.environ.pop(n, None)\n"
    "o = u.build_opener(u.ProxyHandler({{'http': os.environ['http_proxy']}}))\n"
    "try: print(o.open('http://127.0.0.1:{port}/', timeout=20).read().decode())\n"
    "except Exception as e: print('refused', getattr(e, 'code', e))"
)


def network(port: int) -> dict[str, Any]:
    return {"mode": "egress", "allow": [{"host": "127.0.0.1", "ports": [port], "protocol": "http"}]}


def ask(doors: Serving, box: str, port: int) -> str:
    body = {"argv": ["python3", "-c", ASK.format(port=port)]}
    return str(doors.http.post(f"/v1/sandboxes/{box}/processes", json=body).json()["stdout"]).strip()


def test_what_is_named_passes_and_nothing_else(doors: Serving, web: int) -> None:
    opened = doors.sandbox(network=network(web))
    closed = doors.sandbox(network={"mode": "egress"})
    assert ask(doors, opened["id"], web) == "beyond"
    assert ask(doors, opened["id"], web - 1).startswith("refused")
    assert ask(doors, closed["id"], web) == "refused 403"
    # Rules can change while it runs.
    for box, rules, told in ((closed, network(web), "beyond"), (opened, {"mode": "egress"}, "refused 403")):
        changed = doors.http.patch(f"/v1/sandboxes/{box['id']}", json={"network": rules})
        assert changed.status_code == 200, changed.text
        assert ask(doors, box["id"], web) == told
    for box in (opened, closed):
        doors.http.delete(f"/v1/sandboxes/{box['id']}")


def test_a_killed_api_opens_its_doors_again(doors: Serving, web: int) -> None:
    box = doors.sandbox(network=network(web))
    (pid,) = doors.children()["api"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: doors.http.get("/readyz").status_code == 200, "it is back")
    eventually(lambda: ask(doors, box["id"], web) == "beyond", "its door is open again")
    doors.http.delete(f"/v1/sandboxes/{box['id']}")
