"""Kept sandboxes, one by one: to look at, to visit, or to take over.

A node that opens with ``adopt=False`` holds none of them. *Visiting* needs no right: a link is opened to the
agent as any number of processes may, and whoever holds the sandbox goes on holding it. *Taking* makes this
node the holder, which is possible only where the former one is dead (a ``ringfence`` that has ended).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import NotFound, RingfenceError, WrongState
from ringfence.model.ids import SANDBOX_ID
from ringfence.node import supervising
from ringfence.node.groups import of_record
from ringfence.node.journal import HANDLE, Journal, handle_from_json, request_from_json, root_from_json

if TYPE_CHECKING:
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.node.service import Node


def names(node: Node) -> list[str]:
    """Ids of the kept sandboxes of the state root that are alive, the oldest first."""
    found = []
    for name in sorted(os.listdir(node.state.sandboxes)):
        journal = Journal.load(node.state.sandboxes / name) if SANDBOX_ID.fullmatch(name) else None
        if journal is not None and _stands(node, journal.record):
            found.append(name)
    return found


def holder(node: Node, record: dict[str, Any]) -> int | None:
    """The pid of the living process that holds a sandbox; None if nobody does."""
    owner = str(record.get("owner", ""))
    if owner == node.state.owner:
        return os.getpid()
    if node.state.is_dead(owner):
        return None
    with contextlib.suppress(ValueError, IndexError):
        return int(owner.split(".")[1])
    return None


def look(node: Node, name: str) -> dict[str, Any] | None:
    """What is known of a kept sandbox without asking it, JSON-able; None if it is gone.

    id, runtime, state (running, paused), labels, owner, template, snapshot (that it lies over),
    policy_digest, started_at and deadline (seconds since the epoch), holder (a pid), usage (``output_bytes``
    is known to its holder alone).
    """
    journal = Journal.load(node.state.sandboxes / name)
    if journal is None or not _stands(node, journal.record):
        return None
    record = journal.record
    try:
        request = request_from_json(record["request"])
    except (KeyError, TypeError, ValueError):
        return None
    group = of_record(node.cgroups, record)
    return {
        "id": name,
        "runtime": record["runtime"],
        "state": "paused" if record.get("paused") else "running",
        "labels": request.labels,
        "owner": asdict(request.owner),
        "template": request.template,
        "snapshot": record.get("snapshot"),
        "policy_digest": request.policy.wall.digest(),
        "started_at": record["started"],
        "deadline": record.get("deadline_at") or record["started"] + request.policy.door.limits.timeout,
        "service": record.get("service", ""),
        "holder": holder(node, record),
        "usage": {
            "cpu_seconds": group.cpu_seconds(),
            "memory_peak": group.memory_peak(),
            "output_bytes": None,
            "wall_seconds": max(0.0, time.time() - record["started"]),
        },
    }


async def visit(node: Node, name: str) -> NodeSandbox:
    """A sandbox to open links to; somebody else may hold it. End it with ``detach``.

    Raises:
        NotFound: there is no such sandbox; the hint names those that are close.
    """
    sandbox = await _load(node, name)
    sandbox.watch(limits=False)
    return sandbox


async def take(node: Node, name: str) -> NodeSandbox:
    """A sandbox that this node holds from now on; ``Node.close`` lets go of it again.

    Raises:
        NotFound: there is no such sandbox; the hint names those that are close.
        WrongState: another process holds it.
    """
    journal = _journal(node, name)
    service = str(journal.record.get("service", ""))
    if service not in ("", node.service):
        raise WrongState(
            f"sandbox {name} belongs to the service {service!r}",
            hint="end it there: `ringfence sandbox kill`, or DELETE /v1/sandboxes/ID",
            id=name,
        )
    owner = str(journal.record.get("owner", ""))
    with node.state.burying(owner) as dead:
        journal = _journal(node, name)
        now = str(journal.record.get("owner", ""))
        if not dead or now != owner:
            pid = holder(node, journal.record)
            raise WrongState(
                f"sandbox {name} is in the hands of process {pid or '?'}",
                hint="wait until that `ringfence` has ended; `ringfence sandbox exec` works meanwhile",
                id=name,
            )
        journal.append({"owner": node.state.owner})
    from ringfence.node.sweeping import rouse

    sandbox = await _load(node, name)
    await rouse(node, sandbox)
    node.adopted(sandbox)
    return sandbox


async def _load(node: Node, name: str) -> NodeSandbox:
    journal = _journal(node, name)
    record = journal.record
    try:
        handle = handle_from_json(record["handle"])
        request = request_from_json(record["request"])
        root = root_from_json(record["root"], request)
    except (KeyError, TypeError, ValueError) as error:
        raise WrongState(
            f"the journal of sandbox {name} makes no sense", hint=f"ringfence stop {name}"
        ) from error
    runtime = await node.runtime(handle.runtime)
    if not await runtime.recover(handle):
        raise _unknown(node, name)
    return node.adoption(runtime, request, handle, root, journal)


def _journal(node: Node, name: str) -> Journal:
    journal = Journal.load(node.state.sandboxes / name) if SANDBOX_ID.fullmatch(name) else None
    if journal is None or not _stands(node, journal.record):
        raise _unknown(node, name)
    return journal


def _stands(node: Node, record: dict[str, Any]) -> bool:
    from ringfence.node.sweeping import alive

    if not record.get("keep") or record.get("state") != HANDLE or record.get("boot") != node.boot:
        return False
    try:
        handle = handle_from_json(record["handle"])
        return alive(handle) and supervising.now() < float(record["deadline"])
    except (KeyError, TypeError, ValueError, RingfenceError):
        return False


def _unknown(node: Node, name: str) -> NotFound:
    from difflib import get_close_matches

    known = names(node)
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    if not close and len(known) <= 3:
        close = known
    hint = f"did you mean {', '.join(close)}?" if close else "see `ringfence sandbox ls`"
    return NotFound(
        f"no sandbox {name} is kept here", hint=hint if known else "none is: `ringfence run --keep`"
    )
