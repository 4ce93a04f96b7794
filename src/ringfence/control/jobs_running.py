"""Running jobs: who is next, one attempt from its sandbox to its outputs, and what a dead process began.

An attempt is written into the job's row (number, who acts) before its sandbox is asked for, and the sandbox
is asked for with a key made of job and attempt: whoever comes after a process that died gets the same one,
attaches to the command where the log ends, or learns that the attempt is lost: none is ever doubled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ringfence.control import idempotency
from ringfence.control.core import Core, log
from ringfence.control.jobs import (
    CANCELLED,
    FAILED,
    FINAL,
    KIND,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    Jobs,
    policy_of,
)
from ringfence.control.jobs_contents import Over, fetch, keep
from ringfence.control.jobs_files import STDERR, STDOUT, JobFiles, Log, usage
from ringfence.control.jobs_shared import shared_of
from ringfence.control.principals import Principal
from ringfence.control.records import CreateSandbox, Sandbox
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import GuestProcess, ProcessSpec
from ringfence.model.errors import (
    Conflict,
    DeadlineExceeded,
    GuestRefused,
    HostLimit,
    InvalidRequest,
    LinkLost,
    NodeUnavailable,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    StartFailed,
    StoreUnavailable,
    WrongState,
)
from ringfence.model.states import State
from ringfence.placement.contract import VolumeMount
from ringfence.store.contract import Put, Row

if TYPE_CHECKING:
    from ringfence.control.sandboxes import Sandboxes
    from ringfence.control.service import Control

AT_ONCE: Final = 8  # attempts of one process
EVERY: Final = 0.5  # seconds between two looks at the queue
PROCESS: Final = "job"
RING: Final = 1024 * 1024
MOST_LOG: Final = 32 * 1024 * 1024  # bytes of an attempt that are kept
COLLECTING: Final = 300.0  # seconds after the deadline in which outputs may be fetched
MOST_BACKOFF: Final = 600.0
_LOOK: Final = 500  # waiting jobs that one look takes in
_CLEANING: Final = 30.0  # seconds after which another removes what a process that died had to remove
_METER: Final = 128 * 1024
# A start that failed so may go better later; what is not named is the job's own fault.
_TRANSIENT = (NodeUnavailable, StoreUnavailable, StartFailed, HostLimit, DeadlineExceeded, LinkLost, Conflict)


class _TakenOver(Exception):
    """This process was thought dead: the job is another's now."""


