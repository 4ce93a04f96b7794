from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from control_world import ALICE, Fault, World, asked, rows_of, until

from ringfence.control import refilling
from ringfence.control.pools import TICKET, Pool
from ringfence.control.queueing import in_turns
from ringfence.control.records import KIND, Sandbox
from ringfence.control.refilling import arrivals
from ringfence.control.service import Control
from ringfence.model.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, StoreUnavailable
from ringfence.model.policy import Network, Policy, Resources
from ringfence.model.states import State
from ringfence.store.contract import Row
from support.services import MALLORY


async def queue(control: Control, name: str = "p") -> dict[str, Any]:
    return await control.pools.queue(ALICE, name)


async def warm(control: Control, count: int, name: str = "p") -> None:
    async def there() -> bool:
        return int((await queue(control, name))["warm"]) == count

    await until(there)


async def members(control: Control) -> set[str]:
    return {row.id for row in await control.store.find(KIND, states=[State.WARM.value])}


async def empty(world: World, control: Control) -> None:
    """Nothing is left of pools and queues."""

    async def gone() -> bool:
        return not world.machine.sandboxes and not await control.store.find(TICKET)

    await until(gone)


async def test_a_member_is_used_once_and_replaced(world: World, control: Control) -> None:
    await control.pools.create(ALICE, "p", min=2, max=2)
    await warm(control, 2)
    ready = await members(control)
    made = await control.sandboxes.create(ALICE, asked(labels={"a": "b"}))
    assert made.id in ready
    assert dict(made.labels) == {"a": "b"}
    assert world.machine.sandboxes[made.id].spec.labels == {"a": "b"}
    assert world.machine.sandboxes[made.id].spec.owner["project"] == "default"
    await control.sandboxes.delete(ALICE, made.id)
    await warm(control, 2)
    assert made.id not in await members(control)
    await world.settled(control)
    await world.counted(control)


async def test_members_are_nobodys_until_they_are_claimed(control: Control) -> None:
    await control.pools.create(ALICE, "p", min=1, max=1)
    await warm(control, 1)
    (member,) = await members(control)
    assert await control.sandboxes.list(ALICE) == []
    for attempt in (
        control.sandboxes.get(ALICE, member),
        control.sandboxes.delete(ALICE, member),
        control.links.touch(member, "default"),
        control.links.touch(member, ""),
    ):
        with pytest.raises(NotFound):
            await attempt


@pytest.mark.parametrize(
    "request_",
    [
        asked(policy=Policy().with_wall(resources=Resources(cpus=2))),
        asked(policy=Policy().with_door(network=Network("open"))),
        asked(template="sha256:" + "0" * 64),
    ],
    ids=["wall", "network", "template"],
)
async def test_what_is_close_enough_is_not_enough(world: World, control: Control, request_: Any) -> None:
    digest = "sha256:" + "0" * 64
    world.machine.templates[digest] = {"name": digest, "digest": digest}
    await control.pools.create(ALICE, "p", min=1, max=1)
    await warm(control, 1)
    ready = await members(control)
    made = await control.sandboxes.create(ALICE, request_)
    assert made.id not in ready
    assert made.pool == ""
    assert await members(control) == ready


async def test_a_pool_is_its_projects_alone(control: Control) -> None:
    await control.pools.create(ALICE, "p", min=1, max=1)
    await warm(control, 1)
    ready = await members(control)
    made = await control.sandboxes.create(MALLORY, asked())
    assert made.id not in ready
    with pytest.raises(NotFound):
        await control.sandboxes.create(MALLORY, asked(pool="p"))
    with pytest.raises(NotFound):
        await control.pools.get(MALLORY, "p")


async def test_a_request_that_names_a_pool_means_its_wall(control: Control) -> None:
    wall = Policy().with_wall(resources=Resources(cpus=2))
    await control.pools.create(ALICE, "p", policy=wall, min=1, max=1)
    await warm(control, 1)
    ready = await members(control)
    made = await control.sandboxes.create(ALICE, asked(pool="p"))
    assert made.id in ready


