"""The same suites as a normal user, with and without subordinate ids, when the tests run as root.

A sub-session a runtime: its counts go into this session's summary, its failures are this test's.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from ringfence.conformance.plugin import add_counts
from support.rootless import Outcome, normal_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this session is a normal user's already")
# Without subordinate ids everything runs; with them, what differs: who is who, and what that guards. Only the
# jail uses them: bubblewrap maps one id always, and the fake none.
WITH_IDS = "Processes or Boundary or Files or Recovery"


def report(outcomes: list[Outcome]) -> str:
    """The failures, to be read."""
    return "\n\n".join(f"{found.test}\n{found.text}" for found in outcomes if found.outcome == "failed")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("runtime", "ids"),
    # runc wants user 0 mapped, and has subordinate ids for that or says so (tests/integration/oci).
    [
        ("jail", False), ("jail", True), ("bubblewrap", False), ("nsjail", False), ("nsjail", True),
        ("runc", True), ("crun", False), ("wasm", False), ("fake", False),
    ],
    ids=[
        "jail", "jail-with-ids", "bubblewrap", "nsjail", "nsjail-with-ids", "runc-with-ids", "crun", "wasm",
        "fake",
    ],
)  # fmt: skip
def test_conformance(runtime: str, ids: bool, request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("--ringfence-runtime")
    if chosen and runtime not in chosen:
        return
    with normal_user(ids=ids) as user:
        if runtime == "wasm":
            user.give_modules()
        args = ["tests/conformance/test_runtimes.py", f"--ringfence-runtime={runtime}"]
        outcomes, done = user.pytest(*args, *(["-k", WITH_IDS] if ids else []), timeout=1100)
    counts = Counter(found.outcome for found in outcomes)
    add_counts(request.config, f"{runtime} (user{' with ids' if ids else ''})", counts)
    assert outcomes, done.stdout + done.stderr
    failures = report(outcomes)
    assert not failures, failures
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert counts["passed"] > 20
