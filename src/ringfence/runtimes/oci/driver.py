"""Running an OCI runtime (runc, crun) behind our launcher: everything but the program's own options."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence

from ringfence.runtimes.contract import Capabilities, StartSpec
from ringfence.runtimes.launching import readied
from ringfence.runtimes.launching.foreign import LISTEN, ForeignRuntime
from ringfence.runtimes.launching.guestargs import agent_arguments
from ringfence.runtimes.oci import bundle


class OciRuntime(ForeignRuntime):
    """Base of runc and crun."""

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
        )

    def options(self) -> list[str]:
        """Options before the verb: how the program keeps its hands off the cgroups."""
        raise NotImplementedError

    def command(self, spec: StartSpec, agent: int, cgroups: Sequence[int]) -> list[str]:
        """See the base."""
        assert self.program is not None
        rules = agent + 1
        arguments = list(agent_arguments(spec, LISTEN, cgroups, rules))
        users, groups = readied.inner_maps(spec.identity, root=self.context.root)
        document = bundle.document(
            spec,
            rootfs=readied.ROOT,
            command=[f"/proc/self/fd/{agent}", *arguments[1:]],
            maps=users,
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
            str(rules + 1 - LISTEN),
            spec.id,
        ]

    def forget(self, folder: str) -> None:
        """See the base."""
        bundle.remove(folder)

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
