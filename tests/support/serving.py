"""The whole service as a user starts it (``ringfence serve``), on a port and a state folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ringfence.placement.local import LocalPlacement

PATIENCE = 90.0
SMALL = {"memory": "128MiB", "disk": "16MiB"}


def eventually(check: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """The first true value of ``check``; connection errors count as not yet."""
    end = time.monotonic() + patience
    while True:
        with contextlib.suppress(httpx.HTTPError, OSError):
            if found := check():
                return found
        assert time.monotonic() < end, f"not within {patience:g} s: {what}"
        time.sleep(0.05)


class Serving:
    """One ``ringfence serve``. ``http``: a client with the first key."""

    def __init__(self, *options: str, store: str = "", home: Path | None = None, name: str = "test") -> None:
        # Not below pytest's own folder, which only its user may enter: as root the API is another user.
        self.home = home or Path(tempfile.mkdtemp(prefix="rf-serve-", dir="/tmp"))
        self.home.chmod(0o711)
        self.store = store
        self.name = name
        self.options = options
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.key = ""
        self.lines: list[dict[str, Any]] = []
        self._reader: threading.Thread | None = None
        self._ready = threading.Event()
        self._clients: list[httpx.Client] = []
        self.http: httpx.Client = httpx.Client()

    @property
    def log(self) -> str:
        """What it has said on standard error."""
        return (self.home / "serve.log").read_text(errors="replace")

    @property
    def node_socket(self) -> Path:
        """Where its node listens."""
        return self.home / "services" / self.name / "node.sock"

    def start(self, bind: str = "127.0.0.1:0") -> Serving:
        """Start it and wait until it serves."""
        if self.url:
            bind = self.url.removeprefix("http://")  # the same port again
        # It dies with the tests, however they end.
        prefix = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        command = [
            *prefix,
            sys.executable,
            "-m",
            "ringfence",
            "serve",
            "--bind",
            bind,
            "--state",
            str(self.home),
        ]
        command += ["--service", self.name, "--json", *self.options]
        if self.store:
            command += ["--store", self.store]
        self._ready.clear()
        with (self.home / "serve.log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"RINGFENCE_HOME": str(self.home)}, start_new_session=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        ready = self._ready.wait(PATIENCE)
        assert ready and self.process.poll() is None, self.log[-4000:]
        self.http.close()
        self.http = self.client(self.key)
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                told = json.loads(line)
                self.lines.append(told)
                self.key = told.get("key", self.key)
                if told.get("ready"):
                    self.url = told["url"]
                    self._ready.set()
        self._ready.set()

    def client(self, key: str = "", **options: Any) -> httpx.Client:
        """A client with a key."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Without TLS nobody needs the authorities, whose loading takes longer than a request.
        options = {"verify": False, "timeout": PATIENCE, "trust_env": False, **options}
        made = httpx.Client(base_url=self.url, headers=headers, **options)
        self._clients.append(made)
        return made

    def sandbox(self, client: httpx.Client | None = None, **body: Any) -> dict[str, Any]:
        """A small jail that runs."""
        answer = (client or self.http).post("/v1/sandboxes", json={"runtime": "jail", **SMALL, **body})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def run(
        self, sandbox: str, command: str, client: httpx.Client | None = None, **body: Any
    ) -> dict[str, Any]:
        """A command to its end."""
        path = f"/v1/sandboxes/{sandbox}/processes"
        answer = (client or self.http).post(path, json={"command": command, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def tenant(self, name: str, scopes: tuple[str, ...] = ("admin",)) -> tuple[str, str]:
        """Another project, and a key of it."""
        project = self.http.post("/v1/projects", json={"name": name})
        assert project.status_code == 201, project.text
        id = project.json()["id"]
        return id, self.make_key(scopes=list(scopes), project=id)

    def make_key(self, **body: Any) -> str:
        """A key."""
        made = self.http.post("/v1/keys", json=body)
        assert made.status_code == 201, made.text
        return str(made.json()["secret"])

    def children(self) -> dict[str, list[int]]:
        """Process ids of its parts by name: node, api."""
        assert self.process is not None
        found: dict[str, list[int]] = {"node": [], "api": []}
        for pid in _children(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"ringfence.serving.worker" in words:
                    found["api"].append(pid)
                elif b"node" in words:
                    found["node"].append(pid)
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it as an administrator does."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        assert self._reader is not None
        self._reader.join(PATIENCE)
        self.process = None
        return code

    def remove(self) -> None:
        """End it, its sandboxes and its folder."""
        self.http.close()
        for client in self._clients:
            client.close()
        if self.process is not None:
            if self.process.poll() is None and self.node_socket.exists():
                with contextlib.suppress(Exception):
                    asyncio.run(self._clear())
            self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    async def _clear(self) -> None:
        placement = LocalPlacement(self.node_socket)
        try:
            async with asyncio.timeout(60):
                for placed in await placement.list():
                    await placement.destroy(placed.id)
        finally:
            await placement.close()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


@contextlib.contextmanager
def serving(*options: str, **more: Any) -> Iterator[Serving]:
    """One that ends with the block."""
    made = Serving(*options, **more)
    try:
        yield made.start()
    finally:
        made.remove()


def needs_root_or_users() -> None:
    """Skip where no jail can be started."""
    if os.geteuid() != 0 and not Path("/proc/self/uid_map").exists():
        pytest.skip("no user namespaces here")
