"""What `ringfence serve` was asked for; it crosses to the API's process as JSON, never on a command line."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from ringfence.model.values import dataclass


@dataclass(frozen=True, slots=True)
class Worker:
    """One API process. ``listeners`` are numbers of descriptors that it inherits; ``tls`` too (certificate,
    key), ``told`` is where it says that it is ready and which key it made.

    ``egress_webhook``: is told each open question of the doors. ``egress_key``: the command that prints the
    key of their secrets. ``node``: the node's socket. ``owner``: names this process among those that
    share the store, also after a restart. ``state``: a folder of the API's own. ``uid``: what it must run
    as, without any capability; ``None``: as whoever started it.
    """

    store: str
    node: str
    owner: str
    state: str
    listeners: tuple[int, ...]
    told: int
    domain: str = "localhost"
    public_url: str = ""
    tls: tuple[int, int] | None = None
    uid: int | None = None
    egress: bool = True
    egress_webhook: str = ""
    egress_key: tuple[str, ...] = ()
    cpu_ratio: float = 0.0
    memory_ratio: float = 0.0
    keep_events: float = 7.0  # days
    settings: dict[str, Any] | None = None

    def to_json(self) -> bytes:
        """For the other process."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Worker:
        """From the other process."""
        given = json.loads(raw)
        known = {field.name for field in fields(cls)}
        assert given.keys() <= known, given.keys() - known
        given["listeners"] = tuple(given["listeners"])
        given["egress_key"] = tuple(given.get("egress_key", ()))
        given["tls"] = tuple(given["tls"]) if given.get("tls") else None
        return cls(**given)
