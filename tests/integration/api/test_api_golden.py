"""The golden transcripts of the WebSocket of commands, replayed; every SDK replays the same files."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from support.serving import Serving

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "ws"
FILES = sorted(FOLDER.glob("*.jsonl"))


def fits(wanted: Any, got: Any) -> bool:
    """Equal, where ``{number}`` and ``{text}`` stand for any."""
    if wanted == "{number}":
        return isinstance(got, int)
    if wanted == "{text}":
        return isinstance(got, str)
    if isinstance(wanted, dict):
        return (
            isinstance(got, dict)
            and wanted.keys() == got.keys()
            and all(fits(value, got[name]) for name, value in wanted.items())
        )
    return bool(wanted == got)


class Replay:
    """One transcript against the service. Output may come in pieces: they are put together again."""

    def __init__(self, service: Serving, sandbox: str) -> None:
        self.service = service
        self.sandbox = sandbox
        self.socket: ClientConnection | None = None
        self.ahead: list[Any] = []
        self.stack = contextlib.ExitStack()

    def connect(self, line: dict[str, Any]) -> None:
        url = self.service.url.replace("http", "ws") + line["connect"].replace("{sandbox}", self.sandbox)
        headers = {"authorization": f"Bearer {self.service.key}"}
        if "refused" in line:
            with pytest.raises(InvalidStatus) as refused:
                connect(url, additional_headers=headers, proxy=None, open_timeout=60)
            assert refused.value.response.status_code == line["refused"]
            return
        self.socket = self.stack.enter_context(
            connect(url, additional_headers=headers, proxy=None, open_timeout=60)
        )

    def next(self) -> Any:
        if self.ahead:
            return self.ahead.pop(0)
        assert self.socket is not None
        raw = self.socket.recv(60)
        return raw if isinstance(raw, bytes) else json.loads(raw)

    def output(self, wanted: dict[str, Any]) -> None:
        """One piece of output, in however many frames it comes."""
        whole = self.next()
        while whole["type"] == wanted["type"] and len(whole["data"]) < len(wanted["data"]):
            more = self.next()
            assert more["type"] == whole["type"] and more["offset"] == whole["offset"] + len(whole["data"])
            whole = {**whole, "data": whole["data"] + more["data"]}
        assert fits(wanted, whole), (wanted, whole)

    def line(self, line: dict[str, Any]) -> None:
        if "connect" in line:
            self.connect(line)
        elif "close" in line:
            assert self.socket is not None
            if line["from"] == "client":
                self.socket.close(line["close"])
            else:
                with pytest.raises(ConnectionClosed):
                    self.socket.recv(60)
            assert self.socket.close_code == line["close"]
            self.socket = None
        elif line["from"] == "client":
            assert self.socket is not None
            self.socket.send(json.dumps(line["frame"]))
        elif "any_order" in line:
            left = list(line["any_order"])
            for _ in range(len(left)):
                got = self.next()
                found = next((wanted for wanted in left if fits(wanted, got)), None)
                assert found is not None, (left, got)
                left.remove(found)
        elif "bytes" in line:
            self.bytes({name: base64.b64decode(text) for name, text in line["bytes"].items()})
        elif "binary" in line:
            wanted = bytes.fromhex(line["binary"])
            got = self.next()
            while len(got) < len(wanted):
                more = self.next()
                stream, offset = struct.unpack_from(">BQ", more)
                assert stream == wanted[0] and offset == len(got) - 9
                got += more[9:]
            assert got == wanted
        elif line["frame"]["type"] in ("stdout", "stderr"):
            self.output(line["frame"])
        else:
            got = self.next()
            assert fits(line["frame"], got), json.dumps([line["frame"], got])

    def bytes(self, wanted: dict[str, bytes]) -> None:
        got = dict.fromkeys(wanted, b"")
        while got != wanted:
            frame = self.next()
            data = frame["data"]
            piece = base64.b64decode(data) if frame["encoding"] == "base64" else data.encode()
            assert frame["offset"] == len(got[frame["type"]])
            got[frame["type"]] += piece
            assert len(got[frame["type"]]) <= len(wanted[frame["type"]])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(service: Serving, box: dict[str, Any], path: Path) -> None:
    replay = Replay(service, box["id"])
    try:
        for line in path.read_text().splitlines():
            replay.line(json.loads(line))
        assert not replay.ahead
    finally:
        replay.stack.close()


def test_there_are_transcripts() -> None:
    assert len(FILES) >= 10
