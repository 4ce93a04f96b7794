"""What every implementation of ``ringfence.store.contract.Store`` must do, line by line of its contract.

Every class is one subject. ``pytest --pyargs ringfence.conformance.test_store`` runs all of them on SQLite;
``--ringfence-store-opener MODULE:FUNCTION`` on what that coroutine function opens by an address. A conftest
that overrides the fixture ``ringfence_store_address`` says by which (each test wants an empty store).
"""

from __future__ import annotations

from ringfence.conformance.suites_store.changes import ChangeSuite, CounterSuite
from ringfence.conformance.suites_store.leases import EventSuite, LeaseSuite
from ringfence.conformance.suites_store.processes import ProcessesSuite
from ringfence.conformance.suites_store.rows import FindSuite, RowSuite
from ringfence.conformance.suites_store.taking import TakeSuite
from ringfence.conformance.suites_store.watching import LifeSuite, WatchSuite

__all__ = [
    "ChangeSuite",
    "CounterSuite",
    "EventSuite",
    "FindSuite",
    "LeaseSuite",
    "LifeSuite",
    "ProcessesSuite",
    "RowSuite",
    "TakeSuite",
    "WatchSuite",
]
