"""URLs as inputs: fetched from inside, through the door, if the policy names them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import Serving, eventually, serving

ADDRESS = "127.1.2.3"  # of this machine, but nothing that a client takes for itself and asks no proxy for
FINAL = ("succeeded", "failed", "cancelled")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"fetched\n"
        self.send_response(200 if self.path == "/file" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer((ADDRESS, 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with serving() as made:
        yield made


def _ended(service: Serving, port: int, path: str, host: str) -> dict[str, Any]:
    body = {
        "runtime": "jail", "memory": "256MiB", "disk": "16MiB", "command": "cat in/file",
        "network": {"mode": "egress", "allow": [{"host": host, "ports": [port]}]},
        "inputs": [{"url": f"http://{ADDRESS}:{port}{path}", "path": "in/file"}],
    }  # fmt: skip
    made = service.http.post("/v1/jobs", json=body)
    assert made.status_code == 201, made.text

    def look() -> dict[str, Any] | None:
        told = dict(service.http.get(f"/v1/jobs/{made.json()['id']}").json())
        return told if told["state"] in FINAL else None

    return dict(eventually(look, "the job ends"))


def test_what_the_policy_names_is_fetched(service: Serving, port: int) -> None:
    told = _ended(service, port, "/file", ADDRESS)
    assert told["state"] == "succeeded", told
    assert service.http.get(f"/v1/jobs/{told['id']}/logs").text == "fetched\n"


@pytest.mark.parametrize(("path", "host"), [("/file", "other.test"), ("/none", ADDRESS)])
def test_what_is_denied_or_not_there_fails_the_attempt(
    service: Serving, port: int, path: str, host: str
) -> None:
    told = _ended(service, port, path, host)
    assert (told["state"], told["cause"]) == ("failed", "input")
    assert "can't be fetched" in told["detail"]
