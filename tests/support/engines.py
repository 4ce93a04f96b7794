"""Container engines of the tests' own: started once a session when a test needs one, taken down whole.

Each has its own folders, socket and process ids; the machine's own engine, if there is one, is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.leaks import descendants
from support.leaks import process as process_of

NAMES = ("docker", "podman")
DOCKER = "/usr/bin/docker"  # the engine's own client: another program of that name may come first in PATH
_TIME = 60.0  # seconds that an engine may take to come up on a loaded machine


class Engine:
    """A running engine. ``address`` is what DOCKER_HOST or CONTAINER_HOST is set to."""

    def __init__(self, name: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.folder = folder
        self.process = process
        self.address = f"unix://{folder}/engine.sock"

    @property
    def log(self) -> str:
        """The end of what it said."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]


def docker(*words: str, stdin: bytes | None = None) -> str:
    """The engine's own command line, as DOCKER_HOST says."""
    done = subprocess.run([DOCKER, *words], input=stdin, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def lacking(name: str) -> str:
    """Why that engine can't be started here; empty if it can."""
    if os.geteuid() != 0 and name == "docker":
        return "dockerd needs root"
    for program in ("dockerd", "containerd", "runc") if name == "docker" else ("podman", "conmon"):
        if shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            return f"{program} is not installed"
    return ""


def command(name: str, folder: Path, *options: str) -> list[str]:
    """What starts it."""
    if name == "podman":
        storage = [f"--root={folder}/data", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp"]
        return [
            "podman", *storage, "--cgroup-manager=cgroupfs", "--events-backend=none",
            f"--runtime={shutil.which('runc')}", *options,
            "system", "service", "--time=0", f"unix://{folder}/engine.sock",
        ]  # fmt: skip
    words = [
        "dockerd", f"--data-root={folder}/data", f"--exec-root={folder}/run", f"--pidfile={folder}/pid",
        f"--host=unix://{folder}/engine.sock", "--bridge=none", "--iptables=false", "--ip6tables=false",
        f"--cgroup-parent=/{folder.name}",
    ]  # fmt: skip
    # gVisor's own network stack is of no use to containers that have none.
    options_of = {"runsc": ["--network=none"], "crun": []}
    runtimes = {
        runtime: {"path": path, "runtimeArgs": options_of[runtime]}
        for runtime in options_of
        if (path := shutil.which(runtime)) is not None
    }
    (folder / "daemon.json").write_text(json.dumps({"runtimes": runtimes}))
    return [*words, f"--config-file={folder}/daemon.json", *options]


@contextlib.contextmanager
def running(name: str, *options: str, hidden: str = "") -> Iterator[Engine]:
    """An engine for as long as the context lasts; afterwards no process, mount or file of it is left.

    ``hidden``: a type of file system of which it sees no mount.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"rf-{name}-", dir="/tmp"))
    folder.chmod(0o711)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*_without(hidden), *command(name, folder, *options)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    engine = Engine(name, folder, process)
    try:
        _wait(lambda: _answers(engine), f"{name} does not answer", engine)
        yield engine
    finally:
        _take_down(engine)


def _without(kind: str) -> list[str]:
    """What starts a program in a mount namespace that lacks a type of file system."""
    if not kind:
        return []
    script = f'umount --all --types {kind} && exec "$@"'
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh"]


def _answers(engine: Engine) -> bool:
    assert engine.process.poll() is None, f"{engine.name} has ended: {engine.log}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(engine.folder / "engine.sock"))
        sock.sendall(b"GET /_ping HTTP/1.0\r\nHost: x\r\n\r\n")
        return b" 200 " in sock.recv(4096)
    return False


def _wait(true: Callable[[], bool], what: str, engine: Engine) -> None:
    deadline = time.monotonic() + _TIME
    while not true():
        assert time.monotonic() < deadline, f"{what}: {engine.log}"
        time.sleep(0.05)


def _take_down(engine: Engine) -> None:
    """End it and all that it started; unmount and remove its folders."""
    below = descendants(engine.process.pid)
    engine.process.send_signal(signal.SIGTERM)
    try:
        engine.process.wait(30)
    except subprocess.TimeoutExpired:
        engine.process.kill()
        engine.process.wait()
    for key, found in below.items():
        # A shim has left the tree and may be gone by now: its number is not killed for another's process.
        if (still := process_of(found.pid)) is not None and (still.pid, still.birth) == key:
            with contextlib.suppress(OSError):
                os.kill(found.pid, signal.SIGKILL)
    _end_all_of(engine.folder)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{engine.folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(engine.folder, ignore_errors=True)
    _remove_cgroups(engine.folder.name if engine.name == "docker" else "libpod_parent")


def _remove_cgroups(name: str) -> None:
    """Those below the engine's parent, in every hierarchy: the kernel removes empty ones only."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup" in line:
            for folder, _, _ in os.walk(f"{line.split()[4]}/{name}", topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def _end_all_of(folder: Path) -> None:
    """Kill every process that has that folder in its command line, and wait until none is left."""
    deadline = time.monotonic() + _TIME
    while pids := _mentioning(str(folder)):
        assert time.monotonic() < deadline, f"processes of {folder} stay: {pids}"
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _mentioning(text: str) -> list[int]:
    """Processes with that text in their command line: shims and containerd, which leave the tree."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
    return found


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    """A docker daemon for the session, which DOCKER_HOST names."""
    yield from _for_the_session("docker", "DOCKER_HOST")


@pytest.fixture(scope="session")
def podman_engine() -> Iterator[Engine]:
    """A podman service for the session, which CONTAINER_HOST names."""
    yield from _for_the_session("podman", "CONTAINER_HOST")


def _for_the_session(name: str, variable: str) -> Iterator[Engine]:
    if reason := lacking(name):
        pytest.skip(reason)
    with running(name) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, engine.address)
        yield engine


@pytest.fixture(autouse=True)
def engine_of_the_runtime(request: pytest.FixtureRequest) -> None:
    """Tests that are parametrised with a runtime that is an engine's have that engine."""
    callspec = getattr(request.node, "callspec", None)
    name = callspec.params.get("ringfence_runtime") if callspec is not None else None
    engine = str(name).partition(":")[0]
    if engine in NAMES:
        request.getfixturevalue(f"{engine}_engine")
