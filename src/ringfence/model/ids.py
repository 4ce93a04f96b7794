"""Identifiers: sortable by time of birth, safe in paths, host names and labels."""

from __future__ import annotations

import os
import re
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case: no i, l, o, u
SANDBOX_ID = re.compile(r"sb-[0-9a-hjkmnp-tv-z]{20}", re.ASCII)


def new_id(prefix: str) -> str:
    """``prefix-`` and 20 base-32 digits: 48 bits of milliseconds, then 52 random bits."""
    number = (int(time.time() * 1000) & (2**48 - 1)) << 52 | int.from_bytes(os.urandom(7)) >> 4
    return prefix + "-" + "".join([_ALPHABET[number >> shift & 31] for shift in range(95, -1, -5)])
