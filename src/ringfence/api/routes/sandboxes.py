"""Sandboxes: create, look, change, powers, end; what is known of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from ringfence.api import requesting, shown
from ringfence.api.calls import Answer, Call
from ringfence.api.errors import body_of
from ringfence.api.paging import page
from ringfence.api.routing import Routes
from ringfence.api.sse import event as sse_event
from ringfence.api.sse import events as sse_events
from ringfence.api.types import (
    CreateSandbox,
    Extend,
    Fork,
    MakeSnapshot,
    Page,
    Query,
    Sandbox,
    SandboxPage,
    SandboxQuery,
    Shown,
    UpdateSandbox,
)
from ringfence.control.powers import shown as snapshot_shown
from ringfence.control.records import VISIBLE
from ringfence.model.errors import InvalidRequest, RingfenceError
from ringfence.model.states import State

routes = Routes("sandboxes")
_ONE = "/v1/sandboxes/{sandbox}"


class WaitQuery(Query):
    """Which state to wait for."""

    state: tuple[str, ...] = Field(("running",), max_length=9)
    timeout: float = Field(30.0, ge=0, le=120, allow_inf_nan=False)


class DeleteQuery(Query):
    """How to end it."""

    grace: float = Field(0.0, ge=0, le=60, allow_inf_nan=False, description="Seconds between TERM and KILL.")


class EventQuery(Query):
    """From where."""

    after: int = Field(0, ge=0, lt=2**63, description="Only events with a higher number.")
    limit: int = Field(100, ge=1, le=1000)


class EventPage(Shown):
    """Events, oldest first; `next_after` is the `after` of the next page."""

    items: list[dict[str, Any]]
    next_after: int


class FollowQuery(Query):
    """From where; `follow`: as server-sent events, until the end."""

    after: int = Field(0, ge=0, lt=2**63)


def _states(names: tuple[str, ...]) -> list[State]:
    allowed = {state.value for state in VISIBLE}
    for name in names:
        if name not in allowed:
            raise InvalidRequest(
                f"there is no state {name[:40]!r}", hint=f"states are {', '.join(sorted(allowed))}"
            )
    return [State(name) for name in names]


def _labels(given: tuple[str, ...]) -> dict[str, str] | None:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"the label {text[:80]!r} is no name=value", hint="label=team=blue")
        found[name] = value
    return found or None


@routes.post("/v1/sandboxes", body=CreateSandbox, answer=Sandbox, status=201)
async def create(call: Call, body: CreateSandbox) -> Answer:
    """Create a sandbox; answers when it runs (201), or with `wait: false` when it is accepted (202).

    With an `Idempotency-Key` the same request again gives the same sandbox.
    """
    key = call.idempotency_key()
    request = requesting.create(body, key, call.raw)
    made = await call.control.sandboxes.create(call.principal, request)
    return Answer(201 if made.state is State.RUNNING else 202, shown.sandbox(made))


@routes.get("/v1/sandboxes", query=SandboxQuery, answer=SandboxPage)
async def list_sandboxes(call: Call, query: SandboxQuery) -> dict[str, Any]:
    """The project's sandboxes, ended ones for a day."""
    newest = query.order == "newest"

    async def find(after: str, limit: int) -> list[Any]:
        return await call.control.sandboxes.list(
            call.principal,
            states=_states(query.state),
            labels=_labels(query.label),
            after=after,
            limit=limit,
            newest_first=newest,
        )

    what = f"sandboxes.{query.order}"
    return await page(call, what, query.limit, query.cursor, find, lambda each: each.id, shown.sandbox)


@routes.get(_ONE, answer=Sandbox)
async def show(call: Call) -> dict[str, Any]:
    """One sandbox."""
    return shown.sandbox(await call.control.sandboxes.get(call.principal, call.sandbox))


@routes.patch(_ONE, body=UpdateSandbox, answer=Sandbox)
async def update(call: Call, body: UpdateSandbox) -> dict[str, Any]:
    """Change labels and the door: environment of later commands, limits, network rules."""
    control = call.control.sandboxes
    found = await control.get(call.principal, call.sandbox)
    changed = await control.update(
        call.principal,
        call.sandbox,
        labels=None if body.labels is None else dict(body.labels),
        env=None if body.env is None else dict(body.env),
        policy=requesting.changed_door(found.policy, body),
    )
    if call.control.egress is not None:
        await call.control.egress.refresh(changed)
    return shown.sandbox(changed)


@routes.delete(_ONE, query=DeleteQuery, answer=Sandbox)
async def delete(call: Call, query: DeleteQuery) -> dict[str, Any]:
    """End a sandbox, from whatever state, and remove all that is its own. Idempotent."""
    ended = await call.control.sandboxes.delete(call.principal, call.sandbox, grace=query.grace)
    return shown.sandbox(ended)


@routes.get(_ONE + "/wait", query=WaitQuery, answer=Sandbox)
async def wait(call: Call, query: WaitQuery) -> dict[str, Any]:
    """The sandbox once it is in one of these states, or has ended; 504 if it isn't in time."""
    found = await call.control.sandboxes.wait_for(
        call.principal, call.sandbox, _states(query.state), query.timeout
    )
    return shown.sandbox(found)


