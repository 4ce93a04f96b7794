"""``crun``: the OCI runtime in C, started in a mount namespace of its own. Shared kernel, level 2.

As ``runc``: the root file system is made ready by our launcher, the cgroups are the node's
(``--cgroup-manager=disabled``), and crun stays as the monitor. crun by itself refuses hosts with version 1
and version 2 cgroups side by side ("cgroups in hybrid mode not supported"); here it never sees the host's
tree, so it works there too. It doesn't need user 0 to be mapped.
"""

from __future__ import annotations

from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import Probe
from ringfence.runtimes.oci.driver import OciRuntime

OLDEST = (1, 0, 0)


class CrunRuntime(OciRuntime):
    """See the module."""

    name = "crun"
    level = Level.L2
    boundary = Boundary.NAMESPACES
    program_name = "crun"
    remedy = "apt-get install crun"

    def options(self) -> list[str]:
        """See the base."""
        return ["--cgroup-manager=disabled"]

    async def probe(self) -> Probe:
        """See the contract: starts a wall and talks to the agent in it."""
        return await self.probe_version(r"crun version (\S+)", OLDEST)
