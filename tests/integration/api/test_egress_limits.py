"""Several API processes on one store: the limits of a project hold for all of them together."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from support.apis import another, kill
from support.postgres import PostgresServer, postgres
from support.serving import Serving, eventually, needs_root_or_users, serving

__all__ = ["postgres"]
pytest.importorskip("h2")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
SIZE, RATE, BANDWIDTH = 400_000, 8, 2_000_000


class Beyond:
    """A server that remembers when each request came. ``/hold`` is never answered, ``/big`` with many bytes.

    ``most``: connections that were held at once.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.came: list[float] = []
        self.most = 0
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as lines:
            try:
                words = lines.readline().split()
                while lines.readline().strip():
                    pass
                if len(words) < 2:
                    return
                self.came.append(time.monotonic())
                if words[1] == b"/hold":
                    with self._lock:
                        self._held.append(sock)
                        self.most = max(self.most, self._open())
                    sock.recv(1)  # until the other end goes, or we do
                    return
                body = b"x" * (SIZE if words[1] == b"/big" else 2)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                sock.sendall(head.encode() + body)
            except OSError:
                return
            finally:
                with self._lock:
                    if sock in self._held:
                        self._held.remove(sock)

    def _open(self) -> int:
        """Those whose other end is still there: a thread may not have seen yet that it is gone."""
        count = 0
        for sock in self._held:
            try:
                count += sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
            except BlockingIOError:
                count += 1
            except OSError:
                continue
        return count

    def held(self) -> int:
        """Connections that are held now."""
        with self._lock:
            return self._open()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(30)
        with self._lock:
            for sock in self._held:
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)


@pytest.fixture
def beyond() -> Iterator[Beyond]:
    made = Beyond()
    yield made
    made.close()


class Pair:
    """A project with limits, and a sandbox of it at each of two API processes."""

    def __init__(self, first: Serving, second: Serving, beyond: Beyond, **quota: float) -> None:
        self.beyond = beyond
        project, key = first.tenant("-".join(quota).replace("_", "-"))
        self.clients = [first.client(key), second.client(key)]
        answer = first.http.patch(f"/v1/projects/{project}/quota", json=quota)
        assert answer.status_code == 200, answer.text
        rule = {"host": "127.0.0.1", "ports": [beyond.port], "protocol": "http"}
        network = {"mode": "egress", "allow": [rule | {"addresses": ["127.0.0.1/32"]}]}
        # The door of each is at the process that made it.
        self.boxes = [
            service.sandbox(client, network=network)["id"]
            for service, client in zip((first, second), self.clients, strict=True)
        ]

    def start(self, number: int, path: str, many: int) -> None:
        """So many requests at once inside one of them, again and again."""
        url = f"http://127.0.0.1:{self.beyond.port}{path}"
        one = f"curl -sS -m 600 --noproxy '' -x $http_proxy {url} -o /dev/null || sleep 0.1"
        loops = f"for i in $(seq {many}); do (while :; do {one}; done) & done; wait"
        body = {"argv": ["sh", "-c", loops], "wait": False, "detached": True}
        made = self.clients[number].post(f"/v1/sandboxes/{self.boxes[number]}/processes", json=body)
        assert made.status_code in (201, 202), made.text

    def end(self) -> None:
        for client, box in zip(self.clients, self.boxes, strict=True):
            client.delete(f"/v1/sandboxes/{box}")


def test_a_project_has_its_limits_once(postgres: PostgresServer, beyond: Beyond) -> None:
    needs_root_or_users()
    with serving(store=postgres.fresh()) as first, another(first) as second:
        check_rate(Pair(first, second, beyond, egress_rate=RATE))
        check_bandwidth(Pair(first, second, beyond, bandwidth=BANDWIDTH))
        check_connections(Pair(first, second, beyond, connections=4), second)


def check_rate(pair: Pair) -> None:
    came = pair.beyond.came
    began = time.monotonic()
    for number in (0, 1):
        pair.start(number, "/", 4)
    eventually(lambda: len(came) >= 8 * RATE, "many requests pass")
    count = len(list(came))
    took = time.monotonic() - began
    assert count <= RATE + RATE * took + 1, (count, took)
    pair.end()


def check_bandwidth(pair: Pair) -> None:
    url = f"http://127.0.0.1:{pair.beyond.port}/big"
    line = f"curl -sS --noproxy '' -x $http_proxy {url} -o /dev/null -w '%{{http_code}} %{{size_download}}'"

    def fetch(number: int, told: list[str]) -> None:
        place = f"/v1/sandboxes/{pair.boxes[number]}/processes"
        told.append(pair.clients[number].post(place, json={"command": line}).json()["stdout"])

    for _ in range(2):
        told: list[str] = []
        threads = [threading.Thread(target=fetch, args=(number, told)) for number in (0, 1)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        took = time.monotonic() - began
        assert told == [f"200 {SIZE}"] * 2
        # No faster than the limit for both together: each with a limit of its own would take half of that.
        assert took >= 0.85 * 2 * SIZE * 8 / BANDWIDTH
    pair.end()


def check_connections(pair: Pair, second: Serving) -> None:
    beyond = pair.beyond
    pair.start(1, "/hold", 6)
    eventually(lambda: beyond.held() == 4, "one that asks alone has all of them")
    pair.start(0, "/hold", 6)
    for client in pair.clients:  # both are alive, and the limit holds
        assert client.get(f"/v1/sandboxes/{pair.boxes[0]}/connections").status_code == 200
    # A process that dies gives its part back; nobody is over the limit meanwhile.
    kill(second)
    eventually(lambda: beyond.held() == 0, "its connections have gone with it")
    eventually(lambda: beyond.held() == 4, "all of the limit is used again")
    assert beyond.most == 4
    pair.clients[0].delete(f"/v1/sandboxes/{pair.boxes[0]}")
