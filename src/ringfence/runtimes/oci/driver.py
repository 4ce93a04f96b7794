"""Running an OCI runtime (runc, crun) behind our launcher: everything but the program's own options."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringfence.runtimes.contract import Capabilities, Handle, StartSpec
from ringfence.runtimes.launching import readied
from ringfence.runtimes.launching.foreign import LISTEN, ForeignRuntime
from ringfence.runtimes.launching.guestargs import agent_arguments
from ringfence.runtimes.oci import bundle

if TYPE_CHECKING:
    from ringfence.runtimes.context import RuntimeContext
    from ringfence.runtimes.gpu.cdi import Edits
    from ringfence.runtimes.launching.plan import Plan

_NODES = f"{readied.STATE}/gpu"  # where the program finds the nodes of GPUs


class OciRuntime(ForeignRuntime):
    """Base of runc and crun."""

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        self._gpus: dict[str, Edits] = {}  # by sandbox, while it is started

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(
            rootless=True,
            overlay=True,
            user_zero=True,
            mounts=True,
            recover=True,
            disk_limit=True,
            pause=self.context.root,  # by the freezer of a cgroup, which a normal user has seldom
            disk_snapshot=True,
            gpu=self.context.root,  # device nodes are made anew for the wall
            network=("none", "egress", "open"),
            transparent=True,
        )

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        if not spec.gpus:
            return await super().start(spec)
        from ringfence.runtimes.gpu import handing

        self._check(spec)
        prepared, found = handing.prepare(spec)
        assert found is not None
        self._gpus[spec.id] = found
        try:
            return await super().start(prepared)
        except BaseException:
            handing.forget(spec.folder)
            raise
        finally:
            del self._gpus[spec.id]

    def furnish(self, plan: Plan, spec: StartSpec) -> None:
        """See the base: device nodes of its GPUs, in a place that only the program sees."""
        if spec.id in self._gpus:
            from ringfence.runtimes.gpu import handing

            handing.add_nodes(plan, self._gpus[spec.id], _NODES)

    def options(self) -> list[str]:
        """Options before the verb: how the program keeps its hands off the cgroups."""
        raise NotImplementedError

    def command(self, spec: StartSpec, agent: int, cgroups: Sequence[int]) -> list[str]:
        """See the base."""
        assert self.program is not None
        rules, ready = agent + 1, agent + 2
        arguments = list(agent_arguments(spec, LISTEN, cgroups, rules, ready))
        users, groups = readied.inner_maps(spec.identity, root=self.context.root)
        document = bundle.document(
            spec,
            rootfs=readied.ROOT,
            command=[f"/proc/self/fd/{agent}", *arguments[1:]],
            maps=users,
            mounts=self._device_mounts(spec),
            gid_maps=groups,
            cgroup_namespace=False,  # made ahead, around the program
            # libseccomp takes 50 ms to make the filter from its description, each time anew. The agent
            # installs the same filter, finished, as its first act: nothing of the sandbox runs before.
            seccomp=False,
        )
        folder = bundle.write(spec, document)
        return [
            self.program,
            "--root",
            readied.STATE,
            *self.options(),
            "run",
            "--bundle",
            folder,
            "--preserve-fds",
            str(ready + 1 - LISTEN),
            spec.id,
        ]

    def _device_mounts(self, spec: StartSpec) -> list[dict[str, Any]]:
        if spec.id not in self._gpus:
            return []
        from ringfence.runtimes.gpu import handing

        return handing.oci_mounts(self._gpus[spec.id], _NODES)

    def forget(self, folder: str) -> None:
        """See the base."""
        bundle.remove(folder)
        if os.path.isdir(os.path.join(folder, "gpu")):
            from ringfence.runtimes.gpu import handing

            handing.forget(folder)

    def said(self, text: str) -> str:
        """See the base: runc logs ``level=error msg="…"``, crun plain lines, or JSON if told so."""
        lines = text.strip().splitlines()
        for line in reversed(lines):
            if "level=error" in line and " msg=" in line:
                words = line.partition(" msg=")[2]
                try:
                    return str(json.loads(words))
                except ValueError:
                    return words
        return lines[-1] if lines else ""


def subordinate_ids() -> bool:
    """Whether this user can map more than its own id: newuidmap is there, and both files name the user."""
    import pwd

    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        return False
    names = {str(os.geteuid())}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    for path in ("/etc/subuid", "/etc/subgid"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                if not any(line.partition(":")[0] in names for line in file):
                    return False
        except OSError:
            return False
    return True
