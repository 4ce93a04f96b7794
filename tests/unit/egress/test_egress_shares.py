"""Limits of a project that several processes divide: never more than the limit, whatever happens to whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.control.quotas import Quota
from ringfence.egress import shares
from ringfence.egress.sharing import Shared
from ringfence.model.errors import Conflict, NotFound, StoreUnavailable
from ringfence.serving.sharing import Shares
from ringfence.store.contract import Put, Row

WHO = ("a", "b", "c")
QUOTA = Quota(connections=5, bandwidth=1_000_003, egress_rate=3.5, egress_requests=10**9)
WHOLE = {"connections": 5, "out": 1_000_003, "in": 1_000_003, "rate": 3}


@given(
    st.integers(0, 50),
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 60), min_size=1, max_size=6),
)
def test_a_fair_division_gives_all_and_no_more(limit: int, wants: dict[str, int]) -> None:
    found = shares.fair(limit, wants)
    assert sum(found.values()) == limit and min(found.values()) >= 0
    assert found == shares.fair(limit, dict(reversed(wants.items())))  # everybody comes to the same
    if sum(wants.values()) <= limit:
        assert all(found[owner] >= want for owner, want in wants.items())
    else:  # nobody has more than he wants, and nobody who wants more has less than another (but for a rest)
        assert all(found[owner] <= want for owner, want in wants.items())
        short = [found[owner] for owner, want in wants.items() if found[owner] < want]
        assert max(found.values()) <= min(short) + 1


class Connection:
    """A flow, as far as a share looks at it."""

    task = None
    cut: Any = None


class World:
    """A clock, a store whose answers get lost, and processes that die at any moment."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rows: dict[str, Row] = {}
        self.processes: dict[str, Process] = {}
        self.faults: list[tuple[str, float, float]] = []
        self.meanwhile: list[Callable[[], Any]] = []
        self.tokens = shares.burst(3.5)
        self.used = 0
        for who in WHO:
            self.begin(who)

    def begin(self, who: str) -> None:
        if (had := self.processes.get(who)) is not None:
            had.shared.close()
        self.processes[who] = Process(self, who)

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        self.tokens += seconds * 3.5
        for process in self.processes.values():
            if process.shared.until <= self.now:  # what its timer does
                process.shared.lapse()
                process.shared.flows.clear()
        self.check()

    def check(self) -> None:
        for name, limit in WHOLE.items():
            found = [process.uses(name) for process in self.processes.values()]
            assert sum(found) <= limit, (name, found)
        assert self.used <= self.tokens + 1e-6

    # -- the store

    async def get(self, kind: str, id: str) -> Row:
        row = self.rows.get(id)
        if self.meanwhile:  # somebody else acts between this read and what is made of it
            await self.meanwhile.pop()()
        if row is None:
            raise NotFound(id)
        return row

    async def commit(self, put: Put) -> list[Row]:
        outcome, before, after = self.faults.pop() if self.faults else ("ok", 0.0, 0.0)
        self.pass_(before)
        had = self.rows.get(put.row.id)
        try:
            if outcome == "fails":
                raise StoreUnavailable("it is gone")
            if put.row.revision != (0 if had is None else had.revision):
                raise Conflict("somebody else was faster")
            self.rows[put.row.id] = replace(put.row, revision=put.row.revision + 1)
            if outcome == "lost":
                raise StoreUnavailable("nobody knows whether it happened")
            return [self.rows[put.row.id]]
        finally:
            self.pass_(after)


