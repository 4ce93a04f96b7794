"""Templates and snapshots: what sandboxes start from. Runtimes: what they can start in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ringfence.api import shown
from ringfence.api.calls import Call
from ringfence.api.paging import page
from ringfence.api.routing import Routes
from ringfence.api.types import Body, Name, Page, Paging
from ringfence.control.powers import shown as snapshot_shown
from ringfence.model.errors import NotFound
from ringfence.store.contract import Row

routes = Routes("images")


class AddTemplate(Body):
    """A template, please: a source as `ringfence template add` takes it, seen from the node."""

    name: Name
    source: Annotated[str, Field(min_length=1, max_length=4096)]
    options: dict[str, Any] = Field(default_factory=dict)


@routes.get("/v1/templates", answer=Page)
async def list_templates(call: Call) -> dict[str, Any]:
    """Templates; every project may start from them."""
    return {"items": list(await call.control.placement.templates()), "next_cursor": None}


@routes.get("/v1/templates/{template}")
async def show_template(call: Call) -> dict[str, Any]:
    """One template, by name or digest."""
    wanted = call.params["template"]
    for found in await call.control.placement.templates():
        if wanted in (found.get("name"), found.get("digest")):
            return dict(found)
    raise NotFound(f"there is no template {wanted[:200]}", hint="GET /v1/templates shows those there are")


@routes.post("/v1/templates", scope="admin", body=AddTemplate, status=201, creates=True)
async def add_template(call: Call, body: AddTemplate) -> dict[str, Any]:
    """Import or build a template; for the operator, because sources are folders and files of the node."""
    call.principal.require_operator()
    made = await call.control.placement.add_template(body.source, body.name, body.options)
    call.service.templates_changed()
    return dict(made)


@routes.delete("/v1/templates/{template}", scope="admin", status=204)
async def remove_template(call: Call) -> None:
    """Forget a template; for the operator. Sandboxes that use it live on."""
    call.principal.require_operator()
    await call.control.placement.remove_template(call.params["template"])
    call.service.templates_changed()


# -- snapshots


@routes.get("/v1/snapshots", query=Paging, answer=Page)
async def list_snapshots(call: Call, query: Paging) -> dict[str, Any]:
    """The project's saved sandboxes."""

    async def find(after: str, limit: int) -> Sequence[Row]:
        return await call.control.powers.snapshots(call.principal.project, after, limit)

    def told(row: Row) -> dict[str, Any]:
        return shown.snapshot(snapshot_shown(row))

    return await page(call, "snapshots", query.limit, query.cursor, find, lambda each: each.id, told)


@routes.get("/v1/snapshots/{snapshot}")
async def show_snapshot(call: Call) -> dict[str, Any]:
    """One, by id or name."""
    row = await call.control.powers.find_snapshot(call.principal.project, call.params["snapshot"])
    return shown.snapshot(snapshot_shown(row))


@routes.delete("/v1/snapshots/{snapshot}", status=204)
async def remove_snapshot(call: Call) -> None:
    """Remove one; sandboxes that were started from it live on."""
    row = await call.control.powers.find_snapshot(call.principal.project, call.params["snapshot"])
    await call.control.powers.remove_snapshot(row)


# -- runtimes


@routes.get("/v1/runtimes", answer=Page)
async def list_runtimes(call: Call) -> dict[str, Any]:
    """Isolation technologies of the node: level, boundary, health, what they can."""
    return {"items": list(await call.control.placement.runtimes()), "next_cursor": None}
