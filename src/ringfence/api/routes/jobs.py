"""Jobs: commands that run to completion, with results that outlive every sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import Field

from ringfence.api import requesting
from ringfence.api.calls import Answer, Call
from ringfence.api.paging import page
from ringfence.api.routing import Routes
from ringfence.api.types import (
    Attached,
    Body,
    Content,
    Env,
    Labels,
    Page,
    Paging,
    Path,
    Query,
    Seconds,
    Shown,
    Text,
)
from ringfence.control.jobs import DEFAULT_DEADLINE, DEFAULT_TTL, MOST_RETRIES, Fetch, Job, JobSpec
from ringfence.control.jobs_files import STDERR, STDOUT
from ringfence.model.errors import InvalidRequest
from ringfence.model.quantities import parse_duration

routes = Routes("jobs")
_STREAMS = {"all": (STDOUT, STDERR), "stdout": (STDOUT,), "stderr": (STDERR,)}


class Input(Body):
    """A URL whose content is put at a path inside. It goes through egress, so the policy must allow it."""

    url: Annotated[str, Field(max_length=8192, pattern=r"^https?://[^\s\x00]+$")]
    path: Path


class SubmitJob(Body):
    """A job, please: `argv`, or `command` for the shell inside. The policy's fields are as for a sandbox."""

    command: Annotated[str, Field(min_length=1, max_length=128 * 1024)] | None = None
    argv: Annotated[tuple[str, ...], Field(min_length=1, max_length=1024)] | None = None
    template: Text = "host"
    policy: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None
    runtime: Text | None = None
    level: Literal["L1", "L2", "L3", "L4"] | None = None
    size: Literal["small", "medium", "large"] | None = None
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = None
    memory: Annotated[int, Field(gt=0, lt=2**63)] | Text | None = None
    disk: Annotated[int, Field(gt=0, lt=2**63)] | Text | None = None
    network: Literal["none", "egress", "open"] | dict[str, Any] | None = None
    env: Env = Field(default_factory=dict)
    cwd: Path | None = None
    files: Annotated[dict[Path, str | Content], Field(max_length=1000)] = Field(default_factory=dict)
    inputs: Annotated[tuple[Input, ...], Field(max_length=64)] = ()
    volumes: Annotated[tuple[Attached, ...], Field(max_length=16)] = ()
    outputs: Annotated[tuple[Path, ...], Field(max_length=256)] = Field(
        (), description="Paths inside that are kept when the command has ended; folders as tar."
    )
    labels: Labels = Field(default_factory=dict)
    deadline: Seconds | Text = Field(
        DEFAULT_DEADLINE, description="Seconds, or 2h, for all attempts together."
    )
    retries: Annotated[int, Field(ge=0, le=MOST_RETRIES)] = 0
    backoff: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = Field(
        1.0, description="Seconds before the second attempt; doubled each time."
    )
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(0, description="Higher comes first.")
    ttl: Seconds | Text = Field(DEFAULT_TTL, description="Seconds, or 1d, that it is kept after its end.")

    def spec(self) -> JobSpec:
        """As the orchestrator takes it. Raises InvalidRequest, PolicyError."""
        if (self.command is None) == (self.argv is None):
            raise InvalidRequest("a job needs either `command` or `argv`", field="command")
        names = ("runtime", "level", "size", "cpus", "memory", "disk", "network")
        argv = self.argv if self.argv is not None else ("sh", "-c", str(self.command))
        return JobSpec(
            argv,
            policy=requesting.policy(self.policy, **{name: getattr(self, name) for name in names}),
            template=self.template,
            env=dict(self.env),
            cwd=self.cwd,
            files=requesting.files(self.files),
            fetch=tuple(Fetch(each.url, each.path) for each in self.inputs),
            volumes=requesting.volumes(self.volumes),
            outputs=self.outputs,
            labels=dict(self.labels),
            deadline=_seconds(self.deadline, "deadline"),
            retries=self.retries,
            backoff=self.backoff,
            priority=self.priority,
            ttl=_seconds(self.ttl, "ttl"),
        )


class JobQuery(Paging):
    """Which jobs."""

    label: tuple[str, ...] = Field((), max_length=16, description="`name=value`; all must fit.")
    state: tuple[Literal["queued", "running", "succeeded", "failed", "cancelled"], ...] = ()


