"""``docker``: the engine that this user's ``docker`` would use, local or remote. See ``engines.driver``.

Levels: 2 with the engine's namespaces; 3 when the OCI runtime that was chosen has a kernel of its own:
``docker:runsc``, ``docker:kata-…``, or RINGFENCE_DOCKER_RUNTIME for ``docker`` itself.
"""

from __future__ import annotations

from ringfence.runtimes.engines.driver import EngineRuntime


class DockerRuntime(EngineRuntime):
    """See the module."""

    engine = "docker"
    oldest = (20, 10)
    at_once = 16
