from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from control_world import ALICE, Fault, World, asked, rows_of, state_of, until

from ringfence.control.records import KIND, MOST_LINEAGE, Sandbox
from ringfence.control.service import Control
from ringfence.model.errors import (
    DeadlineExceeded,
    HostLimit,
    IdempotencyConflict,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    StartFailed,
    StoreUnavailable,
    Unsupported,
    WrongState,
)
from ringfence.model.policy import Limits, Network, Policy, Resources
from ringfence.model.states import State
from support.services import MALLORY


async def names(control: Control, id: str) -> list[str]:
    return [event.name.removeprefix("sandbox.") for event in await control.store.events(subject=id)]


async def test_every_transition_is_one_event(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    await control.sandboxes.pause(ALICE, made.id)
    await control.sandboxes.resume(ALICE, made.id)
    await control.sandboxes.delete(ALICE, made.id)
    assert await names(control, made.id) == [
        "created", "running", "pausing", "paused", "resuming", "running", "stopping", "stopped",
    ]  # fmt: skip


async def test_without_wait_it_starts_in_the_background(world: World, control: Control) -> None:
    world.faults.script.append(Fault("start", "slow", seconds=0.2))
    made = await control.sandboxes.create(ALICE, asked(wait=False))
    assert made.state is State.STARTING
    assert (await control.sandboxes.wait_for(ALICE, made.id, {State.RUNNING}, 30)).boundary


async def test_a_start_that_fails_is_tried_again(world: World, control: Control) -> None:
    world.faults.script += [Fault("start", "refuse"), Fault("start", "lost"), Fault("start", "partial")]
    made = await control.sandboxes.create(ALICE, asked())
    assert (made.state, made.attempts) == (State.RUNNING, 3)
    assert made.error == {}
    assert await names(control, made.id) == ["created", *["retry", "starting"] * 3, "running"]
    await world.settled(control)


async def test_a_start_gives_up_in_the_end(world: World, control: Control) -> None:
    world.faults.script.append(Fault("start", "partial", times=-1))
    with pytest.raises(StartFailed) as raised:
        await control.sandboxes.create(ALICE, asked())
    failed = await control.sandboxes.get(ALICE, raised.value.details["sandbox"])
    assert (failed.state, failed.cause) == (State.FAILED, "start_failed")
    assert failed.error["code"] == "start_failed"
    assert failed.attempts == 0 or failed.attempts <= 5
    await world.settled(control)
    await world.counted(control)


async def test_a_request_that_cannot_be_is_not_tried_again(world: World, control: Control) -> None:
    with pytest.raises(NotFound) as raised:
        await control.sandboxes.create(ALICE, asked(template="nothing"))
    failed = await control.sandboxes.get(ALICE, raised.value.details["sandbox"])
    assert (failed.state, failed.error["code"]) == (State.FAILED, "not_found")
    assert "retry" not in await names(control, failed.id)


async def test_a_start_has_a_deadline(world: World, control: Control) -> None:
    world.faults.script.append(Fault("start", "hang", times=-1))
    with pytest.raises(DeadlineExceeded):
        await control.sandboxes.create(ALICE, asked(start_timeout=1.0))
    await world.settled(control)


async def test_a_node_that_is_away_is_waited_for(world: World, control: Control) -> None:
    await control.sandboxes.create(ALICE, asked())  # it has told how big it is
    world.faults.down = True
    task = asyncio.ensure_future(control.sandboxes.create(ALICE, asked()))

    async def tried() -> bool:
        return any(row.attempts for row in await rows_of(control.store))

    await until(tried)
    world.faults.down = False
    assert (await task).state is State.RUNNING


async def test_delete_stops_a_start(world: World, control: Control) -> None:
    world.faults.script.append(Fault("start", "hang"))
    made = await control.sandboxes.create(ALICE, asked(wait=False))
    ended = await control.sandboxes.delete(ALICE, made.id)
    assert (ended.state, ended.cause) == (State.STOPPED, "killed")
    await world.settled(control)


@pytest.mark.parametrize("state", ["pending", "starting", "running", "paused", "stopped"])
async def test_delete_works_from_every_state(world: World, control: Control, state: str) -> None:
    if state == "pending":
        world.faults.script.append(Fault("start", "refuse", times=1))
        control.core.settings = replace(control.core.settings, retry_first=600.0, retry_most=600.0)
    if state == "starting":
        world.faults.script.append(Fault("start", "hang"))
    wait = state not in ("pending", "starting")
    made = await control.sandboxes.create(ALICE, asked(wait=wait, start_timeout=3600))
    if state == "paused":
        await control.sandboxes.pause(ALICE, made.id)
    if state == "stopped":
        await control.sandboxes.delete(ALICE, made.id)
    await state_of(control, made.id, State(state))
    ended = await control.sandboxes.delete(ALICE, made.id)
    assert ended.state is State.STOPPED
    assert (await control.sandboxes.delete(ALICE, made.id)).revision == ended.revision
    await world.settled(control)
    await world.counted(control)


async def test_delete_while_the_node_is_away_is_finished_later(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    world.faults.down = True
    assert (await control.sandboxes.delete(ALICE, made.id)).state is State.STOPPING
    world.faults.down = False
    assert (await state_of(control, made.id, State.STOPPED)).cause == "killed"
    assert not world.machine.sandboxes


# -- idempotency


async def test_the_same_key_gives_the_same_sandbox(world: World, control: Control) -> None:
    request = asked(idempotency_key="k", digest="d")
    made = await asyncio.gather(*(control.sandboxes.create(ALICE, request) for _ in range(5)))
    assert len({each.id for each in made}) == 1
    assert sum(world.machine.starts.values()) == 1
    await world.counted(control)
    with pytest.raises(IdempotencyConflict):
        await control.sandboxes.create(ALICE, replace(request, digest="other"))
    other = await control.sandboxes.create(MALLORY, request)  # somebody else's key is another
    assert other.id != made[0].id


async def test_a_key_is_answered_while_the_first_is_under_way_and_after_a_restart(world: World) -> None:
    first = await world.control("api-1")
    world.faults.script.append(Fault("start", "slow", seconds=0.3))
    request = asked(idempotency_key="k", digest="d")
    early = await first.sandboxes.create(ALICE, replace(request, wait=False))
    assert early.state is State.STARTING
    assert (await first.sandboxes.create(ALICE, request)).state is State.RUNNING
    await world.crash(first)
    second = await world.control("api-1")
    assert (await second.sandboxes.create(ALICE, request)).id == early.id


async def test_a_key_repeats_the_failure(world: World, control: Control) -> None:
    request = asked(template="nothing", idempotency_key="k", digest="d")
    for _ in range(2):
        with pytest.raises(NotFound):
            await control.sandboxes.create(ALICE, request)
    assert len(await rows_of(control.store)) == 1


async def test_a_key_is_forgotten_in_the_end(world: World) -> None:
    control = await world.control(keep_keys=0.0)
    request = asked(idempotency_key="k", digest="d")
    first = await control.sandboxes.create(ALICE, request)
    assert (await control.sandboxes.create(ALICE, request)).id != first.id


# -- time


async def test_a_deadline_ends_it(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(timeout=1.0))
    ended = await state_of(control, made.id, State.STOPPED)
    assert ended.cause == "deadline"
    await world.settled(control)


async def test_extend_moves_the_deadline(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(timeout=60.0))
    longer = await control.sandboxes.extend(ALICE, made.id, 3600)
    assert longer.deadline > made.deadline + 1000
    assert world.machine.sandboxes[made.id].placed.deadline == longer.deadline
    with pytest.raises(InvalidRequest):
        await control.sandboxes.extend(ALICE, made.id, -1)


async def test_what_is_idle_sleeps_and_traffic_wakes_it(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(idle=1.0))
    await state_of(control, made.id, State.PAUSED)
    assert world.machine.sandboxes[made.id].placed.state == "paused"
    assert (await control.touch(made.id)).state is State.RUNNING
    assert world.machine.sandboxes[made.id].placed.state == "running"


async def test_what_was_paused_by_hand_stays_paused(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    await control.sandboxes.pause(ALICE, made.id)
    with pytest.raises(WrongState):
        await control.touch(made.id)


async def test_what_is_idle_stops_by_policy(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(idle=1.0, on_idle="stop"))
    assert (await state_of(control, made.id, State.STOPPED)).cause == "idle"


async def test_what_is_used_is_not_idle_for_any_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time is the test's: a machine that stands still for some seconds makes nothing idle.
    first, second = [await world.control(name, process_time=60.0) for name in ("api-1", "api-2")]
    later = 0.0
    for each in (first, second):
        now = each.core.now
        monkeypatch.setattr(each.core, "now", lambda now=now: now() + later)
    made = await first.sandboxes.create(ALICE, asked(idle=600.0, on_idle="stop"))
    async with first.using(made.id):
        for _ in range(14):
            before = (await second.sandboxes.get(ALICE, made.id)).active
            later += 60.0

            async def written_down(before: float = before) -> bool:
                return (await second.sandboxes.get(ALICE, made.id)).active > before

            await until(written_down)
            await second.reconciler._due(await second.core.get(made.id))
            assert (await second.sandboxes.get(ALICE, made.id)).state is State.RUNNING
    later += 700.0
    assert (await state_of(second, made.id, State.STOPPED)).cause == "idle"


async def test_deadlines_are_kept_after_a_restart(world: World) -> None:
    first = await world.control("api-1")
    made = await first.sandboxes.create(ALICE, asked(timeout=1.0))
    await world.crash(first)
    await asyncio.sleep(1.1)
    second = await world.control("api-2")  # another process: nothing of the first one's is in memory
    assert (await state_of(second, made.id, State.STOPPED)).cause == "deadline"


# -- what happens by itself


@pytest.mark.parametrize("cause", ["out_of_memory", "runtime_crash", "output_limit", "cpu_time"])
async def test_the_host_says_why_it_ended(world: World, control: Control, cause: str) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    world.machine.end(made.id, cause, detail="as it was")
    ended = await state_of(control, made.id, State.STOPPED)
    assert (ended.cause, ended.detail, ended.killed_by) == (cause, "as it was", "")
    await world.settled(control)


async def test_an_end_before_the_delete_keeps_its_cause(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    world.machine.listeners.clear()
    world.machine.end(made.id, "out_of_memory")
    ended = await control.sandboxes.delete(ALICE, made.id)
    assert ended.cause == "out_of_memory"


async def test_what_its_node_lost_is_lost_after_a_while(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    world.machine.sandboxes.pop(made.id)
    assert (await state_of(control, made.id, State.STOPPED)).cause == "node_lost"
    assert "missing" in await names(control, made.id)


async def test_what_comes_back_is_kept(world: World) -> None:
    control = await world.control(lost_grace=3600.0)
    made = await control.sandboxes.create(ALICE, asked())
    there = world.machine.sandboxes.pop(made.id)

    async def noted(name: str) -> bool:
        return name in await names(control, made.id)

    await until(lambda: noted("missing"))
    world.machine.sandboxes[made.id] = there
    await until(lambda: noted("found"))
    assert (await control.sandboxes.get(ALICE, made.id)).state is State.RUNNING


async def test_orphans_are_removed(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    row = await control.store.get(KIND, made.id)
    from ringfence.store.contract import Remove

    await control.store.commit(Remove(KIND, row.id))

    async def gone() -> bool:
        return made.id not in world.machine.sandboxes

    await until(gone)


async def test_the_store_says_what_is_paused(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    placed = world.machine.sandboxes[made.id]
    placed.placed = replace(placed.placed, state="paused")  # somebody meddled

    async def runs() -> bool:
        return placed.placed.state == "running"

    await until(runs)


# -- half done


@pytest.mark.parametrize("call", ["start", "destroy", "pause", "resume"])
async def test_another_process_finishes_what_a_dead_one_began(world: World, call: str) -> None:
    first = await world.control("api-1", reconcile=3600.0, due=3600.0)
    made = await first.sandboxes.create(ALICE, asked()) if call != "start" else None
    if call == "resume" and made is not None:
        await first.sandboxes.pause(ALICE, made.id)
    world.faults.script.append(Fault(call, "hang"))
    work = {
        "start": lambda: first.sandboxes.create(ALICE, asked()),
        "destroy": lambda: first.sandboxes.delete(ALICE, made.id),  # type: ignore[union-attr]
        "pause": lambda: first.sandboxes.pause(ALICE, made.id),  # type: ignore[union-attr]
        "resume": lambda: first.sandboxes.resume(ALICE, made.id),  # type: ignore[union-attr]
    }[call]
    task = asyncio.ensure_future(work())

    async def begun() -> bool:
        return not world.faults.script or world.faults.script[0].times == 0

    await until(begun)
    await world.crash(first)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    second = await world.control("api-2")
    wanted = {
        "start": State.RUNNING,
        "destroy": State.STOPPED,
        "pause": State.PAUSED,
        "resume": State.RUNNING,
    }
    (row,) = await rows_of(second.store)
    await state_of(second, row.id, wanted[call])
    await world.settled(second)
    await world.counted(second)


async def test_a_start_whose_secrets_died_with_the_process_fails(world: World) -> None:
    first = await world.control("api-1")
    world.faults.script.append(Fault("start", "hang"))
    made = await first.sandboxes.create(ALICE, asked(wait=False, secrets={"a": b"b"}))
    await world.crash(first)
    second = await world.control("api-1")
    failed = await state_of(second, made.id, State.FAILED)
    assert "restart" in failed.error["message"]
    document = str(dict(failed.document))
    assert "b'b'" not in document


async def test_a_living_process_is_left_to_its_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody is taken for dead because the machine stood still for some seconds.
    first, second = [await world.control(name, process_time=60.0) for name in ("api-1", "api-2")]
    made = await first.sandboxes.create(ALICE, asked())
    pause, looked = first.core.placement.pause, False

    async def slowly(id: str) -> None:
        nonlocal looked
        before = first.reconciler.passes + second.reconciler.passes

        async def passed() -> bool:
            return first.reconciler.passes + second.reconciler.passes >= before + 3

        looked = await until(passed)
        await pause(id)

    monkeypatch.setattr(first.core.placement, "pause", slowly)
    paused = await first.sandboxes.pause(ALICE, made.id)
    assert paused.state is State.PAUSED
    assert looked
    assert "taken_over" not in await names(first, made.id)


# -- powers


async def test_capabilities_are_named_where_they_are_missing(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    await control.core.change(made, expect={State.RUNNING}, capabilities={"pause": False})
    for attempt in (control.sandboxes.pause(ALICE, made.id), control.sandboxes.snapshot(ALICE, made.id)):
        with pytest.raises(Unsupported) as raised:
            await attempt
        assert raised.value.details["capability"] in ("pause", "disk_snapshot")
    assert (await control.sandboxes.get(ALICE, made.id)).state is State.RUNNING


async def test_a_refused_pause_leaves_it_running(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    world.faults.script.append(Fault("pause", "refuse"))
    with pytest.raises(HostLimit):
        await control.sandboxes.pause(ALICE, made.id)
    assert (await control.sandboxes.get(ALICE, made.id)).state is State.RUNNING


async def test_snapshot_restore_and_fork(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(labels={"a": "b"}))
    saved = await control.sandboxes.snapshot(ALICE, made.id, "mine")
    assert saved.state == "ready"
    with pytest.raises(RingfenceError):
        await control.sandboxes.snapshot(ALICE, made.id, "mine")
    copy = await control.sandboxes.create(ALICE, asked(snapshot="mine"))
    assert world.machine.sandboxes[copy.id].spec.snapshot == saved.id
    with pytest.raises(NotFound):
        await control.sandboxes.create(MALLORY, asked(snapshot="mine"))
    forks = await control.sandboxes.fork(ALICE, made.id, 3)
    assert len({each.id for each in forks}) == 3
    assert all(dict(each.labels) == {"a": "b"} for each in forks)
    assert set(world.machine.snapshots) == {saved.id}
    await control.powers.remove_snapshot(await control.powers.find_snapshot("default", "mine"))
    assert not world.machine.snapshots


async def test_what_is_taken_back_stays_taken_back(control: Control) -> None:
    sandboxes = control.sandboxes
    made = await sandboxes.create(ALICE, asked())
    (copy,) = await sandboxes.fork(ALICE, made.id)
    assert (copy.lineage, copy.revoked) == ((made.id,), ())  # the control
    saved = await sandboxes.snapshot(ALICE, copy.id)
    # Two at once: neither is lost, though both have read the same.
    await asyncio.gather(sandboxes.revoke(ALICE, copy.id), sandboxes.revoke(ALICE, copy.id, [copy.id]))
    both = {made.id, copy.id}
    assert set((await sandboxes.get(ALICE, copy.id)).revoked) == both
    # Also in copies of what was saved before, and in those of copies.
    again = await sandboxes.create(ALICE, asked(snapshot=saved.id))
    assert (set(again.lineage), set(again.revoked)) == (both, both)
    (third,) = await sandboxes.fork(ALICE, again.id)
    assert both < {*third.lineage} and set(third.revoked) == both
    assert (await sandboxes.get(ALICE, made.id)).revoked == ()  # of the first it was not asked


async def test_the_oldest_of_a_long_lineage_can_be_taken_back(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    lineage = [f"sb-{number}" for number in range(MOST_LINEAGE)]
    await control.core.change(made, expect={State.RUNNING}, lineage=lineage)
    assert (await control.sandboxes.revoke(ALICE, made.id)).revoked == tuple(lineage)
    with pytest.raises(InvalidRequest):
        await control.sandboxes.revoke(ALICE, made.id, ["sb-of-nobody"])


async def test_a_fork_is_all_or_nothing(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    world.faults.script.append(Fault("start", "refuse", after=1, times=-1))
    world.faults.calls.clear()
    with pytest.raises(RingfenceError):
        await control.sandboxes.fork(ALICE, made.id, 3)
    await world.settled(control)
    assert set(world.machine.sandboxes) == {made.id}


async def test_reset_begins_anew_under_the_same_id(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    again = await control.sandboxes.reset(ALICE, made.id)
    assert again.id == made.id
    assert world.machine.sandboxes[made.id].resets == 1
    await control.sandboxes.delete(ALICE, made.id)
    with pytest.raises(WrongState):
        await control.sandboxes.reset(ALICE, made.id)


async def test_labels_and_door_change_and_the_wall_does_not(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    changed = await control.sandboxes.update(
        ALICE,
        made.id,
        labels={"x": "y"},
        env={"A": "1"},
        policy=Policy().with_door(limits=Limits(timeout=60)),
    )
    assert dict(changed.labels) == {"x": "y"}
    assert changed.deadline == pytest.approx(changed.started + 60)
    assert world.machine.sandboxes[made.id].spec.env["A"] == "1"
    other = Policy().with_wall(resources=Resources(cpus=2))
    with pytest.raises(InvalidRequest):
        await control.sandboxes.update(ALICE, made.id, policy=other)


# -- limits and faults of the store


async def test_quotas_hold_and_are_given_back(world: World, control: Control) -> None:
    assert control._quotas is not None
    await control._quotas.set("default", {"alive": 2})
    made = [await control.sandboxes.create(ALICE, asked()) for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        await control.sandboxes.create(ALICE, asked())
    await control.sandboxes.delete(ALICE, made[0].id)
    await control.sandboxes.create(ALICE, asked())
    await world.counted(control)


async def test_a_store_that_refuses_loses_nothing(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    commit = control.store.commit
    left = 3

    async def refusing(*changes: object, durable: bool = False) -> list[object]:
        nonlocal left
        if left > 0:
            left -= 1
            raise StoreUnavailable("a scripted refusal")
        return await commit(*changes, durable=durable)  # type: ignore[arg-type, return-value]

    control.store.commit = refusing  # type: ignore[assignment, method-assign]
    for attempt in (
        control.sandboxes.create(ALICE, asked()),
        control.sandboxes.pause(ALICE, made.id),
        control.sandboxes.delete(ALICE, made.id),
    ):
        with pytest.raises(StoreUnavailable):
            await attempt
    assert (await control.sandboxes.delete(ALICE, made.id)).state is State.STOPPED
    await world.settled(control)
    await world.counted(control)


async def test_a_store_that_goes_away_in_the_middle_loses_nothing(world: World, control: Control) -> None:
    """The commit that ends each transition fails; the reconciler finishes what the store says."""
    commit = control.store.commit
    refused: set[str] = set()

    async def refusing(*changes: object, durable: bool = False) -> list[object]:
        for change in changes:
            row = getattr(change, "row", None)
            state = getattr(row, "state", "")
            if state in ("running", "paused", "stopped") and state not in refused:
                refused.add(state)
                raise StoreUnavailable("a scripted refusal")
        return await commit(*changes, durable=durable)  # type: ignore[arg-type, return-value]

    control.store.commit = refusing  # type: ignore[assignment, method-assign]
    row = await control.sandboxes.create(ALICE, asked())
    assert row.state is State.RUNNING  # what is tried again here needs no reconciler
    with pytest.raises(StoreUnavailable):
        await control.sandboxes.pause(ALICE, row.id)
    await state_of(control, row.id, State.PAUSED)
    with pytest.raises(StoreUnavailable):
        await control.sandboxes.delete(ALICE, row.id)
    await state_of(control, row.id, State.STOPPED)
    assert refused == {"running", "paused", "stopped"}
    await world.settled(control)
    await world.counted(control)


async def test_a_clock_that_jumps_changes_no_deadline(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    made = await control.sandboxes.create(ALICE, asked(timeout=3600))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    for _ in range(5):
        await control.reconciler.due_once()
    assert (await control.sandboxes.get(ALICE, made.id)).state is State.RUNNING
    assert abs(control.core.now() - real()) < 60


async def test_a_node_that_is_away_costs_no_state(world: World, control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    world.faults.down = True
    with pytest.raises(NodeUnavailable):
        await control.sandboxes.pause(ALICE, made.id)
    assert Sandbox.from_row(await control.store.get(KIND, made.id)).state is State.PAUSING
    world.faults.down = False
    await state_of(control, made.id, State.PAUSED)


async def test_a_door_that_the_service_does_not_have_is_refused_at_once(control: Control) -> None:
    asking = asked(policy=Policy().with_door(network=Network(mode="egress")))
    with pytest.raises(Unsupported) as caught:
        await control.sandboxes.create(ALICE, asking)
    assert caught.value.details["capability"] == "egress"
    assert await control.sandboxes.list(ALICE) == []
