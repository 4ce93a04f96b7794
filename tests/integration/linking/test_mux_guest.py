"""What a broken or replaced host process can do to the agent's end: it costs the links, and nothing else."""

from __future__ import annotations

import os
import random
import struct

import pytest
from ends import muxed_agent, muxing
from muxing import CLOSE, CREDIT, DATA, LOST, NONCE, OPEN, READY, RESET, frame, record
from wall import HEADER, HELLO, MAGIC, PING, fields

GREETING = fields((1, MAGIC), (2, 1), (3, NONCE), (4, "control"))
HELLO_FRAME = HEADER.pack(len(GREETING), 0, HELLO, 0, 0) + GREETING
PING_FRAME = HEADER.pack(1, 0, PING, 0, 0) + b"!"
BIG = frame(DATA, 1, b"x" * 65_000)

VIOLATIONS: dict[str, bytes] = {
    "too large": frame(DATA, 1, size=65_525),
    "type 0": frame(0, 1),
    "type 8": frame(8, 1),
    "byte that must be zero": frame(OPEN, 7, zero=1),
    "wrong seal": frame(OPEN, 7)[:-1] + b"y",
    "OPEN twice": frame(OPEN, 1),
    "OPEN of link 0": frame(OPEN, 0),
    "OPEN with a payload": frame(OPEN, 7, b"x"),
    "never opened": frame(DATA, 99, b"x"),
    "link 2^32-1": frame(CLOSE, 2**32 - 1),
    "empty DATA": frame(DATA, 1),
    "DATA beyond the window": BIG * 30,
    "short CREDIT": frame(CREDIT, 1, b"x"),
    "CREDIT of nothing": muxing.credit(1, 0),
    "CREDIT of 4 GiB": muxing.credit(1, 2**32 - 1),
    "CREDIT again and again": muxing.credit(1, 1 << 24) * 3,
    "CLOSE with a payload": frame(CLOSE, 1, b"x"),
    "CLOSE twice": frame(CLOSE, 1) * 2,
    "READY": record(READY),
    "LOST": frame(LOST),
    "RESET on a link": frame(RESET, 1, record(RESET)[8:-4]),
    "RESET with other magic": frame(RESET, 0, b"RINGFENCE-MUX-2\n" + record(RESET)[24:-4]),
    "RESET too short": frame(RESET, 0, record(RESET)[8:-5]),
    "RESET without a window": record(RESET, window=0),
    "zeros": bytes(8),
    "too many links": b"".join(frame(OPEN, number) for number in range(1000, 1400)),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_is_told_and_costs_the_links(what: str) -> None:
    with muxed_agent() as agent:
        stream = agent.begin()
        stream.send(frame(OPEN, 1))
        stream.send(VIOLATIONS[what])
        while stream.next().type != LOST:
            pass
        nonce = os.urandom(16)
        stream.send(frame(OPEN, 1), frame(DATA, 1, b"to nobody"), record(RESET, nonce))
        assert stream.find(READY) == nonce
        stream.send(frame(OPEN, 1), frame(DATA, 1, HELLO_FRAME + PING_FRAME))
        stream.take(DATA, 1)


def test_garbage_of_any_kind_is_survived() -> None:
    chance = random.Random(3)
    with muxed_agent() as agent:
        stream = agent.begin()
        for _ in range(60):
            parts = [frame(OPEN, 1), frame(DATA, 1, HELLO_FRAME)]
            for _ in range(chance.randrange(1, 6)):
                part = bytearray(chance.choice([*VIOLATIONS.values(), record(RESET), BIG])[:70_000])
                for _ in range(chance.randrange(3)):
                    part[chance.randrange(len(part))] = chance.randrange(256)
                parts.append(bytes(part[: chance.randrange(1, len(part) + 1)]))
            stream.send(*parts)
            nonce = chance.randbytes(16)
            stream.send(muxing.PAD, record(RESET, nonce))
            assert stream.find(READY, nonce) == nonce


def test_a_frame_byte_by_byte() -> None:
    with muxed_agent() as agent:
        stream = agent.begin()
        for byte in frame(OPEN, 5) + frame(DATA, 5, HELLO_FRAME) + frame(DATA, 5, PING_FRAME):
            stream.send(bytes([byte]))
        stream.take(DATA, 5)


def test_a_reset_in_what_a_dead_host_had_begun_is_not_believed_for_long() -> None:
    """An upload may contain anything, the beginning of all things too; what counts is the last one."""
    with muxed_agent() as agent:
        stream = agent.begin()
        stream.send(frame(OPEN, 1))
        forged = frame(DATA, 1, record(RESET, b"f" * 16) + b"x" * 1000)
        stream.send(forged[:-50])
        nonce = os.urandom(16)
        stream.send(muxing.PAD, record(RESET, nonce))
        assert stream.find(READY, nonce) == nonce
        stream.send(frame(OPEN, 1), frame(DATA, 1, HELLO_FRAME))
        stream.take(DATA, 1)


def test_it_sends_no_more_than_it_was_given_credit_for() -> None:
    with muxed_agent() as agent:
        stream = muxing.Stream(agent.host)
        stream.send(record(RESET, window=100))
        stream.take(READY)
        stream.send(frame(OPEN, 1), frame(DATA, 1, HELLO_FRAME))
        got = stream.take(DATA, 1).payload
        while len(got) < 100:
            got += stream.take(DATA, 1).payload
        assert len(got) == 100
        stream.send(frame(OPEN, 2), frame(CLOSE, 2))
        stream.take(CLOSE, 2)  # nothing of link 1 came before it
        stream.send(muxing.credit(1, 7))
        assert len(stream.take(DATA, 1).payload) == 7


def test_what_was_said_before_a_close_is_heard() -> None:
    with muxed_agent() as agent:
        stream = agent.begin()
        started = struct.pack("<H", 1) + fields((1, "d"), (2, "touch"), (2, "heard"), (5, 32))
        stream.send(frame(OPEN, 1))
        stream.send(frame(DATA, 1, HELLO_FRAME + HEADER.pack(len(started), 1, 2, 0, 0) + started))
        stream.send(frame(CLOSE, 1))
        while stream.next().type != CLOSE:
            pass
        from ends import eventually

        eventually((agent.work / "heard").exists, "the command was not started")


def test_a_limit_of_links_holds() -> None:
    with muxed_agent("max_links=2") as agent:
        stream = agent.begin()
        stream.send(frame(OPEN, 1), frame(OPEN, 2), frame(OPEN, 3))
        stream.take(CLOSE, 3)
        stream.send(frame(DATA, 2, HELLO_FRAME))
        stream.take(DATA, 2)
