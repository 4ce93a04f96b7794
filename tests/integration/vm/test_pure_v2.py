"""The version 2 paths of jail, runc and crun, in a guest that has nothing else (and where crun runs)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import guests

from ringfence.model.errors import RingfenceError
from ringfence.runtimes.vm import kernel

RUNTIMES = ("jail", "crun", "runc")
TESTS = (
    "test_running",
    "test_pausing",
    "test_a_paused_wall_can_be_destroyed",
    "test_memory",
    "test_processes",
    "test_processor_time",
    "test_deadline",
    "test_the_limits_say_how_they_are_enforced",
)
TIMEOUT = 2400.0  # seconds: a minute or two on an idle machine


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[guests.Outcome]:
    """One boot, one session of pytest inside."""
    if os.geteuid() != 0:
        pytest.skip("the guest's disk is made as root")
    for program in ("qemu-system-x86_64", "mkfs.erofs", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        kernel.find()
    except RingfenceError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("guest")
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "ringfence.conformance.plugin",
        "-o",
        "asyncio_mode=auto",
    ]
    arguments += [
        "--timeout=300",
        "-k",
        f"({' or '.join(TESTS)}) and not Snapshots",
        "--pyargs",
        "ringfence.conformance.test_runtime",
    ]
    for name in RUNTIMES:
        arguments += ["--ringfence-runtime", name]
    yield guests.run(Path(folder), arguments, TIMEOUT)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(3000)
def test_the_guest_has_version_2_and_nothing_else(outcome: guests.Outcome) -> None:
    assert outcome.old_hierarchies == 0, outcome.console[-4000:]
    assert {"memory", "pids", "cpu"} <= set(outcome.controllers)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.timeout(3000)
def test_every_selected_test_passes_there(outcome: guests.Outcome, runtime: str) -> None:
    failed = [entry for entry in outcome.tests if f"[{runtime}" in entry[0] and entry[1] != "passed"]
    assert not failed, "\n".join(f"{name}: {found}\n{text}" for name, found, text in failed)
    assert outcome.count(runtime, "passed") == len(TESTS), outcome.console[-4000:]
