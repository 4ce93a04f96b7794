"""Jobs: commands that run to completion in sandboxes of their own. The store has their state; what they
brought and left is in :mod:`ringfence.control.jobs_files`; :mod:`ringfence.control.jobs_running` runs them.

``queued`` → ``running`` → ``succeeded``, ``failed`` or ``cancelled``; from ``running`` back to ``queued`` for
the next attempt. Every attempt has a fresh sandbox and is in the row before that sandbox exists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringfence.control import volumes
from ringfence.control.core import Core
from ringfence.control.jobs_files import STDERR, STDOUT, JobFiles, LogReader, usage
from ringfence.control.jobs_shared import AT_ONCE, SharedFiles, missing, records, removed, shared_of
from ringfence.model.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Unsupported,
    WrongState,
)
from ringfence.model.ids import new_id
from ringfence.model.policies import from_dict
from ringfence.model.policy import Policy
from ringfence.model.values import dataclass
from ringfence.placement.contract import VolumeMount
from ringfence.store.contract import Event, Put, Remove, Row

if TYPE_CHECKING:
    from ringfence.control.principals import Principal

KIND: Final = "job"
QUEUED, RUNNING = "queued", "running"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
FINAL: Final = (SUCCEEDED, FAILED, CANCELLED)
DEFAULT_DEADLINE: Final = 3600.0  # seconds
DEFAULT_TTL: Final = 7 * 24 * 3600.0
MOST_RETRIES: Final = 20
MOST_QUEUED: Final = 10_000  # of a project
_TRIES: Final = 20
_FOLLOW: Final = 0.1  # seconds between two looks at a log that grows
List = list  # the class has a method of that name


@dataclass(frozen=True, slots=True)
class Fetch:
    """A URL whose content is put at a path inside, through egress."""

    url: str
    path: str


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job, please. Times are seconds; ``deadline``: for all attempts together, the queue included.

    ``files``: path inside → content. ``outputs``: paths inside that are kept at the end, folders as tar.
    ``retries``: attempts after the first; they wait ``backoff`` seconds, twice as long each time. ``ttl``:
    how long it is kept after its end. Higher ``priority`` comes first within a project.
    """

    argv: tuple[str, ...]
    policy: Policy = field(default_factory=Policy)
    template: str = "host"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[Fetch, ...] = ()
    volumes: tuple[VolumeMount, ...] = ()
    outputs: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    deadline: float = DEFAULT_DEADLINE
    retries: int = 0
    backoff: float = 1.0
    priority: int = 0
    ttl: float = DEFAULT_TTL


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the store knows it."""

    row: Row

    @property
    def id(self) -> str:
        """Its id."""
        return self.row.id

    @property
    def state(self) -> str:
        """queued, running, succeeded, failed or cancelled."""
        return self.row.state

    @property
    def attempts(self) -> List[Mapping[str, Any]]:
        """Each with number, sandbox, started_at, ended_at, cause, exit_code, detail."""
        return list(self.row.document.get("attempts", ()))

    def as_dict(self) -> dict[str, Any]:
        """What its owner may see; JSON-able."""
        document = self.row.document
        spec = document["spec"]
        shown = {
            "id": self.row.id,
            "project": self.row.project,
            "state": self.row.state,
            "created_at": self.row.created,
            "labels": dict(self.row.labels),
            "command": spec["argv"],
            "template": spec["template"],
            "outputs": spec["outputs"],
            "priority": document["priority"],
            "retries": spec["retries"],
            "deadline": document["deadline"],
            "ttl": spec["ttl"],
            "attempts": self.attempts,
            "cancelling": bool(document.get("cancel")) and self.row.state not in FINAL,
        }
        for name in ("exit_code", "cause", "detail", "error", "artifacts", "missing", "ended_at"):
            shown[name] = document.get(name, [] if name in ("artifacts", "missing") else None)
        return shown


class Jobs:
    """Jobs of the service. Every call is within the principal's project."""

    def __init__(
        self,
        core: Core,
        folder: Path | None,
        *,
        egress: Callable[[], bool] = lambda: False,
        sharing: bool = False,
    ) -> None:
        self.core = core
        self.shared = SharedFiles(core.store) if sharing else None
        self.files = None if folder is None else JobFiles(folder)
        self.egress = egress
        self._settled: Iterator[str] = iter(())
        self.urge: Callable[[], None] = lambda: None  # told that there is something to run
        self.stop: Callable[[str], None] = lambda id: None  # told that a job is to end

    def _files(self) -> JobFiles:
        if self.files is None:
            raise Unsupported("this service has no folder for what jobs leave", capability="jobs")
        return self.files

    async def submit(self, principal: Principal, spec: JobSpec) -> Job:
        """Queue one; returns at once.

        Raises:
            InvalidRequest: what can't be, by name. NotFound: no such volume. Unsupported: a URL, no egress.
            QuotaExceeded: too many wait, or the project has no room for what it brings.
        """
        files, core = self._files(), self.core
        self._check(spec)
        mounts, _ = await volumes.attached(core, principal.project, spec.volumes)
        if await core.store.count(KIND, project=principal.project, states=[QUEUED]) >= MOST_QUEUED:
            raise QuotaExceeded(
                f"{MOST_QUEUED} jobs of the project wait", hint="cancel some, or wait", most=MOST_QUEUED
            )
        now = core.now()
        id = new_id("job")
        inputs = {}
        if spec.files:
            for path, data in spec.files.items():
                inputs[path] = await asyncio.to_thread(files.put, id, data)
        stored = {
            "argv": list(spec.argv), "policy": spec.policy.to_dict(), "template": spec.template,
            "env": dict(spec.env), "cwd": spec.cwd, "files": inputs,
            "fetch": [asdict(each) for each in spec.fetch],
            "volumes": [[each.volume, each.path, each.read_only] for each in mounts],
            "outputs": list(spec.outputs), "retries": spec.retries, "backoff": spec.backoff,
            "ttl": spec.ttl, "deadline": spec.deadline,
        }  # fmt: skip
        row = Row(
            KIND, id, principal.project, QUEUED, key=files.home, due=now, created=now,
            labels=dict(spec.labels),
            document={
                "spec": stored, "priority": spec.priority, "deadline": now + spec.deadline,
                "left": spec.retries + 1, "organisation": principal.organisation, "user": principal.user,
                "attempts": [],
            },
        )  # fmt: skip
        try:
            # From now on: so many may wait that what they bring would fill the disk uncounted.
            size = await asyncio.to_thread(usage, files.folder(id))
            row = replace(row, document={**row.document, "charged": size})
            storage = await core.admission.storage(row.project, size) if size else ()
            (row,) = await core.commit(Put(row), *storage, self.told(row, "queued"))
        except BaseException:
            files.remove(id)
            raise
        self.urge()
        return Job(row)

    def _check(self, spec: JobSpec) -> None:
        if not spec.argv or any("\0" in word for word in spec.argv):
            raise InvalidRequest("a job needs a command, without NUL bytes")
        if not 0 <= spec.retries <= MOST_RETRIES:
            raise InvalidRequest(f"{spec.retries} retries; 0 to {MOST_RETRIES} are possible")
        if spec.fetch:
            if spec.policy.door.network.mode != "egress":
                raise InvalidRequest(
                    "a URL as input goes through egress, and this job's policy has none",
                    hint="give it `network: {mode: egress, allow: [{host: …}]}`",
                    field="inputs",
                )
            if not self.egress():
                raise Unsupported(
                    "this service has no egress, so it can fetch no URL", capability="network.egress"
                )

    def told(self, row: Row, what: str, **data: Any) -> Event:
        """An event of a job."""
        return Event(KIND, row.id, row.project, f"job.{what}", self.core.now(), data)

    # -- look

    async def list(
        self,
        principal: Principal,
        *,
        states: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        after: str = "",
        limit: int = 100,
    ) -> List[Job]:
        """The project's, by id."""
        rows = await self.core.store.find(
            KIND, project=principal.project, states=states, labels=labels, after=after, limit=limit
        )
        return [Job(row) for row in rows]

    async def get(self, principal: Principal, id: str) -> Job:
        """One of the project's. Raises NotFound."""
        row = await self.core.store.get(KIND, id)
        if row.project != principal.project:
            raise NotFound(f"no job {id[:64]!r}")
        return Job(row)

    async def logs(
        self,
        principal: Principal,
        id: str,
        *,
        attempt: int | None = None,
        streams: tuple[int, ...] = (STDOUT, STDERR),
        follow: bool = False,
    ) -> AsyncIterator[bytes]:
        """What an attempt (default: the last) printed, as it was printed; ``follow``: until the job ends.

        Raises:
            NotFound: no such attempt.
        """
        job = await self.get(principal, id)
        files = self._files()
        number = len(job.attempts) if attempt is None else attempt
        if attempt is not None and not 1 <= attempt <= len(job.attempts):
            raise NotFound(f"job {id} has no attempt {attempt}", hint=f"it has {len(job.attempts)}")
        if job.row.key != files.home:
            async for piece in self._elsewhere(principal, job, attempt, streams, follow):
                yield piece
            return
        reader = LogReader(files.log(id, number), streams)
        while True:
            # What is over now has said all that it will say: judged before it is read.
            over, earlier = job.state in FINAL, number < len(job.attempts)
            for piece in (found := await asyncio.to_thread(reader.more)):
                yield piece
            if found:
                continue
            if earlier and follow and attempt is None:
                number += 1
                reader = LogReader(files.log(id, number), streams)
                continue
            if over or earlier or not follow:
                return
            await asyncio.sleep(_FOLLOW)
            job = await self.get(principal, id)
            if number == 0 and job.attempts:
                number = 1
                reader = LogReader(files.log(id, number), streams)

    async def _elsewhere(
        self, principal: Principal, job: Job, attempt: int | None, streams: tuple[int, ...], follow: bool
    ) -> AsyncIterator[bytes]:
        """The log of a job that another machine runs: attempts that are over, one after the other if it is
        to be followed.
        """
        number = len(job.attempts) if attempt is None else attempt
        while True:
            ended = number and number <= len(job.attempts) and job.attempts[number - 1].get("ended_at")
            over = job.state in FINAL or bool(ended)
            told = dict(job.row.document.get("logs", {})).get(str(number))
            if over and told is not None and self.shared is not None:
                digest, size = str(told[0]), int(told[1])
                async for piece in records(await self.shared.opened(job.id, digest, size), streams):
                    yield piece
            elif over and 0 < number <= len(job.attempts):
                raise missing(job.id)
            if (job.state in FINAL and number >= len(job.attempts)) or (
                over and not (follow and attempt is None)
            ):
                return
            if over:
                number += 1
            elif not follow:
                raise missing(job.id)
            else:
                await asyncio.sleep(_FOLLOW)
            job = await self.get(principal, job.id)
            number = number or len(job.attempts)

    async def artifact(
        self, principal: Principal, id: str, name: str
    ) -> tuple[Mapping[str, Any], AsyncIterator[bytes]]:
        """An artifact that was kept, by its name or digest: what is known of it, and its content.

        Raises:
            NotFound.
        """
        job = await self.get(principal, id)
        for each in job.row.document.get("artifacts", ()):
            if name in (each["name"], each["sha256"]):
                return each, await self.content(job.row, str(each["sha256"]))
        raise NotFound(f"job {id} kept no {name[:80]!r}", hint="its record lists its artifacts")

    async def content(self, row: Row, digest: str) -> AsyncIterator[bytes]:
        """A file of a job, from here or from the store.

        Raises:
            NotFound.
        """
        files, there = self._files(), shared_of(row)
        try:
            files.path(row.id, digest)
        except NotFound:
            if self.shared is None or digest not in there:
                raise missing(row.id) from None
            return await self.shared.opened(row.id, digest, there[digest])
        return files.read(row.id, digest)

    async def share(self, row: Row, paths: Mapping[Path, str]) -> None:
        """Copy files of a job (path → the number of the attempt whose log it is, or ``""``) into the store,
        where other machines read it; nothing where none do.

        Raises:
            Conflict: another process goes on with the job.
        """
        if self.shared is None:
            return
        files = self._files()
        found = {path: await asyncio.to_thread(files.facts, path) for path in paths if path.is_file()}
        logs = {number: list(found[path]) for path, number in paths.items() if number and path in found}
        for _ in range(_TRIES):
            now = await self.core.store.get(KIND, row.id)
            if now.document.get("actor") != row.document.get("actor"):
                raise Conflict("another process has taken this job over")
            document = {**now.document, "shared": shared_of(now) | dict(found.values())}
            document["logs"] = dict(now.document.get("logs", {})) | logs
            with contextlib.suppress(Conflict):
                await self.core.commit(Put(replace(now, document=document)))
                break
        else:
            raise Conflict(f"job {row.id} is changed all the time")
        for path, (digest, _) in found.items():
            await self.shared.put(row, digest, path)

    # -- change

    async def change(self, id: str, new: Callable[[Row], tuple[Row, str]], **data: Any) -> Row:
        """Change a row by what it is now; ``new`` gives the row and the event's name, or raises."""
        for _ in range(_TRIES):
            row = await self.core.store.get(KIND, id)
            changed, name = new(row)
            if changed is row:
                return row
            with contextlib.suppress(Conflict):
                (stored,) = await self.core.commit(Put(changed), self.told(changed, name, **data))
                return stored
        raise Conflict(f"job {id} is changed all the time", hint="try again")

    async def cancel(self, principal: Principal, id: str) -> Job:
        """End it: at once if it waits, soon if it runs. Idempotent."""
        await self.get(principal, id)

        def new(row: Row) -> tuple[Row, str]:
            if row.state in FINAL or row.document.get("cancel"):
                return row, ""
            if row.state == QUEUED:
                return self.ended(row, CANCELLED, cause="cancelled"), CANCELLED
            return replace(row, document={**row.document, "cancel": True}), "cancelling"

        row = await self.change(id, new)
        self.stop(id)
        return Job(row)

    async def retry(self, principal: Principal, id: str) -> Job:
        """Another attempt of one that has ended, with a deadline as long as the first.

        Raises:
            WrongState: it has not ended.
        """
        await self.get(principal, id)
        now = self.core.now()

        def new(row: Row) -> tuple[Row, str]:
            if row.state not in FINAL:
                raise WrongState(f"job {id} is {row.state}", hint="retry it when it has ended")
            kept = {
                name: value for name, value in row.document.items()
                if name not in ("exit_code", "cause", "detail", "error", "missing", "ended_at", "cancel")
            }  # fmt: skip
            kept |= {"left": 1, "deadline": now + float(row.document["spec"]["deadline"])}
            return replace(row, state=QUEUED, due=now, document=kept), "queued"

        row = await self.change(id, new)
        self.urge()
        return Job(row)

    async def remove(self, principal: Principal, id: str) -> None:
        """Forget one that has ended, with all that it left.

        Raises:
            WrongState: it has not ended.
        """
        job = await self.get(principal, id)
        if job.state not in FINAL:
            raise WrongState(f"job {id} is {job.state}", hint="cancel it first")
        await self.forget(job.row)

    async def forget(self, row: Row) -> None:
        """Remove a row and its files."""
        charged = int(row.document.get("charged", 0))
        storage = await self.core.admission.storage(row.project, -charged) if charged else ()
        parts = list(removed(row.id, shared_of(row)))
        for at in range(AT_ONCE, len(parts), AT_ONCE):
            await self.core.store.commit(*parts[at : at + AT_ONCE])
        await self.core.commit(
            Remove(KIND, row.id, row.revision), *parts[:AT_ONCE], *storage, self.told(row, "removed")
        )
        if self.files is not None and row.key == self.files.home:
            await asyncio.to_thread(self.files.remove, row.id)

    async def tidy(self) -> None:
        """Look at one folder, another with each call. It goes if another machine has forgotten its job: where
        no other shares the store, nobody else forgets one.
        """
        if self.shared is None:
            return
        files = self._files()
        name = next(self._settled, "")
        if not name:
            self._settled = iter(await asyncio.to_thread(lambda: list(files.settled())))
            return
        try:
            await self.core.store.get(KIND, name)
        except NotFound:
            await asyncio.to_thread(files.remove, name)

    def ended(self, row: Row, state: str, **facts: Any) -> Row:
        """The row of a job that is over."""
        now = self.core.now()
        document = {name: value for name, value in row.document.items() if name != "actor"}
        document |= {"ended_at": now, **facts}
        return replace(row, state=state, due=now + float(row.document["spec"]["ttl"]), document=document)


def policy_of(row: Row) -> Policy:
    """The policy of a job's sandboxes."""
    return from_dict(dict(row.document["spec"]["policy"]))
