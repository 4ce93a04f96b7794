"""Cgroups of this machine's kernel: limits hold, counters count, and everything can be removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence.node import cgroups
from ringfence.node.cgroups import Cgroups, Group, GroupLimits
from ringfence.node.groups import CLEAN, MOST_HELD, GroupPool
from ringfence.runtimes.launching import freezing

MIB = 1 << 20
LIMITS = GroupLimits(memory=48 * MIB, cpus=0.25, pids=12)
found = cgroups.detect()
pytestmark = pytest.mark.skipif(found.mode == "none", reason=f"no cgroup here: {found.reason}")


@pytest.fixture
def group() -> Iterator[Group]:
    made = found.create(f"test-{os.getpid()}-{time.monotonic_ns()}", LIMITS)
    yield made
    made.kill()
    assert eventually(made.remove)


def eventually(check: Callable[[], object], limit: float = 60.0) -> bool:
    end = time.monotonic() + limit
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def inside(group: Group, code: str) -> subprocess.Popen[str]:
    """A Python program that is in the workload's groups from its first instruction."""
    places = [*group.place().agent, *group.place().work]

    def join() -> None:
        for path in places:
            with open(path, "w") as file:
                file.write("0")

    return subprocess.Popen(
        [sys.executable, "-S", "-c", code], preexec_fn=join, stdout=subprocess.PIPE, text=True
    )


def output(group: Group, code: str) -> tuple[str, int]:
    with inside(group, code) as process:
        text = process.communicate(timeout=60)[0]
        return text, process.returncode


def test_memory_is_limited_and_the_kill_is_counted(group: Group) -> None:
    assert group.oom_kills() == 0
    assert output(group, "x = bytearray(24 << 20); print('fits')") == ("fits\n", 0)  # the control
    text, code = output(group, "x = bytearray(200 << 20)")
    assert (text, code) == ("", -signal.SIGKILL)
    assert group.oom_kills() == 1
    peak = group.memory_peak()
    assert peak is not None
    assert 40 * MIB < peak <= LIMITS.memory + cgroups.AGENT_MEMORY


def test_there_is_no_swap(group: Group) -> None:
    base = os.path.dirname(group.place().work[0]) if found.mode == "v2" else group._base["memory"] + "/work"
    names = (
        ("memory.swap.max",)
        if found.mode == "v2"
        else ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes")
    )
    values = [Path(base, name).read_text().strip() for name in names if Path(base, name).exists()]
    assert len(set(values)) <= 1  # version 1: memory and swap together are as much as memory alone
    if found.mode == "v2" and values:
        assert values == ["0"]


