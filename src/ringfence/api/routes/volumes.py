"""Volumes: named storage of a project, attached to sandboxes at their start."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ringfence.api.calls import Answer, Call
from ringfence.api.paging import page
from ringfence.api.routing import Routes
from ringfence.api.types import Body, Labels, Page, Paging, Shown, Text
from ringfence.control.volumes import DEFAULT_QUOTA, Volume
from ringfence.model.errors import InvalidRequest
from ringfence.model.quantities import parse_size

routes = Routes("volumes")
MOST_IMPORT = 1 << 40  # bytes of one tar; the volume's own quota ends it long before


class CreateVolume(Body):
    """A volume, please."""

    name: str = Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    quota: Annotated[int, Field(gt=0, lt=2**50)] | Text = Field(
        DEFAULT_QUOTA, description="Bytes, or 1GiB: what it may hold."
    )
    keep: bool = Field(True, description="False: removed when the last sandbox that had it has ended.")
    labels: Labels = Field(default_factory=dict)


class VolumeShown(Shown):
    """A volume. `readers`, `writer`: sandboxes that have it now; `size`: bytes that its files take."""

    id: str
    name: str
    state: str
    quota: int
    keep: bool
    created_at: float


class VolumePage(Page):
    """One page of volumes."""

    items: list[VolumeShown]  # type: ignore[assignment]


@routes.post("/v1/volumes", body=CreateVolume, answer=VolumeShown, status=201, creates=True)
async def create(call: Call, body: CreateVolume) -> dict[str, Any]:
    """Make a volume; answers when it can be attached."""
    made = await call.control.volumes.create(
        call.principal, body.name, quota=parse_size(body.quota), keep=body.keep, labels=dict(body.labels)
    )
    return made.as_dict()


@routes.get("/v1/volumes", query=Paging, answer=VolumePage)
async def list_volumes(call: Call, query: Paging) -> dict[str, Any]:
    """The project's volumes."""

    async def find(after: str, limit: int) -> list[Volume]:
        return await call.control.volumes.list(call.principal, after, limit)

    def shown(volume: Volume) -> dict[str, Any]:
        told = volume.as_dict()
        del told["readers"], told["writer"]  # a list does not look them up
        return told

    return await page(call, "volumes", query.limit, query.cursor, find, lambda each: each.id, shown)


@routes.get("/v1/volumes/{volume}", answer=VolumeShown)
async def show(call: Call) -> dict[str, Any]:
    """One volume, by name or id: how it is in use, and its size."""
    volume = await call.control.volumes.get(call.principal, call.params["volume"])
    told = volume.as_dict()
    if volume.state == "ready":
        told["size"] = await call.control.volumes.size(call.principal, volume.id)
    return told


@routes.delete("/v1/volumes/{volume}", status=204)
async def delete(call: Call) -> None:
    """Remove a volume and its files; 409 while a sandbox has it."""
    await call.control.volumes.remove(call.principal, call.params["volume"])


@routes.get("/v1/volumes/{volume}/export", answer="application/x-tar")
async def export(call: Call) -> Answer:
    """Its files as a tar. Whoever wrote them may be hostile: unpack with care."""
    volume = await call.control.volumes.get(call.principal, call.params["volume"])
    headers = {"content-disposition": f'attachment; filename="{volume.name}.tar"'}
    stream = call.control.volumes.export(call.principal, volume.id)
    return Answer(200, stream=stream, media="application/x-tar", headers=headers)


@routes.put("/v1/volumes/{volume}/import", body="stream", status=204)
async def load(call: Call) -> None:
    """Unpack a tar into it."""
    if call.headers.get("content-type", "application/x-tar") not in (
        "application/x-tar",
        "application/octet-stream",
    ):
        raise InvalidRequest("an import takes a tar", hint="send it with Content-Type: application/x-tar")
    await call.control.volumes.load(call.principal, call.params["volume"], call.stream(MOST_IMPORT))
