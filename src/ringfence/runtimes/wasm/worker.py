"""The worker: first process of the wall, server of the link protocol, parent of every module that runs.

Started as ``python -I -S -c "import sys; sys.path.insert(0, SITE); …main()" NUMBER``; the descriptor NUMBER
has a dictionary of the driver's, which runs on the same Python, marshalled::

    listen            descriptor of the listening socket
    cgroups           descriptors of the workload's cgroups
    library           Wasmtime's shared library
    modules           name or SHA-256 of a module → its compiled form, verified by the driver
    sources           interpreters that lie there uncompiled
    folders           [[host folder, name inside, writable], …]: all that a module can open
    host_functions    names that the policy grants to callers
    memory            bytes that one module may have
    max_open_files, workdir, env, version
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import sys
import time

from ringfence.guest.fields import Fields, decode
from ringfence.runtimes.wasm import commands, files, processes
from ringfence.runtimes.wasm.lean import signal, socket
from ringfence.runtimes.wasm.processes import Process
from ringfence.runtimes.wasm.serving import Link, Loop, listener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_REFUSED = {
    5: "resizing needs a terminal",
    23: "files are not watched here",
    32: "WebAssembly has no ports",
    33: "WebAssembly has no ports",
    50: "snapshots are not for WebAssembly",
}
_SECRETS = "/run/secrets"
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class Worker:
    """State of one worker."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.loop = Loop()
        self.modules = commands.Modules(config)
        self.links: set[Link] = set()
        self.processes: dict[str, Process] = {}
        self.env: dict[str, str] = dict(config["env"])
        self.epoch = 1
        self.instance = os.urandom(16)
        self.version = config["version"]
        self.born = time.monotonic()
        self.shutting = False
        self._operations: dict[int, Callable[[Worker, Link, int, Fields], None]] = {
            1: processes.start,
            2: processes.attach,
            3: processes.send_signal,
            4: processes.listing,
            6: processes.remove,
            16: files.read,
            17: files.write,
            18: files.listing,
            19: files.status,
            20: files.move,
            21: files.remove,
            22: files.mkdir,
            24: files.tar_in,
            25: files.tar_out,
            48: bind,
            49: stats,
            51: shutdown,
        }

    def operate(self, link: Link, number: int, operation: int, fields: Fields) -> None:
        """One OPEN.

        Raises:
            OSError: it is refused, or fails.
        """
        call = self._operations.get(operation)
        if call is None:
            raise OSError(errno.ENOTSUP, _REFUSED.get(operation, "no such operation"))
        call(self, link, number, fields)

    def find(self, fields: Fields) -> Process:
        """The process of field 1."""
        found = self.processes.get(fields.text(1, limit=64))
        if found is None:
            raise OSError(errno.ENOENT, "no such process")
        return found

    def add(self, process: Process) -> None:
        """A process has started."""
        self.processes[process.id] = process
        processes.trim(self)

    def forget(self, process: Process) -> None:
        """A process is remembered no more."""
        process.close()
        self.processes.pop(process.id, None)

    def ended(self, _: Process) -> None:
        """A process has ended."""
        if self.shutting and all(p.status is not None for p in self.processes.values()):
            self.loop.deadline = time.monotonic()

    def run(self) -> None:
        """Serve until told to end."""
        sock = socket(fileno=self.config["listen"])
        os.set_inheritable(sock.fileno(), False)
        self.loop.watch(sock.fileno(), select.EPOLLIN, listener(self, sock))
        while True:
            self.loop.run_once()
            if self.shutting and self.loop.deadline is not None and time.monotonic() >= self.loop.deadline:
                os._exit(0)


def bind(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """bind: environment and secrets. A name, a clock and a seed are what a module has none of."""
    secrets = [decode(raw) for raw in fields.all(2)]
    for tag, what in ((3, "the hostname"), (5, "the clock")):
        if tag in fields:
            raise OSError(errno.ENOTSUP, f"{what} can't be set")
    for secret in secrets:
        name = secret.text(1, limit=255)
        if not name or name.startswith(".") or not _NAME.issuperset(name):
            raise OSError(errno.EINVAL, "an impossible name of a secret")
    for secret in secrets:
        path = os.path.join(_SECRETS, secret.text(1, limit=255))
        part = path + ".part~"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o400), "wb") as file:
            file.write(secret.raw(2, b""))
        os.rename(part, path)
    if 1 in fields:
        pairs = [os.fsdecode(raw).partition("=") for raw in fields.all(1)]
        worker.env = {name: value for name, _, value in pairs}
    link.answer(number, [])


def stats(worker: Worker, link: Link, number: int, _: Fields) -> None:
    """stats"""
    running = [process for process in worker.processes.values() if process.status is None]
    resident = sum(_resident(pid) for pid in (os.getpid(), *(process.pid for process in running)))
    link.answer(
        number,
        [
            (1, len(running)),
            (2, resident),
            (3, int(os.getloadavg()[0] * 1000)),
            (4, int((time.monotonic() - worker.born) * 1e9) + 1),
            (5, sum(len(each.channels) for each in worker.links)),
            (6, len(worker.links)),
        ],
    )


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def shutdown(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """shutdown: SIGTERM ends a module at once, so the grace is seldom used."""
    grace = fields.number(1, 0) / 1000
    link.answer(number, [])
    worker.shutting = True
    running = [process for process in worker.processes.values() if process.status is None]
    for process in running:
        process.signal(signal.SIGTERM)
    worker.loop.deadline = time.monotonic() + (grace if running else 0)


def main() -> None:
    """Entry of the worker process."""
    with open(int(sys.argv[1]), "rb") as file:
        worker = Worker(marshal.load(file))  # noqa: S302 - of the host's own making
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker.run()
