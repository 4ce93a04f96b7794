"""A service of this process's own, for programs that use the SDK where none is configured.

::

    our process ──pipe──▶ keeper (python -m ringfence.sdk.embedded) ──▶ ringfence serve ──▶ node, API, egress
         └────────────── HTTP over a private unix socket ────────────────────────────────▶ API

The keeper's end of the pipe closes when our process ends, however it ends. Then the keeper destroys every
sandbox, ends the service, and removes its folder. A keeper that is killed itself takes ``serve`` along, and
the next keeper of this state folder finishes what it left: each holds a lock on a file in its folder.

Templates, snapshots on the host and limits are those of the state folder (``RINGFENCE_HOME``), as for
``ringfence run``. The key exists in memory only.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringfence.model.errors import HostLimit, RingfenceError
from ringfence.sdk import failures
from ringfence.sdk.settings import Settings

PREFIX = "embedded-"
START_TIME = 120.0  # seconds until it must serve: a machine under load takes its time
END_TIME = 30.0  # seconds that our process waits for the keeper at its own end
CLEAR_TIME = 60.0  # seconds for destroying what is left
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SOCKETS, _SHORT = "ringfence-", "/tmp"  # noqa: S108 - mkdtemp makes them, for us alone
_LONGEST_SOCKET = 100  # bytes of a unix socket's path

_lock = threading.Lock()
_running: _Running | None = None


class _Running:
    """The service of this process: its keeper, and where it is."""

    def __init__(self, keeper: subprocess.Popen[bytes], settings: Settings) -> None:
        self.keeper = keeper
        self.settings = settings
        self.owner = os.getpid()

    def end(self) -> None:
        """Close the pipe, and wait until everything is gone."""
        if self.owner != os.getpid():
            return  # a forked child: the service is its parent's
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.keeper.wait(END_TIME)
        if self.keeper.stdout is not None:
            self.keeper.stdout.close()


async def start() -> Settings:
    """The service of this process; started with the first call.

    Raises:
        HostLimit: it did not start. InvalidRequest: its packages are not installed.
    """
    return await asyncio.to_thread(_start)


def stop() -> None:
    """End it, and everything that it has; the next use starts another. Idempotent."""
    global _running
    with _lock:
        found, _running = _running, None
    if found is not None:
        found.end()


def _start() -> Settings:
    global _running
    with _lock:
        if _running is not None and _running.keeper.poll() is None:
            return _running.settings
        if _running is None:
            atexit.register(stop)
        _running = _begin()
        return _running.settings


def _begin() -> _Running:
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    keeper = subprocess.Popen(
        [sys.executable, "-m", "ringfence.sdk.embedded"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C on our terminal is not its business: it sees our end
    )
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    try:
        told = json.loads(line)
    except ValueError:
        told = {"error": {"code": "host_limit", "message": "the service of this process did not start"}}
    if "error" in told:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.stdout.close()
        keeper.wait()
        raise failures.from_object(told["error"])
    settings = Settings(str(told["url"]), str(told["key"]), source="this process's own service")
    return _Running(keeper, settings)


# -- the keeper


def keep() -> int:
    """The keeper's life: serve until standard input ends, then remove every trace."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # Only the end of our process ends us: whoever signals the whole group would leave sandboxes behind.
        signal.signal(number, signal.SIG_IGN)
    from ringfence.node.state import default_root

    state = default_root()
    try:
        with _folder(state) as name:
            served = _serve(state, name)
            try:
                _tell(served.told)
                _wait(served.process)
            finally:
                _finish(state, name, served)
    except RingfenceError as error:
        _tell({"error": error.as_dict()})
        return 1
    except OSError as error:
        _tell({"error": HostLimit(f"{error.strerror}: {error.filename or state}").as_dict()})
        return 1
    return 0


