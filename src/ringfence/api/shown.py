"""What the orchestrator's values look like on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringfence.control.records import Sandbox
from ringfence.store.contract import Event


def sandbox(value: Sandbox) -> dict[str, Any]:
    """A sandbox. Times are seconds since the epoch, ``null`` for not yet."""
    shown = value.as_dict()
    for name, key in (("created", "created_at"), ("started", "started_at"), ("ended", "ended_at")):
        shown[key] = shown.pop(name) or None
    shown["deadline"] = shown["deadline"] or None
    shown["active_at"] = shown.pop("active") or None
    shown["boundary"] = shown["boundary"] or None
    shown["error"] = shown["error"] or None
    return shown


def event(value: Event) -> dict[str, Any]:
    """An event."""
    return {
        "number": value.number,
        "name": value.name,
        "subject": value.subject,
        "kind": value.kind,
        "at": value.at,
        "data": _plain(value.data),
    }


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(value)


def snapshot(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot."""
    shown = dict(facts)
    shown["created_at"] = shown.pop("created", None)
    return shown
