"""Several API processes on one store: the limits of a project hold for all of them together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from support.apis import another, kill
from support.postgres import PostgresServer
from support.serving import Serving, eventually, needs_root_or_users, serving

pytest.importorskip("h2")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
SIZE, RATE, BANDWIDTH = 400_000, 8, 2_000_000


class Beyond:
    """A server that remembers when each request came. ``/hold…`` is never answered, ``/big`` with many bytes.

    ``most``: connections that were held at once.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.came: list[float] = []
        self.most = 0
        self._held: dict[socket.socket, str] = {}
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
                if words[1].startswith(b"/hold"):
                    with self._lock:
                        self._held[sock] = words[1].decode()
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
                    self._held.pop(sock, None)

    def _open(self, path: str = "/hold") -> int:
        """Those whose other end is still there: a thread may not have seen yet that it is gone."""
        count = 0
        for sock, asked in self._held.items():
            if not asked.startswith(path):
                continue
            try:
                count += sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
            except BlockingIOError:
                count += 1
            except OSError:
                continue
        return count

    def held(self, path: str = "/hold") -> int:
        """Connections that are held now, of requests for this path."""
        with self._lock:
            return self._open(path)

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

    def __init__(self, first: Serving, second: Serving, beyond: Beyond, name: str, **quota: float) -> None:
        self.beyond = beyond
        project, key = first.tenant(name)
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
        for box in self.boxes:
            self.clients[0].delete(f"/v1/sandboxes/{box}")


@pytest.fixture(scope="module")
def apis(postgres: PostgresServer) -> Iterator[tuple[Serving, Serving]]:
    needs_root_or_users()
    with serving(store=postgres.fresh()) as first, another(first) as second:
        yield first, second


def test_a_project_has_its_rate_once(apis: tuple[Serving, Serving], beyond: Beyond) -> None:
    pair = Pair(*apis, beyond, "rate", egress_rate=RATE)
    came = pair.beyond.came
    began = time.monotonic()
    for number in (0, 1):
        pair.start(number, "/", 4)
    eventually(lambda: len(came) >= 8 * RATE, "many requests pass")
    count = len(list(came))
    took = time.monotonic() - began
    assert count <= RATE + RATE * took + 1, (count, took)
    pair.end()


def test_a_project_has_its_bandwidth_once(apis: tuple[Serving, Serving], beyond: Beyond) -> None:
    pair = Pair(*apis, beyond, "bandwidth", bandwidth=BANDWIDTH)
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


def test_a_project_has_its_budget_once(apis: tuple[Serving, Serving], beyond: Beyond) -> None:
    pair = Pair(*apis, beyond, "budget", egress_requests=300)

    def ask(number: int, path: str, pause: float = 0) -> str:
        url = f"http://127.0.0.1:{beyond.port}/{path}"
        command = f"sleep {pause}; curl -sS --noproxy '' -x $http_proxy '{url}'"
        place = f"/v1/sandboxes/{pair.boxes[number]}/processes"
        return str(pair.clients[number].post(place, json={"command": command}).json()["stdout"])

    assert "budget_requests" in ask(0, "[1-310]")
    assert len(beyond.came) == 300
    # The other one, with a state folder of its own, has heard of it within seconds.
    eventually(lambda: "budget_requests" in ask(1, "", 0.5), "nothing is left there either")
    assert len(beyond.came) < 450
    pair.end()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_project_has_its_connections_once(
    apis: tuple[Serving, Serving], beyond: Beyond, number: signal.Signals
) -> None:
    first, second = apis
    pair = Pair(first, second, beyond, number.name.lower(), connections=4)
    pair.start(1, "/hold1", 6)
    eventually(lambda: beyond.held("/hold1") == 4, "one that asks alone has all of them")
    pair.start(0, "/hold0", 6)
    # A process that nobody hears of gives its part back; nobody is over the limit meanwhile.
    if number == signal.SIGKILL:
        kill(second)
    else:  # its proxy lives on without it, and may not go on beyond its time
        pids = second.children()["api"]
        for pid in pids:
            os.kill(pid, number)
    try:
        eventually(lambda: beyond.held("/hold0") == 4, "the other one has all of them")
        assert beyond.most == 4
        pair.end()
        eventually(lambda: beyond.held() == 0, "all have ended")
    finally:
        if number == signal.SIGSTOP:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            eventually(lambda: second.http.get("/readyz").status_code == 200, "it is back")
