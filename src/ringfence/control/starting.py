"""The start of a sandbox: attempts until its deadline, each undone if it fails; the binding of its door."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringfence.control import idempotency
from ringfence.control.core import Core
from ringfence.control.ending import Ending
from ringfence.control.links import Links
from ringfence.control.records import Sandbox
from ringfence.guest.link import GuestLink
from ringfence.model.errors import (
    DeadlineExceeded,
    HostLimit,
    LeaseLost,
    LinkLost,
    NodeUnavailable,
    RingfenceError,
    StartFailed,
    StoreUnavailable,
    WrongState,
)
from ringfence.model.levels import Cause
from ringfence.model.states import State
from ringfence.model.values import dataclass
from ringfence.placement.contract import Placed, PlacedSpec

STORE_PAUSE = 0.2  # seconds between two tries of a store that does not answer
# What may be otherwise at the next attempt. Everything else is a fault of the request, and told at once.
AGAIN = (StartFailed, NodeUnavailable, HostLimit, DeadlineExceeded, LinkLost)


@dataclass(frozen=True, slots=True)
class Unstored:
    """What is bound at the start and never written down; lost with the process that has it."""

    secrets: Mapping[str, bytes]
    files: Mapping[str, bytes]


class Starting:
    """Starts what was accepted, and finishes starts that others began."""

    def __init__(self, core: Core, links: Links, ending: Ending) -> None:
        self.core = core
        self.links = links
        self.ending = ending
        self.doors: Any = None

    # -- a start on demand

    def begin(self, sandbox: Sandbox, token: str, unstored: Unstored | None) -> asyncio.Task[Sandbox]:
        """Start it in a task of this process; deletes find and stop it."""
        task = self.core.task(self._run(sandbox, token, unstored))
        self.core.acting[sandbox.id] = task

        def over(done: asyncio.Task[Sandbox]) -> None:
            if self.core.acting.get(sandbox.id) is done:
                del self.core.acting[sandbox.id]

        task.add_done_callback(over)
        return task

    async def _run(self, sandbox: Sandbox, token: str, unstored: Unstored | None) -> Sandbox:
        core = self.core
        try:
            while True:
                try:
                    async with core.starts:
                        if sandbox.state is State.PENDING:
                            sandbox = await core.change(
                                sandbox, State.STARTING, expect={State.PENDING}, token=token
                            )
                        return await self._attempt(sandbox, token, unstored)
                except AGAIN as error:
                    sandbox = await self._again(sandbox, token, error)
                except StoreUnavailable:
                    # Nobody knows what it holds now. What was started is found again by its id.
                    if core.now() >= float(sandbox.document["start_by"]):
                        raise
                    await asyncio.sleep(STORE_PAUSE)
                    with contextlib.suppress(StoreUnavailable):
                        sandbox = await core.get(sandbox.id)
                        if sandbox.state is State.RUNNING:
                            return sandbox
                    continue
                delay = float(sandbox.document.get("retry", 0.0)) - core.now()
                await asyncio.sleep(max(0.0, delay))
        except (LeaseLost, WrongState):
            # Somebody ended it meanwhile, or took over: they clean up what they know of. What our start made
            # after they looked is an orphan, and removed here already.
            await self._stray(sandbox.id)
            raise WrongState(
                f"sandbox {sandbox.id} was deleted before it ran",
                hint="create another one",
                sandbox=sandbox.id,
            ) from None
        finally:
            core.done(token)

    async def _stray(self, id: str) -> None:
        with contextlib.suppress(RingfenceError):
            if (await self.core.get(id)).state in (State.STOPPING, State.STOPPED, State.FAILED):
                await self.core.placement.destroy(id)

    async def _attempt(self, sandbox: Sandbox, token: str, unstored: Unstored | None) -> Sandbox:
        core = self.core
        document = sandbox.document
        deadline = core.now() + float(document["timeout"])
        left = float(document["start_by"]) - core.now()
        try:
            async with asyncio.timeout(max(0.0, left)):
                spec = replace(self.spec(sandbox, deadline), hold=self._wants_door(sandbox))
                if found := await self.variables(sandbox):
                    spec = replace(spec, env={**spec.env, **found})
                placed = await core.placement.start(spec)
                if placed.state == "ended":
                    raise ended_at_once(placed)
                facts = await self.bound(sandbox, placed, unstored)
                if placed.held:  # what the template starts finds the door open
                    await core.placement.bring_up(sandbox.id)
            return await self.running(sandbox, token, placed, deadline, facts)
        except TimeoutError:
            raise DeadlineExceeded(
                f"sandbox {sandbox.id} did not start in time", hint="ask for a longer start_timeout"
            ) from None
        except (LeaseLost, WrongState, StoreUnavailable, asyncio.CancelledError, *AGAIN):
            raise
        except RingfenceError as error:
            await self.fail(sandbox, token, error)
            raise

    async def _again(self, sandbox: Sandbox, token: str, error: RingfenceError) -> Sandbox:
        """Undo what there may be, and wait for the next attempt; or give up."""
        core, settings = self.core, self.core.settings
        attempts = sandbox.attempts + 1
        delay = min(settings.retry_most, settings.retry_first * 3 ** (attempts - 1))
        late = core.now() + delay >= float(sandbox.document["start_by"])
        # A node that is away may come back: only the deadline ends that wait.
        spent = attempts >= settings.start_attempts and not isinstance(error, NodeUnavailable)
        if late or spent:
            await self.fail(sandbox, token, error, attempts=attempts)
            raise error
        with contextlib.suppress(RingfenceError):
            await core.placement.destroy(sandbox.id)
        return await core.change(
            sandbox,
            State.PENDING,
            expect={State.STARTING},
            token=token,
            event="retry",
            data={"error": error.code, "attempt": attempts, "delay": delay},
            attempts=attempts,
            retry=core.now() + delay,
            error=error.as_dict(),
        )

    async def fail(
        self, sandbox: Sandbox, token: str, error: RingfenceError, *, attempts: int | None = None
    ) -> None:
        """It never ran: remove what there may be, and say why."""
        cause = Cause.DEADLINE if isinstance(error, DeadlineExceeded) else Cause.START_FAILED
        if attempts is not None:
            error.details["attempts"] = attempts
        error.details["sandbox"] = sandbox.id
        expect = (State.PENDING, State.STARTING)
        sandbox, mine = await self.ending.begin(sandbox, cause, error=error, expect=expect, token=token)
        await self.core.whole(self.ending.finish(sandbox, mine))

    def spec(self, sandbox: Sandbox, deadline: float) -> PlacedSpec:
        """What the placement is asked for."""
        return PlacedSpec(
            id=sandbox.id,
            policy=sandbox.policy,
            template=sandbox.digest or sandbox.template,
            owner=owner_of(sandbox),
            env=sandbox.env,
            labels=sandbox.labels,
            volumes=sandbox.volumes,
            snapshot=sandbox.snapshot,
            secrets=bool(sandbox.document.get("unstored")),
            deadline=deadline,
        )

    # -- the door

    async def variables(self, sandbox: Sandbox) -> dict[str, str]:
        """The placeholders of secrets that its policy gives to programs, by variable."""
        return {} if self.doors is None else dict(await self.doors.variables(sandbox))

    def _wants_door(self, sandbox: Sandbox) -> bool:
        return self.doors is not None and bool(self.doors.wanted(sandbox))

    async def bound(
        self, sandbox: Sandbox, placed: Placed, unstored: Unstored | None, *, claim: bool = False
    ) -> dict[str, Any]:
        """Bind what is not in the spec, and measure; returns what the row learns from it."""
        if unstored is not None and unstored.secrets and not claim:
            await self.core.placement.bind(sandbox.id, secrets=unstored.secrets)
        if unstored is not None and unstored.files:
            await self._write(sandbox.id, unstored.files)
        boundary = placed.boundary
        if boundary is None:
            boundary = await self.core.placement.measure(sandbox.id)
        if self.doors is not None:
            await self.doors.open(sandbox)
        return {"boundary": dict(boundary), "capabilities": dict(placed.capabilities)}

    async def _write(self, id: str, files: Mapping[str, bytes]) -> None:
        link = await GuestLink.open(await self.core.placement.connect(id))
        try:
            for path, content in files.items():
                await link.files.write(path, content, parents=True)
        finally:
            await link.close()

    async def running(
        self, sandbox: Sandbox, token: str, placed: Placed, deadline: float, facts: Mapping[str, Any]
    ) -> Sandbox:
        """It runs, and its door is bound."""
        core = self.core
        now = core.now()
        claimed = bool(sandbox.document.get("member"))
        done = await core.change(
            sandbox,
            State.RUNNING,
            expect={State.STARTING},
            token=token,
            labels=sandbox.document.get("labels", sandbox.labels) if claimed else None,
            changes=await idempotency.settled(core, sandbox) if claimed else (),
            data={"runtime": placed.runtime, "pool": sandbox.pool},
            drop=("actor", "retry", "error", "unstored", "member", "labels", "key", "expires"),
            runtime=placed.runtime,
            node=placed.node,
            placement=core.placement.name,
            address=placed.address,
            digest=placed.template,
            started=now,
            active=now,
            deadline=deadline,
            **facts,
        )
        self.links.saw(done)
        return done

    # -- after a restart

    async def resume(self, sandbox: Sandbox, token: str) -> Sandbox:
        """Go on with a start that another process began.

        Its secrets and files died with that process: a start that needs them can't be finished.
        """
        if sandbox.document.get("unstored"):
            error = StartFailed(
                "the service was restarted before this sandbox had its secrets and files",
                hint="create it again",
                step="restart",
            )
            await self.fail(sandbox, token, error)
            return await self.core.get(sandbox.id)
        return await self.core.result(self.begin(sandbox, token, None))


def ended_at_once(placed: Placed) -> StartFailed:
    """It was there and is not any more."""
    end = dict(placed.end or {})
    detail = f": {end['detail']}" if end.get("detail") else ""
    return StartFailed(f"it ended at once, {end.get('cause', 'nobody knows why')}{detail}", step="start")


def owner_of(sandbox: Sandbox) -> dict[str, Any]:
    """The fields of ``model.sandbox.Owner``."""
    return {
        "organisation": sandbox.organisation,
        "project": sandbox.project,
        "user": sandbox.user,
        "agent": sandbox.agent,
        "parent_agent": sandbox.parent_agent,
        "agent_class": sandbox.agent_class,
        "task": sandbox.task,
    }
