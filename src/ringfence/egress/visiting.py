"""The proxies of a folder, visited from outside: for the command line, without an event loop."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringfence.egress.messages import MOST
from ringfence.model import errors
from ringfence.model.errors import NodeUnavailable, RingfenceError

_PATIENCE = 20.0


class Visit:
    """A connection to one proxy process."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(_PATIENCE)
        try:
            # The way to a socket has at most 107 bytes; from its folder it is short.
            descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
            try:
                self._sock.connect(f"/proc/self/fd/{descriptor}/{path.name}")
            finally:
                os.close(descriptor)
        except OSError:
            self._sock.close()
            raise

    def call(self, command: str, **values: Any) -> Any:
        """One question, one answer.

        Raises:
            NodeUnavailable: the proxy went away.
            RingfenceError: what it answered.
        """
        data = json.dumps({"number": 1, "command": command, **values}).encode()
        try:
            self._sock.sendall(len(data).to_bytes(4) + data)
            while True:
                size = int.from_bytes(self._exactly(4))
                if size > MOST:
                    raise NodeUnavailable("the egress proxy sends nonsense")
                message = json.loads(self._exactly(size))
                if message.get("number") == 1:
                    break
        except (OSError, ValueError) as error:
            raise NodeUnavailable(f"the egress proxy does not answer: {error}") from None
        if "error" in message:
            raise _error(message["error"])
        return message.get("result")

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._sock.recv(count - len(data))
            if not piece:
                raise OSError("it went away")
            data += piece
        return data

    def close(self) -> None:
        """End the visit."""
        self._sock.close()


def visits(folder: Path) -> Iterator[Visit]:
    """A visit to each proxy that lives, one after the other. Sockets of dead ones are removed."""
    try:
        paths = sorted((folder / "sockets").glob("*.sock"))
    except OSError:
        return
    for path in paths:
        try:
            visit = Visit(path)
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        except OSError:
            continue
        try:
            yield visit
        finally:
            visit.close()


def _error(values: dict[str, Any]) -> RingfenceError:
    message, hint = str(values.get("message", "it failed")), str(values.get("hint", ""))
    for kind in (errors.NotFound, errors.InvalidRequest, errors.NotAllowed):
        if kind.code == values.get("code"):
            return kind(message, hint=hint)
    return RingfenceError(message, hint=hint)
