"""What a collection of the template store has to know of this state root: who uses what, and which caches."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ringfence.images import collecting
from ringfence.images.collecting import Cache, Collected
from ringfence.images.store import TemplateStore
from ringfence.model.errors import NotFound, WrongState
from ringfence.node import journal
from ringfence.runtimes.contract import Disk, RootFs


def collect(
    state: Path, store: TemplateStore, *, budget: int | None = None, dry_run: bool = False
) -> Collected:
    """Collect what nothing in this state root needs: see :func:`ringfence.images.collecting.collect`."""
    found = collecting.collect(
        store,
        lambda: templates_in_use(state),
        caches=lambda: caches(state, store),
        budget=budget,
        dry_run=dry_run,
    )
    return _engines(state, found, dry_run)


def _engines(state: Path, found: Collected, dry_run: bool) -> Collected:
    """What was sent to container engines and is of no use without its layers."""
    if not (state / "engines").is_dir():
        return found
    from ringfence.runtimes.engines import stock

    going = {name.removeprefix("sha256:") for kind, name, _ in found.removed if kind in ("layer", "fittings")}
    images, failures = stock.collect(state, lambda layer: not going.isdisjoint(layer.split("/")), dry_run)
    return replace(
        found,
        removed=(*found.removed, *(("image", name, 0) for name in images)),
        failures=(*found.failures, *failures),
    )


def templates_in_use(state: Path) -> set[str]:
    """Digests of the templates of all sandboxes that exist, living or not yet taken down."""
    found = set()
    for name in _list(state / "sandboxes"):
        record = journal.read(state / "sandboxes" / name) or {}
        for value in (record.get("template"), _of_root(record)):
            if isinstance(value, str) and value.startswith("sha256:"):
                found.add(value)
    return found


def caches(state: Path, store: TemplateStore) -> list[Cache]:
    """Disks of virtual machines, and compiled WebAssembly modules."""
    from ringfence.runtimes.vm import cleaning

    busy = bool(_list(state / "sandboxes"))
    keeper = cleaning.keeper(str(state / "vm"), _disk_names(store), busy=busy)
    modules = os.environ.get("RINGFENCE_MODULES") or str(state / "modules")
    return [
        Cache("disk", state / "vm", keeper),
        Cache("module", Path(modules)),
    ]


def _disk_names(store: TemplateStore) -> set[str]:
    from ringfence.runtimes.vm import disks

    found = set()
    fittings = _list(store.private / "fittings")
    for digest in store.digests():
        try:
            template = store.resolve(digest)
        except (NotFound, WrongState):
            continue
        for name in fittings:
            if name.startswith(digest.removeprefix("sha256:")):
                lowers = (str(store.private / "fittings" / name / "fs"), *template.lowers)
                root = RootFs(lowers=lowers, binds=(), disk=Disk("tmpfs", 0, 0), template=digest)
                found.add(disks.name_of(root))
    return found


def _of_root(record: dict[str, object]) -> object:
    root = record.get("root")
    return root.get("template") if isinstance(root, dict) else None


def _list(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
