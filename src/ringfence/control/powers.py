"""Optional powers of a running sandbox: pause and resume, snapshot and fork, reset, extend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ringfence.control.core import Core, log, wrong_state
from ringfence.control.links import Links
from ringfence.control.records import Sandbox
from ringfence.model.errors import (
    Conflict,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    Unsupported,
    WrongState,
)
from ringfence.model.ids import new_id
from ringfence.model.states import State
from ringfence.store.contract import Event, Put, Remove, Row

SNAPSHOT = "snapshot"
MAKING, READY, REMOVING = "making", "ready", "removing"
TEMPORARY_TIME = 600.0  # seconds after which a fork's snapshot is left over from a process that died
_WORDS = {
    "pause": "pause",
    "disk_snapshot": "be saved",
    "memory_snapshot": "be saved with its memory",
}


class Powers:
    """Each is a transition in the store around a call of the placement; both may be asked for again."""

    def __init__(self, core: Core, links: Links) -> None:
        self.core = core
        self.links = links
        self.doors: Any = None  # the egress doors, once there are any

    @staticmethod
    def able(sandbox: Sandbox, *capabilities: str) -> None:
        """It has one of these.

        Raises:
            Unsupported: its runtime has none of them; ``details['capability']`` names the first.
        """
        if not any(sandbox.capabilities.get(name) for name in capabilities):
            raise Unsupported(
                f"sandbox {sandbox.id} can't {_WORDS.get(capabilities[0], capabilities[0])}:"
                f" runtime {sandbox.runtime} has no {capabilities[0]} here",
                hint="`ringfence probe` shows what each runtime can",
                capability=capabilities[0],
                runtime=sandbox.runtime,
            )

    # -- pause and resume

    async def pause(
        self, sandbox: Sandbox, *, asleep: bool = False, still: Callable[[Sandbox], bool] | None = None
    ) -> Sandbox:
        """``running`` to ``paused``. ``asleep``: for being idle, so that traffic resumes it; ``still``: see
        :meth:`Core.change`. Idempotent.
        """
        core = self.core
        async with core.alone(sandbox.id):
            sandbox = await core.get(sandbox.id)
            if sandbox.state is State.PAUSED:
                return sandbox
            if sandbox.state is not State.RUNNING:
                raise wrong_state(sandbox)
            self.able(sandbox, "pause")
            token = core.token()
            try:
                sandbox = await core.change(
                    sandbox, State.PAUSING, expect={State.RUNNING}, still=still, actor=token, asleep=asleep
                )
                return await self.finish_pause(sandbox, token)
            finally:
                core.done(token)

    async def finish_pause(self, sandbox: Sandbox, token: str) -> Sandbox:
        """Do what ``pausing`` says."""
        core = self.core
        try:
            await core.placement.pause(sandbox.id)
        except NodeUnavailable:
            raise  # nobody knows whether it did: the reconciler asks again
        except RingfenceError:
            await self._back(sandbox, State.PAUSING, State.RUNNING, token)
            raise
        done = await core.change(sandbox, State.PAUSED, expect={State.PAUSING}, token=token, drop=("actor",))
        self.links.saw(done)
        return done

    async def resume(self, sandbox: Sandbox) -> Sandbox:
        """``paused`` to ``running``. Idempotent."""
        core = self.core
        async with core.alone(sandbox.id):
            sandbox = await core.get(sandbox.id)
            if sandbox.state in (State.PAUSING, State.RESUMING):  # another process is at it
                sandbox = await core.until(sandbox.id, {State.PAUSED, State.RUNNING}, 30.0)
            if sandbox.state is State.RUNNING:
                return sandbox
            if sandbox.state is not State.PAUSED:
                raise wrong_state(sandbox)
            token = core.token()
            try:
                sandbox = await core.change(sandbox, State.RESUMING, expect={State.PAUSED}, actor=token)
                return await self.finish_resume(sandbox, token)
            finally:
                core.done(token)

    async def finish_resume(self, sandbox: Sandbox, token: str) -> Sandbox:
        """Do what ``resuming`` says."""
        core = self.core
        try:
            await core.placement.resume(sandbox.id)
        except NodeUnavailable:
            raise
        except RingfenceError:
            await self._back(sandbox, State.RESUMING, State.PAUSED, token)
            raise
        done = await core.change(
            sandbox,
            State.RUNNING,
            expect={State.RESUMING},
            token=token,
            drop=("actor", "asleep"),
            active=core.now(),
        )
        self.links.saw(done)
        return done

    async def _back(self, sandbox: Sandbox, state: State, to: State, token: str) -> None:
        with contextlib.suppress(RingfenceError):
            await self.core.change(sandbox, to, expect={state}, token=token, drop=("actor",))

    # -- deadline

    async def extend(self, sandbox: Sandbox, seconds: float) -> Sandbox:
        """Its deadline is so many seconds from now. The store first: it is the truth of deadlines."""
        if not 0 < seconds <= 366 * 24 * 3600:
            raise InvalidRequest(f"{seconds} s is no time to go on", hint="more than 0, at most a year")
        core = self.core
        deadline = core.now() + seconds
        states = {State.RUNNING, State.PAUSED, State.PAUSING, State.RESUMING}
        sandbox = await core.change(
            sandbox, expect=states, event="extended", data={"deadline": deadline}, deadline=deadline
        )
        await core.placement.bind(sandbox.id, deadline=deadline)
        self.links.saw(sandbox)
        return sandbox

    # -- begin anew

    async def reset(self, sandbox: Sandbox) -> Sandbox:
        """A new wall from the template, under the same id. What was bound as secrets or files is gone."""
        core = self.core
        async with core.alone(sandbox.id):
            sandbox = await core.change(
                await core.get(sandbox.id), expect={State.RUNNING}, event="resetting", resetting=True
            )
            self.links.drop(sandbox.id)
            try:
                door = self.doors is not None and self.doors.wanted(sandbox)
                placed = await core.placement.reset(sandbox.id, hold=door)
                boundary = placed.boundary or await core.placement.measure(sandbox.id)
                if self.doors is not None:  # the new wall has neither the links nor the bundle of the old one
                    await self.doors.open(sandbox)
                if placed.held:
                    await core.placement.bring_up(sandbox.id)
            except BaseException:
                with contextlib.suppress(RingfenceError):
                    await core.change(
                        sandbox, expect={State.RUNNING}, event="reset_failed", drop=("resetting",)
                    )
                raise
            finally:
                self.links.drop(sandbox.id)
            done = await core.change(
                sandbox,
                expect={State.RUNNING},
                event="reset",
                drop=("resetting",),
                boundary=dict(boundary),
                active=core.now(),
            )
            self.links.saw(done)
            return done

    # -- snapshots

    async def snapshot(
        self, sandbox: Sandbox, name: str = "", kind: str | None = None, *, temporary: bool = False
    ) -> Row:
        """Save it. Returns the snapshot's row: id, key (its name), state and the facts in the document.

        Raises:
            WrongState, Unsupported; Conflict: the project has a snapshot of that name.
        """
        core = self.core
        if sandbox.state not in (State.RUNNING, State.PAUSED):
            raise wrong_state(sandbox)
        if kind not in (None, "disk", "memory"):
            raise InvalidRequest(f"there is no snapshot of kind {kind!r}", hint="disk or memory")
        self.able(sandbox, *((f"{kind}_snapshot",) if kind else ("disk_snapshot", "memory_snapshot")))
        async with core.alone(sandbox.id):
            id = new_id("sn")
            token = core.token()
            now = core.now()
            row = Row(
                SNAPSHOT,
                id,
                sandbox.project,
                MAKING,
                key=name or id,
                created=now,
                document={
                    "name": name or id,
                    "sandbox": sandbox.id,
                    "template": sandbox.template,
                    "digest": sandbox.digest,
                    "policy": dict(sandbox.policy),
                    "runtime": sandbox.runtime,
                    "kind": kind,
                    "temporary": temporary,
                    "lineage": list(sandbox.family),
                    "revoked": list(sandbox.revoked),
                    "actor": token,
                },
            )
            try:
                (row,) = await core.commit(Put(row, unique=True), self._told(row, "making"))
                return await self.finish_snapshot(row)
            finally:
                core.done(token)

    async def finish_snapshot(self, row: Row) -> Row:
        """Do what ``making`` says; nothing is left if it can't be done."""
        core = self.core
        document = row.document
        try:
            facts = await core.placement.snapshot(str(document["sandbox"]), row.id, document.get("kind"))
        except NodeUnavailable:
            raise
        except RingfenceError:
            await self.remove_snapshot(row)
            raise
        finally:
            # A snapshot with memory ends every link.
            self.links.drop(str(document["sandbox"]))
        ready = {key: value for key, value in document.items() if key != "actor"}
        size = int(facts.get("size") or 0)
        ready |= {"facts": dict(facts), "kind": facts.get("kind", document.get("kind")), "charged": size}
        due = core.now() + TEMPORARY_TIME if document.get("temporary") else None
        try:
            (done,) = await core.commit(
                Put(replace(row, state=READY, document=ready, due=due)),
                *await core.admission.storage(row.project, size),
                self._told(row, "ready", kind=ready["kind"]),
            )
        except QuotaExceeded:
            await self.remove_snapshot(row)
            raise
        return done

    def _told(self, row: Row, name: str, **data: Any) -> Event:
        facts = {"sandbox": row.document.get("sandbox"), **data}
        return Event(SNAPSHOT, row.id, row.project, f"snapshot.{name}", self.core.now(), facts)

    async def snapshots(self, project: str, after: str = "", limit: int = 100) -> list[Row]:
        """Those of a project that are ready, by id."""
        return await self.core.store.find(SNAPSHOT, project=project, states=[READY], after=after, limit=limit)

    async def find_snapshot(self, project: str, name: str) -> Row:
        """One by id or name.

        Raises:
            NotFound: the project has none.
        """
        store = self.core.store
        with contextlib.suppress(NotFound):
            row = await store.get(SNAPSHOT, name)
            if row.project == project:
                return row
        for row in await store.find(SNAPSHOT, project=project, key=name, limit=1):
            return row
        raise NotFound(f"there is no snapshot {name}", hint="`ringfence snapshot ls` shows those there are")

    async def remove_snapshot(self, row: Row) -> None:
        """Remove it at the placement, then from the store. Idempotent. One that sandboxes live on is out of
        everybody's sight at once, and goes with the last of them.
        """
        core = self.core
        try:
            if row.state != REMOVING:
                (row,) = await core.commit(
                    Put(replace(row, state=REMOVING, due=core.now())), self._told(row, "removing")
                )
        except Conflict:
            row = await core.store.get(SNAPSHOT, row.id)
        try:
            await core.placement.remove_snapshot(row.id)
        except NotFound:
            pass
        except RingfenceError as error:  # in use, or nobody answers: the reconciler asks again
            if not isinstance(error, NodeUnavailable | WrongState):
                log.warning("snapshot %s can't be removed yet: %s", row.id, error)
            with contextlib.suppress(Conflict):
                await core.commit(Put(replace(row, due=core.now() + core.settings.retry_most)))
            return
        charged = int(row.document.get("charged") or 0)
        less = await core.admission.storage(row.project, -charged) if charged else ()
        with contextlib.suppress(Conflict):  # somebody else has removed it
            await core.commit(Remove(SNAPSHOT, row.id, row.revision), *less, self._told(row, "removed"))


def shown(row: Row) -> dict[str, Any]:
    """A snapshot as its owner sees it."""
    document: Mapping[str, Any] = row.document
    names = ("name", "sandbox", "template", "digest", "runtime", "kind")
    return {
        "id": row.id,
        "project": row.project,
        "state": row.state,
        "created": row.created,
        **{name: document.get(name) for name in names},
        "size": (document.get("facts") or {}).get("size"),
    }
