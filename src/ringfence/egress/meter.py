"""What was used: requests, bytes and money, by rule, sandbox and project."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.egress.door import Door
    from ringfence.egress.policy import Rule


class Meter:
    """Counts in memory."""

    def __init__(self) -> None:
        self.bytes: dict[str, list[int]] = {}

    def add(self, door: Door, rule: Rule | None, sent: int = 0, received: int = 0) -> None:
        """Bytes have passed."""
        counts = self.bytes.setdefault(door.spec.sandbox, [0, 0])
        counts[0] += sent
        counts[1] += received
