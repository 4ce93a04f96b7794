"""A plugin for the session that ``ringfence conformance`` starts: tells its parent what happens.

Loaded with ``-p ringfence.conformance.reporting`` and never by itself. ``RINGFENCE_CONFORMANCE_PIPE`` is the
number of a descriptor to write JSON lines to; ``RINGFENCE_CONFORMANCE_PARENT`` the parent's process id, whose
death ends the session as Ctrl-C does. It writes::

    {"collected": 140}
    {"test": name, "area": "processes", "state": "begins"}
    {"test": name, "area": "processes", "outcome": "passed" | "failed" | "skipped" | "xfailed", "text": why}
    {"runtime": name, "capabilities": {…}, "expected": {…} or null}    at the end: its committed row here
"""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from ringfence.conformance.plugin import LISTED, runtime_of, who

PIPE, PARENT = "RINGFENCE_CONFORMANCE_PIPE", "RINGFENCE_CONFORMANCE_PARENT"
_PR_SET_PDEATHSIG = 1
_MOST_TEXT = 4000
# What a test came to is the worst that its set-up, call and clean-up came to.
_ORDER = ("passed", "xfailed", "skipped", "failed")


def pytest_configure(config: pytest.Config) -> None:
    """Tie this process to its parent, and begin to tell."""
    import ctypes

    pipe = int(os.environ.pop(PIPE))
    os.set_inheritable(pipe, False)  # nothing that is started here may write to it, sandboxes least of all
    parent = int(os.environ.pop(PARENT))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:
        raise pytest.UsageError("whoever started this session is gone")
    config.pluginmanager.register(_Telling(pipe), "ringfence-telling")


def area_of(item: pytest.Item) -> str:
    """``processes`` of ``TestProcesses``; ``other`` for tests in no class."""
    owner = getattr(item, "cls", None)
    name = owner.__name__ if owner is not None else "Other"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.removeprefix("Test")).lower()


class _Telling:
    def __init__(self, pipe: int) -> None:
        self._pipe = os.fdopen(pipe, "w", encoding="utf-8")
        self._items: dict[str, pytest.Item] = {}
        self._worst: dict[str, tuple[str, str]] = {}

    def _say(self, **line: Any) -> None:
        try:
            self._pipe.write(json.dumps(line) + "\n")
            self._pipe.flush()
        except BrokenPipeError:
            # The parent is gone, and with it the reason to go on.
            signal.raise_signal(signal.SIGINT)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._items = {item.nodeid: item for item in session.items}
        self._say(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        item = self._items[nodeid]
        self._worst[nodeid] = ("passed", "")
        self._say(test=item.name, area=area_of(item), state="begins")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail") and not report.failed:
            outcome = "xfailed"
        if _ORDER.index(outcome) <= _ORDER.index(self._worst[report.nodeid][0]):
            return
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ").removeprefix(LISTED)
        elif outcome == "xfailed":
            text = str(report.wasxfail)
        else:
            text = "" if report.longrepr is None else str(report.longrepr)
        self._worst[report.nodeid] = (outcome, text[-_MOST_TEXT:])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        item = self._items[nodeid]
        outcome, text = self._worst.pop(nodeid)
        self._say(test=item.name, area=area_of(item), outcome=outcome, text=text)

    def pytest_sessionfinish(self) -> None:
        from ringfence.conformance.tables.capabilities import expected

        for name in sorted({name for item in self._items.values() if (name := runtime_of(item))}):
            self._say(runtime=name, expected=expected(name, who()))