async def test_an_empty_pool_starts_on_demand_and_then_queues(world: World, control: Control) -> None:
    await control.pools.create(ALICE, "p", min=0, max=0, most=2, overflow=2, queue=2, queue_seconds=60)
    first = await control.sandboxes.create(ALICE, asked())
    second = await control.sandboxes.create(ALICE, asked())
    assert first.pool == second.pool != ""
    waiting = [asyncio.ensure_future(control.sandboxes.create(ALICE, asked())) for _ in range(2)]

    async def queued() -> bool:
        return int((await queue(control))["waiting"]) == 2

    await until(queued)
    with pytest.raises(QuotaExceeded) as raised:
        await control.sandboxes.create(ALICE, asked())
    assert raised.value.details["waiting"] == 2
    assert raised.value.details["position"] == 3
    assert raised.value.details["retry_after"] >= 1
    assert (await queue(control))["oldest_waiting_seconds"] > 0
    assert (await queue(control))["running"] == 2
    await control.sandboxes.delete(ALICE, first.id)
    await control.sandboxes.delete(ALICE, second.id)
    assert {(await task).state for task in waiting} == {State.RUNNING}
    assert (await queue(control))["waiting"] == 0
    await world.settled(control)
    await world.counted(control)
    assert await control.store.counter(f"pool/{first.pool}/running") == 2
    assert await control.store.counter(f"pool/{first.pool}/waiting") == 0


async def test_waiting_has_a_deadline(control: Control) -> None:
    pool = await control.pools.create(ALICE, "p", min=0, max=0, most=0, overflow=0, queue_seconds=0.3)
    with pytest.raises(QuotaExceeded) as raised:
        await control.sandboxes.create(ALICE, asked(idempotency_key="k", digest="d"))
    assert raised.value.details["position"] == 1
    assert await control.store.find(TICKET) == []
    assert await control.store.counter(pool.counter("waiting")) == 0
    # The key has made nothing: it may be used again.
    await control.pools.update(ALICE, "p", most=1, overflow=1)
    assert (
        await control.sandboxes.create(ALICE, asked(idempotency_key="k", digest="d"))
    ).state is State.RUNNING


async def test_who_gives_up_leaves_the_queue(control: Control) -> None:
    pool = await control.pools.create(ALICE, "p", min=0, max=0, most=0, overflow=0, queue_seconds=60)
    task = asyncio.ensure_future(control.sandboxes.create(ALICE, asked()))

    async def queued() -> bool:
        return int((await queue(control))["waiting"]) == 1

    await until(queued)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await control.store.find(TICKET) == []
    assert await control.store.counter(pool.counter("waiting")) == 0


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("failing", [False, True])
async def test_who_gives_up_when_his_turn_comes_has_given_up(
    control: Control, monkeypatch: pytest.MonkeyPatch, turns: int, failing: bool
) -> None:
    """A cancellation is not lost, neither for an answer of that moment nor for a store that is away."""
    await control.pools.create(ALICE, "p", min=0, max=0, most=0, overflow=0, queue_seconds=60)
    task = asyncio.ensure_future(control.sandboxes.create(ALICE, asked()))

    async def queued() -> bool:
        return any(control.queues._waiters.values())

    await until(queued)
    if failing:

        async def away(ticket: Row) -> bool:
            raise StoreUnavailable("it is away")

        monkeypatch.setattr(control.queues, "remove", away)
    ((waiter,),) = [list(each.values()) for each in control.queues._waiters.values()]
    waiter.result.set_exception(QuotaExceeded("the place in the queue is gone"))
    for _ in range(turns):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() or ended


async def test_without_wait_a_place_in_the_queue_is_pending(world: World, control: Control) -> None:
    await control.pools.create(ALICE, "p", min=0, max=0, most=1, overflow=1, queue_seconds=60)
    first = await control.sandboxes.create(ALICE, asked())
    later = await control.sandboxes.create(ALICE, asked(wait=False))
    assert later.state is State.PENDING
    await control.sandboxes.delete(ALICE, first.id)
    running = await control.sandboxes.wait_for(ALICE, later.id, {State.RUNNING}, 60)
    assert running.state is State.RUNNING
    gone = await control.sandboxes.create(ALICE, asked(wait=False))
    assert (await control.sandboxes.delete(ALICE, gone.id)).state is State.STOPPED
    await control.sandboxes.delete(ALICE, later.id)
    await empty(world, control)
    await world.counted(control)


