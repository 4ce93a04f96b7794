"""What a start that is under way has made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ringfence.node.cgroups import Group
    from ringfence.node.journal import Journal
    from ringfence.runtimes.contract import Handle


class Made:
    """What a start has made so far, for the undoing."""

    __slots__ = ("folder", "group", "handle", "journal", "name", "range")

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder: Path | None = None
        self.range: int | None = None
        self.journal: Journal | None = None
        self.group: Group | None = None
        self.handle: Handle | None = None
