"""Measuring a wall of gVisor: the sentry's process as the host sees it."""

from __future__ import annotations

from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Handle
from ringfence.runtimes.measuring import Driver, measure_monitor

KERNEL = "4.4.0 (gVisor)"  # what every gVisor since 2018 says it is


def measure(driver: Driver, handle: Handle) -> EffectiveBoundary:
    """The effective boundary of a living wall: what stands between the sentry and the host.

    Raises:
        LinkLost: the wall has ended.
    """
    note = "the workload's system calls are answered by gVisor; host_uid is of gVisor's process"
    return measure_monitor(driver, handle, "gVisor's kernel", KERNEL, notes=(note,))
