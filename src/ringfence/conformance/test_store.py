"""The store's suites: ``pytest --pyargs ringfence.conformance.test_store``."""

from __future__ import annotations

from ringfence.conformance import suites_store


class TestRows(suites_store.RowSuite):
    """Rows."""


class TestFind(suites_store.FindSuite):
    """Conditions, order, pages."""


class TestChanges(suites_store.ChangeSuite):
    """Transactions."""


class TestCounters(suites_store.CounterSuite):
    """Counters and limits."""


class TestTake(suites_store.TakeSuite):
    """One taker."""


class TestLeases(suites_store.LeaseSuite):
    """Leases and fencing."""


class TestEvents(suites_store.EventSuite):
    """Events."""


class TestWatch(suites_store.WatchSuite):
    """Watching."""


class TestLife(suites_store.LifeSuite):
    """Open and closed."""


class TestProcesses(suites_store.ProcessesSuite):
    """Several processes, some killed."""
