"""Locks of the state root while this process forks."""

from __future__ import annotations

import os
from pathlib import Path

from ringfence.node.state import StateRoot


def test_what_a_child_that_was_just_forked_holds_is_given_back_too(tmp_path: Path) -> None:
    """Between fork and exec it has a copy of every descriptor, close-on-exec or not."""
    ours, gone = StateRoot.open(tmp_path / "state"), StateRoot.open(tmp_path / "state")
    childs = os.dup(gone._lock)
    try:
        gone.close(leave=True)
        (lock,) = ours.dead_nodes().values()
        os.close(childs)
        childs = os.dup(lock)
        with ours.burying("nobody"):
            pass
        ours.bury(gone.owner, lock)
        assert not ours.knows(gone.owner)
    finally:
        os.close(childs)
        ours.close()
