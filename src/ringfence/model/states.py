"""The life cycle of a sandbox in a service: states, and which may follow which."""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """Where a sandbox is in its life. The last two are final and carry a cause."""

    PENDING = "pending"  # accepted; nothing of it exists yet
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    # Members of a pool, started ahead; nobody's yet. A claim takes one from WARM to STARTING: the door.
    WARMING = "warming"
    WARM = "warm"


FINAL = frozenset({State.STOPPED, State.FAILED})

# Deletion works from every state: each that is not final may go to STOPPING. A sandbox whose wall died goes
# to STOPPING as well (its cause is known then), because what it leaves has to be removed; one that never had
# a wall may go straight to its end.
NEXT: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.STARTING, State.STOPPING, State.STOPPED, State.FAILED}),
    State.STARTING: frozenset({State.RUNNING, State.PENDING, State.STOPPING, State.FAILED}),
    State.RUNNING: frozenset({State.PAUSING, State.STOPPING}),
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.STOPPING}),
    State.PAUSED: frozenset({State.RESUMING, State.STOPPING}),
    State.RESUMING: frozenset({State.RUNNING, State.PAUSED, State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED, State.FAILED}),
    State.STOPPED: frozenset(),
    State.FAILED: frozenset(),
    State.WARMING: frozenset({State.WARM, State.STOPPING}),
    State.WARM: frozenset({State.STARTING, State.STOPPING}),
}


def may_follow(state: State, following: State) -> bool:
    """Whether a sandbox in ``state`` may go to ``following``."""
    return following in NEXT[state]
