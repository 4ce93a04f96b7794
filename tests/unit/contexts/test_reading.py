"""What comes from a kernel may be anything."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ringfence.guest.contexts.reading import MOST_LINE, Lines, Messages, Place, Records
from ringfence.guest.contexts.results import Failure, Finished, Result, Text, event_of

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(
    [
        "t",
        "x",
        "s",
        "text",
        "html",
        "png",
        "json",
        "data",
        "chart",
        "extra",
        "main",
        "rows",
        "n",
        "name",
        "value",
        "traceback",
        "d",
    ]
)
kinds = st.sampled_from(["stdout", "stderr", "result", "error", "end", "part", "last", "ready", "x", None])


def _line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


@given(
    st.lists(
        st.binary(max_size=300) | st.just(b"\n") | st.just(b"\x1e") | st.just(b"\x1eringfence end c 0\x1e")
    ),
    st.booleans(),
)
def test_no_bytes_are_a_fault(pieces: list[bytes], begun: bool) -> None:
    for reader in (Lines("c", begun), Records("c", begun)):
        at = {1: 0, 2: 0}
        for number, piece in enumerate(pieces):
            stream = 1 + number % 2
            for place, event in reader.feed(stream, at[stream], piece):
                assert isinstance(place, Place) and isinstance(event, Text | Result | Failure | Finished)
                json.dumps(event.as_dict()).encode()
            at[stream] += len(piece)


@given(st.dictionaries(names, junk), kinds)
def test_no_message_is_a_fault(message: dict[str, Any], kind: str | None) -> None:
    event = event_of({**message, "t": kind})
    if event is not None:
        json.dumps(event.as_dict(), ensure_ascii=False).encode()  # no lone surrogates


@given(st.data())
def test_messages_come_out_whole_however_they_are_cut(data: st.DataObject) -> None:
    said = [{"t": "stdout", "x": "c", "s": text} for text in data.draw(st.lists(st.text(), max_size=5))]
    stream = b"".join(_line(each) for each in said)
    messages = Messages(7)
    found, at = [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 40))
        found += messages.feed(7 + at, stream[at : at + size])
        at += size
    assert [message for _, message in found] == said
    if found:
        assert found[-1][0] == 7 + len(stream)


@given(st.binary(max_size=400).filter(lambda raw: b"\x1e" not in raw), st.data())
def test_output_of_bash_comes_out_whole_however_it_is_cut(raw: bytes, data: st.DataObject) -> None:
    stream = b"before\x1eringfence begin c 0\x1e" + raw + b"\x1eringfence end c 3\x1eafter"
    reader = Records("c")
    reader.feed(2, 0, b"\x1eringfence begin c 0\x1e\x1eringfence end c 3\x1e")
    events, at = [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 50))
        events += [event for _, event in reader.feed(1, at, stream[at : at + size])]
        at += size
    assert events[-1] == Finished("error", 0, 3)
    text = "".join(event.text for event in events if isinstance(event, Text))
    assert text == raw.decode("utf-8", "replace") or "\ufffd" in text


def test_parts_are_joined_and_bounded() -> None:
    whole = json.dumps({"t": "result", "x": "c", "text": "y" * 100_000})
    messages = Messages()
    data = _line({"t": "part", "x": "c", "d": whole[:60_000]}) + _line(
        {"t": "last", "x": "c", "d": whole[60_000:]}
    )
    ((after, message),) = messages.feed(0, data)
    assert after == len(data) and len(message["text"]) == 100_000
    part = _line({"t": "part", "x": "c", "d": "z" * 200_000})
    at = len(data)
    for _ in range(200):
        assert messages.feed(at, part) == []
        at += len(part)
    ((_, message),) = messages.feed(at, _line({"t": "last", "x": "c", "d": ""}))
    assert "left out" in message["text"]


def test_a_line_without_end_costs_its_bound_and_no_more() -> None:
    messages = Messages()
    at = 0
    for _ in range(100):
        assert messages.feed(at, b"x" * 60_000) == []
        at += 60_000
        assert len(messages._held) <= MOST_LINE + 60_000
    assert [m["s"] for _, m in messages.feed(at, b"\n" + _line({"t": "stdout", "s": "on"}))] == ["on"]


def test_deep_json_is_skipped() -> None:
    reader = Lines("c")
    assert (
        reader.feed(1, 0, b'{"t":"result","x":"c","json":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n") == []
    )
    deep = b'{"t":"result","x":"c","json":' + b"[" * 500 + b"]" * 500 + b"}\n"
    at = 29 + 200_002
    for _, event in reader.feed(1, at, deep):
        json.dumps(event.as_dict())


def test_pictures_that_are_no_base64_are_dropped() -> None:
    event = event_of({"t": "result", "text": "t", "png": "<script>", "html": "\ud800"})
    assert event == Result(text="t", html="?")
