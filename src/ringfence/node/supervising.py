"""Holding a living sandbox to its limits, and knowing why it ended. All of it measured from outside.

What the kernel enforces (memory, processes, CPU share, disk) needs no watching: its counters say
afterwards what happened. Watched here are the deadline, the processor time, the output, and, where no
cgroup was delegated, the memory. Whoever crosses a line is killed as a whole: the wall's first process dies,
and with it, by the rules of process namespaces, everything inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable

from ringfence.model.errors import RingfenceError
from ringfence.model.levels import Cause
from ringfence.model.quantities import format_duration, format_size
from ringfence.model.sandbox import End
from ringfence.model.values import dataclass
from ringfence.node.cgroups import Group
from ringfence.runtimes.contract import Exit, Handle, Runtime
from ringfence.runtimes.launching.processes import ProcessRef

POLL = 0.1  # seconds between two looks at memory or processor time
SOON = 1.0  # seconds in which a wall's end is mostly known after its link was lost
DYING = 20.0  # the same, if nobody listens in it any more
SHORTEST = 0.01  # seconds between two looks at processor time close to its limit
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_EXIT_CODES = {Cause.DEADLINE: 124, Cause.RUNTIME_CRASH: 125, Cause.NODE_LOST: 125}


def now() -> float:
    """Seconds since boot, suspend included: the clock that deadlines run on, which nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Watched:
    """The limits that somebody has to look after. ``memory`` is None where the kernel does it."""

    deadline: float  # on the clock of :func:`now`
    timeout: float
    output: int
    cpu_time: float | None
    memory: int | None


