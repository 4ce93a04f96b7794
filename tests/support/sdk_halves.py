"""Both halves of the SDK, as one table of cases sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

SMALL = {"memory": "128MiB", "disk": "32MiB", "runtime": "jail", "timeout": 600}


class Half(NamedTuple):
    """One half of the SDK, as coroutines."""

    name: str
    Sandbox: Any
    Pool: Any
    Volume: Any
    Template: Any
    Snapshot: Any
    Service: Any
