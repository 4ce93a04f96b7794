"""Where the engine is: environment, Docker contexts, the usual sockets; and a byte stream to it.

Plain sockets (unix, tcp) are dialled by us. Where a stream needs TLS or ssh, the ``docker`` program of the
machine carries it (``docker system dial-stdio``), which knows the user's keys and contexts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ringfence.model.errors import RuntimeUnavailable
from ringfence.runtimes.launching import sockets

_carriers: list[subprocess.Popen[bytes]] = []  # to be reaped


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine. ``path``: of a unix socket; or ``host`` and ``port``; or a ``command`` that carries it."""

    engine: str  # docker or podman
    text: str  # as the user would write it
    path: str = ""
    host: str = ""
    port: int = 0
    command: tuple[str, ...] = ()

    async def connect(self) -> socket.socket:
        """A new stream to it, non-blocking.

        Raises:
            RuntimeUnavailable: nobody answers there; says why and what to do.
        """
        try:
            return await self._connect()
        except OSError as error:
            raise RuntimeUnavailable(
                f"{self.engine} can't be reached at {self.text}: {error.strerror or error}",
                hint=self._hint(error),
                runtime=self.engine,
            ) from error

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        if self.command:
            return self._carried()
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            sock = socket.socket(found[0][0], socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            if self.path:
                await sockets.connect(sock, self.path)
            else:
                await loop.sock_connect(sock, found[0][4])
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    def _carried(self) -> socket.socket:
        _carriers[:] = [each for each in _carriers if each.poll() is None]
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # In a session of its own: it carries a stream that outlives this process.
                process = subprocess.Popen(
                    self.command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        _carriers.append(process)
        ours.setblocking(False)
        return ours

    def _hint(self, error: OSError) -> str:
        if isinstance(error, PermissionError):
            group = "docker" if self.engine == "docker" else "its owner"
            return f"let this user use the socket (usermod -aG {group} …, then log in again), or run as root"
        if self.command:
            return f"install {self.command[0]}, which carries the stream"
        if self.engine == "podman":
            return "start its service: systemctl --user start podman.socket (or without --user as root)"
        return "start it (systemctl start docker), or name another one in DOCKER_HOST"


def find(engine: str) -> Endpoint:
    """The engine that the user's own tools would speak to.

    Raises:
        RuntimeUnavailable: the configuration names something that can't be understood.
    """
    return _docker() if engine == "docker" else _podman()


def _docker() -> Endpoint:
    host = os.environ.get("DOCKER_HOST", "")
    if host:
        secure = bool(os.environ.get("DOCKER_TLS_VERIFY"))
        return parse("docker", host, ("docker", "system", "dial-stdio") if secure else ())
    config = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    context = os.environ.get("DOCKER_CONTEXT", "") or _current(config)
    if context and context != "default":
        return _context(config, context)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = ["/var/run/docker.sock", str(Path.home() / ".docker/run/docker.sock")]
    places += [f"{runtime}/docker.sock"] if runtime else []
    path = next((place for place in places if os.path.exists(place)), places[0])
    return Endpoint("docker", f"unix://{path}", path=path)


def _podman() -> Endpoint:
    host = os.environ.get("CONTAINER_HOST", "")
    if host:
        return parse("podman", host, ())
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    path = "/run/podman/podman.sock" if os.geteuid() == 0 else f"{runtime}/podman/podman.sock"
    return Endpoint("podman", f"unix://{path}", path=path)


def _current(config: Path) -> str:
    try:
        found = json.loads((config / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    name = found.get("currentContext", "") if isinstance(found, dict) else ""
    return name if isinstance(name, str) else ""


def _context(config: Path, name: str) -> Endpoint:
    folder = hashlib.sha256(name.encode()).hexdigest()
    try:
        meta = json.loads((config / "contexts" / "meta" / folder / "meta.json").read_text())
        host = meta["Endpoints"]["docker"]["Host"]
        secure = (config / "contexts" / "tls" / folder / "docker").is_dir()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeUnavailable(
            f"the docker context {name} can't be read: {error}", hint="docker context ls", runtime="docker"
        ) from error
    return parse("docker", str(host), ("docker", "--context", name, "system", "dial-stdio") if secure else ())


def parse(engine: str, host: str, carrier: tuple[str, ...]) -> Endpoint:
    """An endpoint from ``unix://…``, ``tcp://host:port`` or ``ssh://…``; ``carrier`` brings TLS to a tcp one.

    Raises:
        RuntimeUnavailable: another scheme, no port, or no program that carries it.
    """
    scheme, _, rest = host.partition("://")
    if scheme == "unix" and rest.startswith("/"):
        return Endpoint(engine, host, path=rest)
    if scheme in ("tcp", "http") and not carrier:
        name, _, port = rest.rstrip("/").rpartition(":")
        if name and port.isdigit() and int(port) < 1 << 16:
            return Endpoint(engine, host, host=name.strip("[]"), port=int(port))
    if engine == "docker" and (scheme == "ssh" or (scheme == "tcp" and carrier)):
        command = carrier or ("docker", "-H", host, "system", "dial-stdio")
        if shutil.which("docker") is None:
            raise RuntimeUnavailable(
                f"{host} needs the docker program to carry the stream",
                hint="install docker's command line, or tunnel its socket and name that in DOCKER_HOST",
                runtime=engine,
            )
        return Endpoint(engine, host, command=command)
    raise RuntimeUnavailable(
        f"{host!r} is no address of {engine} that is understood here",
        hint="unix:///path, tcp://host:port" + (" or ssh://host" if engine == "docker" else ""),
        runtime=engine,
    )
