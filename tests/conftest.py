"""Fixtures for every kind of test; pytest puts this folder on the path, hence ``support``."""

from __future__ import annotations

import os
import signal
import tempfile
from importlib.metadata import entry_points

from hypothesis import HealthCheck, settings

from support.engines import docker_engine, engine_of_the_runtime, podman_engine
from support.leaks import no_leaks

__all__ = ["docker_engine", "engine_of_the_runtime", "no_leaks", "podman_engine"]

# The conformance plugin loads itself where the package is installed; a bare checkout loads it here.
if not any(found.name == "ringfence" for found in entry_points(group="pytest11")):
    pytest_plugins = ["ringfence.conformance.plugin"]


# Compiling the WebAssembly interpreters takes half a minute: once a user of this machine, not once a session.
os.environ.setdefault("RINGFENCE_MODULES", f"{tempfile.gettempdir()}/ringfence-test-modules-{os.geteuid()}")

# Hypothesis for busy machines: no deadlines, no complaint about slow data, nothing written to disk.
# In CI always the same examples: what it refuses can be had again. New ones are tried where code is written.
settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("busy")

# What a script starts in the background ignores interrupts, and so would all that the tests start: some of
# them press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
