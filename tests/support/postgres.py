"""A real PostgreSQL server of the tests' own: another user, a temporary folder, a unix socket, no port.

Nothing of it is left when the test process ends, however it ends: the server dies with it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest

from support.leaks import descendants

_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # what a crash of the machine would cost is not what is tested
    "shared_buffers": "32MB",
    "max_connections": "200",
    "max_wal_size": "256MB",
    "autovacuum_naptime": "10s",
    "log_min_messages": "fatal",
    "deadlock_timeout": "50ms",
}
_numbers = count(1)


def programs() -> Path | None:
    """The folder of the newest server on this machine."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    found.sort(key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0)
    if found:
        return found[-1]
    there = shutil.which("postgres")
    return Path(there).resolve().parent if there else None


class PostgresServer:
    """One server. ``url`` leads to it as its administrator."""

    def __init__(self, **settings: str) -> None:
        found = programs()
        if found is None:
            pytest.skip("no PostgreSQL server here (Debian: postgresql)")
        self.programs = found
        self.settings = {**_SETTINGS, **settings}
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"rf-pg-{os.getpid()}-", dir="/tmp"))
        self.user = _user()
        if self.user is not None:
            os.chown(self.folder, self.user.pw_uid, self.user.pw_gid)
        self.folder.chmod(0o755)  # other users of the tests may connect
        self.server: subprocess.Popen[bytes] | None = None
        try:
            command = [self.programs / "initdb", "-D", self.folder / "data", "-U", "postgres", "-A", "trust"]
            done = subprocess.run(
                [*self._prefix(), *command, "-N", "-E", "UTF8", "--locale=C.UTF-8"],
                capture_output=True, cwd="/", check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr.decode()
            self.start()
        except BaseException:
            self.remove()
            raise

    @property
    def url(self) -> str:
        """Its address."""
        return f"postgresql://postgres@/postgres?host={self.folder}"

    def fresh(self) -> str:
        """The address of an empty schema: a store of the caller's own."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self.url}&options=-csearch_path%3D{name}"

    def start(self) -> None:
        """Start it, and wait until it answers. Of the main thread only: the server dies with its starter."""
        assert self.server is None
        assert threading.current_thread() is threading.main_thread()
        options = [part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")]
        data = self.folder / "data"
        command = [*self._prefix(), self.programs / "postgres", "-D", data, "-k", self.folder, *options]
        deadline = time.monotonic() + 60
        while True:
            if self.server is None or self.server.poll() is not None:
                # Again, too: it refuses while one that was just killed still has a child that nobody saw.
                with (self.folder / "log").open("ab") as log:
                    self.server = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                        start_new_session=True,
                    )  # fmt: skip
            try:
                psycopg.connect(self.url, connect_timeout=10).close()
                return
            except psycopg.OperationalError:
                told = (self.folder / "log").read_text(errors="replace")[-4000:]
                assert time.monotonic() < deadline, told
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it: SIGINT cuts every connection, SIGQUIT and SIGKILL are a crash."""
        if self.server is None:
            return
        children = [one.pid for one in descendants(self.server.pid).values()]
        self.server.send_signal(number)
        try:
            self.server.wait(60)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.server = None
        # Its processes end when they see that it is gone; where orphans come to us, they are ours to bury.
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def remove(self) -> None:
        """End it for good."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _prefix(self) -> list[str]:
        # It must not run as root, and dies with the thread that started it.
        prefix = ["setpriv", "--pdeathsig", "QUIT"]
        if self.user is not None:
            prefix += [f"--reuid={self.user.pw_uid}", f"--regid={self.user.pw_gid}", "--clear-groups"]
        return prefix


def _sweep() -> None:
    """Remove the folders of test processes that were killed; their servers went with them."""
    for folder in Path("/tmp").glob("rf-pg-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.skip("PostgreSQL needs a user that is not root, and neither postgres nor nobody exists")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for the whole session; ``postgres.fresh()`` is the address of a store of a test's own."""
    server = PostgresServer()
    try:
        yield server
    finally:
        server.remove()
