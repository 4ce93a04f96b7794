"""The table of ways out in docs/SECURITY.md, from the committed outcomes. Run it to write the table anew."""

from __future__ import annotations

import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "SECURITY.md"
BEGIN, END = "<!-- ways: written by tests/security/egress_document.py -->", "<!-- end of ways -->"


def table() -> str:
    """The rows, in the order of the suite."""
    from security.tables.egress import WAYS

    lines = ["| way | outcome |", "| --- | --- |"]
    for way in WAYS:
        outcome = "**passes**" if way.outcome == "reached" else "stopped"
        if way.elsewhere:
            caught = "passes" if way.outcome == "reached" else "stopped"
            outcome = f"{caught} where connections are caught, elsewhere {way.elsewhere}"
        if way.control:
            outcome += f" (no control: {way.control})"
        lines.append(f"| `{way.name}`: {way.what} | {outcome} |")
    return "\n".join(lines)


def document() -> str:
    """The whole document with today's table."""
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    DOCUMENT.write_text(document())
