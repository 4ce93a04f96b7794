"""The pytest plugin: chooses the runtimes, gates by the committed table, counts, and lets no skip pass.

A test belongs to the kit when it uses the fixture ``ringfence_runtime`` (its parameter is a runtime's name).
For those tests:

* ``@needs("pause")`` runs the test only where the committed table says that the runtime can do that;
  elsewhere it is a *listed* skip. Any other skip is a failure: a test that quietly stops proves nothing.
* at the end of the session one line a runtime says how many tests ran.

Loaded into every pytest session of whoever installed the package, so nothing is imported at the top that such
a session does not have anyway.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LISTED = "listed: "  # a skip whose reason begins so was decided by a committed table
_COUNTS = pytest.StashKey[dict[str, Counter[str]]]()

pytest.register_assert_rewrite("ringfence.conformance.suites", "ringfence.conformance.harness")
pytest.register_assert_rewrite("ringfence.conformance.suites_store")


def needs(*capabilities: str) -> pytest.MarkDecorator:
    """Run the test only on runtimes whose committed row has all these capabilities."""
    return pytest.mark.ringfence_needs(*capabilities)


def only(*runtimes: str) -> pytest.MarkDecorator:
    """Run the test on these runtimes only: it is about something that no other has."""
    return pytest.mark.ringfence_only(*runtimes)


def who() -> str:
    """The column of the tables that this process belongs to: ``root`` or ``user``."""
    return "root" if os.geteuid() == 0 else "user"


def label(runtime: str) -> str:
    """``jail (root)``: how summaries name a runtime and who runs it."""
    return f"{runtime} ({who()})"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the kit."""
    group = parser.getgroup("ringfence", "Ringfence conformance")
    group.addoption(
        "--ringfence-runtime",
        action="append",
        default=[],
        metavar="NAME",
        help="run the conformance and security suites on this runtime only "
        "(repeatable; default: every runtime of the committed table)",
    )
    group.addoption(
        "--ringfence-store-opener",
        default="ringfence.store.opening:open_store",
        metavar="MODULE:FUNCTION",
        help="the coroutine function that opens the store under test by its address (default: %(default)s)",
    )
    group.addoption(
        "--ringfence-report",
        default=None,
        metavar="FILE",
        help="write the outcome of every test of the session to FILE, one JSON object a line",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Markers, and the counters of this session."""
    config.addinivalue_line("markers", "ringfence_needs(*capabilities): what the runtime must be able to do")
    config.addinivalue_line("markers", "ringfence_only(*runtimes): the only runtimes that it is about")
    config.stash[_COUNTS] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a runtime."""
    if "ringfence_runtime" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--ringfence-runtime")
    if not chosen:
        from ringfence.conformance.tables.capabilities import RUNTIMES
        from ringfence.conformance.tables.selected import runs

        chosen = [name for name in RUNTIMES if runs(name, metafunc.function.__name__)]
    for mark in metafunc.definition.iter_markers("ringfence_only"):
        chosen = [name for name in chosen if name in mark.args]
    metafunc.parametrize("ringfence_runtime", chosen)


def runtime_of(item: pytest.Item) -> str | None:
    """The runtime that a test of the kit runs on; None for other tests."""
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("ringfence_runtime") if callspec is not None else None
    return name if isinstance(name, str) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """More time for what starts slowly."""
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        runtime = runtime_of(item)
        if runtime is None or item.get_closest_marker("timeout") is not None:
            continue
        from ringfence.conformance.tables.selected import SECONDS

        if runtime in SECONDS:
            item.add_marker(pytest.mark.timeout(SECONDS[runtime]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gate by the committed table."""
    runtime = runtime_of(item)
    if runtime is None:
        return
    from ringfence.conformance.tables.capabilities import UNVERIFIED, expected

    if runtime in UNVERIFIED and not _present(runtime):
        pytest.skip(f"{LISTED}{runtime} {UNVERIFIED[runtime]}")
    row = expected(runtime, who())
    if row is not None and who() == "user" and not row["rootless"]:
        pytest.skip(f"{LISTED}{runtime} needs root")
    for mark in item.iter_markers("ringfence_needs"):
        for capability in mark.args:
            if row is not None and not row[capability]:
                pytest.skip(f"{LISTED}{runtime} has no {capability} as {who()}")


def _present(runtime: str) -> bool:
    """Whether an unverified runtime's component is on this machine."""
    return shutil.which(runtime) is not None and os.access("/dev/kvm", os.R_OK | os.W_OK)


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Turn unlisted skips of the kit's tests into failures."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    if runtime_of(item) is None or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if LISTED not in reason:
        report.outcome = "failed"
        report.longrepr = f"a skip that no committed table lists: {reason}"


def _names(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


class _Counting:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.items: dict[str, str] = {}
        path = config.getoption("--ringfence-report")
        self.report = Path(path) if path else None
        if self.report is not None:
            self.report.write_text("")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # A test that is about none of the chosen runtimes is not there at all, rather than skipped.
        nobodys = [i for i in items if "ringfence_runtime" in _names(i) and runtime_of(i) is None]
        if nobodys:
            self.config.hook.pytest_deselected(items=nobodys)
            items[:] = [item for item in items if item not in nobodys]
        self.items = {item.nodeid: name for item in items if (name := runtime_of(item)) is not None}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed"  # type: ignore[assignment]
        if self.report is not None:
            text = "" if report.longrepr is None else str(report.longrepr)
            line = {"test": report.nodeid, "outcome": outcome, "text": text[-4000:]}
            with self.report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        name = self.items.get(report.nodeid)
        if name is not None:
            self.config.stash[_COUNTS].setdefault(label(name), Counter())[outcome] += 1


@pytest.fixture(scope="session")
def ringfence_state() -> Generator[Path, None, None]:
    """A state root for the whole session, where a workload's host user can pass through but not list."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rf-conformance-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def ringfence_store_opener(request: pytest.FixtureRequest) -> str:
    """What opens the store under test: ``module:function``."""
    return str(request.config.getoption("--ringfence-store-opener"))


@pytest.fixture
def ringfence_store_address(tmp_path: Path) -> str:
    """The address of an empty store of the test's own; a conftest overrides it for other kinds."""
    return str(tmp_path / "store.db")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start counting."""
    session.config.pluginmanager.register(_Counting(session.config), "ringfence-counting")


def add_counts(config: pytest.Config, runtime: str, counts: dict[str, int]) -> None:
    """Add the counts of a session in another process (as another user) to this session's summary."""
    config.stash[_COUNTS].setdefault(runtime, Counter()).update(counts)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many tests of each runtime ran."""
    counts = config.stash.get(_COUNTS, {})
    if not counts:
        return
    parts = []
    for name, outcomes in counts.items():
        kinds = [f"{outcomes.get('passed', 0)} passed"]
        kinds += [f"{n} {kind}" for kind in ("failed", "skipped", "xfailed") if (n := outcomes.get(kind))]
        parts.append(f"{name} {' '.join(kinds)}")
    terminalreporter.write_line("ringfence conformance: " + ", ".join(parts))
