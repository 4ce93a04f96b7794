"""``runc``: the reference OCI runtime, started in a mount namespace of its own. Shared kernel, level 2.

The overlay root and what is shown of the host are mounted by our launcher in a namespace that only runc
sees (``launching.readied``), the cgroups are the node's and runc is told to keep its hands off them
(``--rootless=true`` with a read-only cgroup tree: it stays where the launcher has put it), and the guest
agent is a sealed memory file. runc stays as the monitor: killing it kills the wall.

runc insists that user 0 inside is mapped. A normal user without subordinate ids has one id to map, so there
it can only run policies with ``process.user: 0``.
"""

from __future__ import annotations

from ringfence.model.errors import HostLimit
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import Probe, StartSpec
from ringfence.runtimes.oci.driver import OciRuntime, subordinate_ids

OLDEST = (1, 1, 0)  # older ones can't open bind sources that the sandbox's root may not see
IDS = (
    "install the package uidmap, give this user ids in /etc/subuid and /etc/subgid (usermod --add-subuids), "
    "or use the jail runtime"
)


class RuncRuntime(OciRuntime):
    """See the module."""

    name = "runc"
    level = Level.L2
    boundary = Boundary.NAMESPACES
    program_name = "runc"
    remedy = "apt-get install runc"
    probe_user = 0  # of a normal user's probe: see the module

    def options(self) -> list[str]:
        """See the base."""
        return ["--rootless=true"]

    def check(self, spec: StartSpec) -> None:
        """See the base: user 0 must be mapped."""
        if not any(line.inside == 0 for line in spec.identity.maps):
            raise HostLimit("runc wants user 0 mapped inside, and this user has one id only to map", hint=IDS)

    async def probe(self) -> Probe:
        """See the contract: starts a wall and talks to the agent in it."""
        return await self.probe_version(r"runc version (\S+)", OLDEST)

    def lacking(self) -> tuple[str, str]:
        """See the base."""
        if self.context.root or subordinate_ids():
            return "", ""
        return "without subordinate ids it runs policies with process.user: 0 only", IDS
