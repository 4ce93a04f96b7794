"""Both ends of the mux for tests: the real agent on a socket pair, and the real ``ringfence-link``."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import muxing
from wall import NATIVE, USER, Client, agent_path

GROUP = USER if os.geteuid() == 0 else os.getegid()


def link_path() -> Path:
    """The program under test: the packaged one, or what RINGFENCE_LINK names (a sanitizer build)."""
    return Path(os.environ.get("RINGFENCE_LINK", NATIVE / "ringfence-link"))


def eventually(true: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class MuxedAgent:
    """The real agent as PID 1 of a bare process namespace, with nothing but its stdin and stdout."""

    def __init__(self, *options: str, where: str = "mux=0,1", guest: socket.socket | None = None) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="rf-mux-"))
        self.work = self.base / "work"
        self.work.mkdir()
        os.chmod(self.base, 0o755)
        os.chown(self.work, USER, GROUP)
        self.host, theirs = socket.socketpair()
        if guest is None:
            guest = theirs
        namespaces = ["--pid", "--fork", "--kill-child", "--mount-proc"]
        if os.geteuid() != 0:
            namespaces += ["--user", "--map-current-user"]
        self.process = subprocess.Popen(
            [
                "unshare",
                *namespaces,
                "--",
                agent_path(),
                where,
                f"uid={USER}",
                f"gid={GROUP}",
                f"workdir={self.work}",
                "oom=1000",
                *options,
            ],
            stdin=guest,
            stdout=guest,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """The agent's number on the host."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        eventually(lambda: children.read_text().split(), "the agent did not start")
        return int(children.read_text().split()[0])

    def alive(self) -> bool:
        """It runs."""
        return self.process.poll() is None

    def begin(self) -> muxing.Stream:
        """This test is the host: the stream after RESET and READY."""
        stream = muxing.Stream(self.host)
        stream.send(muxing.record(muxing.RESET))
        assert stream.take(muxing.READY).payload[16:32] == muxing.NONCE
        return stream

    def close(self) -> None:
        """End it."""
        self.host.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.base, ignore_errors=True)


class Link:
    """A ``ringfence-link``; ``stream`` is closed here once it has it."""

    def __init__(
        self, stream: socket.socket, *options: str, ready: bool = False, prefix: tuple[str, ...] = ()
    ) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="rf-link-"))
        self.path = self.base / "guest.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(64)
        fds = [listener.fileno(), stream.fileno()]
        told, end = os.pipe()
        self.told = told
        self.dialled: list[socket.socket] = []
        if ready:
            options = (*options, f"ready={end}")
            fds.append(end)
        self.process = subprocess.Popen(
            [*prefix, link_path(), f"listen={listener.fileno()}", f"stream={stream.fileno()}", *options],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(end)
        listener.close()

    def dial(self) -> socket.socket:
        """A connection, without a word."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        self.dialled.append(sock)
        sock.connect(str(self.path))
        return sock

    def client(self) -> Client:
        """A link to an agent."""
        return Client(self.dial())

    def kill(self) -> None:
        """As the kernel does it: not another step is taken."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it."""
        self.kill()
        for sock in self.dialled:
            sock.close()
        os.close(self.told)
        shutil.rmtree(self.base, ignore_errors=True)


@contextlib.contextmanager
def muxed_agent(*options: str) -> Iterator[MuxedAgent]:
    """For one test."""
    agent = MuxedAgent(*options)
    try:
        yield agent
        assert agent.alive(), "the agent has ended"
    finally:
        agent.close()


@contextlib.contextmanager
def linked(
    stream: socket.socket, *options: str, ready: bool = False, prefix: tuple[str, ...] = ()
) -> Iterator[Link]:
    """For one test."""
    link = Link(stream, *options, ready=ready, prefix=prefix)
    try:
        yield link
    finally:
        link.close()