async def test_a_place_in_the_queue_survives_its_process(world: World) -> None:
    first = await world.control("api-1")
    await first.pools.create(ALICE, "p", min=0, max=0, most=1, overflow=1, queue_seconds=60)
    running = await first.sandboxes.create(ALICE, asked())
    later = await first.sandboxes.create(ALICE, asked(wait=False))
    await world.crash(first)
    second = await world.control("api-2")
    await second.sandboxes.delete(ALICE, running.id)
    assert (await second.sandboxes.wait_for(ALICE, later.id, {State.RUNNING}, 60)).state is State.RUNNING
    assert await second.store.find(TICKET) == []
    await world.settled(second)


def test_projects_take_turns() -> None:
    tickets = [Row("ticket", f"{n:02}", project, created=n) for n, project in enumerate("aaabbc")]
    order = [(row.project, row.id) for row in in_turns(tickets, {})]
    assert order == [("a", "00"), ("b", "03"), ("c", "05"), ("a", "01"), ("b", "04"), ("a", "02")]
    # Who was served last comes last, however many he has in line.
    assert [row.project for row in in_turns(tickets, {"a": 10.0, "b": 5.0})] == list("cbabaa")


async def test_a_dead_processs_place_is_given_up(world: World) -> None:
    first, second = await world.control("api-1"), await world.control("api-2")
    await first.pools.create(ALICE, "p", min=0, max=0, most=1, overflow=1, queue_seconds=300)
    running = await first.sandboxes.create(ALICE, asked())
    dead = asyncio.ensure_future(first.sandboxes.create(ALICE, asked()))

    async def queued(count: int) -> bool:
        return int((await queue(second))["waiting"]) == count

    await until(lambda: queued(1))
    waits = asyncio.ensure_future(second.sandboxes.create(ALICE, asked(pool="p", start_timeout=300)))
    await until(lambda: queued(2))
    await world.crash(first)
    dead.cancel()
    await asyncio.gather(dead, return_exceptions=True)
    await second.sandboxes.delete(ALICE, running.id)
    assert (await waits).state is State.RUNNING


async def test_a_broken_member_is_never_handed_out(world: World, control: Control) -> None:
    await control.pools.create(ALICE, "p", min=2, max=2)
    await warm(control, 2)
    ready = await members(control)
    for id in ready:
        world.machine.sandboxes.pop(id)  # as if the node had lost them a moment ago
    made = await control.sandboxes.create(ALICE, asked())
    assert made.state is State.RUNNING
    assert made.id not in ready
    assert made.id in world.machine.sandboxes
    await warm(control, 2)
    await world.settled(control)
    await world.counted(control)


async def test_a_member_that_ends_is_replaced(world: World, control: Control) -> None:
    await control.pools.create(ALICE, "p", min=1, max=1)
    await warm(control, 1)
    (member,) = await members(control)
    world.machine.end(member, "out_of_memory")

    async def replaced() -> bool:
        now = await members(control)
        return len(now) == 1 and member not in now

    await until(replaced)
    await world.settled(control)


async def test_failing_starts_are_tried_less_and_less_often(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refilling, "RETRY_FIRST", 0.3)
    world.faults.script.append(Fault("start", "partial", times=4))
    await control.pools.create(ALICE, "p", min=2, max=2)

    async def failing() -> Pool | None:
        pool = await control.pools.get(ALICE, "p")
        return pool if pool.failures else None

    failed: Pool = await until(failing)
    assert "scripted" in failed.error
    await warm(control, 2)

    async def recovered() -> bool:
        return (await control.pools.get(ALICE, "p")).error == ""

    await until(recovered)
    await world.settled(control)


async def test_another_template_replaces_the_members(world: World, control: Control) -> None:
    for digit in "12":
        digest = "sha256:" + digit * 64
        world.machine.templates[digest] = {"name": digest, "digest": digest}
    one, two = ("sha256:" + digit * 64 for digit in "12")
    world.machine.templates["t"] = {"name": "t", "digest": one}
    await control.pools.create(ALICE, "p", template="t", min=2, max=2)
    await warm(control, 2)
    old = await members(control)
    world.machine.templates["t"] = {"name": "t", "digest": two}
    control.pools.templates_changed()

    async def rolled() -> bool:
        now = await members(control)
        return len(now) == 2 and not now & old

    await until(rolled)
    made = await control.sandboxes.create(ALICE, asked(template="t"))
    assert made.digest == two
    await world.settled(control)


