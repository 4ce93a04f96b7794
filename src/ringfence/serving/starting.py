"""From what `ringfence serve` was asked for to processes: checks, folders, sockets, the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Protocol

from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.model.values import dataclass
from ringfence.serving import privileges
from ringfence.serving.settings import Worker
from ringfence.serving.supervising import Supervisor, listen_tcp, listen_unix, sealed

_DOMAIN = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*", re.ASCII
)
_MOST_WORKERS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for; see ``ringfence serve --help``."""

    bind: str | None
    uds: Path | None = None
    store: str = ""
    service: str = "default"
    state: Path | None = None
    domain: str = "localhost"
    public_url: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    behind_tls: bool = False
    workers: int = 1
    user: str | None = None
    node: Path | None = None
    key_file: Path | None = None
    egress: bool = True
    egress_webhook: str = ""
    egress_key: tuple[str, ...] = ()
    cpu_ratio: float = 0.0
    memory_ratio: float = 0.0
    keep_events: float = 7.0


class Told(Protocol):
    """Who hears what happens."""

    def ready(self, url: str) -> None:
        """It serves."""

    def key(self, secret: str, file: Path | None) -> None:
        """The first key; ``file``: it was written there."""

    def said(self, text: str) -> None:
        """Something happened to a part."""


def serve(request: Request, told: Told) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        InvalidRequest: the options don't fit together. HostLimit: something can't be used or started.
    """
    address = _check(request)
    root = os.geteuid() == 0
    user = privileges.api_user(request.user) if root else None
    from ringfence.node.state import default_root

    state = request.state or default_root()
    with contextlib.ExitStack() as stack:
        own = _folder(state, request.service, user)
        sockets: list[socket.socket] = []
        url = ""
        if request.uds is not None:
            sockets.append(stack.enter_context(listen_unix(request.uds)))
            stack.callback(_unlink, request.uds)
            url = f"unix:{request.uds}"
        if address is not None:
            sock = stack.enter_context(listen_tcp(*address))
            sockets.append(sock)
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            url = f"{'https' if request.tls_cert else 'http'}://{shown}:{port}"
        tls: tuple[int, int] | None = None
        if request.tls_cert:
            tls = (sealed(request.tls_cert), sealed(request.tls_key))
            for number in tls:
                stack.callback(os.close, number)
        node, command = _node(request, state, user)
        listeners = tuple(sock.fileno() for sock in sockets)
        worker = Worker(
            store=request.store or f"sqlite:///{own / 'state.sqlite'}",
            node=str(node),
            owner=f"{socket.gethostname()}:{url.rpartition('/')[2]}",
            state=str(own),
            listeners=listeners,
            told=-1,
            domain=request.domain,
            public_url=request.public_url,
            tls=tls,
            uid=user[0] if user else None,
            egress=request.egress,
            egress_webhook=request.egress_webhook,
            egress_key=request.egress_key,
            cpu_ratio=request.cpu_ratio,
            memory_ratio=request.memory_ratio,
            keep_events=request.keep_events,
        )
        keys = _Keys(request.key_file, told)
        supervisor = Supervisor(
            worker,
            workers=request.workers,
            node=command,
            user=user,
            keep=(*listeners, *(tls or ())),
            said=told.said,
            on_key=keys.made,
        )
        asyncio.run(_until_told(supervisor, lambda: told.ready(url)))


async def _until_told(supervisor: Supervisor, ready: object) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    running = asyncio.current_task()

    def ask() -> None:
        if not stop.is_set():
            stop.set()
        elif running is not None:
            running.cancel()  # a second time: no more waiting for anybody

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ask)
    starting = loop.create_task(supervisor.run(ready, stop))  # type: ignore[arg-type]
    stopping = loop.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            # Also in the middle of the start: what has been started is ended.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60):
                    await asyncio.shield(starting)
        if not starting.done():
            starting.cancel()
        await starting
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(stopping, starting, return_exceptions=True)


class _Keys:
    """Where the first key goes: a file that only we can read, else the terminal."""

    def __init__(self, path: Path | None, told: Told) -> None:
        self._path = path
        self._told = told

    def made(self, secret: str) -> None:
        """The first start made it."""
        path = self._path
        if path is not None:
            try:
                number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with os.fdopen(number, "w") as file:
                    file.write(secret + "\n")
            except OSError as error:
                self._told.said(f"{path} can't be written: {error.strerror}; the key comes here instead")
                path = None
        self._told.key(secret, path)


def _check(request: Request) -> tuple[str, int] | None:
    """The address to bind.

    Raises:
        InvalidRequest.
    """
    if bool(request.tls_cert) != bool(request.tls_key):
        raise InvalidRequest(
            "a certificate needs its key, and a key its certificate", hint="--tls-cert, --tls-key"
        )
    if not 1 <= request.workers <= _MOST_WORKERS:
        raise InvalidRequest(f"{request.workers} API processes", hint=f"1 to {_MOST_WORKERS}")
    if not _DOMAIN.fullmatch(request.domain):
        raise InvalidRequest(f"{request.domain!r} is no domain", hint="as in boxes.example.com")
    if request.egress_webhook and not request.egress_webhook.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{request.egress_webhook[:80]!r} is no URL", hint="--egress-webhook https://example.com/ask"
        )
    for ratio in (request.cpu_ratio, request.memory_ratio):
        if not 0 <= ratio <= 10_000:
            raise InvalidRequest(f"{ratio} is no ratio", hint="a number from 0 on; 0: the usual one")
    if not 0 <= request.keep_events <= 36_600:
        raise InvalidRequest(
            f"{request.keep_events} days", hint="a number of days; 0: events are kept for ever"
        )
    if request.bind is None:
        if request.uds is None:
            raise InvalidRequest("nowhere to listen", hint="--uds PATH, or leave --no-tcp out")
        return None
    host, colon, port = request.bind.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"{request.bind!r} is no ADDRESS:PORT", hint="as in 127.0.0.1:8717")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise InvalidRequest(
            f"{host!r} is no address", hint="names are not looked up: give an IP address"
        ) from None
    if not address.is_loopback and not request.tls_cert and not request.behind_tls:
        raise InvalidRequest(
            f"{address} can be reached from elsewhere, and keys would cross the network in the clear",
            hint="--tls-cert and --tls-key; or --behind-tls where something in front speaks TLS",
        )
    return str(address), int(port)


def _folder(state: Path, service: str, user: tuple[int, int] | None) -> Path:
    """The API's own folder in the state folder; both made if missing.

    Raises:
        HostLimit.
    """
    from ringfence.placement.graves import service_folder

    try:
        state.mkdir(mode=0o711, parents=True, exist_ok=True)
        own = service_folder(state, service) / "api"
        own.mkdir(mode=0o700, exist_ok=True)
        if user is not None:
            found = own.lstat()
            if (found.st_uid, found.st_gid) != user:
                _hand_over(own, user)
        own.chmod(0o700)
    except OSError as error:
        raise HostLimit(f"can't make the API's folder: {error}", hint="look at who owns it") from None
    return own


def _hand_over(folder: Path, user: tuple[int, int]) -> None:
    """A folder, and the database in it, become another user's; links are not followed."""
    for entry in os.scandir(folder):
        os.chown(entry.path, *user, follow_symlinks=False)
    os.chown(folder, *user, follow_symlinks=False)


def _node(request: Request, state: Path, user: tuple[int, int] | None) -> tuple[Path, list[str] | None]:
    """The node's socket, and the command that starts it; ``None``: it is there already."""
    if request.node is not None:
        return request.node, None
    from ringfence.placement.serving import default_socket

    path = default_socket(state, request.service)
    command = [sys.executable, "-m", "ringfence", "node", "--service", request.service, "--state", str(state)]
    if user is not None:
        command += ["--api-uid", str(user[0])]
    return path, command


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
