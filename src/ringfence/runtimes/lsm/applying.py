"""What drivers ask for: the steps or options that put a wall into the host's security module."""

from __future__ import annotations

from ringfence.model.errors import HostLimit
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.lsm import APPARMOR, SELINUX, apparmor, detect, selinux


class Confining:
    """Of one node process. A profile that can't be had costs a layer, never a start; ``trouble`` says why."""

    def __init__(self, *, root: str = "/", privileged: bool | None = None) -> None:
        self.root = root
        self.found = detect(root=root, privileged=privileged)
        self.trouble = self.found.reason
        self._ready: dict[str, str] = {}

    def profile(self, spec: StartSpec) -> str:
        """The name of the AppArmor profile of a wall, loaded; empty if there is none to be had here."""
        if self.found.module != APPARMOR or not self.found.usable:
            return ""
        name, _ = apparmor.profile(spec)
        if name not in self._ready:
            try:
                self._ready[name] = apparmor.ready(spec, root=self.root)
            except HostLimit as error:
                self._ready[name] = ""
                self.trouble = error.message
        return self._ready[name]

    def steps(self, spec: StartSpec) -> list[tuple[str, str, str]]:
        """Steps of a plan, before the process gives up being root: its next exec enters the profile."""
        name = self.profile(spec)
        return [("WRITE", apparmor.ATTRIBUTE, f"exec {name}")] if name else []

    def engine(self, number: int, spec: StartSpec) -> list[str]:
        """Security options for an engine on this machine. ``number`` is the sandbox's own on this host."""
        if self.found.module == SELINUX and self.found.usable:
            return selinux.engine_options(number, root=self.root)
        return apparmor.engine_options(self.profile(spec))
