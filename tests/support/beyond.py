"""A server on this machine's loopback, beyond a sandbox's door; it remembers the key of each request."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Web(socketserver.ThreadingTCPServer):
    """Answers ``beyond``. ``keys``: the X-Key header of each request that came."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        self.keys: list[str] = []
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Web)
        key = ""
        while line := self.rfile.readline().strip().decode():
            name, _, value = line.partition(":")
            if name.lower() == "x-key":
                key = value.strip()
        self.server.keys.append(key)
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nbeyond")


@contextmanager
def web_beyond() -> Iterator[Web]:
    """One that serves."""
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
