"""The orchestrator of one process: any number may share a store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ringfence.control.claiming import Claims
from ringfence.control.core import Admission, Core, Settings, stopped
from ringfence.control.ending import Ending
from ringfence.control.forgetting import Forgetting, Keeping
from ringfence.control.jobs import Jobs
from ringfence.control.jobs_running import Runner
from ringfence.control.links import Links
from ringfence.control.pools import Pools
from ringfence.control.powers import Powers
from ringfence.control.queueing import Queues
from ringfence.control.quotas import Quotas
from ringfence.control.reconciling import Reconciler, process_lease
from ringfence.control.records import Sandbox
from ringfence.control.refilling import Refilling
from ringfence.control.sandboxes import Sandboxes
from ringfence.control.starting import Starting
from ringfence.control.volumes import Volumes
from ringfence.guest.link import GuestLink
from ringfence.model.errors import RingfenceError
from ringfence.model.states import State
from ringfence.placement.contract import Placement
from ringfence.store.contract import Store

if TYPE_CHECKING:
    from ringfence.control.principals import Principal


class Control:
    """Life cycle, pools and reconciliation over a store and a placement. :meth:`start` begins the background
    work, :meth:`close` ends it; sandboxes live on::

        async with Control(store, placement, owner_id="api-1") as control:
            sandbox = await control.sandboxes.create(principal, CreateSandbox())

    ``owner_id`` names this process among those that share the store: one that is started anew under the same
    id goes on at once with what the former one had under way. ``admission``: the quotas that hold
    (``tenancy.quotas``); by default those of the store, on the machines of the placement. ``files``: the
    folder for what jobs bring and leave; without one there are no jobs. ``sharing``: other
    machines may use this store, so it gets all that jobs leave. ``keeping``: of events.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        *,
        owner_id: str,
        egress: Any = None,
        admission: Admission | None = None,
        settings: Settings | None = None,
        files: Path | None = None,
        sharing: bool = False,
        keeping: Keeping | None = None,
    ) -> None:
        self.store = store
        self.placement = placement
        self.egress = egress
        self.owner_id = owner_id
        self._quotas: Quotas | None = None
        if admission is None:
            admission = self._quotas = Quotas(store, capacity=placement.capacity)
        self.core = Core(store, placement, owner_id, admission=admission, settings=settings)
        self.links = Links(self.core, self._awake)
        self.core.saw = self.links.committed
        self.ending = Ending(self.core, self.links)
        self.starting = Starting(self.core, self.links, self.ending)
        self.powers = Powers(self.core, self.links)
        self.sandboxes = Sandboxes(self.core, self.links, self.ending, self.starting, self.powers)
        self.reconciler = Reconciler(self.core, self.links, self.ending, self.starting, self.powers)
        self.pools = Pools(self.core)
        self.queues = Queues(self.core)
        self.refilling = Refilling(self.core, self.pools, self.queues, self.ending)
        self.claims = Claims(self.core, self.pools, self.queues, self.sandboxes, self.ending, self.starting)
        self.volumes = Volumes(self.core)
        self.forgetting = Forgetting(self.core, keeping)
        self.reconciler.also += [self.volumes.sweep, self.forgetting.sweep]

        def has_door() -> bool:  # also in the moments before the doors are wired, after a restart
            return bool(egress or self.ending.doors)

        self.sandboxes.has_door = has_door
        self.jobs = Jobs(self.core, files, egress=has_door, sharing=sharing)
        self.runner = Runner(self, self.jobs)
        self.pools.urge = self.refilling.urge
        self.pools.roomier = self.queues.signal
        self.queues.sandboxes = self.sandboxes
        self.queues.abandoned = self.reconciler.abandoned
        self.sandboxes.claims = self.claims
        self.reconciler.claims = self.claims
        self.core.stale = self._stale
        self.core.released = self.queues.signal
        self._background: list[asyncio.Task[None]] = []

    def _stale(self, id: str) -> None:
        self.links.changed(id)
        self.pools.changed(id)

    async def _awake(self, sandbox: Sandbox) -> Sandbox:
        return await self.core.whole(self.powers.resume(sandbox))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Say that this process is here, reconcile, and begin the background work."""
        await self.reconciler.heartbeat()
        loop = asyncio.get_running_loop()
        self._background = [
            loop.create_task(self.core.watch()),
            loop.create_task(self.reconciler.run()),
            loop.create_task(self.refilling.run()),
            loop.create_task(self.runner.run()),
        ]

    async def close(self) -> None:
        """Stop the background work, let go of links. Sandboxes live on. Idempotent."""
        await stopped(self._background)
        self._background = []
        await self.refilling.close()
        await self.core.close()
        await self.links.close()
        if self._quotas is not None:
            await self._quotas.close()
        with contextlib.suppress(RingfenceError):
            await self.store.release(process_lease(self.owner_id), self.owner_id)

    # -- traffic

    async def link(self, principal: Principal, id: str) -> GuestLink:
        """The shared control link of a sandbox; made, dialled anew and its sandbox resumed as needed.

        Raises:
            NotFound: the project has none of that id. WrongState: it does not run. LinkLost, NodeUnavailable.
        """
        return await self.links.link(id, principal.project)

    async def new_link(self, principal: Principal, id: str, role: str = "stream") -> GuestLink:
        """A link of the caller's own, who closes it; for streams. As :meth:`link`."""
        return await self.links.new_link(id, principal.project, role)

    async def touch(self, id: str) -> Sandbox:
        """There is traffic: it is not idle, and resumed if it slept."""
        return await self.links.touch(id)

    def using(self, id: str, project: str | None = None) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        """While a stream is open its sandbox is not idle."""
        return self.links.using(id, project)

    async def wait_for(
        self,
        id: str,
        states: Iterable[State],
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Sandbox:
        """Whoever's it is; see :meth:`Sandboxes.wait_for`."""
        return await self.core.until(id, states, timeout)
