"""``podman``: by the Docker-compatible API of its service (``podman.socket``). See ``engines.driver``."""

from __future__ import annotations

from ringfence.runtimes.engines.driver import EngineRuntime


class PodmanRuntime(EngineRuntime):
    """See the module."""

    engine = "podman"
    oldest = (4, 0)
