"""The golden transcripts hold: for the real agent, and for the codec of the Python client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from wall import Wall

from ringfence.guest import fields, frames

sys.path.append(str(Path(__file__).parents[2] / "golden" / "link"))

import golden
from golden import Line


@pytest.fixture
def networked(walled: Wall) -> Wall:
    """A sandbox whose loopback is up."""
    walled.client()
    spaces = ["--net"] if os.geteuid() == 0 else ["--user", "--net", "--preserve-credentials"]
    subprocess.run(
        ["nsenter", f"--target={walled.pid}", *spaces, "ip", "link", "set", "lo", "up"],
        check=True,
        timeout=120,
    )
    return walled


def groups(lines: list[Line]) -> list[tuple[list[Line], list[Line]]]:
    """Pairs of what the host sends and what the guest then answers."""
    found: list[tuple[list[Line], list[Line]]] = [([], [])]
    for line in lines:
        if line.side == "host" and found[-1][1]:
            found.append(([], []))
        found[-1][line.side == "guest"].append(line)
    return found


def replay(walled: Wall, lines: list[Line]) -> None:
    """Send the host's lines, and take the guest's: within one group, frames of different channels or streams
    may pass each other, all others keep their order.
    """
    client = walled.client(hello=False)
    known: dict[str, bytes] = {}
    for asked, answers in groups(lines):
        for line in asked:
            client.sock.sendall(line.fill(known))
        waiting = [line for line in answers if line.frame is not None]
        while waiting:
            got = client.receive()
            data = frames.HEADER.pack(len(got.payload), got.channel, got.type, 0, 0) + got.payload
            place = golden.key(data)
            line = next((line for line in waiting if golden.key(line.example()) == place), None)
            assert line is not None, f"not expected now: {data.hex()}"
            if got.type == frames.ERROR:  # the text is for people
                assert golden.split(line.example())[2][:4] == got.payload[:4], line.note
                waiting.remove(line)
                continue
            told = line.match(data, known)
            assert told is not None, f"{line.note}: expected {line.frame}, got {data.hex()}"
            known |= told
            waiting.remove(line)
        if any(line.frame is None for line in answers):
            with pytest.raises(EOFError):
                client.receive()


@pytest.mark.parametrize("path", golden.transcripts(), ids=lambda path: path.stem)
def test_the_agent_answers_as_written(request: pytest.FixtureRequest, path: Path) -> None:
    if path.stem == "shutdown":  # it is meant to end
        from wall import wall

        with wall() as walled:
            replay(walled, golden.load(path))
            assert walled.process.wait(120) == 0
        return
    replay(request.getfixturevalue("networked"), golden.load(path))


def test_an_answer_that_differs_is_noticed(walled: Wall) -> None:
    """The control of the replay: one changed byte fails it."""
    lines = golden.load(golden.FOLDER / "ping.jsonl")
    last = lines[-1]
    assert last.frame is not None
    lines[-1] = Line(last.side, last.frame[:-2] + "00", last.note)
    with pytest.raises(AssertionError, match="expected"):
        replay(walled, lines)


@pytest.mark.parametrize("path", golden.transcripts(), ids=lambda path: path.stem)
def test_the_client_codec_reads_and_writes_them(path: Path) -> None:
    parser = frames.FrameParser()
    for line in golden.load(path):
        if line.frame is None:
            continue
        data = line.example()
        kind, channel, payload = golden.split(data)
        if line.side == "guest":
            got = [(found[0], found[1], bytes(found[2])) for found in parser.feed(data)]
            assert got in ([(kind, channel, payload)], [(channel, kind, payload)])
            continue
        if kind == frames.OPEN:
            number, rest = frames.parse_u16(memoryview(payload), "OPEN")
            items = [(tag, value) for tag, values in raw_fields(bytes(rest)) for value in values]
            assert frames.open_frame(channel, number, fields.encode(items)) == data
        elif kind == frames.DATA:
            stream, offset, body = frames.parse_data(memoryview(payload))
            assert frames.data_frame(channel, stream, offset, body) == data
        elif kind == frames.EOF:
            assert frames.eof_frame(channel, *frames.parse_eof(memoryview(payload))) == data
        elif kind == frames.CREDIT:
            assert frames.credit_frame(channel, *frames.parse_credit(memoryview(payload))) == data
        elif kind == frames.CLOSE:
            assert frames.close_frame(channel) == data
        else:
            assert frames.frame(channel, kind, payload) == data


def raw_fields(payload: bytes) -> list[tuple[int, list[bytes]]]:
    """Tags in the order of their first value, each with all its values."""
    found = fields.decode(payload)
    tags, at = [], 0
    while at < len(payload):
        tag, size = payload[at], int.from_bytes(payload[at + 1 : at + 5], "little")
        at += 5 + size
        if tag not in tags:
            tags.append(tag)
    return [(tag, found.all(tag)) for tag in tags]
