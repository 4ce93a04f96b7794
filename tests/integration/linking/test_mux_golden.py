"""The transcripts of the mux hold for both real ends."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import muxing
import pytest
from ends import Link, muxed_agent

sys.path.append(str(Path(muxing.__file__).parents[1] / "link"))

from golden import Line

FOLDER = Path(muxing.__file__).parent
TRANSCRIPTS = sorted(FOLDER.glob("*.jsonl"))


def lines(path: Path) -> list[dict[str, Any]]:
    """Of one transcript."""
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_they_are_what_is_generated(tmp_path: Path) -> None:
    made = runpy.run_path(str(FOLDER / "generate.py"))["SCENES"]
    assert {path.stem for path in TRANSCRIPTS} == set(made)
    for path in TRANSCRIPTS:
        assert lines(path) == made[path.stem]


def receive(stream: muxing.Stream, line: Line, known: dict[str, bytes]) -> None:
    """The next frame is this one. LOST before READY is no answer: it may come or not."""
    got = stream.next()
    while got.type == muxing.LOST and "READY" in line.note:
        got = stream.next()
    told = line.match(got.data, known)
    assert told is not None, f"{line.note}: expected {line.frame}, got {got.data.hex()}"
    known |= told


def replay_agent(path: Path) -> None:
    """This test is the host."""
    with muxed_agent() as agent:
        stream = muxing.Stream(agent.host)
        known = {"nonce": os.urandom(16), "second": os.urandom(16), "pad": muxing.PAD}
        for item in lines(path):
            if "from" not in item:
                continue
            line = Line(item["from"], item["frame"], item["note"])
            if line.side == "host":
                stream.send(line.fill(known))
            else:
                receive(stream, line, known)


class Callers:
    """What the transcript's callers do at the host's socket."""

    def __init__(self) -> None:
        self.socks: dict[int, socket.socket] = {}

    def act(self, link: Link, item: dict[str, Any], known: dict[str, bytes]) -> None:
        """One line."""
        number, does = item["caller"], item["does"]
        data = b""
        if item["bytes"]:
            line = Line("host", item["bytes"], does)
            for name, size, _ in line.parts():
                if name:
                    known.setdefault(name, b"\1" * size)
            data = line.fill(known)
        if does == "dials":
            self.socks[number] = link.dial()
        elif does == "says":
            self.socks[number].sendall(data)
        elif does == "ends":
            self.socks[number].close()
        elif does == "is closed":
            assert self.socks[number].recv(1) == b""
        else:
            assert does == "hears"
            got = b""
            while len(got) < len(data):
                got += self.socks[number].recv(1 << 16)
            assert got == data


def replay_link(path: Path) -> None:
    """This test is the guest, and the callers."""
    ours, theirs = socket.socketpair()
    stream, callers, known = muxing.Stream(ours), Callers(), {"pad": muxing.PAD}
    link = Link(theirs, "fresh=1")
    try:
        for item in lines(path):
            if "caller" in item:
                callers.act(link, item, known)
                continue
            line = Line(item["from"], item["frame"], item["note"])
            if line.side == "guest":
                for name, size, _ in line.parts():
                    if name:
                        known.setdefault(name, b"\1" * size)
                stream.send(line.fill(known))
            elif "{pad" in str(line.frame):
                link.close()
                link = Link(theirs)
                while len(stream.buffer) < len(muxing.PAD):
                    stream.more()
                assert stream.buffer.startswith(muxing.PAD)
                stream.buffer = stream.buffer[len(muxing.PAD) :]
            else:
                receive(stream, line, known)
    finally:
        link.close()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_agent_answers_as_written(path: Path) -> None:
    replay_agent(path)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_link_process_speaks_as_written(path: Path) -> None:
    replay_link(path)


def test_a_byte_that_differs_is_noticed(tmp_path: Path) -> None:
    """The control of both replays."""
    changed = tmp_path / "changed.jsonl"
    text = (FOLDER / "links.jsonl").read_text()
    changed.write_text(text.replace("000003000200000052466d78", "000003000900000052466d78", 1))
    assert changed.read_text() != text
    with pytest.raises(AssertionError, match="expected"):
        replay_link(changed)
    answer = next(item for item in map(json.loads, text.splitlines()) if item.get("note") == "DATA PONG")
    other = answer["frame"].replace("52466d78", "52466d79")
    changed.write_text(text.replace(answer["frame"], other, 1))
    with pytest.raises(AssertionError, match="expected"):
        replay_agent(changed)
