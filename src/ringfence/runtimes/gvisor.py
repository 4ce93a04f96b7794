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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import GuestError, StartFailed
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import Capabilities, Handle, Probe, StartSpec
from ringfence.runtimes.gvisor_parts import links, sandboxes
from ringfence.runtimes.launching.driver import EXIT_FILE
from ringfence.runtimes.launching.foreign import START_TIMEOUT, ForeignRuntime, pipe
from ringfence.runtimes.launching.launcher import Child
from ringfence.runtimes.launching.processes import ProcessRef

if TYPE_CHECKING:
    import socket

    from ringfence.model.sandbox import EffectiveBoundary

OLDEST = (0, 0, 20230801)  # systrap is the platform since then


class GvisorRuntime(ForeignRuntime):
    """See the module."""

    name = "gvisor"
    level = Level.L3
    boundary = Boundary.USERSPACE_KERNEL
    program_name = "runsc"
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
        )

    async def probe(self) -> Probe:
        """See the contract: starts a wall and talks to the agent in it."""
        return await self.probe_version(r"runsc version (?:release-)?(\S+)", OLDEST)

    # -- the contract

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self._check(spec)
        return await self._begin(spec, sandboxes.running(spec.id))

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

    def open_upper(self, handle: Handle) -> int:
        """See the contract."""
        path = sandboxes.upper(int(handle.data["monitor"]))
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """See the contract."""
        from ringfence.runtimes.gvisor_parts import measuring

        return measuring.measure(self, handle)

    # -- starting

    async def _begin(self, spec: StartSpec, verb: Sequence[str]) -> Handle:
        opened: list[int] = []
        child: Child | None = None
        try:
            links.prepare(spec)
            words, words_end = pipe(opened)
            silence, _ = pipe(opened)
            plan = sandboxes.plan(
                self.context, str(self.program), spec, verb, silence=silence, words=words_end, opened=opened
            )
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral)
            for descriptor in opened:
                if descriptor != words:
                    os.close(descriptor)
            opened[:] = [words]
            async with asyncio.timeout(START_TIMEOUT):
                await self._listening(spec, child, words)
            return self._handle(spec, child)
        except BaseException as error:
            if child is not None:
                await self._undo(child)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(spec.folder, EXIT_FILE))
            links.remove(spec.folder)
            self.forget(spec.folder)
            if isinstance(error, TimeoutError):
                raise StartFailed("the agent behind runsc does not answer", step="agent") from None
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
        # Out of memory the kernel would rather take a process that stands for one of the workload's, and gVisor
        # would call that an exit. With gVisor's kernel the whole wall goes, and the cause is known.
        with contextlib.suppress(OSError), open(f"/proc/{sentry}/oom_score_adj", "w") as file:
            file.write("1000")
        return self.handle(spec, child, sentry, self.data(spec, child))

    def data(self, spec: StartSpec, child: Child) -> dict[str, Any]:
        """See the base."""
        return {
            "uid": spec.identity.uid,
            "capabilities": spec.identity.capabilities,
            "network": spec.network,
            "cgroups": list(spec.cgroup.agent),
            "monitor": child.pid,
            "born": ProcessRef.of(child.pid).birth,
        }
