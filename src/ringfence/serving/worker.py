"""One API process: store, orchestrator, egress and HTTP, on sockets that it inherits.

Run as ``python -m ringfence.serving.worker FD``; FD has its :class:`~ringfence.serving.settings.Worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn

from ringfence.api.app import Service, make_app
from ringfence.api.settings import Settings
from ringfence.control.forgetting import Keeping
from ringfence.control.quotas import Oversell, Quotas
from ringfence.control.service import Control
from ringfence.control.tenancy import Tenancy
from ringfence.model.errors import Conflict, NotFound, RingfenceError
from ringfence.placement.contract import Placement
from ringfence.placement.local import LocalPlacement
from ringfence.serving import privileges
from ringfence.serving.protocol import HttpProtocol, SocketProtocol
from ringfence.serving.settings import Worker
from ringfence.store.contract import Put, Row, Store
from ringfence.store.opening import open_store

_log = logging.getLogger("ringfence.serving")
_SECRET = "service"  # noqa: S105 - the kind of a row
_DRAIN = 20  # seconds that requests under way have
_SWEEP = 1.0
_MESSAGE = 4 * 1024 * 1024  # bytes of one message of a WebSocket


async def signing_secret(store: Store) -> bytes:
    """The secret that all API processes of this store sign with; made by the first."""
    for _ in range(10):
        try:
            row = await store.get(_SECRET, "signing")
            return bytes.fromhex(row.document["secret"])
        except NotFound:
            made = Row(_SECRET, "signing", document={"secret": secrets.token_hex(32)})
            with contextlib.suppress(Conflict):
                await store.commit(Put(made), durable=True)
    raise Conflict("the signing secret is changed all the time")


@contextlib.asynccontextmanager
async def service(
    store: Store,
    placement: Placement,
    *,
    owner: str,
    doors: Any = None,
    egress: str = "",
    oversell: Oversell | None = None,
    files: Path | None = None,
    sharing: bool = False,
    keeping: Keeping | None = None,
    **settings: Any,
) -> AsyncIterator[Service]:
    """The API over a store and a placement, with its background work, until the block ends.

    ``settings``: of ``ringfence.api.settings.Settings``; ``doors``: ``egress.client.Doors``, with their
    folder in ``egress``. Store, placement and doors are the caller's to close.
    """
    quotas = Quotas(store, capacity=placement.capacity, oversell=oversell)
    tenancy = Tenancy(store, quotas)
    control = Control(
        store, placement, owner_id=owner, admission=quotas, files=files, sharing=sharing, keeping=keeping
    )
    made: Service | None = None
    watched = contextlib.AsyncExitStack()
    sweeping: asyncio.Task[None] | None = None
    try:
        if doors is not None:
            from ringfence.serving.doors import watching

            await watched.enter_async_context(watching(control, doors, owner, Path(egress), quotas.of))
        await control.start()
        made = make_app(control, tenancy, Settings(await signing_secret(store), **settings))
        sweeping = asyncio.get_running_loop().create_task(_sweep(made))
        yield made
    finally:
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        if made is not None:
            await made.close()
        await watched.aclose()
        await control.close()
        await tenancy.close()


async def _sweep(made: Service) -> None:
    while True:
        await asyncio.sleep(_SWEEP)
        try:
            await made.sweep()
        except RingfenceError as error:
            _log.warning("sweep: %s", error.message)


class Server(uvicorn.Server):
    """uvicorn on sockets of ours, unix ones too; signals are the worker's."""

    def __init__(self, made: Service, tls: ssl.SSLContext | None = None, *, drain: int = _DRAIN) -> None:
        config = uvicorn.Config(
            made,
            http=HttpProtocol,
            ws=SocketProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws_max_size=_MESSAGE,
            ws_per_message_deflate=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=drain,
        )
        super().__init__(config)
        self._made = made
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return HttpProtocol(config=self.config, server_state=self.server_state, app_state={}, _loop=loop)

        self.servers = []
        for sock in sockets or []:
            if sock.family == socket.AF_UNIX:
                made = await loop.create_unix_server(protocol, sock=sock)
            else:
                made = await loop.create_server(protocol, sock=sock, ssl=self._tls, backlog=2048)
            self.servers.append(made)
        self.started = True

    async def run_on(self, sockets: list[socket.socket], stop: asyncio.Event) -> None:
        """Serve until ``stop``; then requests under way have some seconds."""
        if not self.config.loaded:
            self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets)
        ticking = asyncio.get_running_loop().create_task(self.main_loop())
        try:
            await stop.wait()
        finally:
            self._made.drain()
            self.should_exit = True
            await asyncio.gather(ticking, return_exceptions=True)
            await self.shutdown()


def _tls(worker: Worker) -> ssl.SSLContext | None:
    if worker.tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = (f"/proc/self/fd/{number}" for number in worker.tls)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context


async def run(worker: Worker) -> None:
    """Serve until SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def tell(**told: Any) -> None:
        os.write(worker.told, json.dumps(told).encode() + b"\n")

    async with contextlib.AsyncExitStack() as stack:
        store = await open_store(worker.store)
        stack.push_async_callback(store.close)
        placement = LocalPlacement(worker.node)
        stack.push_async_callback(placement.close)
        doors = await _doors(worker, stack)
        oversell = None
        if worker.cpu_ratio or worker.memory_ratio:
            base = Oversell()
            oversell = Oversell(worker.cpu_ratio or base.cpus, worker.memory_ratio or base.memory)
        made = await stack.enter_async_context(
            service(
                store,
                placement,
                owner=worker.owner,
                doors=doors,
                egress=os.path.join(worker.state, "egress"),
                oversell=oversell,
                files=Path(worker.state) / "jobs",
                sharing=worker.store.startswith(("postgres:", "postgresql:")),
                keeping=Keeping(days=worker.keep_events),
                domain=worker.domain,
                public_url=worker.public_url,
                **(worker.settings or {}),
            )
        )
        if (first := await made.tenancy.first_start()) is not None:
            tell(key=first.secret)
        sockets = [socket.socket(fileno=number) for number in worker.listeners]
        for sock in sockets:
            sock.setblocking(False)
            stack.callback(sock.close)
        server = Server(made, _tls(worker))
        serving = loop.create_task(server.run_on(sockets, stop))
        tell(ready=True)
        await serving


async def _doors(worker: Worker, stack: contextlib.AsyncExitStack) -> Any:
    if not worker.egress:
        return None
    try:
        from ringfence.egress.client import Doors
    except ImportError:
        return None
    doors = await Doors.start(
        os.path.join(worker.state, "egress"),
        webhook=worker.egress_webhook,
        key_command=list(worker.egress_key),
    )
    stack.push_async_callback(doors.stop)
    return doors


def _known(record: logging.LogRecord) -> bool:
    """The API has told already why it cut an answer, and who sends garbage is told so."""
    return not record.getMessage().startswith(
        ("ASGI callable returned without completing", "Invalid HTTP request", "Unsupported upgrade")
    )


def main(arguments: list[str]) -> int:
    """The process."""
    number = int(arguments[0])
    with os.fdopen(number, "rb") as config:
        worker = Worker.from_json(config.read())
    logging.basicConfig(
        level=os.environ.get("RINGFENCE_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_known)
    if worker.uid is not None:
        privileges.verify(worker.uid)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        import uvloop

        uvloop.run(run(worker))
    except RingfenceError as error:
        hint = f" ({error.hint})" if error.hint else ""
        print(f"ringfence serve: {error.message}{hint}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