class Process:
    """An API process with its proxy: the real halves of both, talking directly."""

    def __init__(self, world: World, who: str) -> None:
        self.world = world
        self.shared = Shared(lambda: world.now)
        self.own = [0.0] * 4
        self.elsewhere = [0.0] * 4
        self.shares = Shares(self, world, who, lambda: world.now)  # type: ignore[arg-type]

    def uses(self, name: str) -> int:
        return max(self.shared.amount(name), len(self.shared.flows) if name == "connections" else 0)

    async def turn(self) -> None:
        with contextlib.suppress(StoreUnavailable, Conflict):
            if "p" in self.shares._limits:
                await self.shares.turn("p", self.shared.wants())
            else:
                await self.shares.cover("p", QUOTA)

    async def leave(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self.shares.leave("p")

    async def connect(self, count: int) -> None:
        for _ in range(count):
            if len(self.shared.flows) < self.shared.amount("connections"):
                assert await self.shared.enter(Connection())  # type: ignore[arg-type]
            else:
                self.shared._turned_away += 1

    def hang_up(self, count: int) -> None:
        for flow in list(self.shared.flows)[:count]:
            self.shared.leave(flow)

    def request(self, count: int) -> None:
        for _ in range(count):
            if self.shared.request() is None:
                self.world.used += 1
                self.own[0] += 1

    # -- as Doors

    async def share_shrink(self, project: str, amounts: Any) -> dict[str, Any]:
        told = self.shared.shrink(amounts)
        self.world.check()
        return told | {"used": list(self.own)}

    async def share_grant(
        self, project: str, limits: Any, amounts: Any, until: float, gain: float, elsewhere: Any
    ) -> None:
        self.elsewhere = elsewhere
        self.shared.grant(limits, amounts, until, gain)
        self.world.pass_(0.0)

    async def share_drop(self, project: str, *, cut: bool) -> dict[str, Any]:
        told = self.shared.shrink({})
        self.shared.cut()
        self.shared.flows.clear()
        self.shared.close()
        self.shared = Shared(lambda: self.world.now)
        return {"open": 0, "level": told["back"]}


seconds = st.floats(0, 30, allow_nan=False)
who = st.sampled_from(WHO)
step = st.one_of(
    st.tuples(st.just("turn"), who, st.sampled_from(["ok", "ok", "ok", "lost", "fails"]), seconds, seconds),
    st.tuples(st.just("race"), who, who),
    st.tuples(st.just("rounds"), st.integers(1, 4)),
    st.tuples(st.just("connect"), who, st.integers(1, 7)),
    st.tuples(st.just("hang_up"), who, st.integers(1, 7)),
    st.tuples(st.just("request"), who, st.integers(1, 7)),
    st.tuples(st.just("wait"), seconds),
    st.tuples(st.just("die"), who),
    st.tuples(st.just("leave"), who),
    st.tuples(st.just("clock"), st.floats(-1e9, 1e9, allow_nan=False)),
)


async def play(world: World, steps: list[tuple[Any, ...]], wall: mock.Mock) -> None:
    for kind, *rest in steps:
        match kind:
            case "turn":
                world.faults = [tuple(rest[1:])]
                await world.processes[rest[0]].turn()
                world.faults = []
            case "race":
                if rest[0] != rest[1]:
                    world.meanwhile = [world.processes[rest[1]].turn]
                    await world.processes[rest[0]].turn()
                    world.meanwhile = []
            case "rounds":
                for _ in range(rest[0]):
                    for process in world.processes.values():
                        await process.turn()
                    world.pass_(1.0)
            case "connect":
                await world.processes[rest[0]].connect(rest[1])
            case "hang_up":
                world.processes[rest[0]].hang_up(rest[1])
            case "request":
                world.processes[rest[0]].request(rest[1])
            case "wait":
                world.pass_(rest[0])
            case "die":
                world.begin(rest[0])  # its proxy has gone with it; another one begins with nothing
            case "leave":
                await world.processes[rest[0]].leave()
            case "clock":
                wall.return_value = rest[0]  # of the wall, which nobody may look at
        world.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(step, max_size=40))