@contextlib.contextmanager
def _folder(state: Path) -> Iterator[str]:
    """A name and a folder for the service, locked while it lives; leftovers of dead keepers are removed."""
    from ringfence.placement.graves import FOLDER, service_folder

    state.mkdir(mode=0o711, parents=True, exist_ok=True)
    name = PREFIX + secrets.token_hex(5)
    with _locked(state / "embedded.lock"):
        own = service_folder(state, name)
        lock = os.open(own / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        dead = [
            each.name for each in (state / FOLDER).glob(PREFIX + "*") if each.name != name and _is_dead(each)
        ]
    try:
        for each in dead:
            _bury(state, each)
        yield name
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_dead(folder: Path) -> bool:
    """Whether nobody holds the lock in it."""
    try:
        descriptor = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # it died between making the folder and the lock
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _bury(state: Path, name: str) -> None:
    """Finish what a dead keeper left: its sandboxes, then its folder."""
    from ringfence.placement.graves import FOLDER

    folder = state / FOLDER / name
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "ringfence", "node", "--service", name, "--state", str(state)]
    try:
        node = subprocess.Popen(
            [*command, "--ready-fd", str(writer)],
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    finally:
        os.close(writer)
    try:
        with os.fdopen(reader, "rb") as ready:
            if ready.readline():
                asyncio.run(_clear(state, name))
                gone = True
            else:
                gone = False  # its node still lives: the next keeper looks again
    finally:
        node.terminate()
        node.wait()
    if gone:
        with contextlib.suppress(OSError):
            place = (folder / "elsewhere").read_text()
            if place.startswith(f"{_SHORT}/{_SOCKETS}") and "/" not in place[5:]:
                shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


class _Served:
    """``ringfence serve`` as we started it; ``told``: address and key."""

    def __init__(self, process: subprocess.Popen[str], folder: str, told: dict[str, str]) -> None:
        self.process = process
        self.folder = folder
        self.told = told


def _serve(state: Path, name: str) -> _Served:
    folder = _socket_folder(state, name)
    command = [
        sys.executable, "-m", "ringfence", "serve", "--json", "--no-tcp", "--uds", f"{folder}/api.sock",
        "--service", name, "--state", str(state),
    ]  # fmt: skip
    log = open(f"{folder}/log", "w+b")  # noqa: SIM115 - closed below
    us = os.getpid()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=lambda: _die_with(us),
        )
        told = _first_words(process)
        if "key" not in told or "url" not in told:
            process.terminate()
            process.wait()
            error = told.get("error")
            log.seek(0)
            said = log.read()[-2000:].decode("utf-8", "replace").strip()
            raise (
                failures.from_object(error)
                if error
                else HostLimit("the service of this process did not start", hint=said)
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        log.close()
    return _Served(process, folder, {"url": told["url"], "key": told["key"]})


def _socket_folder(state: Path, name: str) -> str:
    """Where the API's socket and the log lie: in the service's folder, unless its name is too long."""
    from ringfence.placement.graves import service_folder

    own = service_folder(state, name)
    folder = own / "embedded"
    if len(os.fsencode(folder)) < _LONGEST_SOCKET - len("/api.sock"):
        folder.mkdir(mode=0o700)
        return str(folder)
    made = tempfile.mkdtemp(prefix=_SOCKETS, dir=_SHORT)
    (own / "elsewhere").write_text(made)  # so that the next keeper finds it if we are killed
    return made


def _die_with(keeper: int) -> None:
    """In the child: be told to end when the keeper dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _first_words(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says until it serves: the key, then the address; or an error."""
    told: dict[str, Any] = {}
    assert process.stdout is not None
    timer = threading.Timer(START_TIME, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                told |= value if isinstance(value, dict) else {}
            if "ready" in told or "error" in told:
                break
    finally:
        timer.cancel()
    return told


def _wait(process: subprocess.Popen[str]) -> None:
    """Return when our process is gone, or the service is."""
    import select

    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while process.poll() is None:
        if poll.poll(500) and not os.read(0, 4096):
            return


def _finish(state: Path, name: str, served: _Served) -> None:
    process = served.process
    try:
        if process.poll() is None:
            with contextlib.suppress(Exception):
                asyncio.run(_end_all(served))
            with contextlib.suppress(Exception):
                asyncio.run(_clear(state, name))
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLEAR_TIME)
            if process.poll() is None:
                process.kill()
        process.wait()
        if _left(state, name):
            _bury(state, name)  # it died before we did, or under our hands
    finally:
        if process.stdout is not None:
            process.stdout.close()
        shutil.rmtree(served.folder, ignore_errors=True)


async def _end_all(served: _Served) -> None:
    """End pools and sandboxes by the service, so that it starts nothing new."""
    from ringfence.sdk.transport import Transport

    settings = Settings(served.told["url"], served.told["key"], timeout=CLEAR_TIME, retry_for=2.0)
    async with asyncio.timeout(CLEAR_TIME), Transport(settings) as transport:
        async for pool in transport.pages("/v1/pools"):
            await transport.call("DELETE", f"/v1/pools/{pool['id']}")
        found = [each["id"] async for each in transport.pages("/v1/sandboxes") if not each.get("ended_at")]
        results = [transport.call("DELETE", f"/v1/sandboxes/{id}") for id in found]
        await asyncio.gather(*results, return_exceptions=True)


async def _clear(state: Path, name: str) -> None:
    """Destroy, at the node, whatever is left."""
    from ringfence.placement.local import LocalPlacement
    from ringfence.placement.serving import default_socket

    placement = LocalPlacement(default_socket(state, name))
    try:
        until = time.monotonic() + CLEAR_TIME
        while (found := await placement.list()) and time.monotonic() < until:
            await asyncio.gather(*(placement.destroy(each.id) for each in found), return_exceptions=True)
    finally:
        await placement.close()


def _left(state: Path, name: str) -> bool:
    """Whether sandboxes of this service still have folders."""
    sandboxes = state / "sandboxes"
    if not sandboxes.is_dir():
        return False
    for journal in sandboxes.glob("*/*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if journal.is_file() and journal.stat().st_size < 1 << 20 and name in journal.read_text():
                return True
    return False


def _tell(value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(keep())
