"""Sizes, durations and rates."""

# ruff: noqa: E501 (tables of cases)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.model.errors import InvalidRequest
from ringfence.model.quantities import format_duration, format_size, parse_duration, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), (7, 7), ("7", 7), ("1b", 1), ("1K", 1024), ("1k", 1024), ("1KiB", 1024), ("1kB", 1000), ("64M", 64 * 2**20),
        ("64MB", 64 * 10**6), ("2GiB", 2**31), ("1.5G", 3 * 2**29), ("1T", 2**40), (" 3 M ", 3 * 2**20),
    ],
)  # fmt: skip
def test_size(text: str | int, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    "text", ["", "M", "-1", "1e3", "1 2", "1MM", "0x10", "１", True, None, 1.5, "9" * 400, "inf", "1,5G"]
)
def test_not_a_size(text: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert caught.value.hint
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("text", "value"),
    [("250ms", 0.25), ("30s", 30), ("30", 30), (30, 30), (0.5, 0.5), ("10m", 600), ("2h", 7200), ("1d", 86400),
     ("1h30m", 5400), ("1h 30m", 5400), ("1.5h", 5400), ("1min", 60)],
)  # fmt: skip
def test_duration(text: str | float, value: float) -> None:
    assert parse_duration(text) == value


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1w", "1h-30m", "1.5.2s", "m", True, None, "9" * 400])
def test_not_a_duration(text: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_duration(text)  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [("10Mbit", 10**7), ("500kbit", 500_000), ("1Gbit", 10**9), ("1.5mbit", 1_500_000), (9, 9)],
)
def test_rate(text: str | int, value: int) -> None:
    assert parse_rate(text) == value


@pytest.mark.parametrize("text", ["10MB", "fast", "-1", "", True])
def test_not_a_rate(text: object) -> None:
    with pytest.raises(InvalidRequest):
        parse_rate(text)  # type: ignore[arg-type]


@given(st.integers(0, 2**50))
def test_a_formatted_size_is_close(count: int) -> None:
    assert abs(parse_size(format_size(count)) - count) <= count * 0.06


@given(st.integers(1, 10**7))
def test_a_formatted_duration_comes_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
