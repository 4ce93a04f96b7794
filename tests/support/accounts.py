"""Looks at a service from outside, after anything: what the store says, and what is on the machine.

Nothing of the product is asked: the database is read as one, folders, processes and cgroups as the
kernel shows them.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support.leaks import cgroup_folders, descendants, mounts

ALIVE = {"running", "paused", "warm"}
MOVING = {"pending", "starting", "pausing", "resuming", "stopping", "warming"}


def _ask(store: str, table: str, columns: str, where: str = "", *values: str) -> list[tuple[Any, ...]]:
    if store.startswith("postgresql:"):
        import psycopg

        with psycopg.connect(store) as there:
            text = f"SELECT {columns} FROM rf_{table} {where}".replace("?", "%s")
            return there.execute(text.encode(), values).fetchall()
    db = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
    try:
        return db.execute(f"SELECT {columns} FROM {table} {where}", values).fetchall()
    finally:
        db.close()


def rows(store: str, kind: str) -> list[dict[str, Any]]:
    """Rows of a kind, documents read."""
    names = ("id", "project", "state", "key", "document")
    found = [
        dict(zip(names, row, strict=True))
        for row in _ask(store, "rows", ", ".join(names), "WHERE kind = ?", kind)
    ]
    for row in found:
        row["document"] = json.loads(row["document"])
    return found


def counters(store: str) -> dict[str, int]:
    """Every counter."""
    return {str(name): int(value) for name, value in _ask(store, "counters", "name, value")}


def walls() -> Counter[str]:
    """How many walls stand for each sandbox: agents that are the first process of theirs, by host name."""
    found: Counter[str] = Counter()
    for each in descendants().values():
        if each.state in "ZX" or not each.command.startswith("ringfence-agent"):
            continue
        try:
            status = Path(f"/proc/{each.pid}/status").read_text()
            inside = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
        except (OSError, StopIteration):
            continue
        if inside == "1":
            asked = ["nsenter", "--target", str(each.pid), "--uts", "hostname"]
            name = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
            if name:  # else it is gone by now
                found[name] += 1
    return found


def disagreements(store: str, home: Path, grace: float = 60.0) -> list[str]:
    """As :func:`differences`, once walls that were told to go are gone: the kernel takes its time."""
    end = time.monotonic() + grace
    while (found := differences(store, home)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def differences(store: str, home: Path) -> list[str]:
    """Where store and machine disagree now, a sentence each. Empty is good."""
    sandboxes = rows(store, "sandbox")
    states = {row["id"]: row["state"] for row in sandboxes}
    alive = {id for id, state in states.items() if state in ALIVE}
    found = [f"{id} is {state} still" for id, state in states.items() if state in MOVING]
    folder = home / "sandboxes"
    folders = (
        {path.name for path in folder.iterdir() if path.name.startswith("sb-")} if folder.is_dir() else set()
    )
    found += [f"{id} is lost: no folder" for id in alive - folders]
    standing = walls()
    # After a reset the wall of the next one stands by.
    begun_anew = {row[0] for row in _ask(store, "events", "subject", "WHERE name = ?", "sandbox.resetting")}
    for id in alive:
        if not 1 <= standing[id] <= (2 if id in begun_anew else 1):
            found.append(f"{id} has {standing[id]} walls")
    found += [f"{id} has leaked: a wall" for id in standing.keys() - alive]
    found += [f"{id} has leaked: a folder that nobody owns" for id in folders - alive]
    groups = {Path(path).name for path in cgroup_folders() if Path(path).name in states}
    found += [f"{id} has leaked: a cgroup" for id in groups - alive]
    found += [f"{id} has leaked: a mount" for id in states for line in mounts() if id in line]
    saved = {row["id"] for row in rows(store, "snapshot")}
    snapshots = home / "snapshots"
    kept = (
        {path.name for path in snapshots.iterdir() if path.name.startswith("sn-")}
        if snapshots.is_dir()
        else set()
    )
    found += [f"snapshot {id} is lost" for id in saved - kept]
    found += [f"snapshot {id} has leaked" for id in kept - saved]
    return found + _counted(store, sandboxes)


def _counted(store: str, sandboxes: list[dict[str, Any]]) -> list[str]:
    """Counters are the sum of what lives."""
    living = [row for row in sandboxes if row["state"] in ALIVE | MOVING]
    wanted: Counter[str] = Counter()
    for row in living:
        wanted.update(str(name) for name in row["document"].get("counters", ()))
    is_now = counters(store)
    found = []
    for name, value in is_now.items():
        if name.startswith("pool/") and name.endswith(("/running", "/overflow")) and value != wanted[name]:
            found.append(f"{name} is {value}, and {wanted[name]} live")
        if name.startswith("pool/") and name.endswith("/waiting"):
            waiting = sum(row["key"] == name.split("/")[1] for row in rows(store, "ticket"))
            if waiting != value:
                found.append(f"{name} is {value}, and {waiting} wait")
    mine = [row for row in living if row["project"] == "default"]
    for name, value in is_now.items():
        if name == "sandboxes of default" and value != len(mine):
            found.append(f"{name} is {value}, and {len(mine)} live")
    keys = rows(store, "idempotency")
    ids = {row["id"] for row in sandboxes}
    found += [f"key {row['id']} made nothing" for row in keys if row["document"]["sandbox"] not in ids]
    return found