def test_processes_are_limited(group: Group) -> None:
    code = (
        "import os, time\nn = 0\ntry:\n while n < 100:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\n"
        "except OSError as e: print(n, e.errno)"
    )
    with inside(group, code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "11 11\n"  # itself and eleven; EAGAIN
        group.kill()
        process.stdout.close()


def test_processor_share_is_limited_and_time_is_counted(group: Group) -> None:
    code = (
        "import time\nt = time.monotonic()\nwhile time.monotonic() < t + 1: pass\nprint(time.process_time())"
    )
    used = 9.0
    for _ in range(6):  # a machine that stands still may charge it with all of that time
        text, _ = output(group, code)
        used = min(used, float(text))
        if used < 0.6:
            break
    assert used < 0.6  # a quarter of a second, and what fits into the last period
    counted = group.cpu_seconds()
    assert counted is not None
    assert counted >= used * 0.9


def test_killing_takes_everybody(group: Group) -> None:
    code = (
        "import os, time\nfor _ in range(8): os.fork() or time.sleep(60)\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    with inside(group, code) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(group.processes()) >= 9
        assert not group.is_empty()
        assert not group.remove()  # busy, and says so
        group.kill()
        assert eventually(lambda: not group.processes())
        process.stdout.close()


async def test_freezing_and_letting_go(group: Group) -> None:
    with inside(group, "while True: pass") as process:
        assert eventually(lambda: (group.cpu_seconds() or 0) > 0.02)
        await freezing.freeze(group.place().agent, frozen=True)
        before = group.cpu_seconds()
        time.sleep(0.2)
        after = group.cpu_seconds()
        assert before is not None
        assert after is not None
        assert after - before < 0.05
        await freezing.freeze(group.place().agent, frozen=False)
        assert eventually(lambda: (group.cpu_seconds() or 0) > after + 0.05)
        process.kill()


async def test_what_forks_all_the_time_is_frozen(group: Group) -> None:
    """Of hundreds some come while a shell is about to wait for the child that it vfork'ed."""
    code = "import os\nos.execvp('sh', ['sh', '-c', 'while :; do /bin/true; /bin/true | /bin/cat; done'])"
    with inside(group, code) as process:
        assert eventually(lambda: len(group.processes()) > 1)
        try:
            for _ in range(400):
                await freezing.freeze(group.place().agent, frozen=True)
                await freezing.freeze(group.place().agent, frozen=False)
                await asyncio.sleep(0.002)
        finally:
            process.kill()


def test_a_frozen_sandbox_can_be_killed(group: Group) -> None:
    with inside(group, "print('up', flush=True)\nwhile True: pass") as process:
        assert process.stdout is not None
        process.stdout.readline()
        asyncio.run(freezing.freeze(group.place().agent, frozen=True))
        group.kill()
        assert eventually(lambda: not group.processes())
        process.stdout.close()


def test_who_is_not_in_it_is_told(group: Group) -> None:
    assert set(group.outside(os.getpid())) == {"memory", "pids", "cpu"} & set(found.roots)
    with inside(group, "print('up', flush=True)\nimport time\ntime.sleep(60)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert group.outside(process.pid) == []
        process.kill()
        process.stdout.close()


def test_a_name_can_be_had_once(group: Group) -> None:
    from ringfence.model.errors import HostLimit

    with pytest.raises(HostLimit, match="File exists"):
        found.create(group.name, LIMITS)


@pytest.mark.skipif(found.mode == "v2", reason="made anew in version 2")
def test_used_again_it_counts_from_zero() -> None:
    pool = GroupPool(found, f"test.{os.getpid()}.{time.monotonic_ns()}")
    first = pool.take("sb-1", LIMITS, keep=False)
    assert output(first, "x = bytearray(200 << 20)")[1] == -signal.SIGKILL
    assert first.oom_kills() == 1
    assert eventually(first.is_empty)
    assert pool.give_back(first)
    second = pool.take("sb-2", LIMITS, keep=False)
    try:
        if second is first:  # else something still stuck to it, and it was not taken again
            assert (second.memory_now() or 0) <= CLEAN
        assert second.oom_kills() == 0
        assert (second.memory_peak() or 0) <= CLEAN
        assert (second.cpu_seconds() or 0) < 0.01  # the last steps of who died may be charged late
        assert output(second, "print('on')") == ("on\n", 0)
    finally:
        assert eventually(lambda: pool.give_back(second))
        pool.close()
    assert not [name for name in found.names() if name.startswith(f"test.{os.getpid()}")]


@pytest.mark.skipif(found.mode == "v2", reason="made anew in version 2")
def test_files_are_kept_open_of_a_few_groups_and_closed_with_them() -> None:
    owner = f"test.{os.getpid()}.{time.monotonic_ns()}"
    pool = GroupPool(found, owner)
    limit = os.sysconf("SC_OPEN_MAX") // 64
    for _ in range(2):
        groups = [pool.take(f"sb-{n}", LIMITS, keep=False) for n in range(MOST_HELD + 2)]
        held = [group for group in groups if group.held]
        assert output(groups[0], "print('in')") == ("in\n", 0)
        for group in groups:
            assert eventually(group.is_empty)
            assert pool.give_back(group)
    assert len(held) == min(MOST_HELD, limit)
    assert set(held[0].held) >= {*held[0].place().agent, *held[0].place().work}
    assert open_files_of(owner)
    pool.close()
    assert open_files_of(owner) == []
    assert not [name for name in found.names() if name.startswith(f"test.{os.getpid()}")]


@pytest.mark.skipif(found.mode == "v2", reason="made anew in version 2")
def test_what_is_busy_is_not_used_again() -> None:
    pool = GroupPool(found, f"test.{os.getpid()}.{time.monotonic_ns()}")
    group = pool.take("sb-1", LIMITS, keep=False)
    with inside(group, "import time\nprint('up', flush=True)\ntime.sleep(60)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not pool.give_back(group)
        assert pool.take("sb-2", LIMITS, keep=False) is not group or pytest.fail(
            "a busy group was given away"
        )
        process.kill()
        process.stdout.close()
    assert eventually(group.remove)
    for name in found.names():
        if name.startswith(f"test.{os.getpid()}"):
            assert eventually(found.group(name).remove)


def open_files_of(owner: str) -> list[str]:
    """This process's open files below groups of that name; of others', threads may open and close some."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in paths if owner in path]


def test_nothing_delegated_is_no_error() -> None:
    group = Cgroups("none").create("sb-x", LIMITS)
    assert not group
    assert group.remove()
    assert group.processes() == []
    assert (group.oom_kills(), group.cpu_seconds(), group.memory_peak()) == (None, None, None)
    group.kill()