def test_the_sum_never_exceeds_the_limit(steps: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        world = World()
        with mock.patch("time.time", return_value=0.0) as wall:
            await play(world, steps, wall)
            # And in the end everybody gets to what there is.
            await rounds(world, int(shares.RECLAIM) + 5)
            for name, limit in WHOLE.items():
                assert sum(one.shared.amount(name) for one in world.processes.values()) == limit, name
            # And everybody knows what was used, but for what the dead had not said yet. What was said in a
            # write of which nobody knows whether it happened may count twice.
            died = any(each[0] == "die" for each in steps)
            unsure = any(each[0] == "turn" and each[2] == "lost" for each in steps)
            for process in world.processes.values():
                known = process.own[0] + process.elsewhere[0]
                assert (died or known >= world.used) and (unsure or known <= world.used), (known, world.used)
        for process in world.processes.values():
            process.shared.close()

    asyncio.run(run())


async def rounds(world: World, count: int, hungry: str = "", alive: str = "abc") -> None:
    for _ in range(count):
        for name in alive:
            process = world.processes[name]
            if name == hungry:
                process.shared._turned_away += 9
                process.shared._asked += 9
            await process.turn()
        world.pass_(1.0)


async def test_who_needs_it_gets_it_and_the_dead_give_it_back() -> None:
    world = World()
    await rounds(world, 4)
    assert sorted(one.shared.amount("connections") for one in world.processes.values()) == [1, 2, 2]
    await rounds(world, 4, hungry="b")
    assert world.processes["b"].shared.amount("connections") == 5
    assert world.processes["b"].shared.amount("rate") == 3
    await world.processes["b"].connect(5)
    await rounds(world, 4, hungry="a")
    assert world.processes["a"].shared.amount("connections") == 0  # they are open
    world.begin("b")
    await rounds(world, 10, hungry="a", alive="ac")
    assert world.processes["a"].shared.amount("connections") == 0  # nobody knows that it is dead
    await rounds(world, 10, hungry="a", alive="ac")
    assert world.processes["a"].shared.amount("connections") == 5
    await world.processes["a"].leave()
    await rounds(world, 2, alive="c")
    assert world.processes["c"].shared.amount("connections") == 5  # at once: it said so
    for process in world.processes.values():
        process.shared.close()


async def test_who_can_not_reach_the_store_ends_in_time() -> None:
    world = World()
    first = world.processes["a"]
    await rounds(world, 4, hungry="a")
    await first.connect(5)
    flows = list(first.shared.flows)
    world.pass_(shares.VALID / 2)
    assert first.shared.amount("connections") == 5  # it keeps what it had
    world.now += shares.VALID
    first.shared.lapse()
    assert first.shared.amount("connections") == 0 and all(flow.cut is not None for flow in flows)
    assert first.shared.request() is not None
    for process in world.processes.values():
        process.shared.close()


async def test_a_connection_waits_for_a_part_that_others_have() -> None:
    shared = Shared()
    soon = shared._clock() + 60
    shared.grant({"connections": 4}, {"connections": 0}, soon)
    waiting = asyncio.ensure_future(shared.enter(Connection()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert shared.wants() == {"connections": 1}
    shared.grant({"connections": 4}, {"connections": 1}, soon)
    assert await waiting
    shared.grant({"connections": 1}, {"connections": 1}, soon)
    assert not await shared.enter(Connection())  # type: ignore[arg-type] # all of it is here: nobody has more
    shared.close()


async def test_bytes_wait_for_a_share_and_pay_for_what_they_took() -> None:
    shared = Shared()
    out = shared.ways["out"]
    taking = asyncio.ensure_future(out.take(1))
    await asyncio.sleep(0)
    assert not taking.done()  # nothing was given yet
    shared.grant({"out": 8_000_000}, {"out": 8_000_000}, shared._clock() + 60)
    await taking
    assert out.want(1.0, 8_000_000) == 8_000_000  # somebody had to wait
    began = shared._clock()
    await out.take(100_000)  # a megabyte a second, and a twentieth of that at once
    assert shared._clock() - began >= 0.04
    assert shared.shrink({})["open"] == 0
    last = asyncio.ensure_future(out.take(1))
    await asyncio.sleep(0.2)
    assert not last.done()
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    shared.close()


@pytest.mark.parametrize("rate", [0.0005, 1.0, 2.5, 100.0])
def test_a_rate_begins_with_its_burst_and_passes_on_what_is_left(rate: float) -> None:
    whole = shares.units(rate)
    document, gain = shares.passed_on({}, rate, whole, 0.0, 0.0)
    assert gain == shares.burst(rate) and document["spare"] == 0
    document, gain = shares.passed_on(document, rate, whole, 0.0, 0.4)
    assert gain == pytest.approx(0.4)
    assert shares.passed_on(document, rate, 0, 0.0, 1e9)[0]["spare"] == shares.burst(rate)


async def test_budgets_know_what_others_used() -> None:
    world = World()
    await rounds(world, 3)
    for name, count in (("a", 2), ("b", 1)):
        world.processes[name].own[0] += count
    await rounds(world, 2)
    assert [one.own[0] + one.elsewhere[0] for one in world.processes.values()] == [3, 3, 3]
    world.processes["a"].own[0] = 0  # another proxy of the same process
    world.processes["a"].own[0] += 1
    await rounds(world, 2)
    world.begin("b")  # what it used stays, by whomever it is taken back
    await rounds(world, 20)
    assert [one.own[0] + one.elsewhere[0] for one in world.processes.values()] == [4, 4, 4]
    await world.processes["a"].leave()
    await rounds(world, 2, alive="bc")
    await rounds(world, 2)
    assert [one.own[0] + one.elsewhere[0] for one in world.processes.values()] == [4, 4, 4]
    for process in world.processes.values():
        process.shared.close()


async def test_a_share_that_was_left_while_connections_end_is_had_again() -> None:
    world = World()
    process = world.processes["a"]

    async def drop(project: str, *, cut: bool) -> dict[str, Any]:
        process.shared.shrink({})
        return {"open": 1, "level": 0.0}  # one takes its time: what the store says stays

    await process.turn()
    assert process.shared.amount("connections") == WHOLE["connections"]
    with mock.patch.object(process, "share_drop", drop):
        await process.leave()
    assert process.shared.amount("connections") == 0
    before = world.rows["p"].document["holders"]
    world.pass_(shares.RECLAIM - 1)
    await process.turn()
    assert process.shared.amount("connections") == WHOLE["connections"]
    after = world.rows["p"].document["holders"]
    assert after.keys() == before.keys() and after != before, "others would take it for dead"
    process.shared.close()
