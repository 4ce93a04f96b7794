"""Many agents in one process, for the memory of many idle doors: they greet, and say that they listen."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from ringfence.guest import frames
from ringfence.guest.fields import decode, encode


class _Agent(asyncio.Protocol):
    def __init__(self) -> None:
        self.parser = frames.FrameParser()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        space = self.parser.space()
        space[: len(data)] = data
        del space
        for channel, kind, payload in self.parser.advance(len(data)):
            if kind == frames.HELLO:
                nonce = decode(payload).raw(3)
                fields = [(1, frames.MAGIC), (2, 1), (3, nonce), (5, 1), (6, os.urandom(16)), (7, "bench")]
                self.transport.write(frames.frame(0, frames.HELLO, encode(fields)))
            elif kind == frames.OPEN:
                port = decode(payload[2:]).number(1)
                self.transport.write(frames.frame(channel, frames.REPLY, encode([(1, port)])))


class FakeAgents:
    """Dial as often as you like: each is another agent."""

    def __init__(self) -> None:
        self._transports: list[Any] = []

    async def dial(self) -> socket.socket:
        theirs, ours = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(_Agent, sock=ours)
        self._transports.append(transport)
        return theirs

    async def __aenter__(self) -> FakeAgents:
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in self._transports:
            transport.abort()
        await asyncio.sleep(0)
