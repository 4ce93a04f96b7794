"""Links to guests, and what traffic over them means: what is used is not idle, what sleeps wakes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from ringfence.control.core import Core
from ringfence.control.records import KIND, Sandbox
from ringfence.guest.link import GuestLink
from ringfence.model.errors import LinkLost, NotFound, RingfenceError, WrongState
from ringfence.model.states import FINAL, State
from ringfence.store.contract import Row

TRUSTED = 1.0  # seconds for which a row that was read is believed if nobody said that it changed
_FLUSH_PART = 4  # activity is written down every quarter of the idle time
_FLUSH_MOST = 30.0
_CACHED = 10_000  # rows kept


class Links:
    """The control links of one process, each made when it is needed and dialled anew when it was lost."""

    def __init__(self, core: Core, resume: Callable[[Sandbox], Awaitable[Sandbox]]) -> None:
        self.core = core
        self._resume = resume
        self._links: dict[str, GuestLink] = {}
        self._dialling: dict[str, asyncio.Task[GuestLink]] = {}
        self._rows: dict[str, tuple[float, Sandbox]] = {}
        self._used: dict[str, int] = {}
        self._active: dict[str, float] = {}  # last traffic, by the core's clock
        self._flushed: dict[str, float] = {}

    # -- rows, without a look into the store for every call

    def saw(self, sandbox: Sandbox) -> None:
        """This is the newest there is."""
        known = self._rows.get(sandbox.id)
        if known is not None and known[1].revision > sandbox.revision:
            return
        if sandbox.final:
            self.forget(sandbox.id)
            return
        if len(self._rows) >= _CACHED:
            self._rows.clear()
        self._rows[sandbox.id] = (time.monotonic(), sandbox)

    def committed(self, row: Row) -> None:
        """A row as it is in the store now."""
        if row.kind == KIND and row.state not in (State.WARM, State.WARMING):
            self.saw(Sandbox.from_row(row))

    def changed(self, id: str) -> None:
        """What is known of a row may be old now; ``""``: of any."""
        if id:
            self._rows.pop(id, None)
        else:
            self._rows.clear()

    async def current(self, id: str, project: str | None) -> Sandbox:
        """The sandbox, as it was at most a second ago.

        Raises:
            NotFound: there is none, or it is another project's.
        """
        known = self._rows.get(id)
        if known is not None and time.monotonic() - known[0] < TRUSTED:
            if project not in (None, known[1].project):
                await self.core.get(id, project)  # says so
            return known[1]
        sandbox = await self.core.get(id, project)
        self.saw(sandbox)
        return sandbox

    # -- links

    async def link(self, id: str, project: str | None = None) -> GuestLink:
        """The shared control link of a sandbox that runs; one that is paused because it was idle is resumed.

        Raises:
            NotFound, WrongState; LinkLost: the agent does not answer; NodeUnavailable.
        """
        await self.touch(id, project)
        link = self._links.get(id)
        if link is not None and link.failure is None:
            return link
        task = self._dialling.get(id)
        if task is None:
            task = self._dialling[id] = self.core.task(self._dial(id))
        return await asyncio.shield(task)

    async def _dial(self, id: str) -> GuestLink:
        try:
            link = await self._open(id, "control")
            self._links[id] = link
            return link
        finally:
            self._dialling.pop(id, None)

    async def new_link(self, id: str, project: str | None = None, role: str = "stream") -> GuestLink:
        """A link of the caller's own, who closes it. As :meth:`link`."""
        await self.touch(id, project)
        return await self._open(id, role)

    async def _open(self, id: str, role: str) -> GuestLink:
        try:
            return await GuestLink.open(await self.core.placement.connect(id), role)
        except NotFound:
            self.changed(id)
            raise LinkLost(
                f"sandbox {id} is gone", hint="see how it ended: `ringfence sandbox show`"
            ) from None

    def drop(self, id: str) -> None:
        """Let go of the shared link: what it led to is another, or gone."""
        link = self._links.pop(id, None)
        if link is not None:
            self.core.task(_closed(link))

    def forget(self, id: str) -> None:
        """It has ended."""
        self._rows.pop(id, None)
        self._active.pop(id, None)
        self._flushed.pop(id, None)
        self.drop(id)

    async def close(self) -> None:
        """Close every link."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)

    def prune(self) -> None:
        """Let go of links that ended by themselves."""
        for id in [id for id, link in self._links.items() if link.failure is not None]:
            self.drop(id)

    # -- traffic

    async def touch(self, id: str, project: str | None = None) -> Sandbox:
        """Somebody uses it: it is not idle, and resumed if it slept.

        Raises:
            NotFound: there is none. WrongState: it can't be used now.
        """
        from ringfence.control.core import wrong_state

        sandbox = await self.current(id, project)
        if sandbox.state is not State.RUNNING:
            self.changed(id)
            sandbox = await self.core.get(id, project)
            if sandbox.state in (State.PAUSED, State.PAUSING, State.RESUMING) and self.sleeps(sandbox):
                sandbox = await self._resume(sandbox)
            elif sandbox.state in (State.PENDING, State.STARTING):
                raise wrong_state(sandbox)
            if sandbox.state is not State.RUNNING:
                raise wrong_state(sandbox)
            self.saw(sandbox)
        if sandbox.idle is not None:
            self._note(sandbox)
        return sandbox

    @staticmethod
    def sleeps(sandbox: Sandbox) -> bool:
        """Whether it was paused for being idle: traffic wakes it. Who paused it by hand resumes it."""
        return bool(sandbox.document.get("asleep"))

    def _note(self, sandbox: Sandbox) -> None:
        now = self.core.now()
        self._active[sandbox.id] = now
        every = min(_FLUSH_MOST, float(sandbox.idle or 0.0) / _FLUSH_PART)
        if now - max(self._flushed.get(sandbox.id, 0.0), sandbox.active) >= every:
            self._flushed[sandbox.id] = now
            self.core.task(self._flush(sandbox))

    async def _flush(self, sandbox: Sandbox) -> None:
        with contextlib.suppress(RingfenceError):
            try:
                fresh = await self.core.change(
                    sandbox, expect={State.RUNNING}, active=self._active.get(sandbox.id, self.core.now())
                )
            except WrongState:
                self.changed(sandbox.id)
                await self.touch(sandbox.id)  # it fell asleep in the moment in which it was used
            else:
                self.saw(fresh)

    def last_used(self, sandbox: Sandbox) -> float:
        """When it was used last, as far as this process knows."""
        if self._used.get(sandbox.id):
            return self.core.now()
        return max(sandbox.active, self._active.get(sandbox.id, 0.0))

    @contextlib.asynccontextmanager
    async def using(self, id: str, project: str | None = None) -> AsyncIterator[Sandbox]:
        """While a stream is open its sandbox is not idle."""
        sandbox = await self.touch(id, project)
        self._used[id] = self._used.get(id, 0) + 1
        try:
            yield sandbox
        finally:
            self._used[id] -= 1
            if not self._used[id]:
                del self._used[id]
            if sandbox.idle is not None:
                self._active[id] = self.core.now()

    async def keep_awake(self) -> None:
        """Write down that what is in use is: other processes must not find it idle."""
        for id in list(self._used):
            known = self._rows.get(id)
            with contextlib.suppress(RingfenceError):
                sandbox = known[1] if known is not None else await self.core.get(id)
                if sandbox.idle is not None and sandbox.state not in FINAL:
                    self._note(sandbox)


async def _closed(link: GuestLink) -> None:
    with contextlib.suppress(RingfenceError):
        await link.close()
