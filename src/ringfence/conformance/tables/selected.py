"""Runtimes that take seconds for every start: which tests of the suites run on them by default.

An emulated machine boots in three seconds on an idle host and in twenty on a busy one. All of the suites
run on a runtime that is asked for by name (``--ringfence-runtime qemu-microvm``), and must pass there, too.
"""

from __future__ import annotations

SELECTED: dict[str, frozenset[str]] = {
    "qemu-microvm": frozenset(
        {
            "test_capabilities_are_those_of_the_committed_table",
            "test_ended",
            "test_a_start_that_fails_names_the_step_and_leaves_nothing",
            "test_what_it_can_not_do_is_refused",
            "test_pausing",
            "test_memory",
            "test_processes",
            "test_disk",
            "test_deadline",
            "test_it_is_what_the_inside_shows",
            "test_a_kept_sandbox_survives_kill_9_and_is_adopted",
        }
    ),
    # A whole system boots in half a minute to two: tests/integration/vm has one of it.
    "qemu": frozenset({"test_capabilities_are_those_of_the_committed_table"}),
}


# Seconds that one test may take: whole machines start several times in one, emulated, on a busy host.
SECONDS = {"qemu-microvm": 600, "qemu": 1800}
# How many walls a test starts at once.
AT_ONCE = {"qemu-microvm": 4, "qemu": 2}


def at_once(runtime: str) -> int:
    """How many walls of a runtime a test of many starts."""
    return AT_ONCE.get(runtime, 12)


def runs(runtime: str, test: str) -> bool:
    """Whether a test runs on a runtime that was not asked for by name."""
    return runtime not in SELECTED or test in SELECTED[runtime]
