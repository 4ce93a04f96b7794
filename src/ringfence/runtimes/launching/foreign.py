"""Drivers whose wall is built by a foreign program, in a file system that we made ready for it.

The program stays as the wall's *monitor*: it is the first process of a pid namespace of its own, so that
killing it kills the whole wall, and its exit status is the guest agent's. See ``readied`` for what it sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringfence.model.errors import (
    HostLimit,
    RuntimeUnavailable,
    StartFailed,
    Unsupported,
)
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.contract import Handle, Health, Probe, StartSpec
from ringfence.runtimes.launching import readied, sockets
from ringfence.runtimes.launching.driver import EXIT_FILE, LaunchedRuntime
from ringfence.runtimes.launching.freezing import FrozenByCgroup
from ringfence.runtimes.launching.launcher import Child
from ringfence.runtimes.launching.plan import Plan
from ringfence.runtimes.launching.processes import ProcessRef, readable

START_TIMEOUT = 25.0  # seconds until the agent behind the program must answer
LISTEN = 3  # the agent's listening socket; the workload's cgroups follow
_VERSION_TIMEOUT = 30.0  # seconds; from a cold disk it takes some
_MOST_TEXT = 8192  # bytes of a program's own messages


@dataclass(frozen=True, slots=True)
class Ends:
    """Descriptors of one start that its plan hands over."""

    listener: int  # the agent's
    silence: int  # the program's stdin
    words: int  # its stdout and stderr
    ready: int  # where the agent tells that it has taken its place


class ForeignRuntime(FrozenByCgroup, LaunchedRuntime):
    """Base of the drivers whose program builds the wall. Subclasses say how it is called."""

    monitored = True  # the program stays; else it becomes the guest agent
    networks: tuple[str, ...] = ("none", "egress", "open")
    program_name: str  # looked up in PATH
    remedy: str  # how to install it

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        self.program = self.find()

    # -- for the subclasses

    def find(self) -> str | None:
        """The program's path; ``None`` if it is not installed."""
        return shutil.which(self.program_name) or _in_sbin(self.program_name)

    def check(self, spec: StartSpec) -> None:
        """Refuse what this program can't do.

        Raises:
            Unsupported: the spec asks for it.
        """

    def command(self, spec: StartSpec, agent: int, cgroups: Sequence[int]) -> list[str]:
        """The program's argv. ``agent`` is the descriptor of the agent's binary, the next ones are those of
        the system call filter and of where the agent tells that it is there; ``cgroups`` are the workload's.

        Called in a thread of the event loop; may write files into the sandbox's folder.
        """
        raise NotImplementedError

    def furnish(self, plan: Plan, spec: StartSpec) -> None:
        """Add steps after the root file system is ready and before the program starts."""

    def forget(self, folder: str) -> None:
        """Remove what ``command`` wrote into the sandbox's folder; it may not be there."""

    def lacking(self) -> tuple[str, str]:
        """(what can't be had here though walls start, remedy); empty if nothing is missing."""
        return "", ""

    def said(self, text: str) -> str:
        """The telling part of what the program wrote to its stderr."""
        return text.strip().splitlines()[-1] if text.strip() else ""

    async def probe_version(self, pattern: str, oldest: tuple[int, ...], *arguments: str) -> Probe:
        """The probe of a program whose version is the first group of ``pattern`` in what it says."""
        from ringfence.runtimes.launching.probing import probe, unavailable
        from ringfence.runtimes.vulnerabilities import numbers_of, vulnerabilities

        if self.program is None:
            return unavailable(self, f"{self.program_name} is not installed", self.remedy)
        found = re.search(pattern, await version_of(self.program, *arguments))
        version = found.group(1) if found else ""
        known = vulnerabilities(self.program_name, version)
        if numbers_of(version) < oldest:
            wanted = ".".join(map(str, oldest))
            return unavailable(
                self,
                f"{self.program_name} {version or '?'} is too old",
                f"install {self.program_name} {wanted} or later",
                version,
                known,
            )
        answer = await probe(self, version, known)
        reason, remedy = self.lacking()
        if reason and answer.health == Health.HEALTHY:
            answer = replace(answer, health=Health.DEGRADED, reason=reason, remedy=remedy)
        return answer

    # -- the contract

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self._check(spec)
        opened: list[int] = []
        child: Child | None = None
        try:
            listener = sockets.listener(spec.folder)
        except OSError as error:
            raise StartFailed(
                f"no socket in {spec.folder}: {error.strerror}", step="listen", errno=str(error.errno)
            ) from error
        try:
            words, words_end = pipe(opened)
            ready, ready_end = pipe(opened)
            silence, _ = pipe(opened)
            ends = Ends(listener.fileno(), silence, words_end, ready_end)
            plan = self.plan(spec, ends, opened)
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral)
            listener.close()
            for descriptor in opened:
                if descriptor not in (words, ready):
                    os.close(descriptor)
            opened[:] = [words, ready]
            handle = None if self.monitored else self._handle(spec, child)
            async with asyncio.timeout(START_TIMEOUT):
                if not await in_place(ready):
                    raise await self._failure(child, words)
            return handle or self._handle(spec, child)
        except BaseException as error:
            if child is not None:
                await self._undo(child)
            for name in (sockets.NAME, EXIT_FILE):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(spec.folder, name))
            self.forget(spec.folder)
            if isinstance(error, TimeoutError):
                raise StartFailed(
                    f"the agent behind {self.program_name} does not answer", step="agent"
                ) from None
            raise
        finally:
            listener.close()
            for descriptor in opened:
                os.close(descriptor)

    async def destroy(self, handle: Handle) -> None:
        """See the contract."""
        await super().destroy(handle)
        self.forget(handle.folder)

    def open_upper(self, handle: Handle) -> int:
        """See the contract."""
        return os.open(
            f"/proc/{handle.pid}/root/.ringfence/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )

    async def kill(self, handle: Handle) -> None:
        """SIGKILL the monitor: the kernel takes down everything below it.

        Raises:
            HostLimit: it has not, in time.
        """
        if "monitor" not in handle.data:
            await super().kill(handle)
            return
        monitor = ProcessRef(int(handle.data["monitor"]), int(handle.data["born"]), handle.boot_id)
        await self._end(handle, monitor.pid, monitor.pidfd())

    # -- starting

    def _check(self, spec: StartSpec) -> None:
        if self.program is None:
            raise RuntimeUnavailable(f"{self.program_name} is not installed", hint=self.remedy)
        if spec.network == "open" and "open" not in self.networks:
            raise Unsupported(
                f"{self.name} gives no open network",
                hint="use network mode none or egress",
                capability="network",
            )
        if spec.root.disk.kind == "image" and not self.context.root:
            raise HostLimit(
                "only root can mount a disk image",
                hint="ask for a disk of at most half of the memory, or run the node as root",
            )
        self.check(spec)

    def plan(self, spec: StartSpec, ends: Ends, opened: list[int]) -> Plan:
        """Everything up to the program's start."""
        assert self.program is not None
        root = self.context.root
        plan = Plan()
        work = readied.begin(plan, spec, opened, exit_file=os.path.join(spec.folder, EXIT_FILE), root=root)
        numbers = range(LISTEN + 1, LISTEN + 1 + len(work))
        agent = numbers.stop
        readied.add_root(plan, spec, root=root)
        self.furnish(plan, spec)
        # Never the node's own: programs give the standard streams to the sandbox's user.
        # Another description of the file: for reading only.
        rules = os.open(f"/proc/self/fd/{self.context.filter_fd(spec.seccomp)}", os.O_RDONLY | os.O_CLOEXEC)
        opened.append(rules)
        given = {
            0: ends.silence, 1: ends.words, 2: ends.words,
            LISTEN: ends.listener, agent: self.context.agent_fd(), agent + 1: rules, agent + 2: ends.ready,
        }  # fmt: skip
        for number, descriptor in (given | dict(zip(numbers, work, strict=True))).items():
            plan.add("FD", plan.fd(descriptor), number)
        plan.add("NO_NEW_PRIVS")
        if spec.ephemeral:
            plan.add("DEATH_SIGNAL", 9)
        plan.add("UMASK", 0o022)
        for text in self.command(spec, agent, numbers):
            plan.add("ARG", text)
        # For those written in Go: one thread is enough, and collecting garbage would only cost time until
        # there is more of it than a start makes.
        go = ("GOMAXPROCS=1", "GOGC=off", "GOMEMLIMIT=32MiB")
        for text in ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", *go):
            plan.add("ENV", text)
        plan.add("EXEC", self.program)
        return plan

    def _handle(self, spec: StartSpec, child: Child) -> Handle:
        from ringfence.runtimes.measuring import children

        if not self.monitored:
            return self.handle(spec, child, child.pid, self.data(spec, child))
        found = [pid for pid in children(child.pid) if _namespace(pid) not in (None, _namespace(child.pid))]
        if len(found) != 1:
            raise StartFailed(f"the wall of {self.program_name} has ended", step="agent")
        return self.handle(spec, child, found[0], self.data(spec, child))

    def data(self, spec: StartSpec, child: Child) -> dict[str, Any]:
        """What the handle has to know."""
        data: dict[str, Any] = {
            "uid": spec.identity.host_uid(spec.identity.uid),
            "capabilities": spec.identity.capabilities,
            "network": spec.network,
            "cgroups": list(spec.cgroup.agent),
        }
        if self.monitored:
            data |= {"monitor": child.pid, "born": ProcessRef.of(child.pid).birth}
        return data

    async def _failure(self, child: Child, words: int) -> StartFailed:
        text = self.said(await _text(child, words))
        return StartFailed(
            f"{self.program_name}: {text or 'ended without a word'}",
            hint=_hint(text),
            step=self.program_name,
        )

    async def _undo(self, child: Child) -> None:
        # It is the first process of a pid namespace: nothing that it started outlives it.
        if not child.exited.done():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        await asyncio.shield(child.exited)
        for key in [key for key, each in self._children.items() if each is child]:
            del self._children[key]
        child.close()


def pipe(opened: list[int]) -> tuple[int, int]:
    """A pipe; both ends are noted in ``opened``."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    opened += (reading, writing)
    return reading, writing


async def in_place(ready: int) -> bool:
    """Whether the guest agent tells that it has taken its place; false if all that could tell have ended.

    Until then the program builds the wall. What comes by the agent's socket meanwhile waits for it.
    """
    await readable(ready)
    return bool(os.read(ready, 1))


async def version_of(program: str, *arguments: str) -> str:
    """What a program says about its version, all of it; empty if it does not start, or hangs."""
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *(arguments or ("--version",)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(_VERSION_TIMEOUT):
            output, _ = await process.communicate()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, OSError | TimeoutError):
            return ""
        raise
    return output.decode(errors="replace")


def _in_sbin(name: str) -> str | None:
    for folder in ("/usr/local/sbin", "/usr/sbin", "/sbin"):
        if os.access(f"{folder}/{name}", os.X_OK):
            return f"{folder}/{name}"
    return None


def _namespace(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


async def _text(child: Child, words: int) -> str:
    """What the program wrote, once it has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await asyncio.shield(child.exited)
    with contextlib.suppress(OSError):
        return os.read(words, _MOST_TEXT).decode(errors="replace")
    return ""


def _hint(text: str) -> str:
    from ringfence.runtimes.launching.hints import user_namespace_hint

    denied = any(word in text for word in ("user namespace", "uid map", "uid_map", "ermission denied"))
    return user_namespace_hint() if denied else ""