async def test_a_removed_pool_leaves_nothing(world: World, control: Control) -> None:
    await control.pools.create(ALICE, "p", min=3, max=3)
    await warm(control, 3)
    made = await control.sandboxes.create(ALICE, asked())
    await control.pools.delete(ALICE, "p")

    async def gone() -> bool:
        return set(world.machine.sandboxes) == {made.id}

    await until(gone)
    assert (await control.sandboxes.get(ALICE, made.id)).state is State.RUNNING
    await control.sandboxes.delete(ALICE, made.id)
    await world.counted(control)


async def test_several_processes_fill_a_pool_once(world: World) -> None:
    controls = [await world.control(f"api-{n}", process_time=60.0) for n in range(3)]
    await controls[0].pools.create(ALICE, "p", min=6, max=6)
    await warm(controls[0], 6)
    made = await asyncio.gather(*(controls[n % 3].sandboxes.create(ALICE, asked()) for n in range(12)))
    assert len({each.id for each in made}) == 12
    await warm(controls[0], 6)
    for control in controls:
        control.refilling.urge("")
    await world.settled(controls[0])
    warming = [row for row in await rows_of(controls[0].store) if row.state in (State.WARM, State.WARMING)]
    assert len(warming) == 6
    await world.counted(controls[1])


async def test_another_process_goes_on_filling(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refilling, "LEASE_TIME", 1.0)
    first = await world.control("api-1")
    world.faults.script.append(Fault("start", "hang"))
    await first.pools.create(ALICE, "p", min=2, max=2)

    async def begun() -> bool:
        return not world.faults.script[0].times  # else the one that comes next would hang

    await until(begun)
    await world.crash(first)
    second = await world.control("api-2")
    await warm(second, 2)
    await world.settled(second)


async def test_a_half_done_claim_is_finished(world: World) -> None:
    first = await world.control("api-1")
    await first.pools.create(ALICE, "p", min=1, max=1)
    await warm(first, 1)
    world.faults.script.append(Fault("bind", "hang"))
    request = asked(idempotency_key="k", digest="d", labels={"a": "b"})
    task = asyncio.ensure_future(first.sandboxes.create(ALICE, request))

    async def taken() -> bool:
        return not world.faults.script[0].times  # else the one that comes next would hang

    await until(taken)
    assert any(row.state is State.STARTING for row in await rows_of(first.store))
    await world.crash(first)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    second = await world.control("api-2")
    made = await second.sandboxes.create(ALICE, request)
    assert made.state is State.RUNNING
    assert dict(made.labels) == {"a": "b"}
    mine = [row for row in await rows_of(second.store) if row.project == "default"]
    assert [row.id for row in mine] == [made.id]
    await world.settled(second)
    await world.counted(second)


async def test_claims_are_exclusive(world: World) -> None:
    controls = [await world.control(f"api-{n}", process_time=60.0) for n in range(2)]
    await controls[0].pools.create(ALICE, "p", min=10, max=10)
    await warm(controls[0], 10)
    made = await asyncio.gather(
        *(controls[n % 2].sandboxes.create(ALICE, asked(labels={"n": str(n)})) for n in range(20))
    )
    assert len({each.id for each in made}) == 20
    assert {each.labels["n"] for each in made} == {str(n) for n in range(20)}
    for each in made:
        assert world.machine.sandboxes[each.id].spec.labels["n"] == each.labels["n"]


async def test_the_same_key_claims_one_member(world: World, control: Control) -> None:
    await control.pools.create(ALICE, "p", min=3, max=3)
    await warm(control, 3)
    request = asked(idempotency_key="k", digest="d")
    made = await asyncio.gather(*(control.sandboxes.create(ALICE, request) for _ in range(5)))
    assert len({each.id for each in made}) == 1
    await warm(control, 3)
    await world.counted(control)


