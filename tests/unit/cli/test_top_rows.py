"""What ``ringfence top`` shows of a sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.cli.top import _rows


def _found(**usage: Any) -> dict[str, Any]:
    sandbox = {
        "id": "sb-1",
        "name": "",
        "state": "running",
        "runtime": "jail",
        "age": 60,
        "deadline": None,
        "usage": usage,
    }
    return {"at": 0.0, "sandboxes": [sandbox], "pools": []}


@pytest.mark.parametrize(
    ("memory", "shown"),
    [(None, ""), (0, ""), (700 * 1024 + 5, "700KiB"), (3 * 1024 * 1024 + 700_000, "3MiB")],
)
def test_memory_is_shown_in_whole_units_that_are_not_zero(memory: int | None, shown: str) -> None:
    (row,) = _rows(_found(memory=memory, cpu_seconds=None, processes=None))
    assert row[7] == shown
