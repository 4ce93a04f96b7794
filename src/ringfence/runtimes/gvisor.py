"""``gvisor``: a kernel of its own in user space (``runsc`` with systrap). Level 3.

The workload's system calls are answered by gVisor's kernel (the *sentry*), a process of the host that has
its own user, mount, pid, net, ipc and uts namespaces, a system call filter, and no network. As with runc the
overlay root is made ready by our launcher in a mount namespace that only runsc sees; here runsc itself, and
all it starts, runs in the sandbox's own user namespace: no part of the wall has a right over the host.

The guest agent listens on a socket that it makes itself, in a folder that is shown inside for it alone
(``--host-uds=create``: nothing inside can connect to a socket of the host). A host dials it by descriptor and
follows no link, since who owns the wall may put there what he likes.

Control groups: the node's, for the whole of runsc. gVisor's own memory counts against the sandbox's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import GuestError, HostLimit, StartFailed, Unsupported
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import Capabilities, Handle, Probe, StartSpec
from ringfence.runtimes.gvisor_parts import links, sandboxes
from ringfence.runtimes.launching.driver import EXIT_FILE
from ringfence.runtimes.launching.foreign import START_TIMEOUT, ForeignRuntime, pipe, version_of
from ringfence.runtimes.launching.guestargs import environment_of
from ringfence.runtimes.launching.launcher import Child
from ringfence.runtimes.launching.processes import ProcessRef

if TYPE_CHECKING:
    import socket

    from ringfence.model.sandbox import EffectiveBoundary
    from ringfence.runtimes.context import RuntimeContext
    from ringfence.runtimes.gpu.cdi import Edits

OLDEST = (0, 0, 20230801)  # systrap is the platform since then


class GvisorRuntime(ForeignRuntime):
    """See the module."""

    name = "gvisor"
    level = Level.L3
    boundary = Boundary.USERSPACE_KERNEL
    program_name = "runsc"
    networks = ("none", "egress")
    tasks_per_process = 8  # of the host for one of the workload: gVisor itself holds that to max_processes
    remedy = "ringfence setup gvisor, or apt-get install -t bookworm-backports runsc"

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(
            overlay=True,
            user_zero=True,
            mounts=True,
            recover=True,
            disk_limit=True,
            pause=True,
            disk_snapshot=True,
            memory_snapshot=True,
            gpu=True,  # NVIDIA's, by nvproxy
            network=("none", "egress"),
        )

    async def probe(self) -> Probe:
        """See the contract: starts a wall and talks to the agent in it."""
        return await self.probe_version(r"runsc version (?:release-)?(\S+)", OLDEST)

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        self._known_version = ""

    # -- the contract

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self._check(spec)
        if not spec.gpus:
            return await self._begin(spec, sandboxes.running(spec.id))
        from ringfence.runtimes.gpu import handing

        prepared, gpus = handing.prepare(spec)
        try:
            assert gpus is not None
            handing.only_nvidia(gpus)
            return await self._begin(prepared, sandboxes.running(spec.id), gpus=gpus)
        except BaseException:
            handing.forget(spec.folder)
            raise

    async def connect(self, handle: Handle) -> socket.socket:
        """See the contract."""
        return await links.dial_patiently(handle, self.ref(handle).alive)

    async def destroy(self, handle: Handle) -> None:
        """See the contract."""
        await super().destroy(handle)
        links.remove(handle.folder)

    def forget(self, folder: str) -> None:
        """See the base."""
        sandboxes.remove_bundle(folder)
        if os.path.isdir(os.path.join(folder, "gpu")):
            from ringfence.runtimes.gpu import handing

            handing.forget(folder)

    def open_upper(self, handle: Handle) -> int:
        """See the contract."""
        path = sandboxes.upper(int(handle.data["monitor"]))
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """See the contract."""
        from ringfence.runtimes.gvisor_parts import measuring

        return measuring.measure(self, handle)

    # -- snapshots

    async def snapshot(self, handle: Handle, folder: str, *, memory: bool = True) -> dict[str, Any]:
        """See the contract. Without ``memory`` no link ends, and no command is part of what is saved."""
        from ringfence.guest.link import GuestLink
        from ringfence.runtimes.gvisor_parts import images

        program, monitor = str(self.program), int(handle.data["monitor"])
        if memory:
            link = await GuestLink.open(await self.connect(handle))
            try:
                await link.quiesce()
            finally:
                await link.close()
        try:
            await images.save(program, handle, folder, int(handle.data["first"]), memory=memory)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        finally:
            if memory:
                await self._woken(handle, program, monitor)
        return await asyncio.to_thread(
            images.describe, folder, await self._version(), handle.data["fitting"], memory=memory
        )

    async def restore(self, spec: StartSpec, folder: str, data: Mapping[str, Any]) -> Handle:
        """See the contract."""
        from ringfence.guest.link import GuestLink
        from ringfence.runtimes.gvisor_parts import images

        self._check(spec)
        if spec.gpus:
            raise Unsupported(
                "a copy of a saved wall can't be given a GPU", hint="start it afresh", capability="gpu"
            )
        await asyncio.to_thread(images.check, folder, data, await self._version(), spec)
        own = images.own_layers(spec)
        others = (lower for lower in spec.root.lowers if lower not in own)
        lowers = (*own, os.path.join(folder, images.UPPER), *others)
        layered = replace(spec, root=replace(spec.root, lowers=lowers))
        fitting = images.fitting(spec)
        if not data["memory"]:
            return await self._begin(layered, sandboxes.running(spec.id), fitting=fitting)
        memory = os.path.join(folder, images.MEMORY)
        handle = await self._begin(layered, sandboxes.restoring(spec.id), memory=memory, fitting=fitting)
        try:
            async with await GuestLink.open(await self.connect(handle)) as link:
                # No seed: the random numbers of gVisor's kernel are the host's, so copies differ anyway.
                await link.bind(env=environment_of(spec), hostname=spec.hostname)
        except BaseException:
            await self.destroy(handle)
            raise
        return handle

    async def rouse(self, handle: Handle) -> None:
        """Let a wall go on whose snapshot nobody finishes any more: it may stand still, its agent may sleep.

        Raises:
            HostLimit: it does not wake.
        """
        from ringfence.runtimes.gvisor_parts import images

        program, monitor = str(self.program), int(handle.data["monitor"])
        with contextlib.suppress(HostLimit):  # it stands still only if we were killed at that moment
            await images.call(program, monitor, "resume", handle.id)
        await self._woken(handle, program, monitor)

    async def _woken(self, handle: Handle, program: str, monitor: int) -> None:
        """Wake the agent that slept through a snapshot; return when it listens again."""
        from ringfence.runtimes.gvisor_parts import images

        ended = self._ended(handle)
        try:
            async with asyncio.timeout(images.TIMEOUT):
                await images.wake(program, monitor, handle.id, ended)
                # It binds its socket anew a moment after the signal: until then nobody could dial.
                (await links.appear(handle.folder, ended)).close()
        except (TimeoutError, ConnectionError) as error:
            raise HostLimit(
                "the agent did not come back after the snapshot", hint="destroy the sandbox"
            ) from error

    def _ended(self, handle: Handle) -> asyncio.Future[int | None]:
        child = self._children.get((handle.pid, handle.birth))
        return child.exited if child is not None else asyncio.get_running_loop().create_future()

    async def _version(self) -> str:
        if not self._known_version:
            found = re.search(r"runsc version (\S+)", await version_of(str(self.program)))
            self._known_version = found.group(1) if found else ""  # asked again: it may have been too slow
        return self._known_version or "?"

    # -- starting

    async def _begin(
        self,
        spec: StartSpec,
        verb: Sequence[str],
        *,
        memory: str = "",
        fitting: dict[str, Any] | None = None,
        gpus: Edits | None = None,
    ) -> Handle:
        opened: list[int] = []
        child: Child | None = None
        try:
            links.prepare(spec)
            words, words_end = pipe(opened)
            silence, _ = pipe(opened)
            plan = sandboxes.plan(
                self.context,
                str(self.program),
                spec,
                verb,
                silence=silence,
                words=words_end,
                opened=opened,
                memory=memory,
                gpus=gpus,
            )
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral)
            for descriptor in opened:
                if descriptor != words:
                    os.close(descriptor)
            opened[:] = [words]
            async with asyncio.timeout(START_TIMEOUT):
                if memory:
                    from ringfence.runtimes.gvisor_parts import images

                    await images.wake(str(self.program), child.pid, spec.id, child.exited)
                await self._listening(spec, child, words)
            handle = self._handle(spec, child)
            if fitting is not None:
                handle.data["fitting"] = fitting
            return handle
        except BaseException as error:
            said = ""
            if child is not None:
                await self._undo(child)
                with contextlib.suppress(OSError):
                    said = self.said(os.read(words, 8192).decode(errors="replace"))
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(spec.folder, EXIT_FILE))
            links.remove(spec.folder)
            self.forget(spec.folder)
            if isinstance(error, TimeoutError):
                raise StartFailed(
                    "the agent behind runsc does not answer" + (f": {said}" if said else ""), step="agent"
                ) from None
            raise
        finally:
            for descriptor in opened:
                os.close(descriptor)

    async def _listening(self, spec: StartSpec, child: Child, words: int) -> None:
        """Return when the agent has answered, fail as soon as runsc has ended."""
        from ringfence.guest.link import GuestLink
        from ringfence.runtimes.launching.foreign import _hint, _text

        try:
            dialled = await links.appear(spec.folder, child.exited)
            link = await GuestLink.open(dialled, timeout=START_TIMEOUT)
            await link.close()
        except (GuestError, OSError) as error:
            text = self.said(await _text(child, words))
            raise StartFailed(
                f"runsc: {text or 'ended without a word'}", hint=_hint(text), step="runsc"
            ) from error

    def _handle(self, spec: StartSpec, child: Child) -> Handle:
        sentry = sandboxes.sentry(child.pid)
        if sentry is None:
            raise StartFailed("the wall of runsc has ended", step="agent")
        # Out of memory the kernel would rather take a process that stands for one of the workload's, and
        # gVisor would call that an exit. With gVisor's kernel the whole wall goes, and the cause is known.
        with contextlib.suppress(OSError), open(f"/proc/{sentry}/oom_score_adj", "w") as file:
            file.write("1000")
        return self.handle(spec, child, sentry, self.data(spec, child))

    def data(self, spec: StartSpec, child: Child) -> dict[str, Any]:
        """See the base."""
        from ringfence.runtimes.gvisor_parts import images

        return {
            "uid": spec.identity.uid,
            "capabilities": spec.identity.capabilities,
            "network": spec.network,
            "cgroups": list(spec.cgroup.agent),
            "monitor": child.pid,
            "born": ProcessRef.of(child.pid).birth,
            "first": spec.identity.host_uid(0),
            "fitting": images.fitting(spec),
        }
