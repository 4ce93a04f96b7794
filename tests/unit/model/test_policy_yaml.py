"""The YAML reader: one text has one meaning, and no text costs more than it is long."""

# ruff: noqa: E501 (the tables have several cases a line)

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.model import yaml_marks
from ringfence.model.errors import PolicyError
from ringfence.model.yaml_marks import Node, parse


def plain(node: Node) -> Any:
    if isinstance(node.value, list):
        return [plain(part) for part in node.value]
    if isinstance(node.value, dict):
        return {key: plain(part) for key, part in node.value.items()}
    return node.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-7", -7), ("+7", 7), ("0", 0), ("007", "007"), ("0x10", "0x10"), ("1_000", "1_000"),
        ("1:30", "1:30"), ("1.5", 1.5), ("1e3", "1e3"), (".5", ".5"), (".inf", ".inf"), (".nan", ".nan"),
        ("9" * 30, "9" * 30), ("true", True), ("false", False), ("True", "True"), ("yes", "yes"), ("on", "on"),
        ("no", "no"), ("~", None), ("null", None), ("Null", "Null"), ("'1'", "1"), ('"true"', "true"), ("''", ""),
        ("2001-01-01", "2001-01-01"), ("|\n  a\n  b\n", "a\nb\n"), ("a # b", "a"), ("١", "١"),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    found = plain(parse(f"x: {text}", "f"))["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: &x 1\n", 1, "anchors and aliases (&x)"),
        ("\na: &x {b: 1}\n", 2, "anchors and aliases"),
        ("a: *x\n", 1, "anchors and aliases (*x)"),
        ("a: !!str 1\n", 1, "tag"),
        ("a: !!python/object/apply:os.system [id]\n", 1, "tag"),
        ("a: !x {}\n", 1, "tag"),
        ("!!map {a: 1}\n", 1, "tag"),
        ("a: 1\n<<: {b: 2}\n", 2, "merging"),
        ("a: 1\nb: 2\na: 3\n", 3, "given twice, first in line 1"),
        ("a: 1\n'a': 3\n", 2, "given twice"),
        ("? [a]\n: 1\n", 1, "plain word"),
        ("? {a: 1}\n: 1\n", 1, "plain word"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("a: b: c\n", 1, "not valid YAML"),
        ("a:\n\t- b\n", 2, "not valid YAML"),
        ("a: 'x\n", 2, "not valid YAML"),
        ("a: 1\nb: \x07\n", 2, "not valid YAML"),
        ("%TAG ! tag:x,2000:\n---\na: !b 1\n", 3, "tag"),
    ],
)
def test_refused(text: str, line: int, what: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text, "f")
    assert what in caught.value.message
    assert caught.value.details["line"] == line


BOMBS = {
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "\n".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "deep flow": "a: " + "[" * 200_000,
    "deep mapping": "".join(" " * n + "a:\n" for n in range(700)),
    "deep keys": "{a: " * 100_000,
    "complex keys": "? " * 100_000 + "a",
    "many": "a: [" + "1," * 400_000 + "]",
    "many keys": "\n".join(f"k{n}: 1" for n in range(60_000)),
    "many documents": "---\n" * 200_000,
    "too large": "a: " + "x" * (1024**2 + 1),
    "anchors only": "a: [" + ",".join(f"&x{n} 1" for n in range(50_000)) + "]",
}


@pytest.mark.timeout(60)  # a parser that has gone off
@pytest.mark.parametrize("name", BOMBS)
def test_bomb(name: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(BOMBS[name], "f")
    assert len(caught.value.message) < 300


def test_the_pure_python_parser_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    for name in ("laughs", "deep flow", "complex keys", "anchors only"):
        with pytest.raises(PolicyError):
            parse(BOMBS[name], "f")
    assert plain(parse("a: {b: [1, 'x']}", "f")) == {"a": {"b": [1, "x"]}}


def test_lines() -> None:
    root = parse("a: 1\nb:\n  - 2\n  - c:\n      3\n", "f")
    assert isinstance(root.value, dict)
    assert root.keys == {"a": 1, "b": 2}
    [two, mapping] = root.value["b"].value  # type: ignore[misc, union-attr]
    assert (two.line, mapping.line) == (3, 4)
    assert mapping.keys == {"c": 4}


def _usable(value: object) -> bool:
    return not isinstance(value, float) or (math.isfinite(value) and "e" not in repr(value))


words = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x7f\ufeff\u2028\u2029"), max_size=12
)
scalars = st.one_of(
    words, st.integers(-(10**15), 10**15), st.booleans(), st.none(), st.floats().filter(_usable)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60)
@given(st.dictionaries(words, values, min_size=1, max_size=4))
def test_json_reads_as_itself(value: dict[str, Any]) -> None:
    # Depth is bounded by max_leaves, and JSON is YAML but for the characters left out above.
    try:
        expected = plain(yaml_marks.wrap(value))
    except PolicyError:
        return
    try:
        found = plain(parse(json.dumps(value, ensure_ascii=False), "f"))
    except PolicyError as error:
        assert "deep" in error.message or "not valid YAML" in error.message  # noqa: PT017
        return
    assert found == expected


@settings(max_examples=100)
@given(st.one_of(st.text(max_size=80), st.text("ab:-[]{}&*!|>'\"#%,?\n\t 1~<", max_size=60)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text, "f")
    except PolicyError as error:
        assert error.details["file"] == "f"  # noqa: PT017


def test_wrap_refuses_other_types() -> None:
    for value in ({1: 2}, {"a": object()}, {"a": b"x"}):
        with pytest.raises(PolicyError):
            yaml_marks.wrap(value)
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    with pytest.raises(PolicyError, match="deep"):
        yaml_marks.wrap(nested)
