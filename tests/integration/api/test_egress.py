"""A sandbox of the service with one door: what the policy names passes, nothing else does."""

from __future__ import annotations

import os
import signal
import socket
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
    "try: print(o.open('http://127.0.0.1:{port}/', timeout=100).read().decode())\n"
    "except Exception as e: print('refused', getattr(e, 'code', e))"
)


def network(port: int) -> dict[str, Any]:
    return {"mode": "egress", "allow": [{"host": "127.0.0.1", "ports": [port], "protocol": "http"}]}


def ask(doors: Serving, box: str, port: int) -> str:
    body = {"argv": ["python3", "-c", ASK.format(port=port)]}
    told = doors.http.post(f"/v1/sandboxes/{box}/processes", json=body).json()
    assert "stdout" in told, told
    return str(told["stdout"]).strip()


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


def test_doors_and_their_circuits_are_among_the_metrics(doors: Serving) -> None:

    def metrics() -> str:
        return str(doors.http.get("/metrics").text)

    with socket.socket() as taken:  # nobody else listens there, and neither does this one
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        box = doors.sandbox(network=network(port))["id"]
        # Figures of a proxy that says nothing in time are those of before.
        eventually(lambda: "ringfence_egress_doors 1.0" in metrics(), "it is open")
        assert "circuit_failures{" not in metrics()
        for _ in range(5):
            assert ask(doors, box, port).startswith("refused")
    where = f'ringfence_egress_circuit_failures{{destination="127.0.0.1:{port}",project="default",state='
    eventually(lambda: where in metrics(), "its circuit is open")
    doors.http.delete(f"/v1/sandboxes/{box}")
    eventually(lambda: "ringfence_egress_doors 0.0" in metrics(), "it is closed")


def test_secrets_are_of_a_project_and_never_told(doors: Serving) -> None:
    put = doors.http.put("/v1/secrets/token", json={"value": "s3cret-value"})
    assert put.status_code == 200 and "s3cret-value" not in put.text, put.text
    listed = doors.http.get("/v1/secrets")
    assert [each["name"] for each in listed.json()["items"]] == ["token"] and "s3cret" not in listed.text
    _, stranger = doors.tenant("stranger")
    assert doors.client(stranger).get("/v1/secrets").json()["items"] == []
    assert doors.client(stranger).delete("/v1/secrets/token").status_code == 404
    assert doors.http.put("/v1/secrets/a%20b", json={"value": "x"}).status_code == 400
    assert doors.http.delete("/v1/secrets/token").status_code == 204
    assert doors.http.get("/v1/secrets").json()["items"] == []


def test_a_question_is_answered_by_its_project(doors: Serving, web: int) -> None:
    box = doors.sandbox(network={"mode": "egress", "onUnknown": "ask", "askTimeout": 100})
    body = {"argv": ["python3", "-c", ASK.format(port=web)], "id": "asks", "wait": False, "detached": True}
    doors.http.post(f"/v1/sandboxes/{box['id']}/processes", json=body)
    (question,) = eventually(lambda: doors.http.get("/v1/egress/questions").json()["items"], "it is asked")
    assert (question["sandbox"], question["port"]) == (box["id"], web)
    _, key = doors.tenant("curious")
    stranger = doors.client(key)
    answer = {"allow": True, "remember": True}
    assert stranger.get("/v1/egress/questions").json()["items"] == []
    assert stranger.post(f"/v1/egress/questions/{question['id']}", json=answer).status_code == 404
    assert doors.http.post(f"/v1/egress/questions/{question['id']}", json=answer).status_code == 200
    one = f"/v1/sandboxes/{box['id']}"
    told = eventually(
        lambda: doors.http.get(f"{one}/processes/asks/output").json()["stdout"]["data"], "it goes on"
    )
    assert told.strip() == "beyond"
    seen = eventually(lambda: doors.http.get(f"{one}/connections").json()["items"], "it is in the log")
    assert {each["sandbox"] for each in seen} == {box["id"]}
    assert stranger.get(f"{one}/connections").status_code == 404
    doors.http.delete(one)


def test_a_killed_api_opens_its_doors_again(doors: Serving, web: int) -> None:
    box = doors.sandbox(network=network(web))
    (pid,) = doors.children()["api"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: doors.http.get("/readyz").status_code == 200, "it is back")
    eventually(lambda: ask(doors, box["id"], web) == "beyond", "its door is open again")
    doors.http.delete(f"/v1/sandboxes/{box['id']}")
