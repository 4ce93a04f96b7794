"""The golden transcripts against the whole client: its state machine accepts every answer as written, and its
frames are those of the transcript.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfence.guest import frames
from ringfence.guest.channels import Channel
from ringfence.guest.fields import Fields, decode
from ringfence.guest.files import Watch
from ringfence.guest.ports import GuestListener, GuestStream
from ringfence.guest.processes import GuestProcess
from ringfence.guest.wire import Wire
from ringfence.model.errors import LinkLost
from support.peers import pair

sys.path.append(str(Path(__file__).parents[2] / "golden" / "link"))

import golden

NUMBERS = {"port": 4242, "uid": 1000, "gid": 1000}


def guest_bytes(line: golden.Line) -> bytes:
    """The frame, with a possible value for each placeholder."""
    out = b""
    for name, size, data in line.parts():
        number = next((value for part, value in NUMBERS.items() if part in name), 1)
        out += data if not name else number.to_bytes(size, "little")
    return out


class Host:
    """Plays the host's lines with the client's own channels."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.channels: dict[int, Channel] = {}
        self.listeners: dict[int, GuestListener] = {}
        self.accepted: list[GuestStream] = []

    def open(self, operation: int, fields: Fields, raw: list[tuple[int, bytes]], number: int) -> None:
        options: dict[str, Any] = {
            "window": fields.number(8, 262_144) if operation in (1, 2, 16) else 262_144
        }
        if operation in (1, 2):
            process = GuestProcess("x", 0, lambda *_: asyncio.sleep(0))
            flags = fields.number(5 if operation == 1 else 4, 0)
            silent = flags & 32 if operation == 1 else flags & 1
            options |= {
                "single": bool(operation == 1 and silent),
                "receives": () if silent else (1, 2),
                "sends": True,
                "gaps": True,
                "on_event": process.on_event,
            }
            if operation == 2:
                asked = {
                    stream: fields.number(stream + 1) if stream + 1 in fields else None for stream in (1, 2)
                }
                options["on_reply"] = process.begin(asked)
        elif operation in (16, 18, 25):
            options["receives"] = (1,)
        elif operation in (17, 24):
            options["sends"] = True
        elif operation == 23:
            watch = Watch()
            options |= {"on_event": watch.on_event, "on_reply": watch.bind}
        elif operation in (32, 35):
            options |= {"receives": (0,), "sends": True}
        elif operation == 33:
            self.listeners[number] = listener = GuestListener(64)
            options["on_reply"] = listener.bind
        else:
            options["single"] = True
        self.channels[number] = self.wire.open_now(operation, raw, f"operation {operation}", **options)
        assert self.channels[number].number == number

    async def play(self, data: bytes) -> bool:
        """Do what the line says; True if exactly its bytes must have gone out."""
        kind, number, payload = golden.split(data)
        if kind == frames.OPEN:
            operation, rest = frames.parse_u16(memoryview(payload), "OPEN")
            self.open(operation, decode(rest), raw_fields(bytes(rest)), number)
        elif kind == frames.PING:
            self.wire.control(data)
            self.wire._pings.append((payload, asyncio.get_running_loop().create_future()))
        elif not number & 1:
            if kind == frames.CLOSE:
                return False  # answered already
            await self.play_accepted(kind, number, payload)
        elif number not in self.channels:
            return False  # a violation on purpose: the client can't be made to commit it
        elif kind == frames.DATA:
            await self.channels[number].send(payload[9:])
        elif kind == frames.EOF:
            self.channels[number].send_eof()
        elif kind == frames.CREDIT:
            stream, count = frames.parse_credit(memoryview(payload))
            self.channels[number].incoming[stream].credit += count  # as if that much was consumed
            return False
        elif kind == frames.CLOSE:
            self.channels[number].close()
            return False  # the client may have answered by itself before
        else:
            return False
        return True

    async def play_accepted(self, kind: int, number: int, payload: bytes) -> None:
        channel = self.wire._channels[number]
        if kind == frames.REPLY:
            stream = await next(iter(self.listeners.values())).accept()
            assert stream._channel is channel
        elif kind == frames.ERROR:
            channel.refuse(*((lambda n, t: (n, t.decode()))(*frames.parse_error(memoryview(payload)))))
        elif kind == frames.DATA:
            await channel.send(payload[9:])
        else:
            assert kind == frames.EOF
            channel.send_eof()


def raw_fields(payload: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(payload):
        size = int.from_bytes(payload[at + 1 : at + 5], "little")
        found.append((payload[at], payload[at + 5 : at + 5 + size]))
        at += 5 + size
    return found


@pytest.mark.parametrize("path", golden.transcripts(), ids=lambda path: path.stem)
async def test_the_client_holds_the_conversation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = golden.load(path)
    hello = golden.split(lines[0].example())[2]
    nonce = decode(hello).raw(3)
    ours, peer = pair()
    with monkeypatch.context() as patched:
        patched.setattr(os, "urandom", lambda size: nonce[:size])
        dialling = asyncio.ensure_future(Wire.dial(ours, "control", 5.0, resync=False))
        assert (await peer.receive()).payload == hello
    await peer.send(guest_bytes(lines[1]))
    wire = await dialling
    host = Host(wire)
    for line in lines[2:]:
        if line.frame is None:
            peer.shut()
            break
        if line.side == "host":
            data = guest_bytes(line)
            if await host.play(data):
                got = await peer.receive()
                while got.kind in (frames.CREDIT, frames.CLOSE):
                    got = await peer.receive()
                assert frames.frame(got.channel, got.kind, got.payload) == data, line.note
        else:
            await peer.send(guest_bytes(line))
            # Everything was handled when the socket is empty and the loop has turned.
            for _ in range(4):
                await asyncio.sleep(0)
            assert wire.failure is None, f"{line.note}: {wire.failure}"
    for _ in range(20):
        await asyncio.sleep(0)
    assert wire.failure is None or isinstance(wire.failure, LinkLost), wire.failure
    await wire.close()
    peer.shut()
