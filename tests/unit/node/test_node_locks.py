"""Locks that are given back while this process forks."""

from __future__ import annotations

import os
from pathlib import Path

from ringfence.control.jobs_files import Log
from ringfence.node.state import StateRoot, unlock
from ringfence.placement import hosting


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


def test_a_job_log_that_is_closed_can_be_written_by_another_at_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "jobs" / "1.log", 1 << 20)
    log.add(1, 0, b"said")
    childs = os.dup(log._file.fileno())
    try:
        log.close()
        log.close()
        other = Log(tmp_path / "jobs" / "1.log", 1 << 20)
        assert other.size == 4
        other.close()
    finally:
        os.close(childs)


def test_a_service_whose_node_has_ended_can_be_served_by_another_at_once(tmp_path: Path) -> None:
    lock = hosting._lock(tmp_path)
    childs = os.dup(lock)
    try:
        unlock(lock)
        unlock(hosting._lock(tmp_path))
    finally:
        os.close(childs)
