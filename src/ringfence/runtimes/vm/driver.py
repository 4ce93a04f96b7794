"""What ``qemu-microvm`` and ``qemu`` have in common: QEMU in its wall, the guest in QEMU."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence import _native
from ringfence.model.errors import (
    HostLimit,
    LinkLost,
    RingfenceError,
    RuntimeUnavailable,
    StartFailed,
    Unsupported,
)
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes import linking
from ringfence.runtimes.contract import Capabilities, Handle, Probe, StartSpec, WallStats
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.launching.driver import EXIT_FILE, LaunchedRuntime
from ringfence.runtimes.launching.foreign import version_of
from ringfence.runtimes.launching.processes import ProcessRef
from ringfence.runtimes.vm import control, disks, initramfs, kernel, machines, qmp, vmm

if TYPE_CHECKING:
    from ringfence.guest.link import GuestLink
    from ringfence.model.sandbox import EffectiveBoundary
    from ringfence.runtimes.context import RuntimeContext
    from ringfence.runtimes.launching.launcher import Child

PROGRAM = "qemu-system-x86_64"
REMEDY = "ringfence setup qemu, or apt-get install qemu-system-x86 erofs-utils"
OLDEST = (6, 2)
STREAM = "stream.sock"
INITRD, DISK, EXIT = "initrd", "disk.img", EXIT_FILE
_OURS = (INITRD, DISK, EXIT, STREAM, control.NAME, qmp.NAME, sockets.NAME)
_FIRST = 10  # descriptors of QEMU from here on
_MOST_CONSOLE = 64 << 10
_ANSWER = 60.0  # seconds for an agent that was asleep to answer


class QemuRuntime(LaunchedRuntime):
    """Base of the drivers. Subclasses say which machine (with KVM), and whether the guest has an init."""

    level: Level
    kind = "microvm"
    probe_deadline = 250.0  # seconds
    start_deadline = 240.0  # seconds: an emulated machine on a very busy host
    start_timeout = 220.0  # of them for the guest to come up
    boundary: Boundary

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        found = shutil.which(PROGRAM)
        self.program = os.path.realpath(found) if found else None
        # Until a guest has booted with it (`ringfence doctor` tries), KVM counts as not there.
        self.boundary = Boundary.HARDWARE if vmm.kvm_verdict() else Boundary.EMULATED
        self._known_version = ""

    # -- what the node asks of drivers that have a kernel of their own

    @staticmethod
    def memory_overhead(memory: int) -> int:
        """Bytes that the wall takes beyond what the workload may have."""
        return machines.overhead(memory)

    async def memory_kills(self, handle: Handle) -> int:
        """Processes of the workload that the guest's kernel killed for memory: the guest's own word."""
        return int(await control.call(handle.folder, "kills"))

    # -- the contract

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(
            user_zero=True,
            recover=True,
            disk_limit=True,
            pause=True,
            host_template=False,
            gpu=self.kind == "q35",  # by VFIO; the microvm machine has no PCI
            disk_snapshot=True,
            memory_snapshot=True,
            network=("none", "egress"),
        )

    async def probe(self) -> Probe:
        """See the contract: boots a guest and talks to the agent in it."""
        from ringfence.runtimes.vm import probing

        return await probing.probe(self)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self.check(spec)
        return await self._start(spec)

    async def connect(self, handle: Handle) -> socket.socket:
        """See the contract. The process that has the guest's port is started again if it was killed."""
        try:
            return await super().connect(handle)
        except LinkLost:
            if not self.ref(handle).alive():
                raise
        found = await _dial(handle.folder, STREAM)
        try:
            await linking.start(handle.folder, stream=found.fileno())
        except RingfenceError as error:
            raise LinkLost(f"the guest agent can't be reached: {error.message}", id=handle.id) from error
        finally:
            found.close()
        return await super().connect(handle)

    async def destroy(self, handle: Handle) -> None:
        """See the contract."""
        await super().destroy(handle)
        link = handle.data.get("link")
        if link:  # it ends with the stream; nobody has to wait for it to notice
            await linking.end(ProcessRef(int(link[0]), int(link[1]), handle.boot_id))
        _forget(handle.folder)

    async def pause(self, handle: Handle) -> None:
        """See the contract."""
        async with await qmp.Qmp.open(handle.folder) as machine:
            await machine.call("stop")

    async def resume(self, handle: Handle) -> None:
        """See the contract."""
        async with await qmp.Qmp.open(handle.folder) as machine:
            await machine.call("cont")

    async def stats(self, handle: Handle) -> WallStats:
        """See the contract. Processes are the guest's word: the host sees none of them."""
        from ringfence.runtimes.vm import probing

        return await probing.stats(self, handle)

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """See the contract."""
        from ringfence.runtimes.vm import probing

        return probing.measure(self, handle)

    # -- snapshots

    async def snapshot(self, handle: Handle, folder: str, *, memory: bool = True) -> dict[str, Any]:
        """See the contract. Without ``memory`` no link ends; the guest's file system stands still."""
        from ringfence.guest.link import GuestLink
        from ringfence.runtimes.vm import images

        if memory:
            link = await GuestLink.open(await self.connect(handle))
            try:
                await link.quiesce()
            finally:
                await link.close()
        try:
            await images.save(handle, folder, memory=memory)
        except BaseException:
            await asyncio.to_thread(images.remove, folder)
            raise
        finally:
            if memory:
                with contextlib.suppress(RingfenceError):
                    await control.call(handle.folder, "wake")
        if memory:  # as every start: when this returns, a link can be opened
            await (await self._awake(handle)).close()
        return await asyncio.to_thread(images.describe, folder, handle.data["fitting"], memory=memory)

    async def restore(self, spec: StartSpec, folder: str, data: Mapping[str, Any]) -> Handle:
        """See the contract."""
        from ringfence.runtimes.launching.guestargs import environment_of
        from ringfence.runtimes.vm import images

        self.check(spec)
        found = await asyncio.to_thread(kernel.find)
        mine = await self._fitting(spec, found.digest)
        await asyncio.to_thread(images.check, folder, data, mine)
        disk = os.path.join(spec.folder, DISK)
        owner = spec.identity.host_uid(spec.identity.agent_uid)
        memory = -1
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(disk)  # the empty one that came with the request
            await asyncio.to_thread(disks.copy, os.path.join(folder, images.DISK), disk)
            os.chmod(disk, 0o600)
            os.chown(disk, owner, owner)
            if data["memory"]:
                memory = os.open(os.path.join(folder, images.MEMORY), os.O_RDONLY | os.O_CLOEXEC)
            handle = await self._start(spec, disk=disk, memory=memory)
        except OSError as error:
            _forget(spec.folder)
            raise StartFailed(
                f"the snapshot's disk can't be copied: {error.strerror}", step="disk", errno=str(error.errno)
            ) from error
        finally:
            if memory >= 0:
                os.close(memory)
        if data["memory"]:
            try:
                async with await self._awake(handle) as link:
                    await link.bind(env=environment_of(spec))
            except BaseException:
                await self.destroy(handle)
                raise
        return handle

    async def _awake(self, handle: Handle) -> GuestLink:
        """A link to an agent that was just woken: one opened too early ends when the agent begins anew."""
        from ringfence.guest.link import GuestLink

        end = time.monotonic() + _ANSWER
        while True:
            try:
                return await GuestLink.open(await self.connect(handle), timeout=_ANSWER)
            except LinkLost:
                if time.monotonic() > end or not self.ref(handle).alive():
                    raise
                await asyncio.sleep(0.05)

    async def _version(self) -> str:
        if not self._known_version:
            assert self.program is not None
            found = re.search(r"version (\S+)", await version_of(self.program))
            self._known_version = found.group(1) if found else ""  # asked again: it may have been too slow
        return self._known_version or "?"

    # -- starting

    def check(self, spec: StartSpec) -> None:
        """Refuse what can't be had.

        Raises:
            RuntimeUnavailable: QEMU is not installed.
            Unsupported: the spec asks for what a machine has not.
        """
        if self.program is None:
            raise RuntimeUnavailable(f"{PROGRAM} is not installed", hint=REMEDY)
        if spec.network == "open":
            raise Unsupported(
                "a virtual machine has no network card", hint="use network mode none", capability="network"
            )
        disks.check(spec.root)
        if not os.path.isdir(spec.folder):
            raise StartFailed(f"no folder {spec.folder}", step="listen", errno="ENOENT")

    @property
    def kvm(self) -> bool:
        """Machines are run by the processor itself."""
        return self.boundary is Boundary.HARDWARE

    @property
    def machine(self) -> str:
        """What QEMU is asked for. Emulated, it is always a PC.

        ``microvm`` has no timer but the processor's own, and nothing to check that one's speed against: on a
        busy host a guest finds out a wrong one, or switches it off, and then never wakes.
        """
        return self.kind if self.kvm else "q35"

    async def _start(
        self, spec: StartSpec, *, disk: str = "", memory: int = -1, template: tuple[str, str] | None = None
    ) -> Handle:
        """Start a machine. ``disk``: in place of an empty one. ``memory``: the stream it is restored from."""
        assert self.program is not None
        found = await asyncio.to_thread(kernel.find)
        store = disks.store(spec.folder)
        opened: list[int] = []
        listeners: dict[str, socket.socket] = {}
        child: Child | None = None
        link: ProcessRef | None = None
        owner = spec.identity.host_uid(spec.identity.agent_uid)
        try:
            # What is this sandbox's alone (empty mount points) its guest makes itself; a probe has no more.
            own = tuple(each for each in spec.root.lowers if not each.startswith(spec.folder + "/"))
            lowers = own or spec.root.lowers
            image, kind = template or await disks.template(replace(spec.root, lowers=lowers), store)
            base = await vmm.root(self.program, store)
            first = await asyncio.to_thread(
                initramfs.base, found, _native.path("vminit"), self.context.agent, store
            )
            for name in (STREAM, control.NAME, qmp.NAME):
                listeners[name] = _listener(spec.folder, name)
            numbers = {name: _FIRST + index for index, name in enumerate(listeners)}
            machine = machines.Machine(
                self.machine,
                self.kvm,
                stream=numbers[STREAM],
                control=numbers[control.NAME],
                qmp=numbers[qmp.NAME],
                template=kind,
                incoming=_FIRST + len(numbers) if memory >= 0 else -1,
                firmware=vmm.firmware(base, self.kvm),
            )
            writable = disk or await asyncio.to_thread(self._disk, spec, store, owner)
            initrd = os.path.join(spec.folder, INITRD)
            initramfs.compose(first, self._config(machine, spec, found), initrd, owner)
            console, console_end = _pipe(opened)
            silence, _ = _pipe(opened)
            descriptors = {numbers[name]: each.fileno() for name, each in listeners.items()}
            descriptors |= {0: silence, 1: console_end, 2: console_end}
            if memory >= 0:
                descriptors[machine.incoming] = memory
            files = {
                "kernel": (found.image, False),
                "initrd": (initrd, False),
                "template": (image, False),
                "disk": (writable, True),
            }
            locked = machines.guest_memory(spec.memory) * max(1, spec.gpus) + (64 << 20)
            more, devices = _passthrough(spec, locked)
            plan = vmm.plan(
                spec,
                base,
                files,
                [*machines.arguments(machine, spec), *more],
                descriptors,
                opened,
                exit_file=os.path.join(spec.folder, EXIT_FILE),
                guest_memory=machines.guest_memory(spec.memory),
                kvm=self.kvm,
                devices=devices,
                locked=locked,
            )
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral)
            for descriptor in opened:
                if descriptor != console:
                    os.close(descriptor)
            opened[:] = [console]
            link = await self._come_up(spec, child, console, restored=memory >= 0)
            with contextlib.suppress(OSError):
                os.unlink(initrd)  # loaded, and it holds the environment
            data: dict[str, Any] = {
                "uid": owner,
                "capabilities": spec.identity.capabilities,
                "network": spec.network,
                "cgroups": list(spec.cgroup.agent),
                "kernel": found.release,
                "digest": found.digest,
                "link": [link.pid, link.birth],
                "disk": writable,
                "template": [image, kind],
                "kvm": self.kvm,
                "fitting": await self._fitting(spec, found.digest),
            }
            return self.handle(spec, child, child.pid, data)
        except BaseException as error:
            if link is not None:
                await linking.end(link)
            if child is not None:
                await self._undo(child)
            _forget(spec.folder)
            if isinstance(error, OSError) and not isinstance(error, RingfenceError):
                raise StartFailed(
                    f"{error.filename or spec.folder}: {error.strerror}", step="files", errno=str(error.errno)
                ) from error
            raise
        finally:
            for each in listeners.values():
                each.close()
            for descriptor in opened:
                os.close(descriptor)

    async def _fitting(self, spec: StartSpec, digest: str) -> dict[str, Any]:
        from ringfence.runtimes.vm import images

        assert self.program is not None
        firmware = vmm.firmware(await vmm.root(self.program, disks.store(spec.folder)), self.kvm)
        return images.fitting(self.name, spec, digest, await self._version(), self.machine, firmware)

    def _config(self, machine: machines.Machine, spec: StartSpec, found: kernel.Kernel) -> initramfs.Config:
        rules = os.open(f"/proc/self/fd/{self.context.filter_fd(spec.seccomp)}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            program = os.pread(rules, 1 << 20, 0)
        finally:
            os.close(rules)
        return machines.config(machine, spec, found, program, self.init(spec))

    def init(self, spec: StartSpec) -> str:
        """The path of a whole system's init in the template; empty where the agent is all there is."""
        return ""

    @staticmethod
    def _disk(spec: StartSpec, store: str, owner: int) -> str:
        disk = spec.root.disk
        if disk.image is not None:
            os.chown(disk.image, owner, owner)
            return disk.image
        path = os.path.join(spec.folder, DISK)
        disks.writable(store, path, disk.size, disk.inodes, owner)
        return path

    async def _come_up(
        self, spec: StartSpec, child: Child, console: int, *, restored: bool = False
    ) -> ProcessRef:
        """Return when the guest's agent has answered.

        Raises:
            StartFailed: the machine ended before, or hangs; with the last words of its console.
        """
        words = bytearray()
        loop = asyncio.get_running_loop()

        def heard() -> None:
            with contextlib.suppress(BlockingIOError):
                piece = os.read(console, 4096)
                words.extend(piece)
                del words[:-_MOST_CONSOLE]
                if not piece:
                    loop.remove_reader(console)

        stream = await _dial(spec.folder, STREAM)
        loop.add_reader(console, heard)
        try:
            if restored:
                from ringfence.runtimes.vm import images

                await images.resume(spec.folder, spec.hostname, self.start_timeout)
            # Ends with the stream, if the machine does.
            return await linking.start(
                spec.folder, stream=stream.fileno(), fresh=not restored, within=self.start_timeout
            )
        except (StartFailed, LinkLost, HostLimit, TimeoutError) as error:
            await asyncio.wait([child.exited], timeout=2.0)  # it's noticed a moment after its last word
            with contextlib.suppress(OSError):
                heard()
            ended = child.exited.done()
            said = last_words(words.decode(errors="replace"))
            what = "the virtual machine ended while it started" if ended else "the guest does not come up"
            raise StartFailed(
                what + (f": {said}" if said else f" ({error})"),
                hint="" if ended else "the host may be too busy for an emulated machine",
                step="boot" if ended else "agent",
            ) from error
        finally:
            loop.remove_reader(console)
            stream.close()

    async def _undo(self, child: Child) -> None:
        if not child.exited.done():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        await asyncio.shield(child.exited)
        for key in [key for key, each in self._children.items() if each is child]:
            del self._children[key]
        child.close()


def last_words(console: str) -> str:
    """The telling line of what a machine wrote: QEMU's own, its guest's init, or the guest kernel's last."""
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^ -~]", "", line).strip() for line in console.splitlines()]
    lines = [line for line in lines if line]
    for mark in ("ringfence-vminit:", "qemu-system", "/qemu:", "Kernel panic"):
        for line in reversed(lines):
            if mark in line:
                return line[:300]
    return lines[-1][:300] if lines else ""


