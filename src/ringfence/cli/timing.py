"""Samples and what is said of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Samples:
    """Durations of one operation, in milliseconds."""

    name: str
    values: list[float] = field(default_factory=list)

    def add(self, started: float) -> None:
        """One more: from ``started`` (``time.perf_counter``) to now."""
        self.values.append((time.perf_counter() - started) * 1000)

    def percentile(self, percent: float) -> float:
        """The smallest value that ``percent`` per cent of the samples don't exceed."""
        ordered = sorted(self.values)
        rank = -(-len(ordered) * percent // 100)
        return ordered[max(0, int(rank) - 1)]

    def as_dict(self) -> dict[str, Any]:
        """n and milliseconds."""
        return {
            "name": self.name,
            "unit": "ms",
            "n": len(self.values),
            "min": round(min(self.values), 3),
            **{f"p{p}": round(self.percentile(p), 3) for p in (50, 95, 99)},
        }


def first_byte(argv: list[str], samples: Samples | None, env: dict[str, str] | None = None) -> None:
    """Start a program in the cheapest way there is and time it to the first byte of its output.

    Raises:
        OSError: it could not be started.
        RuntimeError: it said nothing, or failed.
    """
    reader, writer = os.pipe()
    started = time.perf_counter()
    try:
        pid = os.posix_spawn(
            argv[0],
            argv,
            os.environ if env is None else env,
            file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)],
        )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        data = os.read(reader, 64)
        if data and samples is not None:
            samples.add(started)
        while os.read(reader, 65536):
            pass
    finally:
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not data or status != 0:
        raise RuntimeError(f"{os.path.basename(argv[0])} ended with {status} and {len(data)} bytes of output")


def to_the_end(argv: list[str], samples: Samples | None, env: dict[str, str]) -> None:
    """Start a program, its output thrown away, and time it to its end.

    Raises:
        RuntimeError: it failed.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    started = time.perf_counter()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, nothing, 1)]
        pid = os.posix_spawn(argv[0], argv, env, file_actions=actions)
    finally:
        os.close(nothing)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if samples is not None:
        samples.add(started)
    if status != 0:
        raise RuntimeError(f"{' '.join(argv)} ended with {status}")


def memory_available() -> int:
    """Bytes that the host could give to a new program."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
