"""What a node does for a service: sandboxes that are found again by their id, and ends that stay known.

Everything here is idempotent by the sandbox's id. Sandboxes are kept (they outlive this process) and belong
to one service: others on this machine leave them alone. When one ends by itself, its end is written down
first and then everything of it is removed; the end stays known until somebody destroys it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.guest.link import GuestLink
from ringfence.model.errors import InvalidRequest, NotFound, RingfenceError, RuntimeUnavailable, WrongState
from ringfence.model.ids import SANDBOX_ID
from ringfence.model.levels import Boundary
from ringfence.model.sandbox import SandboxRequest
from ringfence.node import starting
from ringfence.node.service import Node
from ringfence.node.state import StateRoot, unlock
from ringfence.node.volumes import RUNTIMES, Volumes
from ringfence.placement.attaching import Attachments, no_volumes, no_wall
from ringfence.placement.contract import Capacity, Placed, PlacedSpec
from ringfence.placement.graves import Graves, as_known, bury, noted_cause, service_folder
from ringfence.placement.judging import Judge
from ringfence.placement.policies import owner_of, policy_of, same_wall
from ringfence.placement.values import placed_as_json

if TYPE_CHECKING:
    import socket

    from ringfence.model.policy import Policy
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.runtimes.context import RuntimeContext

PROBED_FOR = 300.0  # seconds
NOTED = 64  # a sandbox's output is written down so many times, at most, until it reaches its limit
OnHappened = Callable[[str, str, dict[str, Any]], None]


class Hosting:
    """A node's sandboxes as the placement contract has them. Open with :meth:`open`, end with :meth:`close`.

    ``happened(name, id, data)`` is called when something happens by itself or was done: ended, paused,
    resumed.
    """

    def __init__(self, node: Node, graves: Graves, volumes: Volumes, happened: OnHappened) -> None:
        self.node = node
        self.graves = graves
        self.happened = happened
        self._starting: dict[str, asyncio.Task[Placed]] = {}
        self._destroying: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._judges: dict[str, Judge] = {}
        self._boundaries: dict[str, dict[str, Any]] = {}
        self._capabilities: dict[str, dict[str, Any]] = {}
        self._probing: asyncio.Future[list[dict[str, Any]]] | None = None
        self._probed = 0.0
        self._lock = -1
        self.name = os.uname().nodename
        self.volumes = Attachments(volumes, self._renew)
        self._former: list[RuntimeContext] = []
        self._saving: dict[str, asyncio.Future[None]] = {}  # snapshots being made, by name

    @classmethod
    async def open(cls, state: Path | str | None, service: str, happened: OnHappened) -> Hosting:
        """Open the state root for this service alone, adopt its sandboxes that live, bury those that don't.

        Raises:
            WrongState: another node serves this service. HostLimit: the state root can't be used.
        """
        node = Node(StateRoot.open(state), service)
        lock = -1
        try:
            lock = _lock(service_folder(node.state.path, service))
            graves = Graves.open(node.state.path, service)
            node.volumes = volumes = Volumes(
                service_folder(node.state.path, service) / "volumes", root=node.root
            )
            volumes.prepare()
            node.lost = functools.partial(bury, node, graves)
            with contextlib.suppress(RingfenceError):  # what can't be removed yet is tried again later
                await node.recover(adopt=True)
        except BaseException:
            await node.close()
            if lock >= 0:
                unlock(lock)
            raise
        made = cls(node, graves, volumes, happened)
        made._lock = lock
        made.volumes.known(node.sandboxes())
        for sandbox in node.sandboxes():
            made._hold(sandbox)
        return made

    async def close(self) -> None:
        """Let go; sandboxes live on. What is half made is undone."""
        for task in (*self._starting.values(), *self._bringing.values()):
            task.cancel()
        under_way = (*self._starting.values(), *self._bringing.values(), *self._destroying.values())
        await asyncio.gather(*under_way, return_exceptions=True)
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        try:
            await self.node.close()
            for context in self._former:
                await context.close()
        finally:
            self.volumes.volumes.close()
            unlock(self._lock)
            self._lock = -1

    def _renew(self) -> None:
        """Let another launcher start the sandboxes to come. Those that run stay with theirs."""
        if self.node._context is not None:
            self._former.append(self.node._context)
            self.node._context = None
            self.node._runtimes = {}

    # -- what there is

    def sandbox(self, name: str) -> NodeSandbox:
        """A living one.

        Raises:
            NotFound: there is none. WrongState: it has ended.
        """
        try:
            sandbox = self.node.get(name)
        except NotFound:
            grave = self.graves.get(name)
            if grave is not None:
                raise WrongState(
                    f"sandbox {name} has ended: {grave['end']['cause']}", hint="start another one"
                ) from None
            raise NotFound(f"no sandbox {name} here", hint="it may have been destroyed") from None
        sandbox.check_alive()
        return sandbox

    def get(self, name: str) -> Placed:
        """One that exists."""
        grave = self.graves.get(name)
        if grave is not None:
            return Placed(**grave["placed"])
        try:
            return self.placed(self.node.get(name))
        except NotFound:
            raise NotFound(f"no sandbox {name} here", hint="it may have been destroyed") from None

    def all(self) -> list[Placed]:
        """All that exist, ended ones too."""
        graves = self.graves.all()
        living = [self.placed(each) for each in self.node.sandboxes() if each.id not in graves]
        return living + [Placed(**grave["placed"]) for grave in graves.values()]

    def placed(self, sandbox: NodeSandbox) -> Placed:
        """The facts about one."""
        end = sandbox.ended.result() if sandbox.ended.done() else None
        name = sandbox.runtime.name
        if name not in self._capabilities:
            self._capabilities[name] = asdict(sandbox.runtime.capabilities())
        return Placed(
            id=sandbox.id,
            state="ended" if end else "paused" if sandbox.paused else "running",
            runtime=name,
            node=self.name,
            started_at=sandbox.started_at,
            deadline=sandbox.deadline,
            template=sandbox.root.template,
            address=f"local:{self.name}/{sandbox.id}",
            end=as_known(end) if end else None,
            boundary=self._boundaries.get(sandbox.id),
            capabilities=self._capabilities[name],
            held=bool(sandbox.journal.record.get("held")),
        )

    def capacity(self) -> Capacity:
        """Of this machine."""
        from ringfence.node.requests import host_memory

        space = os.statvfs(self.node.state.path)
        return Capacity(
            cpus=float(len(os.sched_getaffinity(0))),
            memory=host_memory(),
            disk=space.f_bavail * space.f_frsize,
            sandboxes=len(self.node.sandboxes()),
        )

    # -- start

    async def start(self, spec: PlacedSpec) -> Placed:
        """See the contract. Whoever asks meanwhile for the same id waits for the same start."""
        if not SANDBOX_ID.fullmatch(spec.id):
            raise InvalidRequest(f"{spec.id!r} is no sandbox id", hint="sb- and 20 base-32 digits")
        while (ending := self._destroying.get(spec.id)) is not None:
            await asyncio.wait({ending})
        task = self._starting.get(spec.id)
        if task is None:
            with contextlib.suppress(NotFound):
                found = self.get(spec.id)
                if spec.deadline is not None and found.state != "ended":
                    self._set_deadline(self.node.get(spec.id), spec.deadline)
                    found = self.get(spec.id)
                return found
            task = asyncio.get_running_loop().create_task(self._start(spec))
            self._starting[spec.id] = task
            task.add_done_callback(lambda _: self._starting.pop(spec.id, None))
        return await asyncio.shield(task)

    async def _start(self, spec: PlacedSpec) -> Placed:
        request = self._request(spec)
        await self._walled(request.policy)
        policy = await self.volumes.attach(spec.id, request.policy, spec.volumes)
        sandbox: NodeSandbox | None = None
        try:
            sandbox = await self._make(replace(request, policy=policy), spec.snapshot, spec.hold)
            if spec.volumes and sandbox.runtime.name not in RUNTIMES:
                raise no_volumes(sandbox.runtime.name)
            if sandbox.runtime.boundary is Boundary.NONE:
                raise no_wall(sandbox.runtime.name)
            if spec.deadline is not None:
                self._set_deadline(sandbox, spec.deadline)
        except BaseException:
            if sandbox is not None:
                await sandbox.destroy()
            await self.volumes.let_go(spec.id)
            raise
        self._hold(sandbox)
        return self.placed(sandbox)

    async def _walled(self, policy: Policy) -> None:
        """Nothing of a client's is started without a wall, by whatever name: the service has many owners."""
        isolation = policy.wall.isolation
        for name in {isolation.runtime, *isolation.prefer} - {None}:
            with contextlib.suppress(NotFound, RuntimeUnavailable, ImportError):  # the node says so
                if (await self.node.runtime(str(name))).boundary is Boundary.NONE:
                    raise no_wall(str(name))

    async def _make(self, request: SandboxRequest, snapshot: str, hold: bool) -> NodeSandbox:
        name = request.id or ""
        self.node.forget(name)
        if self.node.state.folder(name).is_dir():  # a dead node's, which could not be removed yet
            await self.recover()
        before = starting.hold if hold else None
        if snapshot:
            return await self.node.restore(snapshot, request, before=before)
        return await self.node.create(request, before)

    def _request(self, spec: PlacedSpec) -> SandboxRequest:
        return SandboxRequest(
            policy=policy_of(spec.policy),
            template=spec.template,
            owner=owner_of(spec.owner),
            env=dict(spec.env),
            labels=dict(spec.labels),
            keep=True,
            id=spec.id,
            secrets=spec.secrets,
        )

    # -- the end

    def _hold(self, sandbox: NodeSandbox) -> None:
        told = noted_cause(sandbox.journal.record)
        if told is not None:  # by a node that died before it was gone
            sandbox.supervisor.kill(*told)
        self._judges[sandbox.id] = Judge(sandbox)
        watch = asyncio.get_running_loop().create_task(self._until_end(sandbox))
        self._watches[sandbox.id] = watch

    async def _until_end(self, sandbox: NodeSandbox) -> None:
        end = await asyncio.shield(sandbox.ended)
        if sandbox.id in self._destroying:
            return
        usage = asdict(await sandbox.usage())
        with contextlib.suppress(RingfenceError):  # no room: it is known while we live
            self.graves.dig(sandbox.id, placed_as_json(self.placed(sandbox)), usage)
        self.happened("ended", sandbox.id, {"end": as_known(end)})
        self._forget(sandbox.id)
        with contextlib.suppress(RingfenceError):  # what can't be removed now is swept later
            await sandbox.destroy()
        await self.volumes.let_go(sandbox.id)

    def _forget(self, name: str) -> None:
        self._watches.pop(name, None)
        self._judges.pop(name, None)
        self._boundaries.pop(name, None)

    async def destroy(self, name: str, grace: float) -> dict[str, Any]:
        """See the contract."""
        task = self._destroying.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._destroy(name, grace))
            self._destroying[name] = task
            task.add_done_callback(lambda _: self._destroying.pop(name, None))
        return await asyncio.shield(task)

    async def _destroy(self, name: str, grace: float) -> dict[str, Any]:
        starting = self._starting.get(name)
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})
        grave = self.graves.get(name)
        end: dict[str, Any] = dict(grave["end"]) if grave else {}
        with contextlib.suppress(NotFound):
            sandbox = self.node.get(name)
            if grace > 0 and not sandbox.ended.done():
                with contextlib.suppress(RingfenceError):
                    await sandbox.stop(grace)
            await sandbox.destroy()
            if not end:
                end = as_known(sandbox.ended.result())
        watch = self._watches.get(name)
        self._forget(name)
        if watch is not None:
            watch.cancel()
        await self.volumes.let_go(name)
        self.graves.fill(name)
        return end

    # -- what is done to one

    async def measure(self, name: str) -> dict[str, Any]:
        """The boundary, measured now."""
        sandbox = self.sandbox(name)
        found = (await sandbox.boundary()).as_dict()
        self._boundaries[name] = found
        return found

    async def usage(self, name: str) -> dict[str, Any]:
        """What it took so far, or had taken when it ended."""
        grave = self.graves.get(name)
        if grave is not None:
            return dict(grave["usage"])
        sandbox = self.sandbox(name)
        found = asdict(await sandbox.usage())
        with contextlib.suppress(RingfenceError, OSError):
            stats = await sandbox.runtime.stats(sandbox.handle)
            found |= {"processes": stats.processes, "memory": stats.resident_bytes}
        found["disk"] = _disk_used(sandbox)
        return found

    async def connect(self, name: str) -> socket.socket:
        """A connected stream to the agent."""
        sandbox = self.sandbox(name)
        return await sandbox.runtime.connect(sandbox.handle)

    def spent(self, name: str, output: int) -> int:
        """Count output."""
        if output < 0:
            raise InvalidRequest("output can't be less than nothing")
        sandbox = self.sandbox(name)
        supervisor = sandbox.supervisor
        supervisor.count_output(output)
        limit = supervisor.watched.output
        # The next node goes on counting, give or take a bit: not every piece is worth a line.
        if supervisor.output - int(sandbox.journal.record.get("output", 0)) > limit // NOTED:
            sandbox.mark("output", supervisor.output)
        return max(0, limit - supervisor.output)

    async def judge(self, name: str, exit_code: int, sent: bool) -> dict[str, Any]:
        """Why a command ended."""
        grave = self.graves.get(name)
        if grave is not None:
            return dict(grave["end"])
        judge = self._judges.get(name)
        if judge is None:
            self.sandbox(name)
            raise NotFound(f"no sandbox {name} here")
        return as_known(await judge.of(exit_code, sent=sent))

    async def bind(
        self,
        name: str,
        *,
        env: Mapping[str, str] | None,
        secrets: Mapping[str, bytes] | None,
        owner: Mapping[str, Any] | None,
        labels: Mapping[str, str] | None,
        policy: Mapping[str, Any] | None,
        deadline: float | None,
    ) -> Placed:
        """Bind or change the door."""
        sandbox = self.sandbox(name)
        request = sandbox.request
        changed = request
        if policy is not None:
            wanted = same_wall(self.volumes.without(request.policy), policy_of(policy))
            changed = replace(changed, policy=replace(wanted, wall=request.policy.wall))
        if owner is not None:
            changed = replace(changed, owner=owner_of(owner))
        if labels is not None:
            changed = replace(changed, labels=dict(labels))
        if env is not None:
            changed = replace(changed, env=request.env | dict(env))
        if secrets:
            changed = replace(changed, secrets=True)
        if changed is not request:
            sandbox.rebind(changed)
        if deadline is not None:
            self._set_deadline(sandbox, deadline)
        if env is not None or secrets:
            link = await GuestLink.open(await sandbox.runtime.connect(sandbox.handle), wait=False)
            try:
                await link.bind(env=env, secrets=secrets)
            finally:
                await link.close()
        return self.placed(sandbox)

    def _set_deadline(self, sandbox: NodeSandbox, deadline: float) -> None:
        sandbox.set_deadline(deadline)

    async def pause(self, name: str) -> None:
        """Stop everything inside."""
        sandbox = self.sandbox(name)
        if not sandbox.paused:
            await sandbox.pause()
            self.happened("paused", name, {})

    async def resume(self, name: str) -> None:
        """Let it go on."""
        sandbox = self.sandbox(name)
        if sandbox.paused:
            await sandbox.resume()
            self.happened("resumed", name, {})

    async def snapshot(self, id: str, name: str, kind: str | None) -> dict[str, Any]:
        """Save one; the same name of the same sandbox again is what was saved."""
        await self._saved(name)
        with contextlib.suppress(NotFound):
            found = self.node.snapshots.get(name)
            if found.source == id:
                return found.as_dict()
        self._saving[name] = made = asyncio.get_running_loop().create_future()
        try:
            return (await self.sandbox(id).snapshot(name, kind=kind)).as_dict()
        finally:
            del self._saving[name]
            made.set_result(None)

    async def _saved(self, name: str) -> None:
        """Wait until nobody is making a snapshot of that name."""
        while (making := self._saving.get(name)) is not None:
            await asyncio.wait({making})

    async def remove_snapshot(self, name: str) -> None:
        """Remove what was saved, or is being saved for somebody who has gone."""
        await self._saved(name)
        with contextlib.suppress(NotFound):
            self.node.snapshots.remove(name)

    async def bring_up(self, name: str) -> Placed:
        """Start what waits. Whoever asks meanwhile waits for the same start."""
        sandbox = self.sandbox(name)
        task = self._bringing.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(starting.release(self.node, sandbox))
            self._bringing[name] = task
            task.add_done_callback(functools.partial(self._brought, name))
        await asyncio.shield(task)
        return self.placed(sandbox)

    def _brought(self, name: str, task: asyncio.Task[None]) -> None:
        self._bringing.pop(name, None)
        if not task.cancelled():
            task.exception()  # whoever asked gets it, if he is still there

    async def reset(self, name: str, *, hold: bool = False) -> Placed:
        """Begin anew."""
        sandbox = self.sandbox(name)
        await sandbox.reset(hold=hold)
        self._judges[name] = Judge(sandbox)
        self._boundaries.pop(name, None)
        return self.placed(sandbox)

    async def changes(self, name: str) -> list[dict[str, Any]]:
        """Files added, modified, deleted."""
        found = await self.sandbox(name).changes()
        return [asdict(each) for each in found]

    # -- the machine

    async def recover(self) -> None:
        """Look again for what dead nodes left."""
        for sandbox in await self.node.recover(adopt=True):
            if sandbox.id not in self._watches:
                self._hold(sandbox)

    async def runtimes(self) -> list[dict[str, Any]]:
        """Every runtime, proved by running something; what was found holds for some minutes."""
        now = asyncio.get_running_loop().time()
        if self._probing is None or (self._probing.done() and now - self._probed > PROBED_FOR):
            self._probing, self._probed = asyncio.ensure_future(self._probe()), now
        return await asyncio.shield(self._probing)

    async def _probe(self) -> list[dict[str, Any]]:
        found = []
        for name in self.node.names():
            if name == "fake":
                continue
            probe = asdict(await self.node.probe(name))
            probe["name"] = probe.pop("runtime")
            with contextlib.suppress(RingfenceError, ImportError):
                probe["capabilities"] = asdict((await self.node.runtime(name)).capabilities())
            found.append(probe)
        return found


def _lock(folder: Path) -> int:
    """The right to serve this service, for as long as we live (a descriptor)."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise WrongState(
            f"another node serves the service {folder.name!r} from this state folder",
            hint="stop it first, or give this one another --service",
        ) from None
    return lock


def _disk_used(sandbox: NodeSandbox) -> int | None:
    from ringfence.runtimes.contract import Layered

    if not (isinstance(sandbox.runtime, Layered) and sandbox.runtime.capabilities().overlay):
        return None
    try:
        upper = sandbox.runtime.open_upper(sandbox.handle)
    except (OSError, RingfenceError):
        return None
    try:
        space = os.fstatvfs(upper)
        return (space.f_blocks - space.f_bfree) * space.f_frsize
    finally:
        os.close(upper)
