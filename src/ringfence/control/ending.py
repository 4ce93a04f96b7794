"""The end of a sandbox: its cause, the removal of all that is its own, what it counted for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringfence.control import idempotency, volumes
from ringfence.control.core import Core, log
from ringfence.control.links import Links
from ringfence.control.records import Sandbox
from ringfence.model.errors import LeaseLost, NodeUnavailable, NotFound, RingfenceError, WrongState
from ringfence.model.levels import Cause
from ringfence.model.policy import Resources
from ringfence.model.states import State
from ringfence.store.contract import Add, Change, Remove

# Every state from which somebody may begin the end. STOPPING: somebody did.
ENDABLE = (
    State.PENDING,
    State.STARTING,
    State.RUNNING,
    State.PAUSING,
    State.PAUSED,
    State.RESUMING,
    State.WARMING,
    State.WARM,
)


class Ending:
    """Brings sandboxes to their end, and finishes ends that others began."""

    def __init__(self, core: Core, links: Links) -> None:
        self.core = core
        self.links = links
        self.doors: Any = None  # the egress doors, once there are any

    async def begin(
        self,
        sandbox: Sandbox,
        cause: Cause | str,
        *,
        detail: str = "",
        killed_by: str = "",
        end: Mapping[str, Any] | None = None,
        error: RingfenceError | None = None,
        expect: Sequence[State] = ENDABLE,
        token: str | None = None,
        still: Callable[[Sandbox], bool] | None = None,
    ) -> tuple[Sandbox, str]:
        """Decide that it ends, and why. Returns it and the right to finish.

        Args:
            sandbox: as read last.
            cause: why.
            detail: in words.
            killed_by: who asked.
            end: as the placement knows it already; wins over ``cause``.
            error: of a start that failed; it ends as ``failed``.
            expect: states from which this may end it.
            token: of the transition under way that ends so; by default this one goes ahead of any.
            still: whether there is a reason to; see :meth:`Core.change`.

        Raises:
            WrongState: somebody began its end before, or it has ended, or there is no reason any more.
        """
        mine = self.core.token()
        facts: dict[str, Any] = {
            "cause": Cause(cause).value,
            "detail": detail,
            "killed_by": killed_by,
            "exit_code": None,
            "reported": False,
            "actor": mine,
        }
        if end is not None:
            facts |= {key: end[key] for key in ("cause", "exit_code", "detail", "reported") if key in end}
        if error is not None:
            facts |= {"error": error.as_dict(), "detail": error.message, "final": State.FAILED.value}
        try:
            ended = await self.core.change(
                sandbox,
                State.STOPPING,
                expect=expect,
                token=token,
                still=still,
                data={"cause": facts["cause"], **({"by": killed_by} if killed_by else {})},
                drop=("retry",),
                **facts,
            )
        except BaseException:
            self.core.done(mine)
            raise
        self.links.drop(sandbox.id)
        return ended, mine

    async def finish(self, sandbox: Sandbox, token: str, *, grace: float = 0.0) -> Sandbox:
        """Remove all that is its own and say so. A placement that does not answer leaves it ``stopping``:
        the reconciler goes on.

        Raises:
            LeaseLost: somebody else goes on with it.
        """
        core = self.core
        try:
            if self.doors is not None:
                await self.doors.close(sandbox.id)
            try:
                end = await core.placement.destroy(sandbox.id, grace=grace)
            except RingfenceError as error:
                if not isinstance(error, NodeUnavailable):
                    log.warning("%s can't be removed yet: %s", sandbox.id, error)
                with contextlib.suppress(RingfenceError):
                    tries = int(sandbox.document.get("removals", 0)) + 1
                    sandbox = await core.change(
                        sandbox,
                        expect={State.STOPPING},
                        token=token,
                        removals=tries,
                        retry=core.now() + min(30.0, 0.25 * 2 ** min(tries, 10)),
                    )
                return sandbox
            return await self._final(sandbox, token, end)
        finally:
            core.done(token)

    async def _final(self, sandbox: Sandbox, token: str, end: Mapping[str, Any] | None) -> Sandbox:
        core = self.core
        facts: dict[str, Any] = {"ended": core.now()}
        document = sandbox.document
        asked = document.get("cause") in (Cause.KILLED.value, Cause.NODE_LOST.value)
        known = (end or {}).get("cause")
        if end and asked and known not in (None, "", Cause.KILLED.value, Cause.NODE_LOST.value):
            # It had ended by itself before anybody asked.
            facts |= {key: end[key] for key in ("cause", "exit_code", "detail", "reported") if key in end}
            facts["killed_by"] = ""
        elif end and document.get("exit_code") is None and end.get("exit_code") is not None:
            facts |= {"exit_code": end["exit_code"], "reported": bool(end.get("reported"))}
        changes = await self.released(sandbox)
        if document.get("member") and not document.get("killed_by"):
            return await self._gone(sandbox, changes)
        state = State.FAILED if document.get("final") == State.FAILED.value else State.STOPPED
        changes = (*changes, *await idempotency.settled(core, sandbox))
        cause = facts.get("cause", document.get("cause", ""))
        ended = await core.change(
            sandbox,
            state,
            expect={State.STOPPING},
            token=token,
            changes=changes,
            data={"cause": cause},
            drop=("actor", "retry", "removals", "asleep", "missing", "member"),
            **facts,
        )
        self.links.forget(sandbox.id)
        core.released(sandbox.pool)
        return ended

    async def _gone(self, sandbox: Sandbox, changes: Sequence[Change]) -> Sandbox:
        """A pool's member that nobody ever used leaves nothing but its event."""
        core = self.core
        told = core.event("removed", sandbox.id, sandbox.project, cause=sandbox.cause)
        gone = [
            Remove(sandbox.row.kind, sandbox.id, sandbox.revision),
            *await idempotency.lost(core, sandbox),
        ]
        await core.commit(*gone, *changes, told)
        core.wake(sandbox.id)
        self.links.forget(sandbox.id)
        return sandbox

    async def released(self, sandbox: Sandbox) -> tuple[Change, ...]:
        """What it counted for, given back."""
        counters = sandbox.document.get("counters", ())
        changes: list[Change] = [Add(str(name), -1) for name in counters]
        if sandbox.document.get("charged"):
            size = Resources(**sandbox.document["charged"])
            changes += await self.core.admission.release(sandbox.project, size)
        changes += volumes.detached(sandbox.volumes)
        return tuple(changes)

    async def end(self, sandbox: Sandbox, cause: Cause | str, **facts: Any) -> Sandbox:
        """Both, as far as it goes now. Ending what ends or has ended already changes nothing."""
        grace = float(facts.pop("grace", 0.0))
        try:
            sandbox, token = await self.begin(sandbox, cause, **facts)
        except WrongState:
            return await self.core.get(sandbox.id)
        task = self.core.acting.get(sandbox.id)
        if task is not None:
            task.cancel()
            await self._settle(task)
        try:
            return await self.core.whole(self._in_turn(sandbox, token, grace))
        except LeaseLost:
            return await self.core.get(sandbox.id)

    async def _in_turn(self, sandbox: Sandbox, token: str, grace: float) -> Sandbox:
        async with self.core.courtesy.ending():
            return await self.finish(sandbox, token, grace=grace)

    @staticmethod
    async def _settle(task: Any) -> None:
        await asyncio.wait([task], timeout=30.0)

    async def remove_orphan(self, id: str) -> None:
        """What exists at the placement and is nobody's."""
        log.warning("removing %s, which no row owns", id)
        with contextlib.suppress(NotFound):
            await self.core.placement.destroy(id)
