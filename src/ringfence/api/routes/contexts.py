"""Code contexts of a sandbox: interpreters whose variables live on between calls."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from ringfence.api.calls import Answer, Call
from ringfence.api.errors import body_of
from ringfence.api.routing import Routes
from ringfence.api.sse import event, events
from ringfence.api.types import Body, Env, Page, Path, Query, Shown
from ringfence.guest.contexts import Call as CodeCall
from ringfence.guest.contexts import Contexts, Place
from ringfence.model.errors import InvalidRequest, RingfenceError

routes = Routes("contexts")
_BASE = "/v1/sandboxes/{sandbox}/contexts"
_ONE = _BASE + "/{context}"
_PLACE = re.compile(r"(\d{1,18})-(\d{1,18})-([01])\Z", re.ASCII)
Id = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9_-]+$")]


class CreateContext(Body):
    """A context, please."""

    language: Annotated[str, Field(max_length=32)] = "python"
    cwd: Path | None = None
    env: Env = Field(default_factory=dict)
    id: Id | None = Field(None, description="Of the caller's choice; 409 if it is taken.")


class RestartContext(Body):
    """What the new interpreter begins with."""

    cwd: Path | None = None
    env: Env = Field(default_factory=dict)


class Run(Body):
    """Code, please. Over its `timeout` (seconds) it is interrupted; 5 seconds later the context is ended."""

    code: Annotated[str, Field(max_length=4 * 1024 * 1024)]
    timeout: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    env: Env = Field(default_factory=dict)
    fresh: bool = Field(
        False,
        description="In a fork of the context (Python): it finds all that is there, and changes nothing.",
    )


class Once(Body):
    """Code that leaves nothing behind."""

    code: Annotated[str, Field(max_length=4 * 1024 * 1024)]
    language: Annotated[str, Field(max_length=32)] = "python"
    timeout: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    env: Env = Field(default_factory=dict)


class ResumeQuery(Query):
    """Where to go on: the id of the last event that was seen (or `Last-Event-ID`)."""

    place: str = Field("", max_length=64)


class ContextShown(Shown):
    """A context. `cwd` is where it is now, as the sandbox reports it."""

    id: str
    language: str
    cwd: str | None
    running: bool


class ContextPage(Page):
    """Contexts that run."""

    items: list[ContextShown]  # type: ignore[assignment]


class CodeResult(Shown):
    """A whole call. Each of `results` has the forms that an object was displayed in: `text`, `html`,
    `markdown`, `svg`, `png`, `jpeg`, `pdf` (base64), `latex`, `json`, `javascript`, `data`, `chart`, `extra`.
    """

    stdout: str
    stderr: str
    results: list[dict[str, Any]]
    error: dict[str, Any] | None
    status: Literal["ok", "error", "timeout", "ended"]
    count: int
    exit_code: int | None
    truncated: bool


async def _contexts(call: Call) -> Contexts:
    made = Contexts(await call.control.link(call.principal, call.sandbox))
    made.admit = call.service.commands.meter(call.sandbox).take
    return made


@routes.post(_BASE, body=CreateContext, answer=ContextShown, status=201, creates=True)
async def create(call: Call, body: CreateContext) -> dict[str, Any]:
    """Start a context; answers when it can be called."""
    contexts = await _contexts(call)
    made = await contexts.create(body.language, cwd=body.cwd, env=body.env, id=body.id)
    return made.as_dict()


@routes.get(_BASE, answer=ContextPage)
async def list_contexts(call: Call) -> dict[str, Any]:
    """Contexts that run."""
    found = await (await _contexts(call)).list()
    return {"items": [each.as_dict() for each in found], "next_cursor": None}


@routes.get(_ONE, answer=ContextShown)
async def show(call: Call) -> dict[str, Any]:
    """One context, and where it is."""
    return (await (await _contexts(call)).get(call.params["context"])).as_dict()


@routes.delete(_ONE, status=204)
async def close(call: Call) -> None:
    """End a context."""
    await (await _contexts(call)).close(call.params["context"])


@routes.post(_ONE + "/restart", body=RestartContext, answer=ContextShown)
async def restart(call: Call, body: RestartContext) -> dict[str, Any]:
    """Begin anew under the same id: variables are gone."""
    made = await (await _contexts(call)).restart(call.params["context"], cwd=body.cwd, env=body.env)
    return made.as_dict()


@routes.post(_ONE + "/interrupt", status=204)
async def interrupt(call: Call) -> None:
    """Interrupt what runs in it, as Ctrl-C does; the context lives on."""
    await (await _contexts(call)).interrupt(call.params["context"])


@routes.post(_ONE + "/run", body=Run, answer=CodeResult)
async def run(call: Call, body: Run) -> dict[str, Any]:
    """Run code to its end. Calls of one context wait for one another."""
    contexts = await _contexts(call)
    async with call.control.using(call.sandbox, call.principal.project):
        made = await contexts.execute(
            call.params["context"], body.code, timeout=body.timeout, env=body.env, fresh=body.fresh
        )
        async with made:
            ran = await made.collect(call.service.settings.most_output)
    return ran.as_dict()


@routes.post("/v1/sandboxes/{sandbox}/code", body=Once, answer=CodeResult)
async def once(call: Call, body: Once) -> dict[str, Any]:
    """Run code that leaves nothing behind: Python in a fork of the sandbox's warm `zygote` context, others in
    a context that ends with the call.
    """
    contexts = await _contexts(call)
    async with call.control.using(call.sandbox, call.principal.project):
        ran = await contexts.once(
            body.code,
            body.language,
            limit=call.service.settings.most_output,
            timeout=body.timeout,
            env=body.env,
        )
    return ran.as_dict()


@routes.post(_ONE + "/stream", body=Run, answer="text/event-stream")
async def stream(call: Call, body: Run) -> Answer:
    """Run code, and get what it does as server-sent events: `started` with the call's id; `stdout`, `stderr`,
    `result`, `error`; at last `end`. An event's id is where to go on (`calls/{call}/stream`).
    """
    contexts = await _contexts(call)
    made = await contexts.execute(
        call.params["context"], body.code, timeout=body.timeout, env=body.env, fresh=body.fresh
    )
    return events(call, _events(call, made))


@routes.get(_ONE + "/calls/{call}/stream", query=ResumeQuery, answer="text/event-stream")
async def resume(call: Call, query: ResumeQuery) -> Answer:
    """Go on with a call whose stream was lost. What has left the context's ring (1 MiB) is missing."""
    text = query.place or call.headers.get("last-event-id", "")
    match = _PLACE.match(text) if text else None
    if text and match is None:
        raise InvalidRequest("a place that no event had", hint="send the id of the last event that was seen")
    place = Place() if match is None else Place(int(match[1]), int(match[2]), match[3] == "1")
    contexts = await _contexts(call)
    made = await contexts.resume(call.params["context"], call.params["call"], place)
    return events(call, _events(call, made))


async def _events(call: Call, made: CodeCall) -> AsyncIterator[bytes]:
    try:
        async with call.control.using(call.sandbox, call.principal.project):
            yield event("started", {"call": made.id, "context": made.context}, id=_id(made.place))
            async for each in made:
                told = each.as_dict()
                yield event(told["type"], told, id=_id(made.place))
    except RingfenceError as error:
        yield event("failed", {"type": "failed", **body_of(error, call.request_id)["error"]})
    finally:
        await made.close()


def _id(place: Place) -> str:
    return f"{place.stdout}-{place.stderr}-{int(place.begun)}"
