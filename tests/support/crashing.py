"""An orchestrator that kills itself at a named point: every store write and every side effect is one.

A point is a name and a side: ``before`` it is done, or ``after`` it was done and before anybody knows. Run as
a program this is a server that has imported everything and forks an orchestrator for each line on its
standard input (a JSON object, see :class:`Run`), so that a crash costs milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ringfence.control.core import stopped
from ringfence.control.records import ALIVE, KIND, Sandbox
from ringfence.control.service import Control
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import Conflict, RingfenceError
from ringfence.model.states import State
from ringfence.placement.local import LocalPlacement
from ringfence.store import postgres, sqlite  # before the fork: neither once for each, nor of another day
from ringfence.store.contract import Put, Remove
from ringfence.store.opening import open_store
from support.services import ALICE, QUICK, asked, small

__all__ = ["Run", "postgres", "sqlite"]
AT_ONCE = 20
EFFECTS = ("start", "bind", "pause", "resume", "snapshot", "remove_snapshot", "reset", "destroy")


@dataclass
class Run:
    """What one orchestrator does. ``point``: where it kills itself, ``""`` nowhere; ``number``: at which
    passage; ``early``: counted from the start, when it recovers; else once as many operations as usual are
    under way. ``seconds``: when it ends by itself. ``work``: whether it does anything but recover.
    ``clear``: at the end nothing lives on. ``die_after``: seconds after which it kills itself anywhere.
    """

    store: str
    socket: str
    point: str = ""
    number: int = 1
    early: bool = False
    seconds: float = 20.0
    work: bool = True
    seed: int = 0
    clear: bool = False
    die_after: float = 0.0
    owner: str = "api-1"


class Points:
    """Counts passages, and dies at the one that was asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.armed = run.early
        self.passed: dict[str, int] = {}
        self.counted = 0

    def pass_(self, point: str) -> None:
        self.passed[point] = self.passed.get(point, 0) + 1
        if self.armed and point == self.run.point:
            self.counted += 1
            if self.counted >= self.run.number:
                os.kill(os.getpid(), signal.SIGKILL)

    async def around(self, name: str, work: Awaitable[Any]) -> Any:
        self.pass_(f"before {name}")
        result = await work
        self.pass_(f"after {name}")
        return result


def write_name(changes: tuple[Any, ...]) -> str:
    """What a transaction writes, as a name: kinds of rows and the states that they go to."""
    names = set()
    for change in changes:
        if isinstance(change, Put):
            names.add(f"{change.row.kind}:{change.row.state}".rstrip(":"))
        elif isinstance(change, Remove):
            names.add(f"-{change.kind}")
    # Rows that only count come along with others.
    few = {name for name in names if not name.startswith(("pool-", "-pool-"))} or names
    return "write " + " ".join(sorted(few))


class CrashingStore:
    """A store whose writes are points."""

    def __init__(self, inner: Any, points: Points) -> None:
        self._inner = inner
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, *changes: Any, durable: bool = False) -> Any:
        return await self._points.around(write_name(changes), self._inner.commit(*changes, durable=durable))

    async def take(self, kind: str, **parts: Any) -> Any:
        return await self._points.around("write claim", self._inner.take(kind, **parts))


class CrashingPlacement:
    """A placement whose side effects are points."""

    def __init__(self, inner: Any, points: Points) -> None:
        self._inner = inner
        self._points = points
        self.name = inner.name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in EFFECTS:
            return found

        def call(*arguments: Any, **parts: Any) -> Any:
            return self._points.around(f"effect {name}", found(*arguments, **parts))

        return call


# -- the work


@dataclass
class Worker:
    """One of many that use the service as hard as they can."""

    control: Control
    points: Points
    draw: random.Random
    busy: list[int]
    faults: list[str] = field(default_factory=list)

    async def forever(self) -> None:
        while True:
            self.busy[0] += 1
            if self.busy[0] >= AT_ONCE:
                self.points.armed = True
            try:
                await self.life()
            except RingfenceError as error:
                if not error.message or error.code == "internal":
                    self.faults.append(f"an error without a cause: {error!r}")
                await asyncio.sleep(0.01)
            except Exception:
                self.faults.append(traceback.format_exc())
                raise
            finally:
                self.busy[0] -= 1

    async def life(self) -> None:
        """Create one, do things to it, end it."""
        sandboxes, draw, wanted = self.control.sandboxes, self.draw, self.points.run.point
        pending = 0.7 if "pending" in wanted else 0.2
        changes: dict[str, Any] = {"labels": {"n": str(draw.randrange(5))}, "wait": draw.random() > pending}
        if draw.random() < 0.5:
            changes |= {"idempotency_key": f"k{draw.random()}", "digest": "d"}
        if "ticket" not in wanted and draw.random() < 0.4:
            changes["policy"] = small(timeout=500).with_wall(process=_OTHER)  # no pool has this wall
        if draw.random() < (0.5 if "failed" in wanted else 0.1):
            changes |= {"template": "nothing", "start_timeout": 5.0}
        if draw.random() < 0.3:
            changes["env"] = {"A": "b"}
        made = await sandboxes.create(ALICE, asked(**{"start_timeout": 30.0} | changes))
        if not changes["wait"]:
            await sandboxes.wait_for(ALICE, made.id, {State.RUNNING}, 30.0)
        acts: list[Callable[[str], Awaitable[Any]]] = [
            self.sleep_and_wake, self.save, self.relabel, self.anew, self.use, self.longer,
        ]  # fmt: skip
        for act in [*self.preferred(wanted), *draw.sample(acts, 2)][:2]:
            await act(made.id)
        await sandboxes.delete(ALICE, made.id)

    def preferred(self, wanted: str) -> list[Callable[[str], Awaitable[Any]]]:
        """What leads to a point soon."""
        if "paus" in wanted or "resum" in wanted:
            return [self.sleep_and_wake]
        if "snapshot" in wanted:
            return [self.save]
        return [self.anew] if "reset" in wanted else []

    async def sleep_and_wake(self, id: str) -> None:
        await self.control.sandboxes.pause(ALICE, id)
        await self.control.sandboxes.resume(ALICE, id)

    async def save(self, id: str) -> None:
        if self.draw.random() < 0.5:
            await self.control.sandboxes.fork(ALICE, id, 1, kind="disk")
            return
        saved = await self.control.sandboxes.snapshot(ALICE, id, kind="disk")
        with contextlib.suppress(Conflict):
            await self.control.powers.remove_snapshot(saved)

    async def relabel(self, id: str) -> None:
        await self.control.sandboxes.update(ALICE, id, labels={"x": "y"}, env={"C": "d"})

    async def anew(self, id: str) -> None:
        await self.control.sandboxes.reset(ALICE, id)

    async def longer(self, id: str) -> None:
        await self.control.sandboxes.extend(ALICE, id, 900.0)

    async def use(self, id: str) -> None:
        link = await self.control.link(ALICE, id)
        process = await link.start(ProcessSpec(("/bin/true",)))
        await process.wait()


