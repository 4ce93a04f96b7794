"""Every suite on the chosen runtimes: ``pytest --pyargs ringfence.conformance.test_runtime``."""

from __future__ import annotations

from ringfence.conformance import suites


class TestLifecycle(suites.LifecycleSuite):
    """The life of a wall."""


class TestProcesses(suites.ProcessSuite):
    """Commands and signals."""


class TestStreams(suites.StreamSuite):
    """Input and output."""


class TestTerminals(suites.TerminalSuite):
    """Terminals."""


class TestFiles(suites.FileSuite):
    """Files and archives."""


class TestWatch(suites.WatchSuite):
    """Watching folders."""


class TestPorts(suites.PortSuite):
    """Ports."""


class TestLinks(suites.LinkSuite):
    """Links."""


class TestLimits(suites.LimitSuite):
    """Limits and causes."""


class TestBoundary(suites.BoundarySuite):
    """The effective boundary."""


class TestRecovery(suites.RecoverySuite):
    """After a restart of the host process."""


class TestFaults(suites.FaultSuite):
    """Scripted faults."""


class TestSnapshots(suites.SnapshotSuite):
    """Snapshots, forks and resets."""
