"""The runtime suite, in parts. Every class is one subject; import all, or those that you want::

from ringfence.conformance.suites.processes import ProcessSuite

class TestProcesses(ProcessSuite):
    pass
"""

from __future__ import annotations

from ringfence.conformance.suites.boundary import BoundarySuite
from ringfence.conformance.suites.faults import FaultSuite
from ringfence.conformance.suites.files import FileSuite, WatchSuite
from ringfence.conformance.suites.lifecycle import LifecycleSuite
from ringfence.conformance.suites.limits import LimitSuite
from ringfence.conformance.suites.links import LinkSuite
from ringfence.conformance.suites.ports import PortSuite
from ringfence.conformance.suites.processes import ProcessSuite
from ringfence.conformance.suites.recovery import RecoverySuite
from ringfence.conformance.suites.snapshots import SnapshotSuite
from ringfence.conformance.suites.streams import StreamSuite
from ringfence.conformance.suites.terminals import TerminalSuite

__all__ = [
    "BoundarySuite",
    "FaultSuite",
    "FileSuite",
    "LifecycleSuite",
    "LimitSuite",
    "LinkSuite",
    "PortSuite",
    "ProcessSuite",
    "RecoverySuite",
    "SnapshotSuite",
    "StreamSuite",
    "TerminalSuite",
    "WatchSuite",
]
