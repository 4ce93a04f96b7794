"""Running a script or a pytest sub-session as a true normal user, on a machine where the tests are root.

The checkout may lie where a normal user can't go (``/root``, a CI's private folder), and nobody may have
made that user. So everything happens in a mount namespace of its own: the repository and the interpreter's
environment are bound to a place that all can read, ``/etc/passwd``, ``/etc/group``, ``/etc/subuid`` and
``/etc/subgid`` are covered by files that know the user, and only then the rights are given up for good: an
unprivileged uid, no groups, no capabilities. The machine itself keeps no trace of it.

``ids=True`` gives the user 65,536 subordinate ids (newuidmap then works), ``ids=False`` none.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
# No user of the machine, and another one for every session: what the host keeps by user (process counts,
# delegated cgroups) is then nobody else's.
UID = 30_000 + os.getpid() % 20_000
NAME = "rf-normal"
FIRST_SUBORDINATE = 3_000_000_000  # above what useradd and Ringfence itself hand out
# Seen by the normal user only: empty folders that every Debian has, to bind things on.
_CHECKOUT, _VENV = "/srv", "/media"


class Outcome(NamedTuple):
    """What a sub-session's tests came to: name and outcome, and for failures the text."""

    test: str
    outcome: str
    text: str


class NormalUser:
    """A normal user's world; see the module. Made by :func:`normal_user`."""

    def __init__(self, folder: Path, *, ids: bool) -> None:
        self.folder = folder  # 0755, with home/ and out/ of the user's own
        self.home = folder / "home"
        self.out = folder / "out"
        self.ids = ids
        for path in (self.home, self.out, folder / "tmp"):
            path.mkdir()
            os.chown(path, UID, UID)
        etc = folder / "etc"
        etc.mkdir()
        line = f"{NAME}:x:{UID}:{UID}::{self.home}:/bin/sh\n"
        (etc / "passwd").write_text(Path("/etc/passwd").read_text() + line)
        (etc / "group").write_text(Path("/etc/group").read_text() + f"{NAME}:x:{UID}:\n")
        given = f"{NAME}:{FIRST_SUBORDINATE}:65536\n" if ids else ""
        (etc / "subuid").write_text(given)
        (etc / "subgid").write_text(given)

    def give_modules(self) -> None:
        """Compiled WebAssembly interpreters as its own, so that they are not compiled for it again."""
        source = Path(os.environ["RINGFENCE_MODULES"])
        if source.is_dir():
            target = self.folder / "tmp" / f"ringfence-test-modules-{UID}"
            shutil.copytree(source, target)
            for path in (target, *target.iterdir()):
                os.chown(path, UID, UID)

    @property
    def env(self) -> dict[str, str]:
        """Its environment: nothing of ours but the PATH."""
        return {
            "PATH": f"{_VENV}/bin:" + os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(self.home),
            "USER": NAME,
            "LOGNAME": NAME,
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": f"{_CHECKOUT}/src",
            "PYTHONDONTWRITEBYTECODE": "1",
            "RINGFENCE_HOME": str(self.home / "state"),
        }

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command, run in that world from the checkout's root."""
        venv = Path(sys.prefix)
        steps = ["set -e", "mount --make-rprivate /"]
        # Binds first, while we may still go everywhere. An unprivileged process can't undo them.
        steps += [f"mount --rbind {shlex.quote(str(REPOSITORY))} {_CHECKOUT}"]
        steps += [f"mount --rbind {shlex.quote(str(venv))} {_VENV}"]
        for name in ("passwd", "group", "subuid", "subgid"):
            target = Path("/etc") / name
            if target.exists():
                steps.append(f"mount --bind {self.folder / 'etc' / name} {target}")
        steps.append(f"cd {_CHECKOUT}")
        steps.append(
            f"exec setpriv --reuid={UID} --regid={UID} --clear-groups --inh-caps=-all --bounding-set=+all "
            + shlex.join(command)
        )
        return ["unshare", "--mount", "sh", "-c", "\n".join(steps)]

    def run(
        self, command: Sequence[str], *, timeout: float = 110, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; output is captured."""
        return subprocess.run(
            self.argv(command),
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )

    def end_all(self) -> None:
        """Kill every process of this user, also those that left their tree, and wait until none is left."""
        deadline = time.monotonic() + 60
        while pids := _living(UID):
            assert time.monotonic() < deadline, f"processes of the user stay: {pids}"
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def python(self, *args: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python."""
        return self.run([f"{_VENV}/bin/python", *args], timeout=timeout)

    def pytest(
        self, *args: str, timeout: float = 600, env: dict[str, str] | None = None
    ) -> tuple[list[Outcome], subprocess.CompletedProcess[str]]:
        """A pytest sub-session of tests of this checkout; what each came to."""
        report = self.out / "report"
        done = self.run(
            [
                f"{_VENV}/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
                f"--ringfence-report={report}", *args,
            ],
            timeout=timeout,
            env=env,
        )  # fmt: skip
        lines = report.read_text().splitlines() if report.exists() else []
        return [Outcome(**json.loads(line)) for line in lines], done


def _living(uid: int) -> list[int]:
    """Processes of that user; the dead that nobody has reaped yet don't count."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                status = Path(f"/proc/{name}/status").read_text(errors="replace")
                if f"\nUid:\t{uid}\t" in status and "\nState:\tZ" not in status:
                    found.append(int(name))
    return found


@contextmanager
def normal_user(*, ids: bool) -> Iterator[NormalUser]:
    """A normal user for the length of a test. The caller must be root."""
    assert os.geteuid() == 0, "only root can become another user"
    folder = Path(tempfile.mkdtemp(prefix="rf-user-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        yield NormalUser(folder, ids=ids)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