class LogQuery(Query):
    """Which log: of the last attempt unless said otherwise."""

    attempt: int | None = Field(None, ge=1, le=1000)
    stream: Literal["all", "stdout", "stderr"] = "all"
    follow: bool = Field(False, description="Go on until the job has ended.")


class JobShown(Shown):
    """A job. `attempts`: each with its sandbox, times, `cause` and `exit_code`. `artifacts`: outputs that
    were kept, each with `name`, `size`, `sha256`; `missing`: outputs that were not there.
    """

    id: str
    state: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    attempts: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]
    exit_code: int | None
    cause: str | None


class JobPage(Page):
    """One page of jobs."""

    items: list[JobShown]  # type: ignore[assignment]


def _seconds(given: float | str, name: str) -> float:
    seconds = parse_duration(given)
    if not 0 < seconds <= 366 * 24 * 3600:
        raise InvalidRequest(f"{name}: {given!r} is not above 0 and within a year", field=name)
    return seconds


def _pairs(given: tuple[str, ...]) -> Mapping[str, str]:
    wrong = [each for each in given if "=" not in each]
    if wrong:
        raise InvalidRequest(f"label: {wrong[0][:80]!r} is not name=value", field="label")
    return {name: value for name, _, value in (each.partition("=") for each in given)}


@routes.post("/v1/jobs", body=SubmitJob, answer=JobShown, status=201, creates=True)
async def submit(call: Call, body: SubmitJob) -> dict[str, Any]:
    """Queue a job; answers at once."""
    return (await call.control.jobs.submit(call.principal, body.spec())).as_dict()


@routes.get("/v1/jobs", query=JobQuery, answer=JobPage)
async def list_jobs(call: Call, query: JobQuery) -> dict[str, Any]:
    """The project's jobs."""
    labels = _pairs(query.label)

    async def find(after: str, limit: int) -> list[Job]:
        return await call.control.jobs.list(
            call.principal, states=query.state, labels=labels, after=after, limit=limit
        )

    return await page(call, "jobs", query.limit, query.cursor, find, lambda job: job.id, Job.as_dict)


@routes.get("/v1/jobs/{job}", answer=JobShown)
async def show(call: Call) -> dict[str, Any]:
    """One job."""
    return (await call.control.jobs.get(call.principal, call.params["job"])).as_dict()


@routes.delete("/v1/jobs/{job}", status=204)
async def delete(call: Call) -> None:
    """Forget a job that has ended, with all that it left."""
    await call.control.jobs.remove(call.principal, call.params["job"])


@routes.post("/v1/jobs/{job}/cancel", answer=JobShown)
async def cancel(call: Call) -> dict[str, Any]:
    """End a job. Idempotent."""
    return (await call.control.jobs.cancel(call.principal, call.params["job"])).as_dict()


@routes.post("/v1/jobs/{job}/retry", answer=JobShown)
async def retry(call: Call) -> dict[str, Any]:
    """Another attempt of a job that has ended."""
    return (await call.control.jobs.retry(call.principal, call.params["job"])).as_dict()


@routes.get("/v1/jobs/{job}/logs", query=LogQuery, answer="application/octet-stream")
async def logs(call: Call, query: LogQuery) -> Answer:
    """What an attempt printed, as it was printed; with `follow` until the job has ended."""
    found = call.control.jobs.logs(
        call.principal,
        call.params["job"],
        attempt=query.attempt,
        streams=_STREAMS[query.stream],
        follow=query.follow,
    )
    return Answer(200, stream=_until_drained(call, found), media="application/octet-stream")


async def _until_drained(call: Call, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for piece in source:
        yield piece
        if call.service.draining.is_set():
            return


@routes.get("/v1/jobs/{job}/artifacts/{artifact:path}", answer="application/octet-stream")
async def artifact(call: Call) -> Answer:
    """An output that was kept, by its name or digest. `ETag` is its SHA-256."""
    job, name = call.params["job"], call.params["artifact"]
    known, stream = await call.control.jobs.artifact(call.principal, job, name)
    headers = {
        "content-length": str(known["size"]),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(str(known['name']).rpartition('/')[2])}",
        "etag": f'"{known["sha256"]}"',
        "content-security-policy": "sandbox",
    }
    return Answer(200, stream=stream, media="application/octet-stream", headers=headers)