def _passthrough(spec: StartSpec, locked: int) -> tuple[tuple[str, ...], tuple[tuple[str, int, int], ...]]:
    """QEMU's arguments and device nodes for the GPUs that are asked for."""
    if not spec.gpus:
        return (), ()
    from ringfence.runtimes.gpu import leases, vfio

    found = vfio.choose(spec.gpus, lease=functools.partial(leases.take, spec.folder))
    vfio.check_lock(locked)
    return found.arguments, vfio.numbers(found.nodes)


def _pipe(opened: list[int]) -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    opened += (reading, writing)
    return reading, writing


def _listener(folder: str, name: str) -> socket.socket:
    """A socket that QEMU listens on, at ``folder/name``.

    Raises:
        StartFailed: it can't be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fchmod(sock.fileno(), 0o600)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=place)
            sock.bind(f"/proc/self/fd/{place}/{name}")
            sock.listen(16)
        finally:
            os.close(place)
    except OSError as error:
        sock.close()
        raise StartFailed(
            f"no socket in {folder}: {error.strerror}", step="listen", errno=str(error.errno)
        ) from error
    return sock


async def _dial(folder: str, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await sockets.connect(sock, f"/proc/self/fd/{place}/{name}")
        finally:
            os.close(place)
    except OSError as error:
        sock.close()
        raise LinkLost(f"the virtual machine does not listen: {error.strerror}") from error
    return sock


def _forget(folder: str) -> None:
    for name in _OURS:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
    if os.path.isdir(os.path.join(folder, "gpu")):
        from ringfence.runtimes.gpu import handing

        handing.forget(folder)
