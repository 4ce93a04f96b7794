"""The node service: creates sandboxes, finds them again after a crash, removes what the dead left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from ringfence.model.errors import (
    HostLimit,
    NotFound,
    RingfenceError,
    RuntimeUnavailable,
    StartFailed,
)
from ringfence.model.ids import new_id
from ringfence.model.policy import Policy
from ringfence.model.sandbox import SandboxRequest
from ringfence.node import cgroups, disks, identities, requests, specs, supervising
from ringfence.node.groups import GroupPool, noted, of_record
from ringfence.node.journal import HANDLE, Journal, handle_as_json, request_as_json, root_as_json
from ringfence.node.making import Made
from ringfence.node.notes import notes
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.selecting import Rejected, candidates, none_left
from ringfence.node.state import StateRoot
from ringfence.node.templates import HostTemplate
from ringfence.runtimes.context import RuntimeContext, privileged
from ringfence.runtimes.contract import (
    Disk,
    Handle,
    Probe,
    RootFs,
    Runtime,
)
from ringfence.runtimes.launching.processes import birth_of, boot_id

if TYPE_CHECKING:
    from ringfence.node.fittings import EngineRoot, ImageRoot, ImageTemplates
    from ringfence.node.restoring import Saved
    from ringfence.node.snapshots import Snapshot, SnapshotStore
    from ringfence.node.volumes import Volumes

BeforeStart = Callable[[NodeSandbox], Awaitable[object]]
CLEAN_TIME = 30.0  # seconds that a dead sandbox's cgroups may stay busy before we call them stuck


class Node:
    """One node process's view of the state root. Open with :meth:`open`, end with :meth:`close`::

        async with await Node.open() as node:
            sandbox = await node.create(SandboxRequest())
            result = await sandbox.run(ProcessSpec(("true",)))
            await sandbox.destroy()

    Several nodes, in this process or others, may have the same state root open.
    """

    def __init__(self, state: StateRoot, service: str = "") -> None:
        self.state = state
        self.service = service  # whose kept sandboxes it makes and adopts; "": of `ringfence run --keep`
        self.lost: Callable[[Mapping[str, Any]], None] | None = None  # hears of those that died unattended
        self.root = privileged()
        self.cgroups = cgroups.detect()
        self.groups = GroupPool(self.cgroups, state.owner)
        self.boot = boot_id()
        self.template = HostTemplate(state)
        self.volumes: Volumes | None = None  # that sandboxes may have
        self._images: ImageTemplates | None = None
        self.ranges = identities.Ranges(state.ranges, state.owner)
        self._context: RuntimeContext | None = None
        self._opening = asyncio.Lock()
        self._runtimes: dict[str, Runtime] = {}
        self._proved: set[str] = set()  # runtimes that have started a wall
        self._sandboxes: dict[str, NodeSandbox] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._launcher_ref: list[int] | None = None
        self._snapshots: SnapshotStore | None = None
        self._creating = 0
        self._created = asyncio.Event()  # set when no create is under way
        self._created.set()
        self.leftovers = ""  # what of a dead node could not be removed at the opening

    @classmethod
    async def open(cls, state: Path | str | None = None, *, adopt: bool = True, service: str = "") -> Self:
        """Open the state root (default: see ``state.default_root``) and clean up after dead nodes.

        ``adopt``: take over kept sandboxes whose node is gone (a service does; a single ``run`` needn't), of
        that ``service`` only.

        Raises:
            HostLimit: the state root can't be used; the message says why and what to do.
        """
        node = cls(StateRoot.open(state), service)
        try:
            await node.recover(adopt=adopt)
        except RingfenceError as error:
            node.leftovers = error.message  # what a dead node left must not keep this one from working
        except BaseException:
            await node.close()
            raise
        return node

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def snapshots(self) -> SnapshotStore:
        """Saved sandboxes."""
        if self._snapshots is None:
            from ringfence.node.snapshots import SnapshotStore

            self._snapshots = SnapshotStore(self.state, root=self.root, released=self._release_template)
        return self._snapshots

    @property
    def images(self) -> ImageTemplates:
        """Templates other than the host's own."""
        if self._images is None:
            from ringfence.node.fittings import ImageTemplates

            self._images = ImageTemplates(self.state)
        return self._images

    def _release_template(self, snapshot: Snapshot) -> None:
        from ringfence.node import templating

        templating.release(self, snapshot)

    # -- runtimes

    async def context(self) -> RuntimeContext:
        """What drivers work with: the launcher, the agent. Started on first use."""
        async with self._opening:
            if self._context is None:
                self._context = await RuntimeContext.open(root=self.root)
            return self._context

    async def launcher(self) -> list[int]:
        """Pid and birth of our launcher: below it lives what we started and never heard of, should we die."""
        pid = (await self.context()).launcher.pid
        if self._launcher_ref is None or self._launcher_ref[0] != pid:
            self._launcher_ref = [pid, birth_of(pid) or 0]
        return self._launcher_ref

    @property
    def creating(self) -> bool:
        """Whether a start is under way."""
        return self._creating > 0

    def names(self) -> list[str]:
        """Every runtime known on this host, built-in ones first."""
        from ringfence.runtimes import registry

        return list(registry.names())

    async def runtime(self, name: str) -> Runtime:
        """A driver by name.

        Raises:
            NotFound: nobody knows it; the hint lists those that are known.
            RuntimeUnavailable: it can't be loaded.
        """
        return self._load(name, await self.context())

    def _load(self, name: str, context: RuntimeContext) -> Runtime:
        if name not in self._runtimes:
            from ringfence.runtimes import registry

            self._runtimes[name] = cast(Runtime, registry.load(name, context))
        return self._runtimes[name]

    def use(self, runtime: Runtime) -> None:
        """From now on the driver of that name, in place of the registry's: one that measures, or a fault."""
        self._runtimes[runtime.name] = runtime

    async def select(self, policy: Policy) -> str:
        """The name of the runtime that :meth:`create` would try first for this policy.

        Raises:
            NotFound, RuntimeUnavailable, Unsupported: as :meth:`create`.
        """
        context = await self.context()
        request = SandboxRequest(policy=policy)
        rejected: list[Rejected] = []
        for runtime in candidates(
            request, self.names, lambda n: self._load(n, context), root=self.root, rejected=rejected
        ):
            return runtime.name
        raise none_left(request, rejected)

    async def probe_all(self) -> list[Probe]:
        """Every runtime known, proved by running something, one after the other."""
        return [await self.probe(name) for name in self.names()]

    async def probe(self, name: str) -> Probe:
        """One runtime, proved by running something. A driver that can't be loaded is unavailable.

        Raises:
            NotFound: nobody knows it.
        """
        from ringfence.model.levels import Boundary, Level

        try:
            runtime = await self.runtime(name)
        except NotFound:
            raise
        except (RingfenceError, ImportError) as error:
            hint = error.hint if isinstance(error, RingfenceError) else ""
            return Probe(name, "unavailable", Level.L1, Boundary.NONE, reason=str(error), remedy=hint)
        return await runtime.probe()

    # -- sandboxes

    async def create(self, request: SandboxRequest, before: BeforeStart | None = None) -> NodeSandbox:
        """Start a sandbox. Whatever step fails, or if the caller is cancelled, nothing is left behind.

        ``before`` is awaited when the wall stands, before what the template starts: for opening a door.

        Raises:
            InvalidRequest: the request can't be right (impossible size, mount that does not exist …).
            NotFound: no such runtime or template.
            Unsupported: the runtime, or Ringfence so far, can't do what the policy asks for.
            RuntimeUnavailable: no runtime here meets the policy.
            StartFailed: the wall could not be built; step and errno are in the details.
            HostLimit: the host lacks something; the hint says what to do.
        """
        self._check(request)
        with self._under_way():
            sandbox = await self._create_best(request)
        return await self._brought_up(sandbox, before)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._creating += 1
        self._created.clear()
        try:
            yield
        finally:
            self._creating -= 1
            if not self._creating:
                self._created.set()

    async def _brought_up(self, sandbox: NodeSandbox, before: BeforeStart | None = None) -> NodeSandbox:
        try:
            if before is not None:
                await before(sandbox)
            record = sandbox.journal.record  # what is held waits for ``starting.release``
            if str(record.get("template", "")).startswith("sha256:") and not record.get("held"):
                from ringfence.node.starting import bring_up

                await bring_up(self, sandbox)
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    async def restore(
        self,
        name: str,
        request: SandboxRequest | None = None,
        *,
        before: BeforeStart | None = None,
        **changes: Any,
    ) -> NodeSandbox:
        """Start a sandbox from a snapshot, any number of times; each has an identity of its own.

        Args:
            name: of the snapshot, or its id. request: must have the wall that was saved; by default the saved
            sandbox's own request. changes: fields of that default request to replace: ``owner``, ``keep``,
            ``labels``, ``env``, ``id``. before: as in :meth:`create`; of a saved memory everything runs on.

        Raises:
            NotFound: no such snapshot. InvalidRequest: it is damaged, or foreign: of another wall, machine or
            version; the message says what. What :meth:`create` raises.
        """
        from ringfence.node import restoring

        saved, request = await restoring.prepare(self, name, request, changes)
        return await self.create_from(saved, request, before)

    async def create_from(
        self, saved: Saved, request: SandboxRequest, before: BeforeStart | None = None
    ) -> NodeSandbox:
        """As :meth:`create`, from a snapshot that was looked at."""
        self._check(request)
        with self._under_way():
            sandbox = await self._create(saved.runtime, request, [], saved)
        # Of a saved memory everything runs on; saved files alone are a first day with other files.
        return sandbox if saved.snapshot.kind == "memory" else await self._brought_up(sandbox, before)

    def _check(self, request: SandboxRequest) -> None:
        if self._closed:
            raise HostLimit("this node is closed", hint="open a new one")
        requests.check(request)
        if not self.root and os.geteuid() == 0:
            # The map of a rootless wall would make the workload the host's root.
            raise HostLimit(
                "root without CAP_SYS_ADMIN (an ordinary container?) can't give a sandbox a user of its own",
                hint="run as a normal user, or give the container CAP_SYS_ADMIN",
            )
        disks.choose(request.policy.wall.resources, root=self.root)

    async def _create_best(self, request: SandboxRequest) -> NodeSandbox:
        context = await self.context()
        rejected: list[Rejected] = []
        failure: RingfenceError | None = None
        for runtime in candidates(
            request, self.names, lambda n: self._load(n, context), root=self.root, rejected=rejected
        ):
            try:
                sandbox = await self._create(runtime, request, rejected)
            except (StartFailed, RuntimeUnavailable) as error:
                # A driver that has worked before fails for a reason of this request: no other would do.
                if runtime.name in self._proved or request.policy.wall.isolation.runtime is not None:
                    raise
                failure = failure or error
                rejected.append(Rejected(runtime.name, error.message))
                continue
            self._proved.add(runtime.name)
            return sandbox
        if failure is not None:
            raise failure
        raise none_left(request, rejected)

    async def _create(
        self, runtime: Runtime, request: SandboxRequest, rejected: list[Rejected], saved: Saved | None = None
    ) -> NodeSandbox:
        made = Made(request.id or new_id("sb"))
        try:
            sandbox = await self._make(made, runtime, request, rejected, saved)
            if self._closed:
                raise HostLimit("this node was closed meanwhile", hint="open a new one")
        except BaseException:
            await asyncio.shield(self.later(self._undo(made, runtime)))  # also if it is cancelled once more
            raise
        self._sandboxes[sandbox.id] = sandbox
        sandbox.watch()
        return sandbox

    async def _make(
        self,
        made: Made,
        runtime: Runtime,
        request: SandboxRequest,
        rejected: list[Rejected],
        saved: Saved | None,
    ) -> NodeSandbox:
        policy = request.policy
        size, process = policy.wall.resources, policy.wall.process
        if self.root:
            made.range = self.ranges.take()
        template = self.template_of(request)
        # Making it takes a second, once: not of the sandbox's own time.
        if template is self.template:
            template.skeleton(process.user)
        else:
            await asyncio.to_thread(template.skeleton, process.user)
        launcher = await self.launcher()
        if leaving := {task for task in self._background if task.get_name() == made.name}:
            await asyncio.wait(leaving)  # one of that id was destroyed, and its processes still die
        started, deadline = time.time(), supervising.now() + policy.door.limits.timeout
        # Nothing is waited for until the journal is begun: a folder without one is swept in seconds.
        made.folder = folder = self.state.take_folder(made.name)
        record: dict[str, Any] = {
            "id": made.name,
            "owner": self.state.owner,
            "boot": self.boot,
            "runtime": runtime.name,
            "keep": request.keep,
            "launcher": launcher,
            "range": made.range,
            "started": started,
            "deadline": deadline,
            "template": template.digest,  # from now on it is in use
        }
        if request.keep:
            record |= {"request": request_as_json(request), "service": self.service}
        if saved is None:
            made.journal = Journal.begin(folder, record)
        else:
            with saved.noting():
                made.journal = Journal.begin(folder, record | saved.record())
        limits_of_group, shared = specs.group_limits(runtime, request), bool(self.service)
        made.group = self.groups.take(made.name, limits_of_group, keep=request.keep, shared=shared)
        if request.keep and shared:
            made.journal.append(noted(made.group))
        disk = disks.prepare(self.state, folder, size, root=self.root)
        root = self.root_fs(request, disk, folder, template)
        if saved is not None:
            root = saved.root(root, folder)
        identity = specs.identity(self, made.range, process.user)
        if made.range is not None and request.keep:
            self.ranges.assign(made.range, made.name)
        spec = specs.start_spec(made.name, folder, request, root, identity, made.group)
        made.handle = await (runtime.start(spec) if saved is None else saved.start(runtime, spec))
        change: dict[str, Any] = {"state": HANDLE, "handle": handle_as_json(made.handle)}
        if request.keep:
            change["root"] = root_as_json(root)
        made.journal.append(change)
        has = runtime.capabilities()
        limits = specs.limits_of(self, request, disk, has)
        return NodeSandbox(
            runtime,
            request,
            made.handle,
            root,
            made.group,
            specs.watched(request, deadline, limits),
            journal=made.journal,
            limits=limits,
            notes=notes(self, request, rejected, has),
            node=self,
            release=self._release,
            started_at=started,
        )

    def template_of(self, request: SandboxRequest) -> HostTemplate | ImageRoot | EngineRoot:
        """Where root file systems of that request come from.

        Raises:
            NotFound, InvalidRequest, WrongState: see :meth:`ImageTemplates.prepare`.
        """
        if request.template == self.template.digest:
            return self.template
        return self.images.prepare(request.template, request.policy.door.limits.max_template_age)

    def root_fs(
        self,
        request: SandboxRequest,
        disk: Disk,
        folder: Path,
        template: HostTemplate | ImageRoot | EngineRoot | None = None,
    ) -> RootFs:
        """The root file system of a request's template."""
        wall = request.policy.wall
        template = template or self.template_of(request)
        root = template.root(wall.filesystem, wall.process.user, disk, folder)
        return root if self.volumes is None else self.volumes.idmapped(root)

    async def _undo(self, made: Made, runtime: Runtime) -> None:
        """Take back what a failed start had made, last first. The folder stays if something won't die."""
        if made.handle is not None:
            with contextlib.suppress(RingfenceError):
                await runtime.destroy(made.handle)
        if made.group is not None:
            made.group.kill()
            await self.until_removed(made.group)
        if made.journal is not None:
            made.journal.close()
        if made.range is not None:
            self.ranges.give_back(made.range)
            self.ranges.release(made.range, made.name)
        if made.folder is not None:
            self.state.give_folder(made.folder)

    async def _release(self, sandbox: NodeSandbox) -> None:
        """The wall is gone: give back everything else, the folder last."""
        self._sandboxes.pop(sandbox.id, None)
        if self.groups.give_back(sandbox.group):
            self._forget(sandbox)
            return
        # Dying processes keep a group busy for a moment; nobody has to wait for that but close().
        self.later(self._release_later(sandbox)).set_name(sandbox.id)

    async def _release_later(self, sandbox: NodeSandbox) -> None:
        sandbox.group.kill()
        await self.until_removed(sandbox.group)
        self._forget(sandbox)

    def _forget(self, sandbox: NodeSandbox) -> None:
        number = sandbox.journal.record.get("range")
        with sandbox.journal as journal:
            if isinstance(number, int):
                self.ranges.give_back(number)
                self.ranges.release(number, sandbox.id)  # of a kept one; before the folder, which tells of it
            self.state.give_folder(journal.folder, journal.descriptor)
        for key in ("snapshot", "base"):
            if name := sandbox.journal.record.get(key):
                self.snapshots.drop(str(name))

    def forget(self, sandbox: str) -> None:
        """Sandboxes of that id that are gone are no hindrance to another one."""
        for runtime in self._runtimes.values():
            getattr(runtime, "forget", lambda _: None)(sandbox)

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something that nobody waits for but :meth:`close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def sandboxes(self) -> list[NodeSandbox]:
        """Sandboxes that this node holds: made or adopted here and not destroyed."""
        return list(self._sandboxes.values())

    def get(self, sandbox: str) -> NodeSandbox:
        """A sandbox of this node by id.

        Raises:
            NotFound: this node holds none of that id.
        """
        try:
            return self._sandboxes[sandbox]
        except KeyError:
            raise NotFound(f"no sandbox {sandbox} on this node", hint="it may have ended") from None

    # -- after a crash

    async def recover(self, *, adopt: bool = True) -> list[NodeSandbox]:
        """Look for what dead nodes left: adopt kept sandboxes that live, remove everything else.

        With nothing to do it costs a listing. Returns what was adopted.

        Raises:
            HostLimit: something can't be removed; the message says what.
        """
        dead = self.state.dead_nodes()
        if not dead and not self.state.has_orphans():
            return []
        from ringfence.node.sweeping import sweep

        return await sweep(self, dead, adopt=adopt)

    def adopted(self, sandbox: NodeSandbox) -> None:
        """A sandbox of a dead node is ours now."""
        self._sandboxes[sandbox.id] = sandbox
        sandbox.watch()

    def adoption(
        self, runtime: Runtime, request: SandboxRequest, handle: Handle, root: RootFs, journal: Journal
    ) -> NodeSandbox:
        """A living kept sandbox from its journal."""
        has = runtime.capabilities()
        limits = specs.limits_of(self, request, root.disk, has)
        return NodeSandbox(
            runtime,
            request,
            handle,
            root,
            of_record(self.cgroups, journal.record),
            specs.watched(request, float(journal.record["deadline"]), limits),
            journal=journal,
            limits=limits,
            notes=notes(self, request, [], has),
            node=self,
            release=self._release,
            started_at=float(journal.record["started"]),
        )

    async def until_removed(self, group: cgroups.Group) -> None:
        """Return when the group is gone, however long its processes take to die.

        Raises:
            HostLimit: they don't.
        """
        deadline = time.monotonic() + CLEAN_TIME
        delay = 0.001
        while not group.remove():
            if time.monotonic() > deadline:
                raise HostLimit(
                    f"cgroup {group.name} stays busy", hint=f"its processes: {group.processes()[:10]}"
                )
            group.kill()  # one may have come in after the last look
            await asyncio.sleep(delay)
            delay = min(delay * 2, 0.05)

    async def close(self) -> None:
        """Destroy what is not kept, let go of what is, wait for the cleaning. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._created.wait()
        kept = [s for s in self._sandboxes.values() if s.request.keep and not s.ended.done()]
        others = [s for s in self._sandboxes.values() if s not in kept]
        results = await asyncio.gather(*(s.destroy() for s in others), return_exceptions=True)
        for sandbox in kept:
            await sandbox.detach()
        results += await asyncio.gather(*self._background, return_exceptions=True)
        if self._context is not None:
            await self._context.close()
        failed = [r for r in results if isinstance(r, BaseException)]
        self.groups.close()
        if self._images is not None:
            self._images.close()
        self.ranges.close()
        # With something left the name stays, unlocked: the next node to open looks after it.
        self.state.close(leave=bool(kept or failed))
        if failed:
            raise failed[0]