@routes.post(_ONE + "/pause", answer=Sandbox)
async def pause(call: Call) -> dict[str, Any]:
    """Stop everything inside until it is resumed; 501 where the runtime can't."""
    return shown.sandbox(await call.control.sandboxes.pause(call.principal, call.sandbox))


@routes.post(_ONE + "/resume", answer=Sandbox)
async def resume(call: Call) -> dict[str, Any]:
    """Let it go on."""
    return shown.sandbox(await call.control.sandboxes.resume(call.principal, call.sandbox))


@routes.post(_ONE + "/extend", body=Extend, answer=Sandbox)
async def extend(call: Call, body: Extend) -> dict[str, Any]:
    """Its deadline is so many seconds from now."""
    return shown.sandbox(await call.control.sandboxes.extend(call.principal, call.sandbox, body.timeout))


@routes.post(_ONE + "/reset", answer=Sandbox)
async def reset(call: Call) -> dict[str, Any]:
    """Begin anew from its template, under its id."""
    return shown.sandbox(await call.control.sandboxes.reset(call.principal, call.sandbox))


@routes.post(_ONE + "/snapshot", body=MakeSnapshot, status=201, creates=True)
async def snapshot(call: Call, body: MakeSnapshot) -> dict[str, Any]:
    """Save it; 501 where the runtime can't."""
    row = await call.control.sandboxes.snapshot(call.principal, call.sandbox, body.name or "", body.kind)
    return shown.snapshot(snapshot_shown(row))


@routes.post(_ONE + "/fork", body=Fork, answer=SandboxPage, status=201, creates=True)
async def fork(call: Call, body: Fork) -> dict[str, Any]:
    """Copies of it, each with an identity of its own: all of them, or none."""
    made = await call.control.sandboxes.fork(call.principal, call.sandbox, body.count)
    if body.labels:
        made = [
            await call.control.sandboxes.update(
                call.principal, each.id, labels={**each.labels, **body.labels}
            )
            for each in made
        ]
    return {"items": [shown.sandbox(each) for each in made], "next_cursor": None}


# -- what is known of it


@routes.get(_ONE + "/events", query=EventQuery, answer=EventPage)
async def events(call: Call, query: EventQuery) -> dict[str, Any]:
    """What happened to it, oldest first."""
    found = await call.control.sandboxes.events(call.principal, call.sandbox, query.after, query.limit)
    last = found[-1].number if found else query.after
    return {"items": [shown.event(each) for each in found], "next_after": last}


@routes.get(_ONE + "/events/stream", query=FollowQuery, answer="text/event-stream")
async def events_stream(call: Call, query: FollowQuery) -> Answer:
    """Its events as they happen, as server-sent events, until it has ended."""
    after = query.after
    if (last := call.headers.get("last-event-id", "")).isascii() and last.isdigit():
        after = int(last)
    await call.control.sandboxes.get(call.principal, call.sandbox)
    return sse_events(call, _follow(call, after))


async def _follow(call: Call, after: int) -> AsyncIterator[bytes]:
    control = call.control.sandboxes
    try:
        while True:
            record = await control.get(call.principal, call.sandbox)
            found = await control.events(call.principal, call.sandbox, after)
            for each in found:
                after = each.number
                yield sse_event(each.name, shown.event(each), id=str(after))
            if record.final and not found:
                return
            if not found:
                await call.service.changed(call.sandbox, record.revision)
    except RingfenceError as error:
        yield sse_event("error", body_of(error, call.request_id)["error"])


@routes.get(_ONE + "/logs", query=EventQuery, answer=EventPage)
async def logs(call: Call, query: EventQuery) -> dict[str, Any]:
    """The same events, and at the end the commands that the guest knows (reported)."""
    told = await events(call, query)
    record = await call.control.sandboxes.get(call.principal, call.sandbox)
    if record.state is State.RUNNING and len(told["items"]) < query.limit:
        link = await call.control.link(call.principal, call.sandbox)
        told["processes"] = [
            {"id": p.id, "state": p.state, "command": p.argv0, "started_at": p.started_ns / 1e9}
            for p in await link.processes()
        ]
    return told


@routes.get(_ONE + "/changes", answer=Page)
async def changes(call: Call) -> dict[str, Any]:
    """Files that were added, modified or deleted since its start, as the host sees them."""
    await call.control.sandboxes.get(call.principal, call.sandbox)
    return {"items": list(await call.control.placement.changes(call.sandbox)), "next_cursor": None}


@routes.get(_ONE + "/metrics")
async def metrics(call: Call) -> dict[str, Any]:
    """What it takes, measured on the host; what the guest says of itself is under `reported`."""
    record = await call.control.sandboxes.get(call.principal, call.sandbox)
    told: dict[str, Any] = {"usage": dict(await call.control.placement.usage(call.sandbox))}
    if record.state is State.RUNNING:
        stats = await (await call.control.link(call.principal, call.sandbox)).stats()
        told["reported"] = stats._asdict()
    return told


@routes.get(_ONE + "/boundary")
async def boundary(call: Call) -> dict[str, Any]:
    """The wall, measured now on the living sandbox."""
    await call.control.sandboxes.get(call.principal, call.sandbox)
    return dict(await call.control.placement.measure(call.sandbox))
