"""The ``firecracker`` driver: see the package. Started by its jailer, in namespaces that our launcher made.

The first process of the machine's pid namespace is a shell that waits for the jailer (and so for Firecracker,
which the jailer becomes) and passes its status on. It dies with the launcher, and with it the kernel ends the
machine: the jailer changes its user, which would lose such a wish of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence import _native
from ringfence.guest.link import GuestLink
from ringfence.model.errors import (
    LinkLost,
    RuntimeUnavailable,
    StartFailed,
    Unsupported,
)
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import Capabilities, Handle, Probe, StartSpec, WallStats
from ringfence.runtimes.firecracker import files, images, links, machine, saving
from ringfence.runtimes.firecracker.api import Api, Refused
from ringfence.runtimes.launching.driver import EXIT_FILE, LaunchedRuntime
from ringfence.runtimes.launching.guestargs import environment_of
from ringfence.runtimes.launching.plan import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUTS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    Plan,
)
from ringfence.runtimes.launching.processes import ProcessRef
from ringfence.runtimes.launching.steps import add_cgroups
from ringfence.runtimes.measuring import children
from ringfence.runtimes.vm import disks, initramfs, kernel

if TYPE_CHECKING:
    import socket

    from ringfence.model.sandbox import EffectiveBoundary
    from ringfence.runtimes.context import RuntimeContext
    from ringfence.runtimes.launching.launcher import Child

PROGRAM, JAILER = "firecracker", "jailer"
OLDEST = (1, 8, 0)  # describes its devices by ACPI, which the guest's kernel finds without being told
REMEDY = (
    "put `firecracker` and `jailer` of one release (1.14.4, 1.15.1 or later) on the PATH; "
    "see `ringfence setup firecracker`"
)
_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWTIME
_WAIT = '"$@"; exit $?'  # not the last command, so that the shell stays and waits
_MOST_WORDS = 64 << 10


class FirecrackerRuntime(LaunchedRuntime):
    """See the module."""

    name = "firecracker"
    level = Level.L3
    boundary = Boundary.HARDWARE
    start_deadline = 60.0
    start_timeout = 30.0  # of them for the guest to come up
    api_timeout = 10.0  # for the monitor to listen

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        self.program = _real(shutil.which(PROGRAM))
        self.jailer = _real(shutil.which(JAILER))
        self.known_version = ""

    # -- what the node asks of drivers that have a kernel of their own

    @staticmethod
    def memory_overhead(memory: int) -> int:
        """Bytes that the wall takes beyond what the workload may have."""
        return machine.overhead(memory)

    async def memory_kills(self, handle: Handle) -> int:
        """Processes of the workload that the guest's kernel killed for memory: the guest's own word."""
        return int(await links.call(self.jail(handle), "kills"))

    # -- the contract

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(
            user_zero=True,
            recover=True,
            disk_limit=True,
            pause=True,
            disk_snapshot=True,
            memory_snapshot=True,
            host_template=False,
            network=("none", "egress"),
        )

    async def probe(self) -> Probe:
        """See the contract: boots a guest and talks to the agent in it."""
        from ringfence.runtimes.firecracker import probing

        return await probing.probe(self)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self.check(spec)
        return await self._begin(spec)

    async def connect(self, handle: Handle) -> socket.socket:
        """See the contract."""
        try:
            return await links.connect(self.jail(handle), links.AGENT)
        except OSError as error:
            raise LinkLost(
                f"the guest agent can't be reached: {error.strerror or 'no answer'}", id=handle.id
            ) from error

    async def destroy(self, handle: Handle) -> None:
        """See the contract."""
        await super().destroy(handle)
        await asyncio.to_thread(forget, handle.folder)

    async def kill(self, handle: Handle) -> None:
        """SIGKILL the first process of the machine's pid namespace: the kernel takes down the rest.

        Raises:
            HostLimit: it has not, in time.
        """
        monitor = ProcessRef(int(handle.data["monitor"]), int(handle.data["born"]), handle.boot_id)
        await self._end(handle, monitor.pid, monitor.pidfd())

    async def pause(self, handle: Handle) -> None:
        """See the contract."""
        await self.send(self.jail(handle), [machine.state(running=False)])

    async def resume(self, handle: Handle) -> None:
        """See the contract."""
        await self.send(self.jail(handle), [machine.state(running=True)])

    async def stats(self, handle: Handle) -> WallStats:
        """See the contract. Processes are the guest's word: the host sees none of them."""
        from ringfence.runtimes.vm import probing

        return await probing.stats(self, handle)

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """See the contract."""
        from ringfence.runtimes.firecracker import probing

        return probing.measure(self, handle)

    # -- snapshots

    async def snapshot(self, handle: Handle, folder: str, *, memory: bool = True) -> dict[str, Any]:
        """See the contract. Without ``memory`` the disk alone, after the guest has flushed and frozen it."""
        return await saving.save(self, handle, folder, memory=memory)

    async def restore(self, spec: StartSpec, folder: str, data: Mapping[str, Any]) -> Handle:
        """See the contract. A machine restored with its memory has the size that it was saved with."""
        self.check(spec)
        await saving.check(spec, folder, data, await self.program_version())
        handle = await self._begin(spec, saved=folder, memory=bool(data["memory"]))
        if not data["memory"]:
            return handle
        try:
            async with await GuestLink.open(await self.connect(handle)) as link:
                await link.bind(env=environment_of(spec), hostname=spec.hostname)
        except BaseException:
            await self.destroy(handle)
            raise
        return handle

    # -- starting

    def check(self, spec: StartSpec) -> None:
        """Refuse what can't be had.

        Raises:
            RuntimeUnavailable: Firecracker, its jailer or the right to start it is missing.
            Unsupported: the spec asks for what a machine has not.
        """
        for name, path in ((PROGRAM, self.program), (JAILER, self.jailer)):
            if path is None:
                raise RuntimeUnavailable(f"{name} is not installed", hint=REMEDY)
        if not self.context.root:
            raise RuntimeUnavailable("the jailer of Firecracker needs root", hint="run the node as root")
        if spec.network == "open":
            raise Unsupported(
                "a virtual machine has no network card", hint="use network mode none", capability="network"
            )
        if spec.gpus:
            from ringfence.runtimes.gpu import why_not

            raise Unsupported(f"firecracker: {why_not(self.name)}", capability="gpu")
        disks.check(spec.root)

    async def program_version(self) -> str:
        """Firecracker's version; empty if it says none."""
        if not self.known_version:
            from ringfence.runtimes.firecracker import probing

            self.known_version = await probing.version(str(self.program))
        return self.known_version

    async def _begin(self, spec: StartSpec, *, saved: str = "", memory: bool = False) -> Handle:
        assert self.program is not None
        assert self.jailer is not None
        jail = machine.place(spec.folder, self.program, spec.id)
        opened: list[int] = []
        child: Child | None = None
        words = bytearray()
        loop = asyncio.get_running_loop()
        console = -1
        try:
            found, template = await self._furnish(spec, jail, saved, memory)
            console, console_end = _pipe(opened)
            silence, _ = _pipe(opened)
            child = await self.context.launcher.spawn(
                self._plan(spec, silence, console_end, opened), keep=not spec.ephemeral
            )
            for descriptor in opened:
                if descriptor != console:
                    os.close(descriptor)
            opened[:] = [console]
            loop.add_reader(console, _hear, console, words)
            await self._listening(jail, child)
            await self.send(jail, machine.load() if memory else machine.boot(spec), within=saving.TIMEOUT)
            if memory:
                # Before its agent hears anybody: an identity of its own, and the time.
                await saving.identify(jail, spec.hostname, child, self.start_timeout)
            sock = await links.appear(jail, links.AGENT, child.exited.done, self.start_timeout)
            await _answers(sock, self.start_timeout)
            files.unlink(jail, (machine.INITRD,))  # loaded, and it holds the environment
            return self._handle(spec, child, jail, found, template)
        except BaseException as error:
            ended = child is not None and child.exited.done()
            if child is not None:
                await self._undo(child)
            with contextlib.suppress(OSError):
                _hear(console, words)
            await asyncio.to_thread(forget, spec.folder)
            failure = self._failure(error, words, ended=ended)
            if failure is error:
                raise
            raise failure from error
        finally:
            if console >= 0:
                loop.remove_reader(console)
            for descriptor in opened:
                os.close(descriptor)

    def _failure(self, error: BaseException, words: bytearray, *, ended: bool) -> BaseException:
        """The error of a start that failed, with what the machine said last."""
        from ringfence.runtimes.firecracker.probing import last_words

        said = last_words(words.decode(errors="replace"))
        more = f": {said}" if said else ""
        if isinstance(error, Refused):
            return StartFailed(error.message, step=str(error.details.get("call", "api")))
        if isinstance(error, LinkLost | ConnectionError | TimeoutError):
            what = str(error) or "the guest does not come up in time"
            return StartFailed(what + more, step="boot" if ended else "agent")
        if isinstance(error, OSError):
            return StartFailed(
                f"{error.filename or 'files'}: {error.strerror}", step="files", errno=str(error.errno)
            )
        return error

    async def _furnish(
        self, spec: StartSpec, jail: str, saved: str, memory: bool
    ) -> tuple[kernel.Kernel, str]:
        """Put into the jail what the machine opens. The jailer makes its own around it."""
        found = await asyncio.to_thread(kernel.find)
        store = disks.store(spec.folder)
        # What is this sandbox's alone (empty mount points) its guest makes itself; a probe has no more.
        own = tuple(each for each in spec.root.lowers if not each.startswith(spec.folder + "/"))
        image, kind = await disks.template(replace(spec.root, lowers=own or spec.root.lowers), store)
        owner = spec.identity.host_uid(spec.identity.agent_uid)
        await asyncio.to_thread(forget, spec.folder)
        # The monitor is put below by its jailer; nobody else passes through.
        await asyncio.to_thread(os.mkdir, os.path.join(spec.folder, machine.FOLDER), 0o700)
        await asyncio.to_thread(os.makedirs, jail, 0o700)
        await asyncio.to_thread(files.give, image, os.path.join(jail, machine.TEMPLATE))
        disk = os.path.join(jail, machine.DISK)
        if saved:
            await asyncio.to_thread(disks.copy, os.path.join(saved, "disk"), disk)
        elif spec.root.disk.image is not None:
            await asyncio.to_thread(files.give, spec.root.disk.image, disk)
        else:
            size, inodes = spec.root.disk.size, spec.root.disk.inodes
            await asyncio.to_thread(disks.writable, store, disk, size, inodes, owner)
        os.chown(disk, owner, owner)
        os.chmod(disk, 0o600)
        if memory:
            for name, inside in (("state", machine.STATE), ("memory", machine.MEMORY)):
                await asyncio.to_thread(files.give, os.path.join(saved, name), os.path.join(jail, inside))
            return found, kind
        elf = await asyncio.to_thread(images.vmlinux, found, store)
        await asyncio.to_thread(files.give, elf, os.path.join(jail, machine.KERNEL))
        first = await asyncio.to_thread(
            initramfs.base, found, _native.path("vminit"), self.context.agent, store
        )
        rules = os.pread(self.context.filter_fd(spec.seccomp), 1 << 20, 0)
        wanted = machine.config(spec, found, rules, kind)
        initramfs.compose(first, wanted, os.path.join(jail, machine.INITRD), owner)
        return found, kind

    def _plan(self, spec: StartSpec, silence: int, words: int, opened: list[int]) -> Plan:
        plan = Plan()
        plan.add("CLONE", _NAMESPACES)
        if not spec.ephemeral:
            plan.add("KEEP")
        plan.add("EXIT_FILE", os.path.join(spec.folder, EXIT_FILE))
        add_cgroups(plan, spec, opened)
        # Of its own namespace: the jailer looks up its descriptors there.
        plan.add("MOUNT", "proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "")
        for number, descriptor in {0: silence, 1: words, 2: words}.items():
            plan.add("FD", plan.fd(descriptor), number)
        if spec.ephemeral:
            plan.add("DEATH_SIGNAL", 9)
        plan.add("UMASK", 0o077)
        for text in ("sh", "-c", _WAIT, "sh", *machine.jailer(str(self.jailer), str(self.program), spec)):
            plan.add("ARG", text)
        plan.add("ENV", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
        plan.add("EXEC", "/bin/sh")
        return plan

    async def _listening(self, jail: str, child: Child) -> None:
        """Return when the monitor answers and is of the version that was looked at.

        Raises:
            ConnectionError, TimeoutError: it ended, or does not listen in time.
            StartFailed: it is another one.
        """
        api = Api(jail, machine.API)
        async with asyncio.timeout(self.api_timeout):
            while True:
                try:
                    found = await api.get("/version")
                    break
                except LinkLost:
                    if child.exited.done():
                        raise ConnectionResetError("Firecracker or its jailer ended") from None
                    await asyncio.sleep(0.01)
        version = str(found.get("firecracker_version"))[:40]
        if version != await self.program_version():
            raise StartFailed(
                f"Firecracker says that it is {version}, and its program is {await self.program_version()}",
                hint=REMEDY,
                step="version",
            )

    async def send(self, jail: str, requests: Iterable[machine.Request], within: float = 10.0) -> None:
        """Make these requests of the monitor in that jail, one after the other.

        Raises:
            Refused, LinkLost: see ``api``.
        """
        api = Api(jail, machine.API)
        for each in requests:
            call = api.put if each.method == "PUT" else api.patch
            await call(each.path, each.body, within=within)

    def _handle(self, spec: StartSpec, child: Child, jail: str, found: kernel.Kernel, kind: str) -> Handle:
        inside = children(child.pid)
        if len(inside) != 1:
            raise StartFailed("the virtual machine has ended", step="agent")
        data: dict[str, Any] = {
            "uid": spec.identity.host_uid(spec.identity.agent_uid),
            "capabilities": spec.identity.capabilities,
            "network": spec.network,
            "cgroups": list(spec.cgroup.agent),
            "monitor": child.pid,
            "born": ProcessRef.of(child.pid).birth,
            "jail": os.path.relpath(jail, spec.folder),
            "kernel": found.release,
            "digest": found.digest,
            "firecracker": self.known_version,
            "template": spec.root.template,
            "size": [machine.memory(spec), machine.processors(spec)],
            "disk": kind,
        }
        return self.handle(spec, child, inside[0], data)

    @staticmethod
    def jail(handle: Handle) -> str:
        """The root of a machine's jail."""
        return os.path.join(handle.folder, handle.data["jail"])

    async def _undo(self, child: Child) -> None:
        # It is the first process of a pid namespace: nothing that it started outlives it.
        if not child.exited.done():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        await asyncio.shield(child.exited)
        for key in [key for key, each in self._children.items() if each is child]:
            del self._children[key]
        child.close()


async def _answers(sock: socket.socket, within: float) -> None:
    link = await GuestLink.open(sock, timeout=within)
    await link.close()


def _real(path: str | None) -> str | None:
    return os.path.realpath(path) if path else None


def forget(folder: str) -> None:
    """Remove the jail from a sandbox's folder; it may not be there."""
    shutil.rmtree(os.path.join(folder, machine.FOLDER), ignore_errors=True)
    files.unlink(folder, (EXIT_FILE,))


def _pipe(opened: list[int]) -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    opened += (reading, writing)
    return reading, writing


def _hear(console: int, words: bytearray) -> None:
    with contextlib.suppress(BlockingIOError):
        piece = os.read(console, 4096)
        words.extend(piece)
        del words[:-_MOST_WORDS]
        if not piece:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(console)