_OTHER = small().wall.process.__class__(max_processes=63)


async def serve(run: Run) -> dict[str, Any]:
    points = Points(run)
    store = await open_store(run.store)
    placement = LocalPlacement(run.socket)
    if run.die_after:
        asyncio.get_running_loop().call_later(run.die_after, os.kill, os.getpid(), signal.SIGKILL)
    control = Control(
        CrashingStore(store, points),  # type: ignore[arg-type]
        CrashingPlacement(placement, points),  # type: ignore[arg-type]
        owner_id=run.owner,
        settings=QUICK,
    )
    await control.start()
    busy, faults = [0], []
    try:
        if run.work:
            with contextlib.suppress(Conflict):
                await control.pools.create(
                    ALICE, "p", policy=small(), min=3, max=3, most=8, overflow=4, queue=30, queue_seconds=4
                )
            # What an earlier one left is used up beside the new work.
            left = asyncio.ensure_future(remove_all(control))
            workers = [
                Worker(control, points, random.Random(run.seed * 1000 + n), busy) for n in range(AT_ONCE)
            ]
            tasks = [asyncio.ensure_future(worker.forever()) for worker in workers]
            await asyncio.wait(tasks, timeout=run.seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            deaf = (await asyncio.wait(tasks, timeout=120.0))[1]
            faults = [fault for worker in workers for fault in worker.faults]
            faults += [f"a cancellation was lost: {task}" for task in deaf]
            await stopped(deaf)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        if run.clear:
            with contextlib.suppress(RingfenceError):
                await control.pools.delete(ALICE, "p")
            await remove_all(control)
        settled = await settle(control, empty=run.clear)
    finally:
        await control.close()
        await placement.close()
        await store.close()
    return {"passed": points.passed, "faults": faults, "settled": settled}


async def remove_all(control: Control) -> None:
    """End every sandbox and snapshot there is."""
    for row in await control.store.find("snapshot", limit=10_000):
        with contextlib.suppress(RingfenceError):
            await control.powers.remove_snapshot(row)
    states = [state.value for state in ALIVE]
    rows = await control.store.find(KIND, project="default", states=states, limit=10_000)
    await asyncio.gather(*(control.sandboxes.delete(ALICE, row.id) for row in rows), return_exceptions=True)


async def settle(control: Control, *, empty: bool, seconds: float = 60.0) -> str:
    """Wait until nothing is under way; returns what still is, "" if all is at rest."""
    end = time.monotonic() + seconds
    moving = ""
    while time.monotonic() < end:
        rows = [Sandbox.from_row(row) for row in await control.store.find(KIND, limit=10_000)]
        states = {State.RUNNING, State.PAUSED, State.WARM} if not empty else set()
        living = {row.id for row in rows if row.state in (State.RUNNING, State.PAUSED, State.WARM)}
        exist = {placed.id for placed in await control.placement.list()}
        half = [f"{row.id} {row.state.value}" for row in rows if not row.final and row.state not in states]
        going = ["making"] if not empty else []
        half += [f"snapshot {row.id}" for row in await control.store.find("snapshot", states=going)]
        half += [f"{id} exists" for id in exist - living] + [f"{id} is lost" for id in living - exist]
        half += [f"ticket {row.id}" for row in await control.store.find("ticket", limit=10_000)]
        moving = ", ".join(half[:10])
        if not half:
            return ""
        await asyncio.sleep(0.05)
    return moving


def main() -> None:
    """The server."""
    for line in sys.stdin:
        run = Run(**json.loads(line))
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            code = 1
            try:
                result = asyncio.run(serve(run))
                os.write(writer, json.dumps(result).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as said:
            text = said.read()
        _, status = os.waitpid(pid, 0)
        answer = {
            "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            "code": os.waitstatus_to_exitcode(status),
            **(json.loads(text) if text else {}),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
