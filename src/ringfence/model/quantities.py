"""Sizes, durations and rates as people write them: ``64M``, ``2GiB``, ``30m``, ``10Mbit``."""

from __future__ import annotations

import re

from ringfence.model.errors import InvalidRequest

_SIZES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    # A bare K, M, G means the binary unit, as docker and systemd read it; only "kB", "MB" are decimal.
    _SIZES[_letter] = _SIZES[_letter + "ib"] = _SIZES[_letter + "i"] = 1024**_power
    _SIZES[_letter + "b"] = 1000**_power
_TIMES = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes. ``64M`` and ``64MiB`` are binary, ``64MB`` decimal, a bare number is bytes.

    Raises:
        InvalidRequest: not a number with a known unit.
    """
    value, unit = _split(text, "size", "64M, 2GiB or 1000000")
    if unit not in _SIZES:
        raise InvalidRequest(f"unknown unit in size {text!r}", hint="use K, M, G or T, as in 64M or 2GiB")
    return int(value * _SIZES[unit])


def parse_duration(text: str | int | float) -> float:
    """Seconds. ``250ms``, ``30s``, ``10m``, ``2h``, ``1d``, ``1h30m``; a bare number is seconds.

    Raises:
        InvalidRequest: not a duration.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(text), re.ASCII)
    rebuilt = re.sub(r"\s+", "", str(text))
    if (
        not parts
        or "".join(n + u for n, u in parts) != rebuilt
        or any(u.lower() not in _TIMES for _, u in parts)
    ):
        raise InvalidRequest(f"{text!r} is not a duration", hint="write 250ms, 30s, 10m, 2h or 1h30m")
    total = sum(float(n) * _TIMES[u.lower()] for n, u in parts)
    if total == float("inf"):
        raise InvalidRequest(
            f"{str(text)[:20]}… is too large a duration", hint="write 250ms, 30s, 10m, 2h or 1h30m"
        )
    return total


def parse_rate(text: str | int) -> int:
    """Bits a second. ``10Mbit``, ``1Gbit``, ``500kbit``; decimal units, as networks are sold."""
    value, unit = _split(text, "rate", "10Mbit")
    factors = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "": 1}
    if unit not in factors:
        raise InvalidRequest(f"unknown unit in rate {text!r}", hint="use kbit, Mbit or Gbit")
    return int(value * factors[unit])


def format_size(count: int) -> str:
    """``1536`` as ``1.5KiB``: the shortest binary form with at most one decimal."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.1f}".removesuffix(".0") + unit
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + "TiB"


def format_duration(seconds: float) -> str:
    """``5400`` as ``1h30m``; below a second in milliseconds."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    rest, text = seconds, ""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if rest >= length:
            text += f"{int(rest // length)}{unit}"
            rest %= length
    return text + (f"{rest:.1f}".removesuffix(".0") + "s" if rest or not text else "")


def _split(text: str | int, what: str, example: str) -> tuple[float, str]:
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise InvalidRequest(f"{text!r} is not a {what}", hint=f"write {example}")
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        raise InvalidRequest(f"{text!r} is not a {what}", hint=f"write {example}")
    value = float(match[1])
    if value > 1e18:  # beyond 64 bits: no size or rate is that large
        raise InvalidRequest(f"{str(text)[:20]}… is too large a {what}", hint=f"write {example}")
    return value, match[2].lower()
