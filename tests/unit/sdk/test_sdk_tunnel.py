"""Connections of a tunnel that is closed at a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from ringfence.sdk.ports import AsyncTunnel


class Peer:
    """A WebSocket whose reader takes its time to be cancelled."""

    def __init__(self) -> None:
        self.transport = self
        self.aborted = False
        self.ending = asyncio.Event()
        self.may_end = asyncio.Event()

    async def recv(self) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.may_end.wait()
        return b""

    async def send(self, data: bytes) -> None:
        raise ConnectionError

    async def close(self) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True


class Wire:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    async def connect(self, path: str) -> Any:
        return self.peer


async def opened(peer: Peer) -> tuple[AsyncTunnel, asyncio.StreamReader, asyncio.StreamWriter]:
    tunnel = await AsyncTunnel.open(Wire(peer), "/sandboxes/sb-1", 80, "127.0.0.1", 0)  # type: ignore[arg-type]
    return tunnel, *(await asyncio.open_connection(tunnel.host, tunnel.port))


async def test_closed_while_a_connection_ends() -> None:
    peer = Peer()
    tunnel, reader, writer = await opened(peer)
    writer.write(b"x")
    await peer.ending.wait()  # what it carries has broken; its halves are being ended
    closing = asyncio.create_task(tunnel.close())
    await asyncio.sleep(0.05)
    peer.may_end.set()
    await closing
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    assert peer.aborted
    writer.close()
    await writer.wait_closed()


async def test_closed_before_a_connection_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    accept = AsyncTunnel._accept

    def accepted(self: AsyncTunnel, *ends: Any) -> None:
        accept(self, *ends)
        for task in self._tasks:
            task.cancel()

    monkeypatch.setattr(AsyncTunnel, "_accept", accepted)
    tunnel, reader, writer = await opened(peer)
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await tunnel.close()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
