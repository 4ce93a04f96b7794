"""Watching from outside: what a process tree holds, who is killed and why."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ringfence.model.levels import Cause
from ringfence.node import supervising
from ringfence.node.cgroups import Cgroups, Group
from ringfence.node.supervising import Supervisor, Watched, kill_process
from ringfence.runtimes.contract import Exit, Handle
from ringfence.runtimes.launching.processes import ProcessRef

NONE = Group(Cgroups("none"), "sb-x", ())


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def handle_of(pid: int) -> Handle:
    return Handle("jail", 1, "sb-x", "/nowhere", *ProcessRef.of(pid))


def watched(**change: object) -> Watched:
    usual: dict[str, object] = {
        "deadline": supervising.now() + 60,
        "timeout": 60.0,
        "output": 100,
        "cpu_time": None,
        "memory": None,
    }
    return Watched(**{**usual, **change})  # type: ignore[arg-type]


def supervisor(pid: int, **change: object) -> Supervisor:
    return Supervisor(handle_of(pid), NONE, watched(**change), before_kill=lambda: None)


def test_only_the_process_that_is_meant_dies(child: subprocess.Popen[bytes]) -> None:
    real = handle_of(child.pid)
    for other in (
        Handle("jail", 1, "sb-x", "/", real.pid, real.birth + 1, real.boot_id),
        Handle("jail", 1, "sb-x", "/", real.pid, real.birth, "another boot"),
    ):
        assert not kill_process(other)
        assert child.poll() is None
    assert kill_process(real)
    assert child.wait() == -signal.SIGKILL
    assert not kill_process(real)


async def test_output_is_counted_to_the_byte(child: subprocess.Popen[bytes]) -> None:
    watch = supervisor(child.pid, output=100)
    assert watch.count_output(60) == 60
    assert watch.count_output(40) == 40
    assert watch.cause is None
    assert watch.count_output(1) == 0
    assert watch.cause is Cause.OUTPUT_LIMIT
    assert child.wait() == -signal.SIGKILL
    assert watch.count_output(50) == 0
    assert watch.output == 151


async def test_the_part_within_the_limit_is_delivered(child: subprocess.Popen[bytes]) -> None:
    watch = supervisor(child.pid, output=100)
    assert watch.count_output(150) == 100
    assert watch.cause is Cause.OUTPUT_LIMIT


async def test_a_deadline_that_has_passed_kills_at_once(child: subprocess.Popen[bytes]) -> None:
    watch = supervisor(child.pid, deadline=supervising.now() - 5)
    watch.start()
    assert child.wait() == -signal.SIGKILL
    end = watch.verdict(Exit(signal=9))
    assert (end.cause, end.exit_code, end.reported) == (Cause.DEADLINE, 124, False)


async def test_a_deadline_is_met(child: subprocess.Popen[bytes]) -> None:
    deadline = supervising.now() + 1.0
    watch = supervisor(child.pid, deadline=deadline)
    watch.start()
    while watch.cause is None:
        assert child.poll() is None or supervising.now() >= deadline
        await asyncio.sleep(0.01)
    assert watch.cause is Cause.DEADLINE
    assert supervising.now() >= deadline
    assert child.wait() == -signal.SIGKILL


async def test_processor_time_is_polled_where_no_cgroup_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        watch = supervisor(process.pid, cpu_time=0.2)
        watch.start()
        while watch.cause is None:
            await asyncio.sleep(0.01)
        assert watch.cause is Cause.CPU_TIME
        assert process.wait() == -signal.SIGKILL
        assert (watch.cpu_seconds() or 0) >= 0.2  # remembered although the process is gone


async def test_memory_is_polled_where_no_cgroup_limits() -> None:
    code = "import time\nx = b'x' * (64 << 20)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        watch = supervisor(process.pid, memory=48 << 20)
        watch.start()
        while watch.cause is None:
            await asyncio.sleep(0.01)
        assert process.wait() == -signal.SIGKILL
        assert watch.verdict(Exit(signal=9)).cause is Cause.OUT_OF_MEMORY
        assert watch.memory_peak > 48 << 20


async def test_who_stays_below_lives(child: subprocess.Popen[bytes]) -> None:
    watch = supervisor(child.pid, memory=1 << 30, cpu_time=60.0)
    watch.start()
    await asyncio.sleep(0.25)
    assert watch.cause is None
    watch.stop()


async def test_the_first_cause_stands(child: subprocess.Popen[bytes]) -> None:
    watch = supervisor(child.pid)
    watch.kill(Cause.CPU_TIME, "one")
    watch.kill(Cause.DEADLINE, "two")
    assert (watch.cause, watch.detail) == (Cause.CPU_TIME, "one")


async def test_a_failing_last_look_does_not_keep_it_alive(child: subprocess.Popen[bytes]) -> None:
    def fail() -> None:
        raise RuntimeError

    Supervisor(handle_of(child.pid), NONE, watched(), before_kill=fail).kill(Cause.DEADLINE)
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Exit(code=3), "exited with 3"),
        (Exit(signal=11), "SIGSEGV"),
        (Exit(signal=64), "signal 64|SIGRTMAX"),
        (Exit(), "went away"),
    ],
)
def test_an_end_that_nobody_asked_for_is_a_crash(ended: Exit, words: str) -> None:
    import re

    end = supervisor(os.getpid()).verdict(ended)
    assert (end.cause, end.exit_code) == (Cause.RUNTIME_CRASH, 125)
    assert re.search(words, end.detail)


def test_a_tree_has_everybody_in_it() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        found = supervising.tree(shell.pid)
        assert found[0] == shell.pid
        assert len(found) == 3
        for pid in found:
            os.kill(pid, signal.SIGKILL)


def test_shared_pages_count_once_when_it_matters() -> None:
    size = 32 << 20
    shared = mmap.mmap(-1, size)
    shared.write(b"x" * size)
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            sum(shared[n] for n in range(0, size, 4096))
            signal.pause()
        pids.append(pid)
    try:
        deadline = supervising.now() + 20
        while any(supervising.memory_of([p], 1 << 40) < size for p in pids) and supervising.now() < deadline:
            pass
        rough = supervising.memory_of(pids, 1 << 40)  # nothing near the limit: the cheap sum
        exact = supervising.memory_of(pids, 0)
        assert rough >= 3 * size
        assert exact < rough - size
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_the_dead_hold_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert supervising.memory_of([process.pid], 0) == 0
    assert supervising.cpu_of(process.pid) == 0.0
    assert supervising.tree(process.pid) == [process.pid]
