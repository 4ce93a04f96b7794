"""Counters of the API itself, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
