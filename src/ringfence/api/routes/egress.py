"""The egress door through the API: secrets of a project, open questions, what a sandbox used and reached."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field

from ringfence.api import shown
from ringfence.api.calls import Answer, Call
from ringfence.api.routing import Routes
from ringfence.api.types import Body, Page, Query, Sandbox
from ringfence.model.errors import NotFound, Unsupported

routes = Routes("egress")


class PutSecret(Body):
    """A secret's value. It is never given back: sandboxes see a placeholder."""

    value: str = Field(min_length=1, max_length=64 * 1024)


class Decide(Body):
    """The answer to a question; `remember`: it is a rule of the sandbox from now on."""

    allow: bool
    remember: bool = False


class Revoke(Body):
    """Whose placeholders are worth nothing in a sandbox any more; without names all that it inherited."""

    sandboxes: tuple[Annotated[str, Field(max_length=64)], ...] | None = Field(None, max_length=65)


class ConnectionQuery(Query):
    """Which of them."""

    limit: int = Field(100, ge=1, le=1000, description="The newest so many.")


class RecordQuery(Query):
    """Which of them."""

    limit: int = Field(1000, ge=1, le=10_000, description="The newest so many.")


def _doors(call: Call) -> Any:
    """What `serve` keeps. Raises Unsupported: this service has no egress."""
    if call.control.egress is None:
        raise Unsupported(
            "this service has no egress proxy",
            hint="start `ringfence serve` without --no-egress",
            capability="network.egress",
        )
    return call.control.egress


@routes.get("/v1/secrets", answer=Page)
async def list_secrets(call: Call) -> dict[str, Any]:
    """The project's secrets, without their values."""
    found = await _doors(call).doors.secret_list(call.principal.project)
    return {"items": found, "next_cursor": None}


@routes.put("/v1/secrets/{secret}", scope="admin", body=PutSecret)
async def put_secret(call: Call, body: PutSecret) -> dict[str, Any]:
    """Store a secret, or rotate it: open doors use the new value from then on."""
    doors = _doors(call).doors
    return dict(await doors.secret_put(call.principal.project, call.params["secret"], body.value))


@routes.delete("/v1/secrets/{secret}", scope="admin", status=204)
async def remove_secret(call: Call) -> None:
    """Forget a secret."""
    await _doors(call).doors.secret_remove(call.principal.project, call.params["secret"])


async def _questions(call: Call) -> list[dict[str, Any]]:
    found = await _doors(call).questions()
    return [each for each in found if each.get("project") == call.principal.project]


@routes.get("/v1/egress/questions", answer=Page)
async def list_questions(call: Call) -> dict[str, Any]:
    """Requests of the project's sandboxes that are held until somebody answers (policy `onUnknown: ask`)."""
    return {"items": await _questions(call), "next_cursor": None}


@routes.post("/v1/egress/questions/{question}", body=Decide)
async def answer_question(call: Call, body: Decide) -> dict[str, Any]:
    """Let a held request pass, or refuse it."""
    number = call.params["question"]
    if not any(each.get("id") == number for each in await _questions(call)):
        raise NotFound(
            f"no question {number[:64]} is open", hint="GET /v1/egress/questions shows those there are"
        )
    return dict(await _doors(call).answer(number, body.allow, remember=body.remember))


@routes.post("/v1/sandboxes/{sandbox}/placeholders/revoke", body=Revoke, answer=Sandbox)
async def revoke(call: Call, body: Revoke) -> dict[str, Any]:
    """Take back placeholders of secrets, for good: those that a copy inherited, or, named by id, its own."""
    await call.control.sandboxes.get(call.principal, call.sandbox)
    _doors(call)
    named = None if body.sandboxes is None else list(body.sandboxes)
    return shown.sandbox(await call.control.sandboxes.revoke(call.principal, call.sandbox, named))


@routes.get("/v1/sandboxes/{sandbox}/connections", query=ConnectionQuery)
async def connections(call: Call, query: ConnectionQuery) -> dict[str, Any]:
    """What a sandbox asked for through its door, newest last, and what it used of its budgets."""
    await call.control.sandboxes.get(call.principal, call.sandbox)
    doors = _doors(call)
    lines = await asyncio.to_thread(doors.connections, call.sandbox, query.limit)
    return {"items": lines, "usage": await doors.doors.usage(f"sandbox/{call.sandbox}")}


@routes.get("/v1/sandboxes/{sandbox}/records", query=RecordQuery, answer="application/json")
async def records(call: Call, query: RecordQuery) -> Answer:
    """Requests that a sandbox made through its door, as HAR 1.2: what `network.record` keeps (`headers` or
    `bodies`), without what is redacted. Read at the API process that is asked, from its own state folder.
    """
    await call.control.sandboxes.get(call.principal, call.sandbox)
    return Answer(200, stream=_doors(call).records(call.sandbox, query.limit), media="application/json")
