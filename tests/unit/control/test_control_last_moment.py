"""Ends and sleeps that are decided in the moment in which somebody else has a use for the sandbox."""

from __future__ import annotations

import time

import pytest
from control_world import ALICE, World, asked, state_of

from ringfence.control.records import Sandbox
from ringfence.model.errors import HostLimit
from ringfence.model.policy import Limits, Policy
from ringfence.model.states import State


async def test_who_uses_or_extends_it_in_the_last_moment_wins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await world.control("api-1"), await world.control("api-2")
    made = await first.sandboxes.create(ALICE, asked(idle=600.0, on_idle="stop", timeout=600.0))
    later = 1000.0
    monkeypatch.setattr(second.core, "now", lambda: time.time() + later)

    async def judged(sandbox: Sandbox) -> State:
        await second.reconciler._due(sandbox)
        return (await first.sandboxes.get(ALICE, made.id)).state

    due = await second.core.get(made.id)
    await first.sandboxes.extend(ALICE, made.id, 7200.0)
    assert await judged(due) is State.RUNNING
    due = await second.core.get(made.id)
    await first.core.change(due, expect={State.RUNNING}, active=time.time() + later)
    assert await judged(due) is State.RUNNING
    later = 2000.0
    assert await judged(due) in (State.STOPPING, State.STOPPED)  # by what was read first as well
    assert (await state_of(first, made.id, State.STOPPED)).cause == "idle"


async def test_what_is_used_in_the_moment_in_which_it_falls_asleep_is_awake(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await world.control("api-1"), await world.control("api-2")
    made = await first.sandboxes.create(ALICE, asked(idle=600.0))
    later = time.time() + 1000
    monkeypatch.setattr(second.core, "now", lambda: later)
    due = await second.core.get(made.id)
    await first.core.change(due, expect={State.RUNNING}, active=later)  # before it is decided
    await second.reconciler._due(due)
    assert (await second.core.get(made.id)).state is State.RUNNING
    assert not (await second.core.get(made.id)).document.get("asleep")

    pause = second.core.placement.pause

    async def used(id: str) -> None:  # after it is decided
        await pause(id)
        second.links._active[id] = later

    later += 1000
    monkeypatch.setattr(second.core.placement, "pause", used)
    await second.reconciler._due(await second.core.get(made.id))
    assert (await second.core.get(made.id)).state is State.RUNNING
    monkeypatch.setattr(second.core.placement, "pause", pause)
    later += 1000
    await second.reconciler._due(await second.core.get(made.id))
    asleep = await second.core.get(made.id)
    assert asleep.state is State.PAUSED
    # And one that another process has used by a row that it had read before.
    await first.links._flush(due)
    assert (await second.core.get(made.id)).state is State.RUNNING


async def test_what_was_seen_before_a_pause_and_its_end_pauses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = await world.control("api-1")
    made = await control.sandboxes.create(ALICE, asked())
    placed = await control.core.placement.get(made.id)
    await control.sandboxes.pause(ALICE, made.id)
    paused = await control.core.get(made.id)
    await control.sandboxes.resume(ALICE, made.id)
    asked_for: list[str] = []

    async def pause(id: str) -> None:
        asked_for.append(id)

    monkeypatch.setattr(control.core.placement, "pause", pause)
    assert (placed.state, paused.state) == ("running", State.PAUSED)
    await control.reconciler._compare(paused, placed)
    assert asked_for == []


async def test_a_member_of_a_pool_as_it_was_holds_up_no_mended_one(world: World) -> None:
    control = await world.control("api-1")
    await control.pools.create(ALICE, "p", min=0, max=1)
    was = await control.pools.get(ALICE, "p")
    await control.refilling._failed(was, HostLimit("as it was"))
    assert (await control.pools.get(ALICE, "p")).failures == 1
    policy = Policy().with_door(limits=Limits(timeout=77.0))
    await control.pools.update(ALICE, "p", policy=policy)
    before = await control.pools.get(ALICE, "p")
    await control.refilling._failed(was, HostLimit("as it was"))
    found = await control.pools.get(ALICE, "p")
    assert (found.failures, found.error) == (before.failures, before.error)
