"""Health, the description of the API, the service's own metrics."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ringfence
from ringfence.api.calls import Answer, Call
from ringfence.api.routing import Routes
from ringfence.model.errors import RingfenceError

routes = Routes("system")
_PATIENCE = 5.0  # seconds for the doors' own figures


@routes.get("/healthz", scope="")
async def healthz(call: Call) -> dict[str, Any]:
    """Whether this process serves. Says nothing about what it needs."""
    return {"status": "ok", "version": ringfence.__version__}


@routes.get("/readyz", scope="")
async def readyz(call: Call) -> Answer:
    """Whether store and placement answer; 503 while they don't, or while the process is on its way out."""
    ready = not call.service.draining.is_set() and await call.service.ready()
    return Answer(200 if ready else 503, {"status": "ready" if ready else "not ready"})


@routes.get("/openapi.json", scope="")
async def openapi(call: Call) -> Answer:
    """This description."""
    return Answer(200, call.service.openapi, media="application/json")


@routes.get("/metrics", scope="admin", answer="text/plain")
async def metrics(call: Call) -> Answer:
    """Metrics of this process for Prometheus; for the operator: they are of all projects."""
    call.principal.require_operator()
    if call.control.egress is not None:
        with contextlib.suppress(RingfenceError, TimeoutError):  # without its proxy there is the rest
            async with asyncio.timeout(_PATIENCE):
                found = await call.control.egress.doors.metrics()
            call.service.metrics.egress(found)
    text = call.service.metrics.text()
    return Answer(200, text, media="text/plain; version=0.0.4; charset=utf-8")
