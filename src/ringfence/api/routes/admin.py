"""Keys of a project, its quota and usage; projects of the service, for its operator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from ringfence.api import shown
from ringfence.api.calls import Answer, Call
from ringfence.api.paging import page
from ringfence.api.routes.sandboxes import EventPage, EventQuery
from ringfence.api.routing import Routes
from ringfence.api.types import Body, Name, Page, Paging, Shown
from ringfence.control.tenancy import Key, NewKey, Project
from ringfence.model.errors import NotFound

routes = Routes("admin")
Limit = Annotated[float, Field(ge=0, lt=2**53, allow_inf_nan=False)]


class MakeKey(Body):
    """A key, please; of this project unless the operator names another."""

    name: str = Field("", max_length=200)
    user: str = Field("", max_length=200)
    scopes: Annotated[tuple[Literal["read", "run", "admin"], ...], Field(min_length=1, max_length=3)] = (
        "run",
    )
    seconds: Annotated[float, Field(gt=0, le=10 * 366 * 24 * 3600, allow_inf_nan=False)] | None = Field(
        None, description="It expires after so many."
    )
    project: str | None = Field(None, max_length=64)


class RotateKey(Body):
    """Another key that may do the same; the old one is good for `overlap` seconds more."""

    overlap: Annotated[float, Field(ge=0, le=366 * 24 * 3600, allow_inf_nan=False)] = 0.0


class KeyShown(Shown):
    """A key. The key itself (`secret`) is only in the answer that made it."""

    id: str
    name: str
    scopes: tuple[str, ...]
    state: str
    project: str


class KeyPage(Page):
    """One page of keys."""

    items: list[KeyShown]  # type: ignore[assignment]


class MakeProject(Body):
    """A project, please."""

    name: Name
    organisation: str | None = Field(None, max_length=64)


class SetQuota(Body):
    """Limits of a project; `null` means none, what is left out stays."""

    alive: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    cpus: Limit | None = None
    memory: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    storage: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    creates: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    pool: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    requests: Limit | None = None
    burst: Annotated[int, Field(ge=1, lt=2**53)] | None = Field(None, description="Never null.")
    connections: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    bandwidth: Annotated[int, Field(ge=1000, lt=2**53)] | None = Field(None, description="Bits a second.")
    egress_requests: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    egress_bytes: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    egress_rate: Annotated[float, Field(gt=1e-6, le=1e6, allow_inf_nan=False)] | None = None
    egress_spend: Limit | None = None


def _key(key: Key) -> dict[str, Any]:
    told = asdict(key)
    for name in ("created", "expires", "used"):
        told[f"{name}_at"] = told.pop(name)
    return told


def _new(made: NewKey) -> dict[str, Any]:
    return {**_key(made.key), "secret": made.secret}


def _project(project: Project) -> dict[str, Any]:
    told = asdict(project)
    told["created_at"] = told.pop("created")
    return told


@routes.get("/v1/me")
async def me(call: Call) -> dict[str, Any]:
    """Whose key this is."""
    return asdict(call.principal)


@routes.post("/v1/keys", scope="admin", body=MakeKey, answer=KeyShown, status=201)
async def make_key(call: Call, body: MakeKey) -> dict[str, Any]:
    """Make a key. It is shown once, in this answer; so a repeated request makes another."""
    project = call.principal.project
    if body.project is not None and body.project != project:
        call.principal.require_operator()
        project = body.project
    expires = None if body.seconds is None else time.time() + body.seconds
    made = await call.service.tenancy.make_key(
        project, name=body.name, user=body.user, scopes=body.scopes, expires=expires, by=call.principal
    )
    return _new(made)


@routes.get("/v1/keys", scope="admin", query=Paging, answer=KeyPage)
async def list_keys(call: Call, query: Paging) -> dict[str, Any]:
    """The project's keys."""

    async def find(after: str, limit: int) -> Sequence[Key]:
        return await call.service.tenancy.keys(call.principal.project, after=after, limit=limit)

    return await page(call, "keys", query.limit, query.cursor, find, lambda each: each.id, _key)


