"""The codec against every cut, every order and garbage: hypothesis looks for what we did not think of."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.guest import fields as fields_module
from ringfence.guest import frames
from ringfence.guest.fields import clean, decode, encode
from ringfence.guest.frames import FrameParser
from ringfence.model.errors import ProtocolViolation

FRAMES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 11), st.binary(max_size=300)), max_size=20
)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({min(c, len(data)) for c in cuts})
    edges = [0, *marks, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def parse(pieces: list[bytes], parser: FrameParser | None = None) -> list[tuple[int, int, bytes]]:
    parser = parser or FrameParser()
    return [(c, k, bytes(p)) for piece in pieces for c, k, p in parser.feed(piece)]


@given(FRAMES, st.lists(st.integers(0, 6000), max_size=40))
def test_frames_survive_any_cut(items: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frames.frame(*item) for item in items)
    parser = FrameParser()
    assert parse(cut(stream, cuts), parser) == items
    assert parser.held == 0


def test_frames_survive_a_cut_at_every_byte() -> None:
    items = [(1, frames.DATA, b"x" * 9 + b"abc"), (0, frames.PING, b""), (2**32 - 1, frames.REPLY, b"y" * 40)]
    stream = b"".join(frames.frame(*item) for item in items)
    for at in range(len(stream) + 1):
        assert parse([stream[:at], stream[at:]]) == items
    assert parse([bytes([byte]) for byte in stream]) == items


def test_the_largest_frames_fit_and_one_byte_more_does_not() -> None:
    item = (7, frames.DATA, bytes(frames.MAX_PAYLOAD))
    stream = frames.frame(*item)
    assert len(stream) == frames.MAX_FRAME
    # Out of step with the buffer, so that frames lie across its end.
    assert parse(cut(stream * 5, [11, 65_000, 65_537, 200_001])) == [item] * 5
    with pytest.raises(ValueError, match="does not fit"):
        frames.frame(7, frames.DATA, bytes(frames.MAX_PAYLOAD + 1))
    with pytest.raises(ProtocolViolation, match="65525"):
        parse([struct.pack("<IIBBH", frames.MAX_PAYLOAD + 1, 7, frames.DATA, 0, 0)])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((2**32 - 1, 1, 5, 0, 0), "bytes; the limit"),
        ((0, 1, 0, 0, 0), "unknown type"),
        ((0, 1, 12, 0, 0), "unknown type"),
        ((0, 1, 255, 0, 0), "unknown type"),
        ((0, 1, 5, 1, 0), "reserved"),
        ((0, 1, 5, 0, 1), "reserved"),
        ((0, 1, 5, 128, 0x8000), "reserved"),
    ],
)
def test_a_wrong_header_is_a_violation(header: tuple[int, ...], message: str) -> None:
    assert parse([struct.pack("<IIBBH", 0, 1, 5, 0, 0)])  # the control: it is the header that is wrong
    with pytest.raises(ProtocolViolation, match=message):
        parse([struct.pack("<IIBBH", *header)])


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=30), st.booleans())
def test_garbage_is_parsed_or_refused_and_never_hoarded(pieces: list[bytes], seek: bool) -> None:
    parser = FrameParser()
    if seek:
        parser.seek()
    try:
        for channel, kind, payload in (item for piece in pieces for item in parser.feed(piece)):
            assert 0 <= channel < 2**32
            assert frames.HELLO <= kind <= frames.PONG
            assert len(payload) <= frames.MAX_PAYLOAD
    except ProtocolViolation:
        return
    assert parser.held < frames.MAX_FRAME
    assert len(parser.space())


HELLO = frames.frame(0, frames.HELLO, encode([(1, frames.MAGIC), (2, 1), (3, bytes(16))]))


@given(
    st.binary(max_size=500).filter(lambda b: frames.MAGIC not in b), st.lists(st.integers(0, 700), max_size=9)
)
def test_seeking_finds_hello_behind_any_garbage(garbage: bytes, cuts: list[int]) -> None:
    parser = FrameParser()
    parser.seek()
    found = parse(cut(garbage + HELLO + frames.close_frame(5), cuts), parser)
    assert found == [(0, frames.HELLO, HELLO[12:]), (5, frames.CLOSE, b"")]


def test_seeking_drops_a_long_stream_without_holding_it() -> None:
    parser = FrameParser()
    parser.seek()
    assert parse([b"\xff" * 1_000_000], parser) == []
    assert parser.held < 64
    assert parse([HELLO[:20], HELLO[20:]], parser) == [(0, frames.HELLO, HELLO[12:])]


def test_seeking_skips_a_pattern_with_an_absurd_size() -> None:
    parser = FrameParser()
    parser.seek()
    false = struct.pack("<I", 2**31) + HELLO[4:]
    assert parse([false, HELLO], parser) == [(0, frames.HELLO, HELLO[12:])]


VALUES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=60)), max_size=12)


@given(VALUES)
def test_fields_survive(items: list[tuple[int, bytes]]) -> None:
    found = decode(encode(items))
    for tag in range(256):
        assert found.all(tag) == [value for t, value in items if t == tag]


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.text(max_size=40))
def test_numbers_and_text_survive(number: int, signed: int, text: str) -> None:
    found = decode(encode([(1, number), (2, signed), (3, text), (4, None)]))
    assert found.number(1) == number
    assert found.signed(2) == signed
    assert found.raw(3) == text.encode()
    assert 4 not in found


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_garbage_fields_are_read_or_refused(data: bytes) -> None:
    try:
        found = decode(data)
    except ProtocolViolation:
        return
    assert sum(len(v) + 5 for tag in range(256) for v in found.all(tag)) == len(data)


@pytest.mark.parametrize("data", [b"\1", b"\1\1\0\0", b"\1\1\0\0\0", b"\1\xff\xff\xff\xffx", b"\1\0\0\0\0\2"])
def test_a_field_that_is_cut_off_is_a_violation(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(data)


def test_a_field_of_the_wrong_form_is_a_violation() -> None:
    found = decode(encode([(1, b"1234567"), (2, b"123456789"), (3, 7)]))
    for tag in (1, 2):
        with pytest.raises(ProtocolViolation, match="not a number"):
            found.number(tag)
    with pytest.raises(ProtocolViolation, match="missing"):
        found.number(9)
    with pytest.raises(ProtocolViolation, match="missing"):
        found.raw(9)
    with pytest.raises(ProtocolViolation, match="larger"):
        found.number(3, most=6)
    assert found.number(3, most=7) == 7


@given(st.binary(max_size=3000), st.integers(1, 600))
def test_text_from_the_guest_is_bounded_and_can_not_drive_a_terminal(raw: bytes, limit: int) -> None:
    text = clean(raw, limit)
    assert len(text) <= limit
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E for c in text)


def test_clean_keeps_what_is_harmless() -> None:
    assert clean("größe 漢字 ✓ 🎉".encode()) == "größe 漢字 ✓ 🎉"
    assert "\x1b" not in clean(b"\x1b]0;owned\x07\x1b[2J")
    assert clean(b"a" * 600) == "a" * 511 + "…"
    assert fields_module.encode([(1, None)]) == b""


def test_an_error_text_is_cut_between_characters() -> None:
    payload = frames.error_frame(3, 2, "é" * 400)[12:]
    number, text = frames.parse_error(memoryview(payload))
    assert number == 2
    assert text.decode() == "é" * 256


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_payload_parsers_refuse_or_agree(data: bytes) -> None:
    view = memoryview(data)
    for parser in (frames.parse_data, frames.parse_eof, frames.parse_credit, frames.parse_error):
        try:
            parser(view)
        except ProtocolViolation:
            continue
