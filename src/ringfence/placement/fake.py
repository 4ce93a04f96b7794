"""Scripted faults over any placement: slow, refusing, lost, half done, answers that never arrive.

::

    placement = FakePlacement(Faults([Fault("start", "lost_answer", times=2)]))   # nothing real below
    placement = Faulty(LocalPlacement(path), Faults([Fault("connect", "slow", seconds=2)]))  # real walls
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ringfence.model.errors import HostLimit, NodeUnavailable, RingfenceError, StartFailed
from ringfence.placement.contract import Capacity, Happened, Placed, PlacedSpec, Placement
from ringfence.placement.memory import Machine, MemoryPlacement

KINDS = ("slow", "refuse", "lost", "lost_answer", "partial", "hang")
_Result = TypeVar("_Result")


@dataclass
class Fault:
    """One thing that goes wrong.

    Attributes:
        call: name of the contract's method, or ``*``.
        kind: ``slow``: it takes ``seconds`` longer. ``refuse``: ``error`` (default HostLimit), and nothing is
            done. ``lost``: NodeUnavailable, and nothing is done. ``lost_answer``: it is done, then
            NodeUnavailable. ``partial``: it is done, then ``error`` (default StartFailed): something stays
            behind. ``hang``: nothing is done and nothing comes back.
        times: how often; -1 for ever. after: so many such calls work before.
    """

    call: str
    kind: str
    times: int = 1
    after: int = 0
    seconds: float = 0.0
    error: RingfenceError | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no fault: {', '.join(KINDS)}")


class Faults:
    """A script: faults used up in order, and whether the node can be reached at all."""

    def __init__(self, script: Iterable[Fault] = ()) -> None:
        self.script = list(script)
        self.calls: dict[str, int] = {}
        self.down = False

    def next(self, call: str) -> Fault | None:
        """What goes wrong with this call."""
        self.calls[call] = self.calls.get(call, 0) + 1
        for fault in self.script:
            if fault.call not in (call, "*") or fault.times == 0:
                continue
            if fault.after > 0:
                fault.after -= 1
                continue
            fault.times -= fault.times > 0
            return fault
        return None


class Faulty:
    """A placement below, with faults. See :class:`ringfence.placement.contract.Placement`."""

    def __init__(self, inner: Placement, faults: Faults | None = None) -> None:
        self.inner = inner
        self.faults = faults if faults is not None else Faults()
        self.name = inner.name
        self._listeners: set[asyncio.Queue[Happened]] = set()

    def go_down(self) -> None:
        """From now on nobody answers."""
        self.faults.down = True
        self._tell("lost")

    def come_back(self) -> None:
        """The node is there again, and so is everything that it had."""
        self.faults.down = False
        self._tell("back")

    def _tell(self, name: str) -> None:
        for queue in self._listeners:
            queue.put_nowait(Happened(name, ""))

    async def _do(self, call: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        await self._before(call)
        fault = self.faults.next(call)
        if fault is None:
            return await work()
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
            return await work()
        if fault.kind == "refuse":
            raise fault.error or HostLimit("a scripted refusal", hint="try again")
        if fault.kind == "lost":
            raise _gone()
        if fault.kind == "hang":
            await asyncio.Event().wait()
        result = await work()
        if isinstance(result, socket.socket):
            result.close()
        if fault.kind == "lost_answer":
            raise _gone()
        raise fault.error or StartFailed("a scripted failure in the middle", step="scripted")

    async def _before(self, call: str) -> None:
        if self.faults.down:
            raise _gone()

    async def close(self) -> None:
        """See the contract."""
        await self.inner.close()

    async def capacity(self) -> Capacity:
        """See the contract."""
        return await self._do("capacity", self.inner.capacity)

    async def runtimes(self) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return await self._do("runtimes", self.inner.runtimes)

    async def start(self, spec: PlacedSpec) -> Placed:
        """See the contract."""
        return await self._do("start", lambda: self.inner.start(spec))

    async def list(self) -> Sequence[Placed]:
        """See the contract."""
        return await self._do("list", self.inner.list)

    async def get(self, id: str) -> Placed:
        """See the contract."""
        return await self._do("get", lambda: self.inner.get(id))

    async def measure(self, id: str) -> Mapping[str, Any]:
        """See the contract."""
        return await self._do("measure", lambda: self.inner.measure(id))

    async def usage(self, id: str) -> Mapping[str, Any]:
        """See the contract."""
        return await self._do("usage", lambda: self.inner.usage(id))

    async def connect(self, id: str) -> socket.socket:
        """See the contract."""
        return await self._do("connect", lambda: self.inner.connect(id))

    async def spent(self, id: str, output: int) -> int:
        """See the contract."""
        return await self._do("spent", lambda: self.inner.spent(id, output))

    async def judge(self, id: str, exit_code: int, *, sent: bool = False) -> Mapping[str, Any]:
        """See the contract."""
        return await self._do("judge", lambda: self.inner.judge(id, exit_code, sent=sent))

    async def bind(self, id: str, **parts: Any) -> Placed:
        """See the contract."""
        return await self._do("bind", lambda: self.inner.bind(id, **parts))

    async def pause(self, id: str) -> None:
        """See the contract."""
        await self._do("pause", lambda: self.inner.pause(id))

    async def resume(self, id: str) -> None:
        """See the contract."""
        await self._do("resume", lambda: self.inner.resume(id))

    async def snapshot(self, id: str, name: str, kind: str | None = None) -> Mapping[str, Any]:
        """See the contract."""
        return await self._do("snapshot", lambda: self.inner.snapshot(id, name, kind))

    async def remove_snapshot(self, name: str) -> None:
        """See the contract."""
        await self._do("remove_snapshot", lambda: self.inner.remove_snapshot(name))

    async def reset(self, id: str, *, hold: bool = False) -> Placed:
        """See the contract."""
        return await self._do("reset", lambda: self.inner.reset(id, hold=hold))

    async def bring_up(self, id: str) -> Placed:
        """See the contract."""
        return await self._do("bring_up", lambda: self.inner.bring_up(id))

    async def changes(self, id: str) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return await self._do("changes", lambda: self.inner.changes(id))

    async def destroy(self, id: str, *, grace: float = 0.0) -> Mapping[str, Any]:
        """See the contract."""
        return await self._do("destroy", lambda: self.inner.destroy(id, grace=grace))

    async def happened(self) -> AsyncIterator[Happened]:
        """See the contract; what happens while the node is down is missed."""
        queue: asyncio.Queue[Happened] = asyncio.Queue()
        self._listeners.add(queue)
        pump = asyncio.get_running_loop().create_task(self._pump(queue))
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _pump(self, queue: asyncio.Queue[Happened]) -> None:
        async for event in self.inner.happened():
            if not self.faults.down:
                queue.put_nowait(event)

    async def templates(self) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return await self._do("templates", self.inner.templates)

    async def add_template(self, source: str, name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See the contract."""
        return await self._do("add_template", lambda: self.inner.add_template(source, name, options))

    async def remove_template(self, name: str) -> None:
        """See the contract."""
        await self._do("remove_template", lambda: self.inner.remove_template(name))

    async def make_volume(self, id: str, quota: int) -> None:
        """See the contract."""
        await self._do("make_volume", lambda: self.inner.make_volume(id, quota))

    async def remove_volume(self, id: str) -> None:
        """See the contract."""
        await self._do("remove_volume", lambda: self.inner.remove_volume(id))

    async def volume_size(self, id: str) -> int:
        """See the contract."""
        return await self._do("volume_size", lambda: self.inner.volume_size(id))

    async def export_volume(self, id: str) -> AsyncIterator[bytes]:
        """See the contract; a fault comes before the first byte."""
        await self._do("export_volume", _nothing)
        async for piece in self.inner.export_volume(id):
            yield piece

    async def import_volume(self, id: str, tar: AsyncIterator[bytes] | Path) -> None:
        """See the contract."""
        await self._do("import_volume", lambda: self.inner.import_volume(id, tar))


class FakePlacement(Faulty):
    """Faults over a placement in memory; ``machine`` is what exists, for tests to look at and to end."""

    inner: MemoryPlacement

    def __init__(self, faults: Faults | None = None, machine: Machine | None = None) -> None:
        super().__init__(MemoryPlacement(machine), faults)
        self.name = "fake"

    @property
    def machine(self) -> Machine:
        """What exists."""
        return self.inner.machine


async def _nothing() -> None:
    return None


def _gone() -> NodeUnavailable:
    return NodeUnavailable("a scripted fault: the node does not answer", hint="try again")
