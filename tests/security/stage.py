"""What attacks aim at: decoys of the test's own. Nothing real is ever a target."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from security.payloads import program

VICTIM = """
import ctypes, sys
buffer = ctypes.create_string_buffer(b"x" * 64)
print(hex(ctypes.addressof(buffer)), flush=True)
sys.stdin.read()
"""


class Stage:
    """Decoy files, a victim process and listeners on the host. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.marker = "decoy-" + secrets.token_hex(8)
        self.env_marker = "decoy-" + secrets.token_hex(8)

    def __enter__(self) -> Stage:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rf-stage-", dir="/tmp"))
        self.folder = Path(folder)
        self.folder.chmod(0o755)  # readable by all: only the wall may keep the decoys away
        home = self.folder / "home" / ".ssh"
        home.mkdir(parents=True)
        self.decoy = self._file("secret")
        self.key = self._file("home/.ssh/id_ed25519")
        self.writable = self._file("writable", 0o666)
        (self.folder / "scratch").mkdir()
        (self.folder / "scratch").chmod(0o777)
        os.environ["RINGFENCE_TEST_DECOY"] = self.env_marker
        # The victim is asked for by pid and may be killed by a control; see victim().
        self._victim: subprocess.Popen[str] | None = None
        self._stack.callback(self._end_victim)
        self._stack.callback(os.environ.pop, "RINGFENCE_TEST_DECOY", None)
        self.abstract = "rf-" + secrets.token_hex(8)
        self.tcp = self._listen(socket.AF_INET, ("127.0.0.1", 0))
        self.tcp6 = self._listen(socket.AF_INET6, ("::1", 0))
        self._listen(socket.AF_UNIX, "\0" + self.abstract)
        self.unix = str(self.folder / "listener")
        self._listen(socket.AF_UNIX, self.unix)
        os.chmod(self.unix, 0o777)
        self.suid = self._set_user_id_program()
        return self

    def _set_user_id_program(self) -> str:
        """A set-user-ID root program that prints its effective uid; empty where only root could make it."""
        if os.geteuid() != 0:
            return os.environ.get("RINGFENCE_TEST_SUID", "")
        path = self.folder / "decoys" / "print_uid"
        path.parent.mkdir()
        path.write_bytes(program("print_uid.c"))
        path.chmod(0o4755)
        return str(path)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _file(self, name: str, mode: int = 0o644) -> str:
        path = self.folder / name
        path.write_text(f"{self.marker}\n")
        path.chmod(mode)
        return str(path)

    def _listen(self, family: int, address: object) -> int:
        made = self._stack.enter_context(socket.socket(family))
        made.bind(address)  # type: ignore[arg-type]
        made.listen(16)
        return 0 if family == socket.AF_UNIX else int(made.getsockname()[1])

    def victim(self) -> tuple[int, str]:
        """A living process of the host, of our own user, and the address of a buffer in it."""
        if self._victim is None or self._victim.poll() is not None:
            self._end_victim()
            self._victim = subprocess.Popen(
                ["/usr/bin/python3", "-I", "-S", "-c", VICTIM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={"SECRET": self.env_marker},
            )
            assert self._victim.stdout is not None
            self._address = self._victim.stdout.readline().strip()
        return self._victim.pid, self._address

    def victim_lives(self) -> bool:
        """Is the victim still there?"""
        return self._victim is not None and self._victim.poll() is None

    def victim_ends(self) -> bool:
        """Does the victim die soon?"""
        assert self._victim is not None
        try:
            self._victim.wait(60)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _end_victim(self) -> None:
        if self._victim is not None:
            for pipe in (self._victim.stdin, self._victim.stdout):
                assert pipe is not None
                pipe.close()
            if self._victim.poll() is None:
                self._victim.send_signal(signal.SIGKILL)
            self._victim.wait()

    def things(self) -> dict[str, str]:
        """What the arguments of attacks may name."""
        pid, address = self.victim()
        return {
            "folder": str(self.folder / "scratch"),
            "decoy": self.decoy,
            "marker": self.marker,
            "ssh_key": self.key,
            "writable": self.writable,
            "env_marker": self.env_marker,
            "passwd": hashlib.sha256(Path("/etc/passwd").read_bytes()).hexdigest(),
            "suid": self.suid,
            "suid_folder": os.path.dirname(self.suid),
            "victim": str(pid),
            "address": address,
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
            "abstract": self.abstract,
            "unix": self.unix,
            "tcp": str(self.tcp),
            "tcp6": str(self.tcp6),
        }
