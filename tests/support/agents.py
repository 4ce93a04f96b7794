"""The real agent as PID 1 of a bare process namespace: no wall, so that only the link is under test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ringfence import _native
from ringfence.guest.link import GuestLink


class BareAgent:
    """One agent; ``folder`` is the workdir of its commands."""

    def __init__(self, *options: str, env: dict[str, str] | None = None) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="rf-bare-"))
        self.folder = self.base / "work"
        self.folder.mkdir()
        self.socket_path = self.base / "guest.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.socket_path))
        listener.listen(128)
        namespaces = ["--pid", "--fork", "--kill-child", "--mount-proc"]
        if os.geteuid() != 0:
            namespaces += ["--user", "--map-current-user"]
        listening = listener.fileno()
        self.process = subprocess.Popen(
            [
                "unshare",
                *namespaces,
                "--",
                _native.agent(),
                f"listen={listening}",
                f"uid={os.geteuid()}",
                f"gid={os.getegid()}",
                f"workdir={self.folder}",
                f"home={self.folder}",
                "oom=1000",
                *options,
            ],
            pass_fds=(listening,),
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.folder), **(env or {})},
        )
        listener.close()

    @property
    def pid(self) -> int:
        """The agent's process id on the host."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + 60
        while not (text := children.read_text().split()):
            assert self.process.poll() is None, "the agent did not start"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return int(text[0])

    def dial(self) -> socket.socket:
        """A new connection."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(self.socket_path))
        sock.setblocking(False)
        return sock

    async def link(self, **options: object) -> GuestLink:
        """A new link."""
        return await GuestLink.open(self.dial(), **options)  # type: ignore[arg-type]

    def close(self) -> None:
        """Kill it and all that it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        subprocess.run(["rm", "-rf", self.base], check=True)


@contextlib.contextmanager
def bare_agent(*options: str) -> Iterator[BareAgent]:
    """An agent for one test."""
    agent = BareAgent(*options)
    try:
        yield agent
    finally:
        agent.close()
