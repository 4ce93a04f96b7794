"""A program of its own: removes the containers of a node that has died, whatever their agents think of it.

It reads lines of JSON from its stdin, whose other end only the node has: ``{"name", "endpoint"}`` of a
container that is about to be made, ``{"name", "made": true}`` once it is there, ``{"name", "gone": true}``
when it was removed. At the end of the stream it asks the engine to remove what is left, until the engine says
that it is gone. Nothing of a sandbox reaches it. Standard library only: it is started with ``-I -S``, to be
there at once.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from typing import Any

PATIENCE = 300.0  # seconds that an engine may be out of reach
UNMADE = 15.0  # seconds after which a container that was being made would have appeared
PAUSE = 0.1


def main() -> None:
    """Wait for the node's end, and clear up."""
    left: dict[str, dict[str, Any]] = {}
    for line in sys.stdin.buffer:
        with contextlib.suppress(ValueError, KeyError):  # the last line of a node that was killed
            told = json.loads(line)
            if told.get("gone"):
                left.pop(told["name"], None)
            else:
                left.setdefault(told["name"], {}).update(told)
    began = time.monotonic()
    while left and time.monotonic() - began < PATIENCE:
        for name, known in list(left.items()):
            status = _remove(name, known["endpoint"])
            if status == 404 and (known.get("made") or time.monotonic() - began > UNMADE):
                del left[name]
        if left:
            time.sleep(PAUSE)


def _remove(name: str, endpoint: Any) -> int:
    """The engine's answer, as HTTP's status; 0 if there was none."""
    try:
        with _connect(endpoint) as sock:
            sock.settimeout(30)
            path = f"/containers/{name}?force=true&v=true"
            sock.sendall(f"DELETE {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n".encode())
            head = b""
            while b"\r\n" not in head and (part := sock.recv(4096)):
                head += part
        return int(head.split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _connect(endpoint: Any) -> socket.socket:
    path, host, port, command = endpoint
    if command:
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
            )
        return ours
    if path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(30)
        try:
            sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return sock
    return socket.create_connection((host, port), 30)


if __name__ == "__main__":
    main()
