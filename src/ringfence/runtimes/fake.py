"""``fake``: the real guest agent behind no wall at all, and faults on demand.

For tests of everything above a runtime, and the control of the security tests ("protection off"). It has a
process namespace, so that the agent can be PID 1, and a mount namespace with the folders that every sandbox
has; the host's files, network and kernel are all there. The workload is never the host's root. Level L1,
boundary ``none``: nothing chooses it, it must be asked for by name.

Faults come from :class:`FakeFaults`, given to the class or as JSON in ``RINGFENCE_FAKE_FAULTS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, fields, replace

from ringfence.model.errors import HostLimit, InvalidRequest, LinkLost, StartFailed
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.context import DEVICE_LINKS, DEVICES, STAGE, RuntimeContext
from ringfence.runtimes.contract import Capabilities, Handle, Health, Probe, StartSpec
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.launching.driver import EXIT_FILE, LaunchedRuntime
from ringfence.runtimes.launching.guestargs import agent_arguments, environment
from ringfence.runtimes.launching.plan import (
    BIND_DEVICES,
    BIND_MAKE,
    BIND_NOEXEC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MAPS_DENY_SETGROUPS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    NOBODY,
    Plan,
    id_maps,
)
from ringfence.runtimes.launching.steps import add_cgroups, add_limits

VARIABLE = "RINGFENCE_FAKE_FAULTS"
_QUIET = MS_NOSUID | MS_NODEV | MS_NOEXEC
_LISTEN_FD = 3
# Folders of the host's root that are not shown as they are: made anew, or opened up to put something beside.
_OWN = {"proc", "sys", "dev", "workspace", "lost+found", ".ringfence"}
_OPENED_UP = {"home": "agent", "run": "secrets"}
_MOST_ENTRIES = 200  # of a folder that is opened up; a plan has an end
_GARBAGE = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@dataclass(frozen=True, slots=True)
class FakeFaults:
    """What goes wrong. Everything is off by default; times are seconds.

    ``start_error`` names the step that fails: ``listen`` (nothing exists yet), ``spawn`` (the socket does)
    or ``handle`` (the wall does). ``start_errno`` is its number. ``start_works``: so many starts work before.
    """

    start_error: str = ""
    start_errno: int = errno.EIO
    start_works: int = 0
    start_delay: float = 0.0
    start_hang: bool = False  # after the wall was spawned, as a runtime whose guest never answers
    die_after: float | None = None  # the wall is killed from outside so long after its start
    refuse_connect: int = 0  # so many connects fail with LinkLost, then they work; -1: all
    connect_hang: bool = False
    garbage: bool = False  # whoever connects is answered by something that is no agent
    cut_after: int | None = None  # a link is cut after so many bytes from the guest
    stop_hang: bool = False
    destroy_hang: bool = False
    destroy_error: int = 0  # so many destroys fail with HostLimit, then they work
    leak: str = ""  # destroy says it worked and leaves: "process" or "file"
    probe_error: str = ""
    probe_hang: bool = False

    @classmethod
    def parse(cls, text: str) -> FakeFaults:
        """From JSON: an object with any of the fields.

        Raises:
            InvalidRequest: no such fault, or a value of the wrong type.
        """
        try:
            values = json.loads(text or "{}")
            assert isinstance(values, dict)
        except (ValueError, AssertionError) as error:
            raise InvalidRequest(f"{VARIABLE} is no JSON object", hint='write {"start_delay": 1}') from error
        kinds = {field.name: type(getattr(cls(), field.name)) for field in fields(cls)}
        for name, value in values.items():
            kind = kinds.get(name)
            number = kind in (float, type(None)) and isinstance(value, int | float | None)
            if kind is None or not (number or type(value) is kind):
                raise InvalidRequest(f"{VARIABLE}: {name}={value!r} is no fault", hint=", ".join(kinds))
        if values.get("start_error", "") not in ("", "listen", "spawn", "handle"):
            raise InvalidRequest(f"{VARIABLE}: start_error names no step", hint="listen, spawn or handle")
        if values.get("leak", "") not in ("", "process", "file"):
            raise InvalidRequest(f"{VARIABLE}: leak names nothing that can be left", hint="process or file")
        return cls(**values)


class FakeRuntime(LaunchedRuntime):
    """See the module."""

    name = "fake"
    level = Level.L1
    boundary = Boundary.NONE

    def __init__(self, context: RuntimeContext, faults: FakeFaults | None = None) -> None:
        super().__init__(context)
        self.faults = FakeFaults.parse(os.environ.get(VARIABLE, "")) if faults is None else faults
        self._starts = self._refusals = self._failed_destroys = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._relays: dict[str, set[asyncio.Task[None]]] = {}  # by sandbox

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(rootless=True, recover=True)

    async def probe(self) -> Probe:
        """See the contract."""
        if self.faults.probe_hang:
            await asyncio.Event().wait()
        if self.faults.probe_error:
            return Probe(
                self.name, Health.UNAVAILABLE, self.level, self.boundary, reason=self.faults.probe_error
            )
        from ringfence.runtimes.launching.probing import probe

        return await probe(self)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self._starts += 1
        faulty = self._starts > self.faults.start_works
        if faulty and self.faults.start_delay:
            await asyncio.sleep(self.faults.start_delay)
        self._fail("listen", faulty)
        try:
            listener = sockets.listener(spec.folder)
        except OSError as error:
            raise StartFailed(
                f"no socket in {spec.folder}: {error.strerror}", step="listen", errno=str(error.errno)
            ) from error
        opened: list[int] = []
        handle: Handle | None = None
        try:
            self._fail("spawn", faulty)
            host = self._host_spec(spec)
            plan = self._plan(host, listener.fileno(), opened)
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral)
            data = {"uid": spec.identity.host_uid(spec.identity.uid), "network": "open"}
            handle = self.handle(spec, child, child.pid, data)
            self._fail("handle", faulty)
            if faulty and self.faults.start_hang:
                await asyncio.Event().wait()
        except BaseException:
            if handle is not None:
                await self.kill(handle)
            for name in (sockets.NAME, EXIT_FILE):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(spec.folder, name))
            raise
        finally:
            listener.close()
            for descriptor in opened:
                os.close(descriptor)
        if self.faults.die_after is not None:
            self._spawn(self._die(handle, self.faults.die_after))
        return handle

    async def connect(self, handle: Handle) -> socket.socket:
        """See the contract."""
        faults = self.faults
        if faults.connect_hang:
            await asyncio.Event().wait()
        if faults.refuse_connect < 0 or self._refusals < faults.refuse_connect:
            self._refusals += 1
            raise LinkLost("the guest agent can't be reached: a scripted fault", id=handle.id)
        sock = await super().connect(handle)
        if not faults.garbage and faults.cut_after is None:
            return sock
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        sock.setblocking(False)
        relay = self._spawn(self._relay(theirs, sock))
        relays = self._relays.setdefault(handle.id, set())
        relays.add(relay)

        def over(_: asyncio.Task[None]) -> None:  # however it ended, also before it began
            relays.discard(relay)
            theirs.close()
            sock.close()

        relay.add_done_callback(over)
        return ours

    async def stop(self, handle: Handle, grace: float) -> None:
        """See the contract."""
        if self.faults.stop_hang:
            await asyncio.Event().wait()
        await super().stop(handle, grace)

    async def destroy(self, handle: Handle) -> None:
        """See the contract."""
        if self.faults.destroy_hang:
            await asyncio.Event().wait()
        if self._failed_destroys < self.faults.destroy_error:
            self._failed_destroys += 1
            raise HostLimit(f"sandbox {handle.id} is still there: a scripted fault", hint="try again")
        if self.faults.leak == "process":
            return
        await super().destroy(handle)
        if relays := self._relays.pop(handle.id, None):  # they would end by themselves, but after the loop
            for relay in relays:
                relay.cancel()
            await asyncio.wait(relays)
        if self.faults.leak == "file":
            handle.socket_path.touch()

    # -- faults

    def _fail(self, step: str, faulty: bool) -> None:
        if faulty and self.faults.start_error == step:
            number = self.faults.start_errno
            raise StartFailed(
                f"step {step} failed: {os.strerror(number)} (a scripted fault)",
                step=step,
                errno=errno.errorcode.get(number, str(number)),
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _die(self, handle: Handle, seconds: float) -> None:
        await asyncio.sleep(seconds)
        descriptor = self.ref(handle).pidfd()
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)

    async def _relay(self, host: socket.socket, guest: socket.socket) -> None:
        """Carry bytes both ways until the fault says otherwise."""
        loop = asyncio.get_running_loop()

        async def up() -> None:
            while data := await loop.sock_recv(host, 65536):
                await loop.sock_sendall(guest, data)

        async def down() -> None:
            left = self.faults.cut_after
            if self.faults.garbage:
                await loop.sock_sendall(host, _GARBAGE)
                return
            while data := await loop.sock_recv(guest, 65536):
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                await loop.sock_sendall(host, data)
                if left == 0:
                    return

        tasks = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- the wall that is none

    def _host_spec(self, spec: StartSpec) -> StartSpec:
        """As root there is no user namespace: the workload's number inside is the host's."""
        if not self.context.root:
            return spec
        uid, gid = spec.identity.host_uid(spec.identity.uid), spec.identity.host_uid(spec.identity.gid)
        return replace(spec, identity=replace(spec.identity, uid=uid, gid=gid, agent_uid=uid))

    def _plan(self, spec: StartSpec, listener: int, opened: list[int]) -> Plan:
        root, identity = self.context.root, spec.identity
        plan = Plan()
        if root:
            plan.add("CLONE", CLONE_NEWNS | CLONE_NEWPID)
        else:
            plan.add("CLONE", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUSER)
            users = [(identity.uid, os.geteuid(), 1)]
            groups = [(identity.gid, os.getegid(), 1)]
            plan.add("MAPS", MAPS_DENY_SETGROUPS, id_maps(users, groups))
        if not spec.ephemeral:
            plan.add("KEEP")
        plan.add("EXIT_FILE", os.path.join(spec.folder, EXIT_FILE))
        work = add_cgroups(plan, spec, opened)
        plan.add("FD", plan.fd(listener), _LISTEN_FD)
        for index, descriptor in enumerate(work):
            plan.add("FD", plan.fd(descriptor), _LISTEN_FD + 1 + index)
        self._add_root(plan, spec)
        add_limits(plan, spec)
        plan.add("NO_NEW_PRIVS")
        plan.add("BECOME", identity.uid, identity.gid, int(root), 0)
        if spec.ephemeral:
            plan.add("DEATH_SIGNAL", 9)
        plan.add("UMASK", 0o022)
        for text in agent_arguments(spec, _LISTEN_FD, range(_LISTEN_FD + 1, _LISTEN_FD + 1 + len(work))):
            plan.add("ARG", text)
        for text in environment(spec):
            plan.add("ENV", text)
        plan.add("EXEC_FD", plan.fd(self.context.agent_fd()))
        return plan

    def _add_root(self, plan: Plan, spec: StartSpec) -> None:
        """The host's files, beside folders of the sandbox's own."""
        root, disk = self.context.root, spec.root.disk
        stage = f"{STAGE}/stage" if root else STAGE
        owner = (spec.identity.uid, spec.identity.gid) if root else (NOBODY, NOBODY)
        options = f"size={disk.size},nr_inodes={disk.inodes},mode=0755"
        plan.add("MOUNT", "disk", stage, "tmpfs", MS_NOSUID | MS_NODEV, options)
        for path in ("proc", "dev", *_OPENED_UP):
            plan.add("MKDIR", f"{stage}/{path}", 0o755, NOBODY, NOBODY)
        plan.add("MKDIR", f"{stage}/workspace", 0o755, *owner)
        plan.add("MKDIR", f"{stage}/home/agent", 0o755, *owner)
        plan.add("MKDIR", f"{stage}/run/secrets", 0o755, NOBODY, NOBODY)
        plan.add("PIVOT", stage)
        for name in sorted(os.listdir("/")):
            if name in _OPENED_UP:
                entries = sorted(set(os.listdir(f"/{name}")) - {_OPENED_UP[name]})[:_MOST_ENTRIES]
                for entry in entries:
                    _show(plan, f"/{name}/{entry}")
            elif name not in _OWN:
                _show(plan, f"/{name}")
        plan.add("MOUNT", "proc", "/proc", "proc", _QUIET, "")
        if root:
            plan.add("BIND", f"{STAGE}/dev", "/dev", BIND_DEVICES | BIND_NOEXEC)
        else:
            plan.add("MOUNT", "dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=0755")
            for device in DEVICES:
                plan.add("BIND", f"/dev/{device}", f"/dev/{device}", BIND_DEVICES | BIND_NOEXEC | BIND_MAKE)
            for link, target in DEVICE_LINKS.items():
                plan.add("SYMLINK", target, f"/dev/{link}")
            for folder in ("pts", "shm"):
                plan.add("MKDIR", f"/dev/{folder}", 0o755, NOBODY, NOBODY)
        plan.add(
            "MOUNT",
            "devpts",
            "/dev/pts",
            "devpts",
            MS_NOSUID | MS_NOEXEC,
            "newinstance,ptmxmode=0666,mode=0620",
        )
        plan.add("MOUNT", "shm", "/dev/shm", "tmpfs", _QUIET, "size=16m,mode=1777")  # noqa: S108
        mine = f",uid={owner[0]},gid={owner[1]}" if root else ""
        plan.add("MOUNT", "secrets", "/run/secrets", "tmpfs", _QUIET, f"size=1m,mode=0755{mine}")
        plan.add("DETACH")


def _show(plan: Plan, path: str) -> None:
    if os.path.islink(path):
        plan.add("SYMLINK", os.readlink(path), path)
    else:
        plan.add("BIND", path, path, BIND_MAKE)
