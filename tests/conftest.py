"""Fixtures for every kind of test; pytest puts this folder on the path, hence ``support``."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import entry_points

from support.leaks import no_leaks

__all__ = ["no_leaks"]

# The conformance plugin loads itself where the package is installed; a bare checkout loads it here.
if not any(found.name == "ringfence" for found in entry_points(group="pytest11")):
    pytest_plugins = ["ringfence.conformance.plugin"]


# Compiling the WebAssembly interpreters takes half a minute: once a user of this machine, not once a session.
os.environ.setdefault("RINGFENCE_MODULES", f"{tempfile.gettempdir()}/ringfence-test-modules-{os.geteuid()}")
