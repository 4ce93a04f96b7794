"""The worker's side of the link protocol against hosts that break it: each costs its own link only."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from ringfence.guest import frames
from ringfence.guest.fields import encode
from ringfence.runtimes.wasm.serving import Link
from ringfence.runtimes.wasm.worker import Worker

HELLO = frames.frame(0, frames.HELLO, encode([(1, frames.MAGIC), (2, 1), (3, bytes(16)), (4, "control")]))


@pytest.fixture
def worker(tmp_path: object) -> Iterator[Worker]:
    made = Worker(
        {"env": {}, "version": "0", "workdir": str(tmp_path), "modules": {}, "cgroups": [], "library": ""}
    )
    yield made
    for link in list(made.links):
        link.close()
    made.loop.close()


class Host:
    """The host's end of a link, and the worker's turns in between."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(5)
        self.link = Link(worker, theirs)
        worker.links.add(self.link)
        self.parser = frames.FrameParser()

    def say(self, *data: bytes) -> list[tuple[int, int, bytes]]:
        """Send, let the worker work, and give what it answered."""
        self.sock.sendall(b"".join(data))
        for _ in range(3):
            self.worker.loop.deadline = time.monotonic()
            self.worker.loop.run_once()
        self.sock.setblocking(False)
        found: list[tuple[int, int, bytes]] = []
        try:
            while piece := self.sock.recv(65536):
                found += [(c, k, bytes(p)) for c, k, p in self.parser.feed(piece)]
        except BlockingIOError:
            pass
        self.sock.setblocking(True)
        return found

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def test_hello_and_ping(worker: Worker) -> None:
    with Host(worker) as host:
        ((channel, kind, payload),) = host.say(HELLO)
        assert (channel, kind) == (0, frames.HELLO)
        assert payload.startswith(b"\1\x10\0\0\0" + frames.MAGIC)
        assert host.say(frames.frame(0, frames.PING, b"abc")) == [(0, frames.PONG, b"abc")]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frames.frame(0, frames.PING, b"before hello"),
        frames.frame(0, frames.HELLO, encode([(1, b"RINGFENCE-LINK-0"), (2, 1), (3, bytes(16))])),
        frames.frame(0, frames.HELLO, encode([(1, frames.MAGIC), (2, 1), (3, bytes(15))])),
        HELLO + HELLO,
        HELLO + frames.frame(0, frames.PING, bytes(65)),
        HELLO + frames.open_frame(2, 49, b""),
        HELLO + frames.data_frame(1, 0, 0, b"x"),
        HELLO + frames.open_frame(1, 17, encode([(1, "f")])) + frames.data_frame(1, 0, 5, b"x"),
        HELLO + frames.open_frame(1, 17, encode([(1, "f")])) + frames.data_frame(1, 1, 0, b"x"),
        HELLO + frames.open_frame(1, 17, encode([(1, "f")])) + frames.eof_frame(1, 0, 9),
        HELLO + frames.open_frame(1, 17, encode([(1, "f")])) + frames.credit_frame(1, 1, 5),
        HELLO + frames.open_frame(1, 17, encode([(1, "f")])) * 2,
        HELLO + frames.frame(1, frames.REPLY, b""),
        HELLO + frames.open_frame(1, 17, b"\1\xff\xff\xff\xff"),
        struct.pack("<IIBBH", 1 << 20, 0, 1, 0, 0),
    ],
)
def test_a_violation_costs_the_link(worker: Worker, data: bytes) -> None:
    with Host(worker) as good, Host(worker) as bad:
        good.say(HELLO)
        bad.say(data)
        assert not bad.link.alive or frames.ERROR in [kind for _, kind, _ in bad.say()]
        assert good.link.alive
        assert good.say(frames.frame(0, frames.PING, b"on")) == [(0, frames.PONG, b"on")]


def test_data_beyond_the_credit(worker: Worker) -> None:
    with Host(worker) as host:
        host.say(HELLO + frames.open_frame(1, 24, encode([(1, "into")])))
        channel = host.link.channels[1]
        channel.grant = lambda count: None  # type: ignore[method-assign] - as if nothing were taken
        piece = bytes(16_384)
        for at in range(0, 65_536, len(piece)):
            host.say(frames.data_frame(1, 0, at, piece))
        assert host.link.alive
        host.say(frames.data_frame(1, 0, 65_536, b"x"))
        assert not host.link.alive


@pytest.mark.parametrize("operation", [5, 23, 32, 33, 50, 99])
def test_what_is_not_there_is_refused_by_number(worker: Worker, operation: int) -> None:
    with Host(worker) as host:
        host.say(HELLO)
        ((channel, kind, payload),) = host.say(frames.open_frame(1, operation, b""))
        assert (channel, kind) == (1, frames.ERROR)
        assert struct.unpack_from("<I", payload)[0] == errno.ENOTSUP
        assert host.link.alive


def test_a_write_that_is_cut_off_leaves_the_old_file(worker: Worker) -> None:
    path = os.path.join(worker.config["workdir"], "f")
    with open(path, "w") as file:
        file.write("old")
    with Host(worker) as host:
        host.say(HELLO + frames.open_frame(1, 17, encode([(1, "f")])) + frames.data_frame(1, 0, 0, b"new"))
        host.sock.close()
        worker.loop.deadline = time.monotonic()
        worker.loop.run_once()
        assert not host.link.alive
    assert os.listdir(worker.config["workdir"]) == ["f"]
    with open(path) as file:
        assert file.read() == "old"


def test_random_bytes_never_raise(worker: Worker) -> None:
    for _ in range(200):
        with Host(worker) as host:
            host.say(HELLO + os.urandom(200))
            host.link.close()