async def test_size_follows_arrivals(control: Control) -> None:
    pool = await control.pools.create(ALICE, "p", min=1, max=20, most=1000)
    assert await control.refilling.wanted(pool) == 1
    from ringfence.store.contract import Add

    control.core.now = lambda: 1_000_000.0  # type: ignore[method-assign]
    known = await control.store.get("pool-rate", pool.id)
    await control.store.commit(Add(pool.counter("claims"), 120))
    # 120 requests in a minute that began at rest: half of them count, after half of it again.
    document = {"rate": 0.0, "at": 1_000_000.0 - 60.0, "claims": 0}
    from ringfence.store.contract import Put

    fresh = await control.store.get("pool-rate", pool.id)
    await control.store.commit(Put(replace(fresh, document=document)))
    wanted = await control.refilling.wanted(pool)
    assert wanted == 15  # 1.5 a second, for 10 seconds
    assert known.revision >= 1


def test_the_rate_of_arrivals() -> None:
    known = {"rate": 2.0, "at": 100.0, "claims": 10}
    assert arrivals(known, 10, 130.0) == pytest.approx(1.0)  # half after a half-life without any
    assert arrivals(known, 70, 130.0) == pytest.approx(2.0)  # as many as before
    assert arrivals(known, 10, 100.0) == 2.0
    assert arrivals(known, 0, 90.0) == 2.0  # a counter or clock that goes back breaks nothing


@pytest.mark.parametrize(
    "numbers", [{"min": 5, "max": 1}, {"most": 1, "overflow": 2}, {"min": -1}, {"min": True}, {"what": 1}]
)
async def test_impossible_pools_are_refused(control: Control, numbers: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await control.pools.create(ALICE, "p", **numbers)
    assert await control.pools.list(ALICE) == []


async def test_names_of_pools_are_taken_once(control: Control) -> None:
    await control.pools.create(ALICE, "p", min=0, max=0)
    with pytest.raises(Conflict):
        await control.pools.create(ALICE, "p", min=0, max=0)
    for name in ("", "P", "../x", "a b", "x" * 64):
        with pytest.raises(InvalidRequest):
            await control.pools.create(ALICE, name)
    await control.pools.create(MALLORY, "p", min=0, max=0)


async def test_pools_count_for_the_quota(control: Control) -> None:
    assert control._quotas is not None
    await control._quotas.set("default", {"pool": 5})
    await control.pools.create(ALICE, "p", min=0, max=5)
    with pytest.raises(QuotaExceeded):
        await control.pools.create(ALICE, "q", min=0, max=1)
    await control.pools.update(ALICE, "p", max=4)
    await control.pools.create(ALICE, "q", min=0, max=1)
    await control.pools.delete(ALICE, "p")
    assert (await control._quotas.usage("default")).pool == 1


async def test_a_full_machine_stops_the_filling_only(world: World, control: Control) -> None:
    from ringfence.placement.contract import Capacity

    world.machine.capacity = Capacity(cpus=4 / 32, memory=1 << 40, disk=1 << 40, sandboxes=0)
    await control.pools.create(ALICE, "p", min=10, max=10)

    async def full() -> bool:
        return "CPU" in (await control.pools.get(ALICE, "p")).error

    await until(full)
    await warm(control, 4)
    made = await control.sandboxes.create(ALICE, asked())
    assert made.state is State.RUNNING


async def test_a_store_that_goes_away_leaves_no_member_behind(world: World, control: Control) -> None:
    commit = control.store.commit
    refused = 0

    async def refusing(*changes: Any, durable: bool = False) -> Any:
        nonlocal refused
        states = [change.row.state for change in changes if hasattr(change, "row")]
        if State.WARM.value in states and refused < 3:
            refused += 1
            raise StoreUnavailable("a scripted refusal")
        return await commit(*changes, durable=durable)

    control.store.commit = refusing  # type: ignore[method-assign]
    await control.pools.create(ALICE, "p", min=2, max=2)
    await warm(control, 2)
    assert refused == 3
    await world.settled(control)


async def test_what_a_row_of_a_member_tells(control: Control) -> None:
    await control.pools.create(ALICE, "p", min=1, max=1)
    await warm(control, 1)
    made = await control.sandboxes.create(ALICE, asked(secrets={"a": b"very-hush"}))
    row = await control.store.get(KIND, made.id)
    assert "very-hush" not in str(row)
    assert not {"member", "labels", "actor", "unstored", "key"} & set(Sandbox.from_row(row).document)
