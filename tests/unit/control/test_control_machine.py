"""The life cycle against a model: whatever is asked in whatever order, with faults and crashes between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from control_world import ALICE, Fault, World, asked, rows_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ringfence.control.records import KIND, Sandbox
from ringfence.control.service import Control
from ringfence.model.errors import RingfenceError, WrongState
from ringfence.model.states import FINAL, NEXT, State

# What each request does to a sandbox in each settled state; anything else is refused and changes nothing.
MODEL = {
    "pause": {State.RUNNING: State.PAUSED, State.PAUSED: State.PAUSED},
    "resume": {State.RUNNING: State.RUNNING, State.PAUSED: State.RUNNING},
    "reset": {State.RUNNING: State.RUNNING},
    "snapshot": {State.RUNNING: State.RUNNING, State.PAUSED: State.PAUSED},
    "extend": {State.RUNNING: State.RUNNING, State.PAUSED: State.PAUSED},
    "update": {State.RUNNING: State.RUNNING, State.PAUSED: State.PAUSED},
    "delete": {
        State.RUNNING: State.STOPPED,
        State.PAUSED: State.STOPPED,
        State.STOPPED: State.STOPPED,
        State.FAILED: State.FAILED,
    },
}
CALLS = {"pause": "pause", "resume": "resume", "reset": "reset", "snapshot": "snapshot", "delete": "destroy"}


class Life(RuleBasedStateMachine):
    """Sandboxes of one project; the model knows the state of each."""

    sandboxes = Bundle("sandboxes")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.mkdtemp(prefix="rf-life-")
        self.world = World(f"{self.folder}/store.db")
        self.model: dict[str, State] = {}
        self.keys: dict[int, str] = {}
        self.control: Control = self.do(self.world.control())

    def do(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60.0))

    def teardown(self) -> None:
        self.do(self.world.settled(self.control))
        self.do(self.world.counted(self.control))
        self.do(self.world.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(target=sandboxes, faults=st.integers(0, 2), idle=st.booleans())
    def create(self, faults: int, idle: bool) -> str:
        self.world.faults.script.extend(Fault("start", "partial") for _ in range(faults))
        made = self.do(self.control.sandboxes.create(ALICE, asked(idle=3600.0 if idle else None)))
        self.model[made.id] = State.RUNNING
        return str(made.id)

    @rule(target=sandboxes, key=st.integers(0, 2))
    def create_with_a_key(self, key: int) -> str:
        request = asked(idempotency_key=f"k{key}", digest="d")
        made = self.do(self.control.sandboxes.create(ALICE, request))
        known = self.keys.setdefault(key, made.id)
        assert made.id == known
        self.model.setdefault(made.id, State.RUNNING)
        assert made.state is self.model[made.id]
        return str(made.id)

    @rule(target=sandboxes)
    def create_what_cannot_be(self) -> str:
        try:
            self.do(self.control.sandboxes.create(ALICE, asked(template="nothing")))
        except RingfenceError as error:
            id = str(error.details["sandbox"])
            self.model[id] = State.FAILED
            return id
        raise AssertionError("a template that is not there was found")

    @rule(id=sandboxes, act=st.sampled_from(sorted(MODEL)))
    def ask(self, id: str, act: str) -> None:
        before = self.do(self.control.sandboxes.get(ALICE, id))
        wanted = MODEL[act].get(self.model[id])
        try:
            self.do(self.request(act)(id))
        except WrongState:
            assert wanted is None
            after = self.do(self.control.sandboxes.get(ALICE, id))
            assert after.revision == before.revision
        else:
            assert wanted is not None
            self.model[id] = wanted

    @rule(id=sandboxes, act=st.sampled_from(sorted(CALLS)), kind=st.sampled_from(["lost", "lost_answer"]))
    def ask_a_node_that_does_not_answer(self, id: str, act: str, kind: str) -> None:
        """Nothing is known then, until the reconciler has found out: it is as asked, or as it was."""
        wanted = MODEL[act].get(self.model[id])
        if wanted is None:
            return
        self.world.faults.script.append(Fault(CALLS[act], kind))
        with contextlib.suppress(RingfenceError):
            self.do(self.request(act)(id))
        self.world.faults.script.clear()
        state = self.do(self.settled(id))
        assert state in (wanted, self.model[id])
        self.model[id] = state

    @rule(id=consumes(sandboxes), cause=st.sampled_from(["out_of_memory", "runtime_crash"]))
    def end_by_itself(self, id: str, cause: str) -> None:
        if self.model[id] in FINAL:
            return
        self.world.machine.end(id, cause)
        assert self.do(self.settled(id, {State.STOPPED})) is State.STOPPED
        assert self.do(self.control.sandboxes.get(ALICE, id)).cause == cause
        self.model[id] = State.STOPPED

    @rule()
    def crash(self) -> None:
        self.do(self.world.crash(self.control))
        self.control = self.do(self.world.control())

    def request(self, act: str) -> Callable[[str], Awaitable[Any]]:
        sandboxes = self.control.sandboxes
        calls: dict[str, Callable[[str], Awaitable[Any]]] = {
            "pause": lambda id: sandboxes.pause(ALICE, id),
            "resume": lambda id: sandboxes.resume(ALICE, id),
            "reset": lambda id: sandboxes.reset(ALICE, id),
            "snapshot": lambda id: sandboxes.snapshot(ALICE, id),
            "extend": lambda id: sandboxes.extend(ALICE, id, 3600.0),
            "update": lambda id: sandboxes.update(ALICE, id, env={"A": "b"}),
            "delete": lambda id: sandboxes.delete(ALICE, id),
        }
        return calls[act]

    async def settled(self, id: str, states: set[State] | None = None) -> State:
        wanted = states or {State.RUNNING, State.PAUSED, State.STOPPED, State.FAILED}
        while True:
            state = Sandbox.from_row(await self.control.store.get(KIND, id)).state
            if state in wanted:
                return state
            await asyncio.sleep(0.01)

    @invariant()
    def store_and_model_agree(self) -> None:
        rows = {row.id: row for row in self.do(rows_of(self.control.store))}
        assert {id: row.state for id, row in rows.items()} == self.model
        for row in rows.values():
            if row.final:
                assert row.cause

    @invariant()
    def every_event_is_a_transition_that_is_allowed(self) -> None:
        for event in self.do(self.control.store.events(limit=10_000)):
            before, after = event.data.get("from"), event.data.get("state")
            if event.kind == KIND and before and before != after:
                assert State(after) in NEXT[State(before)]

    @invariant()
    def what_lives_was_started_once(self) -> None:
        machine = self.world.machine
        alive = {id for id, state in self.model.items() if state not in FINAL}
        assert alive == set(machine.sandboxes)
        assert all(count - machine.destroys.get(id, 0) <= 1 for id, count in machine.starts.items())


Life.TestCase.settings = settings(
    max_examples=int(os.environ.get("RINGFENCE_LIVES", "8")),
    stateful_step_count=20,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestLife = Life.TestCase
