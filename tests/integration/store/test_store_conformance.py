"""The shipped suites on both implementations."""

from ringfence.conformance.test_store import (
    TestChanges,
    TestCounters,
    TestEvents,
    TestFind,
    TestLeases,
    TestLife,
    TestProcesses,
    TestRows,
    TestTake,
    TestWatch,
)

__all__ = [
    "TestChanges",
    "TestCounters",
    "TestEvents",
    "TestFind",
    "TestLeases",
    "TestLife",
    "TestProcesses",
    "TestRows",
    "TestTake",
    "TestWatch",
]
