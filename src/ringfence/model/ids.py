"""Identifiers: sortable by time of birth, safe in paths, host names and labels."""

from __future__ import annotations

import os
import re
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case: no i, l, o, u
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
_SHIFTS = tuple(range(90, -1, -10))
SANDBOX_ID = re.compile(r"sb-[0-9a-hjkmnp-tv-z]{20}", re.ASCII)


_drawn: list[bytes] = []
_last = 0


def _random() -> bytes:
    """Seven bytes that nobody can guess, each given out once. Drawn many at a time: a system call lets other
    threads go first, which may take milliseconds."""
    try:
        return _drawn.pop()
    except IndexError:
        many = os.urandom(7 * 256)
        _drawn.extend(many[at : at + 7] for at in range(7, len(many), 7))
        return many[:7]


# A copy of the process must not give out the same ones.
os.register_at_fork(after_in_child=_drawn.clear)


def new_id(prefix: str) -> str:
    """``prefix-`` and 20 base-32 digits: 48 bits of milliseconds, then 52 random bits. In a process one is
    larger than those before, unless the clock is set back: lists by id are lists by age.
    """
    global _last
    number = (int(time.time() * 1000) & (2**48 - 1)) << 52 | int.from_bytes(_random()) >> 4
    if number <= _last and (_last >> 52) - (number >> 52) <= 1:  # else the clock was set back
        number = _last + 1 + (int.from_bytes(_random()) >> 16)
    _last = number
    return prefix + "-" + "".join([_PAIRS[number >> shift & 1023] for shift in _SHIFTS])
