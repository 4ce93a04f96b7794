"""Every write of the store and every side effect is a point at which an orchestrator is killed, with others
under way. What follows it on the same store finishes or undoes what was begun; afterwards store and machine
are compared from outside.

`make test` kills at each point once; ``RINGFENCE_FAULTS_FULL=1`` at each of them three times, in three ways.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from typing import Any

import pytest
from faults_world import FULL, Crashes

from support.accounts import ALIVE, differences, disagreements, rows, walls

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="without root no wall here can be frozen")

# Those that every run has to find. More are found (what comes together in one transaction differs).
WRITES = (
    "claim", "sandbox:starting", "sandbox:running", "sandbox:pausing", "sandbox:paused", "sandbox:resuming",
    "sandbox:stopping", "sandbox:stopped", "sandbox:failed", "sandbox:warming", "sandbox:warm",
    "snapshot:making", "snapshot:ready", "snapshot:removing", "-snapshot", "pool-rate",
    "sandbox:pending ticket:waiting", "idempotency:made sandbox:starting", "idempotency:made sandbox:running",
)  # fmt: skip
EFFECTS = ("start", "bind", "pause", "resume", "snapshot", "remove_snapshot", "reset", "destroy")
ESSENTIAL = {
    f"{side} {what}"
    for side in ("before", "after")
    for what in (*(f"write {name}" for name in WRITES), *(f"effect {name}" for name in EFFECTS))
}
POINTS = sorted(ESSENTIAL)
PARTS = 6
# Early: while it recovers from the one before. Then with all under way, at the first or a later passage.
WAYS = ((True, 1), (False, 1), (False, 3))


def at_rest(crashes: Crashes, *, clear: bool = False) -> None:
    """Whoever comes next brings all to rest, and store and machine agree."""
    answer = crashes.run(work=False, clear=clear)
    assert answer.get("settled") == "", f"{answer.get('settled')}\n{crashes.words()}"
    found = disagreements(crashes.store, crashes.home)
    assert not found, "\n".join([*found[:20], crashes.words()])


def unharmed(answer: dict[str, Any]) -> None:
    """Every caller had a result or a clear error."""
    assert not answer.get("faults"), answer["faults"][0]


def hit(crashes: Crashes, point: str, early: bool, passage: int, seed: int) -> bool:
    """Kill one at a point; a seed that does not lead there is followed by others."""
    for number in range(5):
        answer = crashes.run(
            point=point, early=early, number=passage if number == 0 else 1, seed=seed + number, seconds=6.0
        )
        if answer["killed"]:
            return True
        assert answer["code"] == 0, crashes.words()
        unharmed(answer)
    return False


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_point_nothing_is_lost_leaked_or_doubled(crashes: Crashes, part: int) -> None:
    draw = random.Random(part)
    points = POINTS[part::PARTS]
    plan = [(point, *way) for point in points for way in (WAYS if FULL else [draw.choice(WAYS)])]
    draw.shuffle(plan)
    missed = [each for number, each in enumerate(plan) if not hit(crashes, *each, seed=100 * part + number)]
    assert not missed
    at_rest(crashes)


@pytest.mark.skipif(
    not FULL, reason="RINGFENCE_FAULTS_FULL is not set: only the points that every run passes"
)
def test_points_that_only_some_runs_pass(crashes: Crashes) -> None:
    found: set[str] = set()
    for seed in range(5):
        answer = crashes.run(seconds=6.0, seed=seed)
        assert answer["code"] == 0, crashes.words()
        unharmed(answer)
        found |= set(answer["passed"])
    for number, point in enumerate(sorted(found - ESSENTIAL)):
        hit(crashes, point, False, 1, seed=number)
    at_rest(crashes)


def test_killed_at_any_moment_nothing_is_lost_leaked_or_doubled(crashes: Crashes) -> None:
    draw = random.Random(11)
    for number in range(30 if FULL else 6):
        answer = crashes.run(die_after=draw.uniform(0.05, 1.5), seed=number, seconds=30.0)
        assert answer["killed"], crashes.words()
    at_rest(crashes)
    at_rest(crashes, clear=True)


def test_a_node_killed_at_any_moment_costs_no_sandbox(crashes: Crashes) -> None:
    draw = random.Random(13)
    for number in range(10 if FULL else 2):
        crashes.begin(seed=number, seconds=4.0)
        for _ in range(2):
            time.sleep(draw.uniform(0.3, 1.2))
            crashes.node.kill()
            crashes.node.start()
        answer = crashes.result()
        assert answer["code"] == 0, crashes.words()
        unharmed(answer)
        assert answer["settled"] == "", answer["settled"] + crashes.words()
        found = disagreements(crashes.store, crashes.home)
        assert not found, "\n".join([*found[:20], crashes.words()])
    at_rest(crashes, clear=True)


def test_the_accounts_notice_what_is_wrong(crashes: Crashes) -> None:
    """Positive control: each kind of disagreement is seen."""
    for seconds in (2.0, 5.0, 10.0, 20.0):  # until one is alive: in a short time on a busy machine none is
        answer = crashes.run(seconds=seconds)
        assert answer["code"] == 0, crashes.words()
        alive = [row["id"] for row in rows(crashes.store, "sandbox") if row["state"] in ALIVE]
        if alive:
            break
    assert alive
    assert disagreements(crashes.store, crashes.home) == []
    assert all(walls()[id] for id in alive)
    wrong = str(crashes.home / "wrong.db")

    def seen(change: str, *values: str) -> str:
        with (
            contextlib.closing(sqlite3.connect(crashes.store)) as there,
            contextlib.closing(sqlite3.connect(wrong)) as copy,
        ):
            there.backup(copy)
            copy.execute(change, values)
            copy.commit()
        return "\n".join(differences(wrong, crashes.home))

    leaked = seen("DELETE FROM rows WHERE id = ?", alive[0])
    assert f"{alive[0]} has leaked: a folder" in leaked
    assert f"{alive[0]} has leaked: a wall" in leaked
    gone = "sb-" + "0" * 20
    lost = seen("UPDATE rows SET id = ? WHERE kind = 'sandbox' AND id = ?", gone, alive[0])
    assert f"{gone} is lost: no folder" in lost
    assert f"{gone} has 0 walls" in lost
    assert "still" in seen("UPDATE rows SET state = 'starting' WHERE id = ?", alive[0])
    assert "live" in seen("UPDATE counters SET value = value + 1 WHERE name = 'sandboxes of default'")
    at_rest(crashes, clear=True)
