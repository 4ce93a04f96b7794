"""A placement that is a few dictionaries: sandboxes without a wall, for tests of everything above.

It keeps the contract but for what only a wall can do: :meth:`connect` is refused (for links put faults over a
real node, see ``placement.fake``). Time is the loop's; deadlines and output limits end sandboxes as a node
would. Several clients may share one :class:`Machine`, which is what survives a client.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringfence.model.errors import InvalidRequest, NotFound, Unsupported, WrongState
from ringfence.model.ids import SANDBOX_ID
from ringfence.model.policy import Policy
from ringfence.placement.contract import Capacity, Happened, Placed, PlacedSpec
from ringfence.placement.policies import owner_of, policy_of, same_wall

_CAPABILITIES = {"pause": True, "disk_snapshot": True, "memory_snapshot": False, "mounts": True}
_PIECE = 64 << 10


@dataclass
class Made:
    """One sandbox of the machine, for tests to look at."""

    spec: PlacedSpec
    policy: Policy
    placed: Placed
    output: int = 0
    resets: int = 0
    secrets: dict[str, bytes] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


@dataclass
class Machine:
    """What exists. ``starts``, ``destroys``: how often each id really was (a double start is a defect)."""

    sandboxes: dict[str, Made] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Any]] = field(default_factory=dict)
    volumes: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    destroys: dict[str, int] = field(default_factory=dict)
    listeners: set[asyncio.Queue[Happened | None]] = field(default_factory=set)
    capacity: Capacity = field(default_factory=lambda: Capacity(64.0, 256 << 30, 1 << 40, 0))

    def tell(self, name: str, id: str, **data: Any) -> None:
        """Something happened."""
        for queue in self.listeners:
            queue.put_nowait(Happened(name, id, data))

    def end(self, id: str, cause: str, exit_code: int = 137, detail: str = "") -> None:
        """One ends by itself."""
        made = self.sandboxes.get(id)
        if made is None or made.placed.state == "ended":
            return
        if made.timer is not None:
            made.timer.cancel()
        end = {"cause": cause, "exit_code": exit_code, "detail": detail, "reported": False}
        made.placed = replace(made.placed, state="ended", end=end)
        self.tell("ended", id, end=end)

    def close(self) -> None:
        """No timer is left."""
        for made in self.sandboxes.values():
            if made.timer is not None:
                made.timer.cancel()


class MemoryPlacement:
    """See the module and :class:`ringfence.placement.contract.Placement`."""

    name = "memory"

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine if machine is not None else Machine()
        self._own = machine is None
        self._closed = False
        self._queues: set[asyncio.Queue[Happened | None]] = set()

    async def close(self) -> None:
        """See the contract."""
        self._closed = True
        for queue in self._queues:
            queue.put_nowait(None)
        if self._own:
            self.machine.close()

    def _made(self, id: str) -> Made:
        if id not in self.machine.sandboxes:
            raise NotFound(f"no sandbox {id} here", hint="it may have been destroyed")
        return self.machine.sandboxes[id]

    def _living(self, id: str) -> Made:
        made = self._made(id)
        if made.placed.end is not None:
            raise WrongState(f"sandbox {id} has ended: {made.placed.end['cause']}", hint="start another one")
        return made

    async def capacity(self) -> Capacity:
        """See the contract."""
        living = sum(made.placed.state != "ended" for made in self.machine.sandboxes.values())
        return replace(self.machine.capacity, sandboxes=living)

    async def runtimes(self) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return [
            {
                "name": "memory", "level": "L1", "boundary": "none", "health": "healthy", "version": "1",
                "reason": "", "remedy": "", "capabilities": _CAPABILITIES,
            }
        ]  # fmt: skip

    async def start(self, spec: PlacedSpec) -> Placed:
        """See the contract."""
        if not SANDBOX_ID.fullmatch(spec.id):
            raise InvalidRequest(f"{spec.id!r} is no sandbox id", hint="sb- and 20 base-32 digits")
        machine, now = self.machine, time.time()
        if spec.id in machine.sandboxes:
            if spec.deadline is not None and machine.sandboxes[spec.id].placed.state != "ended":
                self._set_deadline(spec.id, spec.deadline)
            return machine.sandboxes[spec.id].placed
        policy = policy_of(spec.policy)
        owner_of(spec.owner)
        if spec.template != "host" and spec.template not in machine.templates:
            raise NotFound(f"no template {spec.template}", hint="see `ringfence template ls`")
        if spec.snapshot and spec.snapshot not in machine.snapshots:
            raise NotFound(f"no snapshot {spec.snapshot}", hint="see `ringfence snapshot ls`")
        for mount in spec.volumes:
            self._volume(mount.volume)
            if not mount.read_only and self._users(mount.volume):
                raise WrongState(f"volume {mount.volume} is in use", hint="attach it read-only")
        deadline = spec.deadline if spec.deadline is not None else now + policy.door.limits.timeout
        placed = Placed(
            id=spec.id,
            state="running",
            runtime="memory",
            node="memory",
            started_at=now,
            deadline=deadline,
            template=spec.template,
            address=f"memory:{spec.id}",
            capabilities=_CAPABILITIES,
        )
        machine.sandboxes[spec.id] = Made(spec, policy, placed)
        machine.starts[spec.id] = machine.starts.get(spec.id, 0) + 1
        self._set_deadline(spec.id, deadline)
        return machine.sandboxes[spec.id].placed

    def _set_deadline(self, id: str, at: float) -> None:
        made = self.machine.sandboxes[id]
        made.placed = replace(made.placed, deadline=at)
        if made.timer is not None:
            made.timer.cancel()
        left = max(0.0, at - time.time())
        call = self.machine.end
        made.timer = asyncio.get_running_loop().call_later(
            left, call, id, "deadline", 124, "it ran long enough"
        )

    async def list(self) -> Sequence[Placed]:
        """See the contract."""
        return [made.placed for made in self.machine.sandboxes.values()]

    async def get(self, id: str) -> Placed:
        """See the contract."""
        return self._made(id).placed

    async def measure(self, id: str) -> Mapping[str, Any]:
        """See the contract."""
        self._living(id)
        return {"runtime": "memory", "level": "L1", "boundary": "none", "limits": {}, "notes": ["no wall"]}

    async def usage(self, id: str) -> Mapping[str, Any]:
        """See the contract."""
        made = self._made(id)
        wall = time.time() - made.placed.started_at
        return {
            "cpu_seconds": 0.0, "memory_peak": None, "output_bytes": made.output, "wall_seconds": wall,
            "processes": 1, "memory": 0, "disk": 0,
        }  # fmt: skip

    async def connect(self, id: str) -> socket.socket:
        """Refused: there is no agent."""
        self._living(id)
        raise Unsupported("a placement in memory has no guest agent", capability="links")

    async def spent(self, id: str, output: int) -> int:
        """See the contract."""
        made = self._living(id)
        if output < 0:
            raise InvalidRequest("output can't be less than nothing")
        made.output += output
        left = made.policy.door.limits.output - made.output
        if left < 0:
            self.machine.end(id, "output_limit", detail="more output than it may make")
        return max(0, left)

    async def judge(self, id: str, exit_code: int, *, sent: bool = False) -> Mapping[str, Any]:
        """See the contract."""
        made = self._made(id)
        if made.placed.end is not None:
            return dict(made.placed.end)
        cause = "exited" if exit_code <= 128 else "killed" if sent else "signaled"
        return {"cause": cause, "exit_code": exit_code, "detail": "", "reported": True}

    async def bind(
        self,
        id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes] | None = None,
        owner: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        policy: Mapping[str, Any] | None = None,
        deadline: float | None = None,
    ) -> Placed:
        """See the contract."""
        made = self._living(id)
        if policy is not None:
            made.policy = same_wall(made.policy, policy_of(policy))
        if owner is not None:
            owner_of(owner)
        env = None if env is None else {**made.spec.env, **env}
        given: dict[str, Any] = {"env": env, "owner": owner, "labels": labels, "policy": policy}
        changed: dict[str, Any] = {key: dict(each) for key, each in given.items() if each is not None}
        made.spec = replace(made.spec, **changed)
        made.secrets |= secrets or {}
        if deadline is not None:
            self._set_deadline(id, deadline)
        return made.placed

    async def pause(self, id: str) -> None:
        """See the contract."""
        made = self._living(id)
        if made.placed.state != "paused":
            made.placed = replace(made.placed, state="paused")
            self.machine.tell("paused", id)

    async def resume(self, id: str) -> None:
        """See the contract."""
        made = self._living(id)
        if made.placed.state == "paused":
            made.placed = replace(made.placed, state="running")
            self.machine.tell("resumed", id)

    async def snapshot(self, id: str, name: str, kind: str | None = None) -> Mapping[str, Any]:
        """See the contract."""
        made = self._living(id)
        if kind not in (None, "disk"):
            raise Unsupported(f"runtime memory has no {kind} snapshots", capability=f"{kind}_snapshot")
        known = self.machine.snapshots.get(name)
        if known is not None and known["source"] != id:
            raise InvalidRequest(f"there is a snapshot {name} already", hint="choose another name")
        if known is None:
            known = {"id": name, "name": name, "kind": "disk", "source": id, "size": 0}
            known |= {"made_at": time.time(), "template": made.placed.template}
            self.machine.snapshots[name] = known
        return known

    async def remove_snapshot(self, name: str) -> None:
        """See the contract."""
        self.machine.snapshots.pop(name, None)

    async def bring_up(self, id: str) -> Placed:
        """See the contract: nothing ever waits here."""
        return self._living(id).placed

    async def reset(self, id: str, *, hold: bool = False) -> Placed:
        """See the contract."""
        made = self._living(id)
        made.resets += 1
        made.placed = replace(made.placed, state="running")
        return made.placed

    async def changes(self, id: str) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        self._living(id)
        return []

    async def destroy(self, id: str, *, grace: float = 0.0) -> Mapping[str, Any]:
        """See the contract."""
        made = self.machine.sandboxes.pop(id, None)
        if made is None:
            return {}
        if made.timer is not None:
            made.timer.cancel()
        self.machine.destroys[id] = self.machine.destroys.get(id, 0) + 1
        killed = {"cause": "killed", "exit_code": 137, "detail": "destroyed", "reported": False}
        return made.placed.end or killed

    async def happened(self) -> AsyncIterator[Happened]:
        """See the contract."""
        queue: asyncio.Queue[Happened | None] = asyncio.Queue()
        self.machine.listeners.add(queue)
        self._queues.add(queue)
        try:
            yield Happened("back", "")
            while not self._closed and (event := await queue.get()) is not None:
                yield event
        finally:
            self.machine.listeners.discard(queue)
            self._queues.discard(queue)

    # -- templates and volumes

    async def templates(self) -> Sequence[Mapping[str, Any]]:
        """See the contract."""
        return list(self.machine.templates.values())

    async def add_template(self, source: str, name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See the contract."""
        made = {"name": name, "digest": f"sha256:{abs(hash(source)):064x}", "size": 0, "source": source}
        self.machine.templates[name] = made | {"made_at": time.time()}
        return self.machine.templates[name]

    async def remove_template(self, name: str) -> None:
        """See the contract."""
        self.machine.templates.pop(name, None)

    def _volume(self, id: str) -> tuple[int, bytes]:
        if id not in self.machine.volumes:
            raise NotFound(f"no volume {id} here", hint="make it first")
        return self.machine.volumes[id]

    def _users(self, id: str) -> tuple[str, ...]:
        made = self.machine.sandboxes.values()
        using = (each for each in made if any(mount.volume == id for mount in each.spec.volumes))
        return tuple(each.spec.id for each in using)

    async def make_volume(self, id: str, quota: int) -> None:
        """See the contract."""
        if quota <= 0:
            raise InvalidRequest("a volume has a quota of at least a byte")
        self.machine.volumes.setdefault(id, (quota, b""))

    async def remove_volume(self, id: str) -> None:
        """See the contract."""
        if users := self._users(id):
            raise WrongState(f"volume {id} is in use by {', '.join(users)}", hint="end them first")
        self.machine.volumes.pop(id, None)

    async def volume_size(self, id: str) -> int:
        """See the contract."""
        return len(self._volume(id)[1])

    async def export_volume(self, id: str) -> AsyncIterator[bytes]:
        """See the contract: what was imported."""
        data = self._volume(id)[1]
        for at in range(0, len(data), _PIECE):
            yield data[at : at + _PIECE]

    async def import_volume(self, id: str, tar: AsyncIterator[bytes] | Path) -> None:
        """See the contract; the tar is kept as it is."""
        quota = self._volume(id)[0]
        data = bytearray()
        if isinstance(tar, Path):
            data += await asyncio.to_thread(tar.read_bytes)
        else:
            async for piece in tar:
                data += piece
        if len(data) > quota:
            raise InvalidRequest(f"more than the {quota} bytes of volume {id}", hint="make a larger one")
        self.machine.volumes[id] = quota, bytes(data)
