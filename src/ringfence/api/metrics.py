"""Counters of the API itself, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

if TYPE_CHECKING:
    from ringfence.api.routing import Route

_TIMES = (0.002, 0.004, 0.006, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """One registry for each service: two in one process (tests, embedded) don't meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "ringfence_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "ringfence_request_seconds",
            "Time to the end of the answer.",
            ("route",),
            buckets=_TIMES,
            registry=self.registry,
        )
        self.sandboxes = Gauge(
            "ringfence_sandboxes", "Sandboxes by state.", ("state",), registry=self.registry
        )
        self._output = Counter("ringfence_output_bytes", "Output of commands.", registry=self.registry)

        self._doors = {
            name: Gauge(f"ringfence_egress_{name}", text, registry=self.registry)
            for name, text in (
                ("doors", "Open doors of sandboxes."),
                ("connections", "Connections through them."),
                ("pending", "Questions that wait for an answer."),
            )
        }
        self._circuits = Gauge(
            "ringfence_egress_circuit_failures",
            "Failures in a row of destinations that are left alone for a while.",
            ("project", "destination", "state"),
            registry=self.registry,
        )

    def egress(self, found: Mapping[str, Any]) -> None:
        """What the doors of this process say of themselves."""
        for name, gauge in self._doors.items():
            gauge.set(found[name])
        self._circuits.clear()
        for one in found["circuits"]:
            if one["state"] != "closed":
                where = f"{one['host']}:{one['port']}"
                self._circuits.labels(one["project"], where, one["state"]).set(one["failures"])

    def request(self, route: Route | None, status: int, seconds: float) -> None:
        """One request came to its end."""
        name = route.name if route is not None else "other"
        self._requests.labels(name, str(status)).inc()
        self._seconds.labels(name).observe(seconds)

    def output(self, size: int) -> None:
        """So many bytes of output went out."""
        self._output.inc(size)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return bytes(generate_latest(self.registry))
