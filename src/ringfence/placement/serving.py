"""One node as a process: opens its state, serves its socket, ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence.model.errors import RingfenceError
from ringfence.placement.calls import Calls
from ringfence.placement.graves import service_folder
from ringfence.placement.hosting import Hosting
from ringfence.placement.server import Server, greeting_of

SOCKET = "node.sock"
SWEEP_EVERY = 30.0  # seconds between two looks at what dead nodes left


def default_socket(state: Path, service: str) -> Path:
    """Where a service's node listens unless told otherwise; the folder is made."""
    return service_folder(state, service) / SOCKET


class NodeServer:
    """A node that serves. Open with :meth:`open`, end with :meth:`close`; sandboxes live on."""

    def __init__(self, hosting: Hosting, server: Server, socket: Path) -> None:
        self.hosting = hosting
        self.socket = socket
        self._server = server
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    @classmethod
    async def open(
        cls,
        state: Path | str | None = None,
        service: str = "default",
        socket: Path | None = None,
        api_uid: int | None = None,
    ) -> NodeServer:
        """Serve.

        Args:
            state: the state root. service: whose sandboxes. socket: to listen on. api_uid: a user that may
            connect besides root and our own; the socket belongs to it.

        Raises:
            WrongState: another node serves this service. HostLimit: the socket or the state can't be used.
        """
        published: list[Callable[[str, str, dict[str, Any]], None]] = []

        def happened(name: str, id: str, data: dict[str, Any]) -> None:
            for tell in published:
                tell(name, id, data)

        hosting = await Hosting.open(state, service, happened)
        path = socket if socket is not None else default_socket(hosting.node.state.path, service)
        uids = {0, os.geteuid()} | ({api_uid} if api_uid is not None else set())
        server = Server(Calls(hosting), greeting_of(service, hosting.name), frozenset(uids))
        try:
            server.listen(path, owner=api_uid)
        except BaseException:
            await hosting.close()
            raise
        published.append(server.publish)
        return cls(hosting, server, path)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY)
            with contextlib.suppress(RingfenceError):
                await self.hosting.recover()

    async def close(self) -> None:
        """Stop serving; sandboxes live on."""
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        with contextlib.suppress(OSError):
            self.socket.unlink()
        await self._server.close()
        await self.hosting.close()


async def serve(
    state: Path | str | None,
    service: str,
    socket: Path | None,
    api_uid: int | None,
    ready: Callable[[NodeServer], None],
) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    node = await NodeServer.open(state, service, socket, api_uid)
    try:
        ready(node)
        await stop.wait()
    finally:
        await node.close()
