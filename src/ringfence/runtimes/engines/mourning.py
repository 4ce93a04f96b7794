"""The node's side of ``mourner``: a process that removes its ephemeral containers when the node dies.

One for all of them; it is there while there is one, and ends with the last. A node's end usually is enough:
the engine closes the agent's stdin and the agent leaves. This is for agents that belong to somebody else by
then, and for nodes that die in the middle of a start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ringfence.model.errors import HostLimit
from ringfence.runtimes.engines.endpoints import Endpoint
from ringfence.runtimes.launching.processes import readable

_PROGRAM = Path(__file__).with_name("mourner.py")


class Mourning:
    """Who is to be mourned, told to a process that outlives this one."""

    def __init__(self) -> None:
        self._watched: dict[str, dict[str, Any]] = {}  # name → what the process was told of it
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def watched(self) -> set[str]:
        """Names of the containers."""
        return set(self._watched)

    def begin(self, name: str, endpoint: Endpoint) -> None:
        """A container of that name is about to be made.

        Raises:
            HostLimit: no process can be started: then there must be no such container.
        """
        address = [endpoint.path, endpoint.host, endpoint.port, list(endpoint.command)]
        self._watched[name] = {"name": name, "endpoint": address}
        try:
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(BrokenPipeError):  # it is being killed at this moment
                    self._say(self._watched[name])
                    return
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
            self._process = _spawn()  # and is told of those that one before it knew
            for known in self._watched.values():
                self._say(known)
        except OSError as error:
            del self._watched[name]
            raise HostLimit(
                f"nothing can watch over the container {name}: {error.strerror}",
                hint="look at the limits of this user",
            ) from error

    def made(self, name: str) -> None:
        """It is there."""
        if name in self._watched:
            self._watched[name]["made"] = True
            with contextlib.suppress(OSError):  # it was killed; the next one will be told
                self._say({"name": name, "made": True})

    async def end(self, name: str) -> None:
        """It is gone. With the last one the process goes."""
        if self._watched.pop(name, None) is None or self._process is None:
            return
        process = self._process
        with contextlib.suppress(OSError):
            self._say({"name": name, "gone": True})
        if self._watched:
            return
        self._process = None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                await readable(descriptor)
            finally:
                os.close(descriptor)
        process.wait()

    def _say(self, words: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")


def _spawn() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        start_new_session=True,  # a Ctrl-C is not for it
    )
