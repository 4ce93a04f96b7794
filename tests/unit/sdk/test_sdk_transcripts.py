"""The golden transcripts of the WebSocket of commands: the SDK understands the server's side of each."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from ringfence.model.errors import RingfenceError
from ringfence.sdk.process import AsyncProcess
from ringfence.sdk.settings import Settings
from ringfence.sdk.transport import Transport

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "ws"
Line = dict[str, Any]
SANDBOX = "/v1/sandboxes/sb-00000000000000000000"


def sessions(name: str) -> list[list[Line]]:
    """The connections of a transcript, each with its lines."""
    found: list[list[Line]] = []
    for text in (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "connect" in line:
            found.append([])
        found[-1].append(line)
    return found


class Player:
    """Plays the server's side. What clients say by HTTP or in other frames than ours is passed over."""

    def __init__(self, played: list[list[Line]]) -> None:
        self.left = list(played)
        self.firsts: list[Line] = []
        self.inputs = b""

    async def __call__(self, socket: ServerConnection) -> None:
        lines = self.left.pop(0)
        try:
            self.firsts.append(json.loads(await socket.recv()))
            for line in lines[1:]:
                await self._line(socket, line)
        except ConnectionClosed:
            return

    async def _line(self, socket: ServerConnection, line: Line) -> None:
        frame = line.get("frame", {})
        if "close" in line:
            await socket.close(line["close"])  # also where the client closed: our client is cut off
        elif line["from"] == "client":
            if frame.get("type") in ("input", "eof"):
                said = await socket.recv()
                self.inputs += said if isinstance(said, bytes) else b""
        elif "binary" in line:
            await socket.send(bytes.fromhex(line["binary"]))
        elif "bytes" in line:
            for stream, text in line["bytes"].items():
                told = {"type": stream, "offset": 0, "data": text, "encoding": "base64"}
                await socket.send(json.dumps(told))
        else:
            for each in line.get("any_order", [frame]):
                await socket.send(json.dumps({k: 7 if v == "{number}" else v for k, v in each.items()}))


@asynccontextmanager
async def playing(player: Player) -> AsyncIterator[Transport]:
    def refuse(connection: ServerConnection, request: Any) -> Any:
        refused = player.left[0][0].get("refused") if player.left else 404
        return connection.respond(HTTPStatus(refused), "no") if refused else None

    async with serve(player, "127.0.0.1", 0, process_request=refuse, compression=None) as server:
        port = server.sockets[0].getsockname()[1]
        async with Transport(Settings(f"http://127.0.0.1:{port}", retry_for=5)) as transport:
            yield transport


def wanted(played: list[list[Line]]) -> tuple[bytes, bytes, Line | None]:
    """Output, errors and end that a transcript tells of one command."""
    streams: dict[str, dict[int, bytes]] = {"stdout": {}, "stderr": {}}
    end = None
    for lines in played:
        for line in lines:
            for frame in line.get("any_order", [line.get("frame", {})]):
                if frame.get("type") in streams and line["from"] == "server":
                    streams[frame["type"]][frame["offset"]] = frame["data"].encode()
                if frame.get("type") == "exit":
                    end = frame
            if "binary" in line:
                raw = bytes.fromhex(line["binary"])
                streams["stdout" if raw[0] == 1 else "stderr"][int.from_bytes(raw[1:9])] = raw[9:]
            for stream, text in line.get("bytes", {}).items():
                streams[stream][0] = base64.b64decode(text)
    out, err = (b"".join(data for _, data in sorted(streams[s].items())) for s in ("stdout", "stderr"))
    return out, err, end


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.jsonl")))
async def test_a_transcript(name: str) -> None:
    played = sessions(name)
    if name == "ended":
        played = played[:1]  # what follows is another client's
    asked = next((line["frame"] for lines in played for line in lines if "frame" in line), {})
    spec = {key: asked[key] for key in ("argv", "command") if key in asked} | {
        "id": asked.get("command_id", "x")
    }
    player = Player(played)
    out, err, end = wanted(played)
    async with playing(player) as transport:
        if end is None:
            with pytest.raises(RingfenceError):
                await AsyncProcess.begin(transport, SANDBOX, spec)
            return
        async with asyncio.timeout(60):
            process = await AsyncProcess.begin(transport, SANDBOX, {**spec, "stdin": "keep_stdin" in asked})
            said = [
                line["frame"]
                for lines in played
                for line in lines
                if line["from"] == "client" and "frame" in line
            ]
            first = (await anext(process)).data if len(played) > 1 else b""  # before it is cut off
            for frame in said:
                if frame.get("type") == "input":
                    raw = frame["data"]
                    await process.write(base64.b64decode(raw) if frame.get("encoding") == "base64" else raw)
                elif frame.get("type") == "eof":
                    await process.close_stdin()
            result = await process.wait()
    assert (first + result.stdout_bytes, result.stderr_bytes, result.lost) == (out, err, 0)
    assert (result.exit_code, result.cause) == (end["exit_code"], end["cause"])
    assert player.firsts[0]["command_id"] == spec["id"]
    assert not player.left
    # A second connection asks from where the first one was, and starts nothing.
    for again in player.firsts[1:]:
        assert "argv" not in again
        assert again["stdout_offset"] == 4


def test_there_are_transcripts() -> None:
    assert len(list(GOLDEN.glob("*.jsonl"))) >= 8
