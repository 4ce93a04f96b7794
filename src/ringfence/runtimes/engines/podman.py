"""``podman``: by the Docker-compatible API of its service (``podman.socket``). See ``engines.driver``."""

from __future__ import annotations

from ringfence.runtimes.engines.driver import EngineRuntime


class PodmanRuntime(EngineRuntime):
    """See the module."""

    engine = "podman"
    oldest = (4, 0)
    at_once = 3  # it takes one to two seconds for each, mostly one after the other
