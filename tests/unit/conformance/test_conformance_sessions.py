"""What `ringfence conformance` makes of the lines that a session tells."""

from __future__ import annotations

from collections import Counter

from ringfence.cli.conformance import cell
from ringfence.cli.conforming import Session


def line(area: str, outcome: str, text: str = "") -> dict[str, str]:
    return {"test": "test_x", "area": area, "outcome": outcome, "text": text}


def test_a_session_counts_by_area_and_reason():
    session = Session("jail")
    session.take({"collected": 5})
    session.take({"test": "test_x", "area": "files", "state": "begins"})
    assert session.done == 0
    for told in (
        line("files", "passed"), line("files", "skipped", "no disk"), line("links", "skipped", "no disk"),
        line("links", "xfailed", "known"),
    ):  # fmt: skip
        session.take(told)
    session.take({"runtime": "jail", "expected": {"pty": True}})
    assert session.ok
    assert (session.collected, session.done, session.count("skipped")) == (5, 4, 2)
    assert session.skipped == {"no disk": 2}
    assert session.xfailed == {"known": 1}
    assert session.expected == {"pty": True}
    session.take(line("links", "failed", "assert 1 == 2"))
    assert not session.ok
    found = session.as_dict()
    assert found["areas"] == {
        "files": {"passed": 1, "skipped": 1},
        "links": {"skipped": 1, "xfailed": 1, "failed": 1},
    }
    assert found["failures"] == [{"test": "links: test_x", "text": "assert 1 == 2"}]


def test_a_session_that_ended_badly_is_no_success():
    session = Session("jail")
    session.take(line("files", "passed"))
    session.trouble = "the session ended with signal 9"
    assert not session.ok


def test_cells():
    assert cell(None) == "-"
    assert cell(Counter(passed=9)) == "9"
    assert cell(Counter(passed=8, xfailed=1)) == "9"
    assert cell(Counter(passed=8, skipped=1)) == "8/9"
    assert cell(Counter(passed=6, skipped=1, failed=2)) == "6/9, 2 FAILED"
