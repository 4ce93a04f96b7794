"""A template from a snapshot: what the sandbox wrote becomes one more layer over its template."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from ringfence.model.errors import InvalidRequest
from ringfence.node.snapshots import LAYER, Snapshot, may_be_template

if TYPE_CHECKING:
    from ringfence.images.contract import Template
    from ringfence.node.service import Node

SOURCE = "snapshot:"  # begins the name of such a source


async def template_from(node: Node, snapshot: str, name: str) -> tuple[Template, tuple[str, ...]]:
    """Make a template of a disk snapshot; what could not be kept is said in words.

    Args:
        node: with the stores of both.
        snapshot: its name or id.
        name: of the template.

    Raises:
        NotFound: no such snapshot, or its template is gone.
        InvalidRequest: it held secrets, has memory, is damaged, or lies over the host's own programs.
        HostLimit: the disk is full.
    """
    return await asyncio.to_thread(_make, node, node.snapshots.get(snapshot), name)


def _make(node: Node, snapshot: Snapshot, name: str) -> tuple[Template, tuple[str, ...]]:
    from ringfence.images import names
    from ringfence.images.building import archives
    from ringfence.images.contract import ImportLimits

    names.full_name(name)
    may_be_template(snapshot)
    if not snapshot.template.startswith("sha256:"):
        raise InvalidRequest(
            f"snapshot {snapshot.name} lies over this host's own programs, which are no layer of a template",
            hint="start the sandbox with `ringfence run --keep --template T`; or restore the snapshot itself",
        )
    node.snapshots.verify(snapshot)
    store = node.images.store
    base = store.resolve(snapshot.template)
    left_out: list[str] = []
    pieces = archives.of_upper(
        str(snapshot.folder / LAYER),
        epoch=int(snapshot.made_at),
        limit=max(snapshot.wanted().policy.wall.resources.disk, snapshot.size),
        left_out=left_out,
    )
    first = next(pieces)
    layers = base.layers
    if first != archives.END:  # it has written something
        added = store.add_layer_from(
            archives.Stream(itertools.chain((first,), pieces)), limits=ImportLimits()
        )
        layers = (*layers, added)
    made = store.put(
        name,
        layers,
        base.config,
        source=SOURCE + snapshot.name,
        base_digest=base.digest,
        base_made_at=base.base_made_at or base.made_at,
        architecture=base.architecture,
    )
    return made, (*snapshot.left_out, *left_out)


def hold(node: Node, snapshot: Snapshot) -> None:
    """While the snapshot is there its template stays.

    Raises:
        NotFound: it is gone already.
    """
    if snapshot.template.startswith("sha256:"):
        node.images.store.pin(snapshot.template, snapshot.id)


def release(node: Node, snapshot: Snapshot) -> None:
    """The snapshot is gone."""
    if snapshot.template.startswith("sha256:"):
        node.images.store.unpin(snapshot.template, snapshot.id)


def release_lost(node: Node) -> None:
    """Let go of templates whose snapshots a crash has taken."""
    if not (node.state.path / "images").is_dir():
        return
    store = node.images.store
    known = {snapshot.id for snapshot in node.snapshots.all(temporary=True)}
    for digest in store.digests():
        for holder in store.pinned(digest):
            if holder.startswith("sn-") and holder not in known and not node.snapshots.in_work(holder):
                store.unpin(digest, holder)