@routes.get("/v1/keys/{key}", scope="admin", answer=KeyShown)
async def show_key(call: Call) -> dict[str, Any]:
    """One key."""
    return _key(await call.service.tenancy.key(call.principal.project, call.params["key"]))


@routes.post("/v1/keys/{key}/rotate", scope="admin", body=RotateKey, answer=KeyShown, status=201)
async def rotate_key(call: Call, body: RotateKey) -> dict[str, Any]:
    """Replace a key by another that may do the same."""
    made = await call.service.tenancy.rotate_key(
        call.principal.project, call.params["key"], overlap=body.overlap, by=call.principal
    )
    return _new(made)


@routes.delete("/v1/keys/{key}", scope="admin", answer=KeyShown)
async def revoke_key(call: Call) -> dict[str, Any]:
    """Revoke a key: from now on it is good for nothing, in every process. Idempotent."""
    gone = await call.service.tenancy.revoke_key(
        call.principal.project, call.params["key"], by=call.principal
    )
    return _key(gone)


# -- quotas


@routes.get("/v1/quota")
async def quota(call: Call) -> dict[str, Any]:
    """The project's limits, and what it has now."""
    return await _quota(call, call.principal.project)


async def _quota(call: Call, project: str) -> dict[str, Any]:
    quotas = call.service.tenancy.quotas
    limits, usage = await quotas.of(project), await quotas.usage(project)
    return {"project": project, "limits": limits.as_dict(), "usage": asdict(usage)}


@routes.get("/v1/projects/{project}/quota", scope="admin")
async def project_quota(call: Call) -> dict[str, Any]:
    """A project's limits: one's own, or any for the operator."""
    return await _quota(call, await _of(call))


@routes.patch("/v1/projects/{project}/quota", scope="admin", body=SetQuota)
async def set_quota(call: Call, body: SetQuota) -> dict[str, Any]:
    """Change a project's limits; for the operator. What lives already lives on."""
    call.principal.require_operator()
    project = await _of(call)
    given = {name: getattr(body, name) for name in body.model_fields_set}
    await call.service.tenancy.quotas.set(project, given, by=call.principal.key_id)
    return await _quota(call, project)


# -- projects


async def _of(call: Call) -> str:
    """The project in the path, if this principal may see it. Raises NotFound."""
    project = call.params["project"]
    if project != call.principal.project and not call.principal.operator:
        raise NotFound(f"there is no project {project[:64]}", hint="see GET /v1/me for your own")
    return (await call.service.tenancy.project(project)).id


@routes.post("/v1/projects", scope="admin", body=MakeProject, status=201, creates=True)
async def make_project(call: Call, body: MakeProject) -> dict[str, Any]:
    """Make a project; for the operator. Its first key: POST /v1/keys with `project`."""
    call.principal.require_operator()
    organisation = body.organisation or call.principal.organisation
    return _project(await call.service.tenancy.make_project(organisation, body.name))


@routes.get("/v1/projects", scope="admin", query=Paging, answer=Page)
async def list_projects(call: Call, query: Paging) -> dict[str, Any]:
    """Projects: one's own, or all for the operator."""

    async def find(after: str, limit: int) -> Sequence[Project]:
        if not call.principal.operator:
            own = await call.service.tenancy.project(call.principal.project)
            return [own] if own.id > after else []
        return await call.service.tenancy.projects(after=after, limit=limit)

    return await page(call, "projects", query.limit, query.cursor, find, lambda each: each.id, _project)


@routes.get("/v1/projects/{project}", scope="admin")
async def show_project(call: Call) -> dict[str, Any]:
    """One project."""
    return _project(await call.service.tenancy.project(await _of(call)))


@routes.get("/v1/events", query=EventQuery, answer=EventPage)
async def events(call: Call, query: EventQuery) -> dict[str, Any]:
    """What happened in the project, oldest first."""
    found = await call.control.store.events(
        project=call.principal.project, after=query.after, limit=query.limit
    )
    last = found[-1].number if found else query.after
    return {"items": [shown.event(each) for each in found], "next_after": last}


__all__ = ["Answer", "routes"]
