"""What ``ringfence probe`` puts up on the host for the sandbox not to find."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

from ringfence.model.errors import HostLimit

_PATIENCE = 30.0  # seconds for a process to begin
CREDENTIALS = (".ssh/id_rsa", ".ssh/id_ed25519", ".aws/credentials", ".kube/config", ".docker/config.json")
VARIABLE = "RINGFENCE_PROBE_CANARY"


class Canaries:
    """A context: a file that everybody on the host can read, a variable, a process, a server, two sockets.

    All carry one random token. Listeners accept nothing: who has connected waits in the queue to be counted.
    """

    def __init__(self, *, root: bool) -> None:
        self.root = root
        self.token = "canary" + secrets.token_hex(16)
        self._listeners: dict[str, socket.socket] = {}
        self._met: dict[str, int] = {}

    def __enter__(self) -> Canaries:
        # Readable by every user of the host: only the wall keeps the workload away from it.
        self._folder = tempfile.mkdtemp(prefix="ringfence-probe-")
        try:
            self._put_up()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    def _put_up(self) -> None:
        os.chmod(self._folder, 0o755)  # noqa: S103 - see above
        self.file = os.path.join(self._folder, "file")
        with open(self.file, "w") as file:
            file.write(self.token)
        os.chmod(self.file, 0o644)
        os.environ[VARIABLE] = self.token
        # A name of its own in the process list; it ends by itself should we be killed.
        self._process = subprocess.Popen(
            [self.token, "-I", "-S", "-c", "import sys; sys.stdin.read()", self.token],
            executable=os.path.realpath(sys.executable),
            stdin=subprocess.PIPE,
            env={},
            start_new_session=True,  # a Ctrl-C is for us: it would print a traceback
        )
        self._wait_for_name()
        self._listen("tcp", socket.AF_INET, ("127.0.0.1", 0))
        self._listen("abstract", socket.AF_UNIX, "\0" + self.token)
        path = os.path.join(self._folder, "socket")
        self._listen("socket", socket.AF_UNIX, path)
        os.chmod(path, 0o666)  # noqa: S103

    def _wait_for_name(self) -> None:
        """A new process shows its command line a little after it was started: only then can it be found."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            with open(f"/proc/{self._process.pid}/cmdline", "rb") as file:
                if self.token.encode() in file.read():
                    return
            time.sleep(0.001)
        raise HostLimit("the canary process did not start", hint="the machine may be overloaded: try again")

    def _listen(self, name: str, family: int, address: Any) -> None:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(16)
        listener.setblocking(False)
        self._listeners[name] = listener

    def described(self) -> dict[str, Any]:
        """What the attempts inside are told: where to look."""
        home = os.path.expanduser("~")
        return {
            "token": self.token,
            "files": [self.file],
            "secrets": [os.path.join(home, name) for name in CREDENTIALS],
            "pid": self._process.pid,
            "port": self._listeners["tcp"].getsockname()[1],
            "abstract": self.token,
            "socket": os.path.join(self._folder, "socket"),
            "hostname": os.uname().nodename,
            "root": self.root,
        }

    def connections(self, name: str) -> int:
        """How many have connected to this listener so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listeners[name].accept()[0].close()
                self._met[name] = self._met.get(name, 0) + 1
        return self._met.get(name, 0)

    def process_alive(self) -> bool:
        """Whether nobody has killed the process."""
        return self._process.poll() is None

    def _take_down(self) -> None:
        os.environ.pop(VARIABLE, None)
        for listener in self._listeners.values():
            listener.close()
        process = getattr(self, "_process", None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