class Runner:
    """The jobs of one process. :meth:`run` until cancelled; attempts under way are then left to whoever
    comes next.
    """

    def __init__(self, control: Control, jobs: Jobs, *, at_once: int = AT_ONCE) -> None:
        self.core: Core = control.core
        self.jobs = jobs
        self.sandboxes: Sandboxes = control.sandboxes
        self.control = control
        self.at_once = at_once
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._served: dict[str, int] = {}  # project: its last turn
        self._turn = 0
        jobs.urge = self._wake.set
        jobs.stop = self._stop

    def _stop(self, id: str) -> None:
        if id in self._stops:
            self._stops[id].set()

    async def run(self) -> None:
        """Look at the queue whenever something may have come or become free."""
        if self.jobs.files is None:
            return
        try:
            while True:
                try:
                    await self.sweep()
                except (StoreUnavailable, NodeUnavailable) as error:
                    log.warning("jobs: %s", error)
                except Exception:
                    log.exception("looking at the jobs failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def sweep(self) -> None:
        """One look: adopt, start, expire."""
        files = self.jobs.files
        assert files is not None
        running = await self.core.store.find(KIND, states=[RUNNING], limit=1000)
        for row in running:
            if row.key == files.home and row.id not in self._running and await self._abandoned(row):
                await self._take(row, adopt=True)
        await self._next(running, files)
        for row in await self.core.store.due(KIND, self.core.now(), states=FINAL):
            with contextlib.suppress(Conflict, NotFound):
                await self._due(row)
        await self.jobs.tidy()

    async def _abandoned(self, row: Row) -> bool:
        actor = str(row.document.get("actor", ""))
        owner = actor.rsplit("/", 1)[0]
        if owner == self.core.owner:
            return not self.core.acts(actor)
        name = f"process/{owner}"
        if not await self.core.store.lease(name, self.core.owner, 0.5):
            return False
        await self.core.store.release(name, self.core.owner)
        return True

    async def _next(self, running: list[Row], files: JobFiles) -> None:
        """Start what may start: the project with the fewest running first, in it by priority, then age."""
        if len(self._served) > _LOOK:
            self._served.clear()
        room = self.at_once - len(self._running)
        if room <= 0:
            return
        now = self.core.now()
        waiting = await self._waiting(files.home)
        busy = Counter(row.project for row in running)
        for row in waiting:
            if float(row.document["deadline"]) <= now:
                with contextlib.suppress(Conflict):
                    await self._end(row, FAILED, cause="deadline", detail="its time was over")
        # What an attempt leaves behind is removed after its end is known: the next one waits for that.
        free = [row for row in waiting if row.id not in self._running]
        ready = [row for row in free if (row.due or 0) <= now < float(row.document["deadline"])]
        ready.sort(key=lambda row: (-int(row.document["priority"]), row.id))
        while ready and room > 0:
            # Stable: the first of that project. Of those with as many running, whose turn is longest ago.
            row = min(ready, key=lambda each: (busy[each.project], self._served.get(each.project, 0)))
            ready.remove(row)
            busy[row.project] += 1
            self._turn += 1
            self._served[row.project] = self._turn
            if await self._take(row):
                room -= 1

    async def _waiting(self, home: str) -> list[Row]:
        store = self.core.store
        rows = await store.find(KIND, states=[QUEUED], key=home, limit=_LOOK)
        if len(rows) == _LOOK:  # one project's flood must not hide the others'
            seen = {row.id for row in rows}
            for project in await store.find("project", limit=1000):
                more = await store.find(KIND, project=project.id, states=[QUEUED], key=home, limit=50)
                rows += [row for row in more if row.id not in seen]
        return rows

    async def _take(self, row: Row, *, adopt: bool = False) -> bool:
        """Make it this process's, by one conditional write, and go on with it in the background."""
        token = self.core.token()
        document = {**row.document, "actor": token}
        if not adopt:
            number = len(document["attempts"]) + 1
            attempt = {"number": number, "started_at": self.core.now(), "sandbox": ""}
            document |= {"attempts": [*document["attempts"], attempt], "left": int(document["left"]) - 1}
        try:
            (mine,) = await self.core.commit(
                Put(replace(row, state=RUNNING, due=None, document=document)),
                self.jobs.told(row, "adopted" if adopt else "running", attempt=len(document["attempts"])),
            )
        except Conflict:
            self.core.done(token)
            return False
        self._stops[row.id] = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._attempt(mine, token))
        self._running[row.id] = task
        task.add_done_callback(lambda task: self._done(row.id, token, task))
        return True

    def _done(self, id: str, token: str, task: asyncio.Task[None]) -> None:
        if self._running.get(id) is task:
            del self._running[id], self._stops[id]
        self.core.done(token)
        self._wake.set()

    # -- one attempt

    async def _attempt(self, row: Row, token: str) -> None:
        sandbox: Sandbox | None = None
        principal = _principal(row)
        try:
            try:
                for earlier in row.document["attempts"][:-1]:
                    if earlier["sandbox"]:
                        await self._destroy(principal, str(earlier["sandbox"]))
                sandbox = await self._guarded(row, self._sandbox(row, principal))
                await self._guarded(row, self._work(row, principal, sandbox))
            except Over as over:
                await self._finish(row, principal, over)
            except QuotaExceeded as error:  # no room now: it was no attempt
                await self._wait(row, float(error.details.get("retry_after") or 2.0))
            except OSError as error:  # our own disk
                lost = Over(cause="lost", detail=f"the service could not keep its output: {error.strerror}")
                await self._finish(row, principal, lost)
            except _TRANSIENT as error:
                await self._finish(
                    row, principal, Over(cause="lost", detail=error.message, error=error.as_dict())
                )
            except RingfenceError as error:
                refused = Over(FAILED, cause="refused", detail=error.message, error=error.as_dict())
                await self._finish(row, principal, refused)
        except (_TakenOver, Conflict, StoreUnavailable) as error:
            log.warning("job %s: %s", row.id, error)  # the next look finds it abandoned
        except RingfenceError:
            log.exception("job %s", row.id)

    async def _guarded(self, row: Row, work: Any) -> Any:
        """The result of work, unless the job is cancelled or its time is over before."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._until_stop(row))
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            await stop  # raises
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _until_stop(self, row: Row) -> None:
        event = self._stops[row.id]
        while True:
            rest = float(row.document["deadline"]) - self.core.now()
            if rest <= 0:
                raise Over(FAILED, cause="deadline", detail="its time was over")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(rest, 1.0)):
                    await event.wait()
            event.clear()
            with contextlib.suppress(StoreUnavailable):
                now = (await self.core.store.get(KIND, row.id)).document
                if now.get("actor") != row.document["actor"]:
                    raise _TakenOver(f"another process goes on with job {row.id}")
                if now.get("cancel"):
                    raise Over(CANCELLED, cause="cancelled")

    async def _sandbox(self, row: Row, principal: Principal) -> Sandbox:
        spec = row.document["spec"]
        number = len(row.document["attempts"])
        policy = policy_of(row)
        rest = max(1.0, float(row.document["deadline"]) - self.core.now()) + COLLECTING
        policy = policy.with_door(limits=replace(policy.door.limits, timeout=rest, idle=None))
        key = f"job/{row.id}/{number}"
        request = CreateSandbox(
            policy=policy,
            template=str(spec["template"]),
            env=dict(spec["env"]),
            labels={**row.labels, "ringfence.job": row.id},
            volumes=tuple(VolumeMount(*each) for each in spec["volumes"]),
            idempotency_key=key,
            digest=key,
        )
        try:
            made = await self.sandboxes.create(principal, request)
        except WrongState as error:
            if "volume" in error.details:  # another has it: wait for it
                raise QuotaExceeded(error.message, hint=error.hint) from None
            raise
        if made.state is not State.RUNNING:
            raise Over(cause=made.cause or "lost", detail=made.detail or f"its sandbox is {made.state.value}")
        if row.document["attempts"][-1]["sandbox"] != made.id:

            def note(now: Row) -> tuple[Row, str]:
                attempts = [
                    *now.document["attempts"][:-1],
                    {**now.document["attempts"][-1], "sandbox": made.id},
                ]
                return replace(now, document={**now.document, "attempts": attempts}), "placed"

            await self.jobs.change(row.id, note, sandbox=made.id)
        return made

    async def _work(self, row: Row, principal: Principal, sandbox: Sandbox) -> None:
        files = self.jobs.files
        assert files is not None
        try:
            record = Log(files.log(row.id, len(row.document["attempts"])), MOST_LOG)
        except Conflict as error:  # who had it before has not noticed yet: another look takes it again
            raise _TakenOver(error.message) from None
        try:
            while True:
                try:
                    link = await self.control.new_link(principal, sandbox.id)
                    async with link:
                        process = await self._process(row, link, record)
                        await self._follow(sandbox, process, record)
                        exit = process.exit
                        assert exit is not None
                        artifacts, missing = await keep(row, link, files)
                        told: Mapping[str, Any] = {"cause": "exited"}
                        if exit.status:
                            told = await self.core.placement.judge(sandbox.id, exit.status)
                    break
                except (LinkLost, NodeUnavailable):  # the command lives on: go on where the log ends
                    await self._check(sandbox)
                    await asyncio.sleep(0.2)
        except (NotFound, WrongState):
            await self._check(sandbox)
            raise
        finally:
            record.close()
        facts: dict[str, Any] = {"exit_code": exit.status, "artifacts": artifacts, "missing": missing}
        state = "" if exit.status else SUCCEEDED
        raise Over(state, cause=str(told["cause"]), detail=str(told.get("detail") or ""), **facts)

    async def _check(self, sandbox: Sandbox) -> None:
        """Its sandbox lives, or the attempt is over."""
        now = await self.core.get(sandbox.id)
        if now.final or now.state is State.STOPPING:
            raise Over(
                cause=now.cause or "lost", detail=now.detail or "its sandbox ended", exit_code=now.exit_code
            )

    async def _process(self, row: Row, link: GuestLink, record: Log) -> GuestProcess:
        """The command, started or found again."""
        try:
            return await link.attach(
                PROCESS, record.offsets[STDOUT], record.offsets[STDERR], window=RING // 4
            )
        except GuestRefused as error:
            if error.errno != errno.ENOENT:
                raise
        spec = row.document["spec"]
        files = self.jobs.files
        assert files is not None
        for path, digest in spec["files"].items():
            await link.files.write(path, files.read(row.id, digest), parents=True)
        for each in spec["fetch"]:
            await fetch(link, str(each["url"]), str(each["path"]))
        command = ProcessSpec(tuple(spec["argv"]), cwd=spec["cwd"], id=PROCESS, ring=RING, window=RING // 4)
        try:
            return await link.start(command)
        except GuestRefused as error:
            raise InvalidRequest(
                f"the command can't start: {error.message}", hint="see the template"
            ) from None

    async def _follow(self, sandbox: Sandbox, process: GuestProcess, record: Log) -> None:
        untold = 0
        async with process:
            async for stream, offset, data in process:
                await asyncio.to_thread(record.add, stream, offset, data)
                untold += len(data)
                if untold >= _METER:
                    await self.core.placement.spent(sandbox.id, untold)
                    untold = 0
            await process.wait()
        if untold:
            await self.core.placement.spent(sandbox.id, untold)

    # -- the end of an attempt

    async def _finish(self, row: Row, principal: Principal, over: Over) -> None:
        """Write how it ended, then remove its sandbox."""
        files = self.jobs.files
        assert files is not None
        now = self.core.now()
        facts = over.facts
        number = len(row.document["attempts"])
        left = [files.folder(row.id) / str(each["sha256"]) for each in facts.get("artifacts", ())]
        await self.jobs.share(row, dict.fromkeys(left, "") | {files.log(row.id, number): str(number)})
        size = await asyncio.to_thread(usage, files.folder(row.id))
        sandbox = ""

        def new(had: Row) -> tuple[Row, str]:
            nonlocal sandbox
            if had.state != RUNNING or had.document.get("actor") != row.document["actor"]:
                raise Conflict("another process has taken this job over")
            last = dict(had.document["attempts"][-1]) | {"ended_at": now}
            last |= {
                name: facts[name] for name in ("cause", "exit_code", "detail") if facts.get(name) is not None
            }
            sandbox = str(last["sandbox"])
            document = {**had.document, "attempts": [*had.document["attempts"][:-1], last]}
            had = replace(had, document=document)
            state = over.state
            if document.get("cancel") and state != SUCCEEDED:
                state = CANCELLED
            pause = _pause(document)
            if not state and (document["left"] < 1 or now + pause >= float(document["deadline"])):
                state = FAILED
            if state:
                ended = self.jobs.ended(had, state, **{"artifacts": [], "missing": [], **facts})
                more = {"charged": size, "cleaning": True}
                return replace(ended, due=now + _CLEANING, document={**ended.document, **more}), state
            del document["actor"]
            return replace(had, state=QUEUED, due=now + pause, document=document), "waiting"

        await self._settle(row.id, new, size)
        if not sandbox:  # nobody noted it: it may have been asked for all the same
            key = f"job/{row.id}/{number}"
            with contextlib.suppress(RingfenceError):
                sandbox = await idempotency.replay(self.core, principal, key, key) or ""
        if sandbox:
            await self._destroy(principal, sandbox)
        await self._cleaned(row.id)

    async def _destroy(self, principal: Principal, sandbox: str) -> None:
        with contextlib.suppress(NotFound):
            await self.sandboxes.delete(principal, sandbox)

    async def _cleaned(self, id: str) -> None:
        """Nothing of its sandboxes is left: it is kept until its time is over."""

        def new(row: Row) -> tuple[Row, str]:
            if row.state not in FINAL or not row.document.get("cleaning"):
                return row, ""
            document = {name: value for name, value in row.document.items() if name != "cleaning"}
            due = float(document["ended_at"]) + float(document["spec"]["ttl"])
            return replace(row, due=due, document=document), "cleaned"

        with contextlib.suppress(NotFound):
            await self.jobs.change(id, new)

    async def _due(self, row: Row) -> None:
        """One that has ended: its sandbox was left by a process that died, or its time is over."""
        if not row.document.get("cleaning"):
            await self.jobs.forget(row)
            return
        for attempt in row.document["attempts"]:
            if attempt["sandbox"]:
                await self._destroy(_principal(row), str(attempt["sandbox"]))
        await self._cleaned(row.id)

    async def _settle(self, id: str, new: Any, size: int) -> None:
        """Commit it with what its files cost; without them where the project has no room."""
        for _ in range(20):
            row = await self.core.store.get(KIND, id)
            changed, name = new(row)
            more = size - int(row.document.get("charged", 0)) if changed.state in FINAL else 0
            storage = await self.core.admission.storage(row.project, more) if more else ()
            try:
                await self.core.commit(Put(changed), *storage, self.jobs.told(row, name))
                return
            except QuotaExceeded as error:
                assert self.jobs.files is not None
                inputs = set(row.document["spec"]["files"].values())
                left = {each["sha256"] for each in changed.document.get("artifacts", ())} - inputs
                # Before it is known to have ended: it may be retried the moment after.
                await asyncio.to_thread(self.jobs.files.drop, id, left)
                if self.jobs.shared is not None:
                    there = shared_of(row)
                    await self.jobs.shared.drop(id, {name: there[name] for name in left if name in there})
                kept = {**changed.document, "artifacts": [], "cause": "outputs", "error": error.as_dict()}
                kept |= {"detail": error.message, "charged": int(row.document.get("charged", 0))}
                with contextlib.suppress(Conflict):
                    await self.core.commit(
                        Put(replace(changed, state=FAILED, document=kept)), self.jobs.told(row, FAILED)
                    )
                    return
            except Conflict:
                continue
        raise Conflict(f"job {id} is changed all the time")

    async def _wait(self, row: Row, seconds: float) -> None:
        """Back into the queue, as if it had not been taken."""

        def new(had: Row) -> tuple[Row, str]:
            if had.state != RUNNING or had.document.get("actor") != row.document["actor"]:
                raise _TakenOver(f"another process goes on with job {row.id}")
            document = {name: value for name, value in had.document.items() if name != "actor"}
            document |= {"attempts": document["attempts"][:-1], "left": int(document["left"]) + 1}
            if document.get("cancel"):
                ended = self.jobs.ended(replace(had, document=document), CANCELLED, cause="cancelled")
                return ended, CANCELLED
            return replace(had, state=QUEUED, due=self.core.now() + seconds, document=document), "waiting"

        await self.jobs.change(row.id, new)

    async def _end(self, row: Row, state: str, **facts: Any) -> None:
        ended = self.jobs.ended(row, state, **facts)
        await self.core.commit(Put(ended), self.jobs.told(row, state))


def _pause(document: Mapping[str, Any]) -> float:
    """Seconds until the next attempt: twice as long each time."""
    done = len(document["attempts"])
    return min(MOST_BACKOFF, float(document["spec"]["backoff"]) * 2.0 ** min(done - 1, 20))


def _principal(row: Row) -> Principal:
    """Whoever submitted it, for what his job may do."""
    document = row.document
    return Principal(str(document["organisation"]), row.project, str(document["user"]), "", ("run",))
