"""A door in this process, with real servers behind it: no agent, so that only the proxy is under test.

What would come over a link comes over loopback TCP. Servers lie on 127.0.0.x; rules name these addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from ringfence.egress.door import Door, DoorSpec
from ringfence.egress.engine import Engine, Settings
from ringfence.egress.names import Address
from ringfence.egress.serving import Served
from ringfence.egress.streams import SocketStream

LOCAL = ["127.0.0.0/8"]


class TestAuthority:
    """The authority of the made-up internet."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.certificate = self._sign(self.name, self.key.public_key(), ca=True, names=[])
        self.file = folder / "ca.pem"
        self.file.write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def _sign(self, subject: Any, public: Any, *, ca: bool, names: list[str], old: bool = False) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * day)
            .not_valid_after(now - day if old else now + day)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            found = [
                x509.IPAddress(ip_address(name)) if name[0].isdigit() else x509.DNSName(name)
                for name in names
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def server(self, *names: str, old: bool = False, alpn: tuple[str, ...] = ()) -> ssl.SSLContext:
        """TLS for a server with these names; ``old``: its certificate has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = self._sign(subject, key.public_key(), ca=False, names=list(names), old=old)
        path = self.folder / f"{names[0].replace('*', '_')}-{certificate.serial_number}.pem"
        path.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            + certificate.public_bytes(Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context


class Names:
    """A resolver whose answers the test decides; also different ones each time (rebinding)."""

    def __init__(self) -> None:
        self.known: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    def add(self, name: str, *addresses: str) -> None:
        """One answer; more of them are given in turn, the last one for ever."""
        self.known.setdefault(name, []).append(list(addresses))

    async def resolve(self, name: str) -> list[Address]:
        self.asked.append(name)
        answers = self.known.get(name)
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return [ip_address(text) for text in answer]


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Origin:
    """A server that keeps what it was asked, and answers what it was told to."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.response: bytes | None = None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, context: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> Origin:
        self._server = await asyncio.start_server(self._serve, address, 0, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head)
                lines = head.decode("latin-1").lower()
                body = b""
                if "content-length:" in lines:
                    body = await reader.readexactly(int(lines.split("content-length:")[1].split("\r\n")[0]))
                elif "transfer-encoding: chunked" in lines:
                    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                        body += await reader.readexactly(size)
                        await reader.readexactly(2)
                    await reader.readuntil(b"\r\n")
                self.bodies.append(body)
                if self.response is not None:
                    writer.write(self.response)
                else:
                    data = json.dumps(
                        {"head": head.decode("latin-1"), "body": body.decode("latin-1")}
                    ).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
            self._writers.discard(writer)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0)
        await self._server.wait_closed()


class LocalDoor:
    """A door whose proxy ports are on this machine's loopback."""

    def __init__(self, engine: Engine, spec: DoorSpec) -> None:
        self.engine = engine
        self.door = Door(engine, spec)
        self.served = Served(self.door)
        self.events: list[dict[str, Any]] = []
        self.ports: dict[str, int] = {}
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        engine.emit = self.events.append

    async def start(self) -> LocalDoor:
        for kind in ("http", "socks", "names"):
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            self._listeners.append(listener)
            self.ports[kind] = listener.getsockname()[1]
            self._spawn(self._accept(kind, listener))
        return self

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, kind: str, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            self._spawn(self._connection(kind, sock))

    async def _connection(self, kind: str, sock: socket.socket) -> None:
        await self.served.connection(kind, await SocketStream.over(sock))

    async def stop(self) -> None:
        await self.door.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        await self.engine.close()

    def log(self) -> list[dict[str, Any]]:
        """The connection log."""
        return list(self.engine.log.read())

    async def idle(self) -> None:
        """Return when no connection is left."""
        async with asyncio.timeout(60):
            while self.door.flows:
                await asyncio.sleep(0.01)

    # -- a client

    async def raw(self, data: bytes, kind: str = "http", *, eof: bool = False) -> bytes:
        """Send bytes to a port, and everything that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[kind])
        try:
            writer.write(data)
            if eof:
                writer.write_eof()
            got = b""
            with contextlib.suppress(ConnectionError):  # hung up on before everything was read
                async with asyncio.timeout(60):
                    while piece := await reader.read(65536):
                        got += piece
            return got
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def curl(self, *arguments: str, proxy: bool = True) -> tuple[int, str, str]:
        """Run curl through the door: exit code, output (with head), errors."""
        via = ["-x", f"http://127.0.0.1:{self.ports['http']}"] if proxy else []
        process = await asyncio.create_subprocess_exec(
            "curl", "-sS", "-i", "-m", "90", *via, *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={"PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        output, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode("latin-1"), errors.decode("latin-1")

    async def ca(self) -> str:
        """A file with the sandbox's authority."""
        path = self.engine.folder / "sandbox-ca.pem"
        path.write_bytes((await self.engine.authorities.of(self.door.spec.sandbox)).certificate)
        return str(path)


@contextlib.asynccontextmanager
async def local_door(
    folder: Path,
    network: dict[str, Any],
    names: Names | None = None,
    ca_file: Path | None = None,
    **spec: Any,
) -> AsyncIterator[LocalDoor]:
    """A door with these rules, for the length of a block."""
    settings = spec.pop("settings", Settings(ca_file=None if ca_file is None else str(ca_file)))
    engine = Engine(folder, settings, resolver=names or Names())
    network = {"mode": "egress"} | network
    made = LocalDoor(engine, DoorSpec(spec.pop("sandbox", "sb-test"), network=network, **spec))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
