"""The versions of the schema: numbered files of a dialect, each applied once, in order."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ringfence.model.errors import WrongState

_NAME = re.compile(r"(\d{3})_\w+\.sql", re.ASCII)


@cache
def migrations(dialect: str) -> tuple[tuple[int, str], ...]:
    """Version and text of every migration of a dialect (``sqlite``, ``postgres``), ascending from 1."""
    found = []
    for file in sorted((Path(__file__).parent / "sql" / dialect).iterdir()):
        if match := _NAME.fullmatch(file.name):
            found.append((int(match[1]), file.read_text(encoding="utf-8")))
    if [number for number, _ in found] != list(range(1, len(found) + 1)):
        raise WrongState(f"the migrations of {dialect} are incomplete: {[number for number, _ in found]}")
    return tuple(found)


def missing(dialect: str, version: int) -> tuple[tuple[int, str], ...]:
    """What a schema of this version lacks; 0 is an empty database.

    Raises:
        WrongState: the schema is newer than this Ringfence.
    """
    known = migrations(dialect)
    if version > len(known):
        raise WrongState(
            f"the store has version {version}; this Ringfence knows versions up to {len(known)}",
            hint="run the Ringfence that wrote it, or a newer one",
            version=version,
            known=len(known),
        )
    return known[version:]