class Supervisor:
    """Watches one wall. ``on_end`` is called once, when the wall has ended, with the host's verdict.

    ``before_kill`` runs before a kill: the last moment at which the wall can still be looked into.
    """

    def __init__(
        self,
        handle: Handle,
        group: Group,
        watched: Watched,
        *,
        before_kill: Callable[[], None],
    ) -> None:
        self.handle = handle
        self.group = group
        self.watched = watched
        self.output = 0  # bytes delivered by the guest so far, of all commands
        self.cause: Cause | None = None
        self.detail = ""
        self.memory_peak = 0  # polled
        self._cpu_seen = 0.0
        self._before_kill = before_kill
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Arm the watches. A deadline that has passed already kills at once."""
        self._check_deadline()
        if self.watched.cpu_time is not None:
            self._check_cpu()
        if self.watched.memory is not None:
            self._check_memory()

    def stop(self) -> None:
        """Disarm the watches."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def change(self, **parts: float) -> None:
        """Other limits from now on: ``deadline``, ``timeout``, ``output`` of :class:`Watched`."""
        self.watched = dataclasses.replace(self.watched, **parts)  # type: ignore[arg-type]
        timer = self._timers.pop("deadline", None)
        if timer is not None:  # else it isn't watched, or not any more
            timer.cancel()
            self._check_deadline()

    def count_output(self, size: int) -> int:
        """Account for bytes of output; how many of them are still within the limit.

        What crosses the limit ends the sandbox.
        """
        left = self.watched.output - self.output
        self.output += size
        if size <= left:
            return size
        self.kill(Cause.OUTPUT_LIMIT, f"more than {format_size(self.watched.output)} of output")
        return max(0, left)

    def oom_kills(self) -> int:
        """Processes of this sandbox that the kernel killed for memory, so far."""
        return self.group.oom_kills() or 0

    def cpu_seconds(self) -> float | None:
        """Processor time of the whole sandbox; without a cgroup what can be seen of it from outside."""
        measured = self.group.cpu_seconds()
        if measured is None:
            measured = sum(cpu_of(pid) for pid in tree(self.handle.pid))
        self._cpu_seen = max(self._cpu_seen, measured)  # an ended process tree shows nothing any more
        return self._cpu_seen

    def kill(self, cause: Cause, detail: str = "") -> None:
        """End the sandbox now, for this cause. The first cause stands. Returns at once."""
        if self.cause is None:
            self.cause, self.detail = cause, detail
            with contextlib.suppress(Exception):  # nothing may keep us from killing
                self._before_kill()
                self.cpu_seconds()
        self.stop()
        self.group.kill()
        kill_process(self.handle)

    def verdict(self, ended: Exit) -> End:
        """Why the wall is gone."""
        cause, detail = self.cause, self.detail
        if cause is None:
            how = _describe(ended)
            if self.oom_kills() and ended.signal in (None, signal.SIGKILL):
                cause, detail = Cause.OUT_OF_MEMORY, "the whole sandbox ran out of memory"
            else:
                cause, detail = (
                    Cause.RUNTIME_CRASH,
                    f"the sandbox's first process {how} without being asked to",
                )
        return end_of(cause, detail)

    def _check_deadline(self) -> None:
        left = self.watched.deadline - now()
        if left <= 0:
            self.kill(Cause.DEADLINE, f"it ran for {format_duration(self.watched.timeout)}")
            return
        # The loop's clock stands still while the machine sleeps; ours does not: look again in time.
        self._later("deadline", min(left, 60.0), self._check_deadline)

    def _check_cpu(self) -> None:
        limit = self.watched.cpu_time
        assert limit is not None
        used = self.cpu_seconds() or 0.0
        if used >= limit:
            self.kill(Cause.CPU_TIME, f"it used {format_duration(limit)} of processor time")
            return
        # It can't burn faster than all processors together.
        self._later("cpu", max(SHORTEST, (limit - used) / (os.cpu_count() or 1)), self._check_cpu)

    def _check_memory(self) -> None:
        limit = self.watched.memory
        assert limit is not None
        used = memory_of(tree(self.handle.pid), limit)
        self.memory_peak = max(self.memory_peak, used)
        if used > limit:
            self.kill(Cause.OUT_OF_MEMORY, f"its processes took more than {format_size(limit)}")
            return
        # Twice as far in a fifth of the time: whoever is near the limit is watched more closely.
        self._later("memory", POLL if used < limit // 2 else POLL / 5, self._check_memory)

    def _later(self, name: str, delay: float, call: Callable[[], None]) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(delay, call)


async def ended_soon(ended: asyncio.Future[End], runtime: Runtime, handle: Handle) -> None:
    """Return when a wall has ended whose link was lost, or when it seems to live on.

    A link breaks when the agent dies, and the death is known when the kernel has taken down everything inside
    and somebody has reaped it: on a busy host that takes seconds. Nobody listens meanwhile.
    """
    await asyncio.wait({ended}, timeout=SOON)
    if not ended.done():
        try:
            (await runtime.connect(handle)).close()
        except RingfenceError:
            await asyncio.wait({ended}, timeout=DYING)


def end_of(cause: Cause, detail: str) -> End:
    """The end of a whole wall for this cause."""
    return End(cause, _EXIT_CODES.get(cause, 137), detail, reported=False)


def _describe(ended: Exit) -> str:
    if ended.signal is not None:
        try:
            return f"was killed by {signal.Signals(ended.signal).name}"
        except ValueError:
            return f"was killed by signal {ended.signal}"
    if ended.code is not None:
        return f"exited with {ended.code}"
    return "went away"


def kill_process(handle: Handle) -> bool:
    """SIGKILL the wall's first process; False if it is gone. Never hits another process of that number."""
    pidfd = ProcessRef(handle.pid, handle.birth, handle.boot_id).pidfd()
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def tree(root: int) -> list[int]:
    """The process and its descendants.

    In a process namespace orphans become children of its first process, so none is missed.
    """
    found = [root]
    for pid in found:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def memory_of(pids: list[int], enough: int) -> int:
    """Bytes that these processes hold.

    Shared pages count once, but as that costs, it is looked up only beyond ``enough``.
    """
    resident = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm") as file:
            resident += int(file.read().split()[1]) * _PAGE
    if resident <= enough:
        return resident
    total = 0
    for pid in pids:
        total += _proportional(pid)
    return total


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    # Not readable (it made itself undumpable): all of it counts as its own.
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def cpu_of(pid: int) -> float:
    """Seconds of processor time of a process and its reaped children."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return 0.0
    fields = text[text.rindex(b")") + 2 :].split()
    return sum(int(fields[n]) for n in (11, 12, 13, 14)) / _TICK
