"""What is remembered of builds: which layer a step gave, and how a template is made again.

::

    <state>/images/builds/          0700
      steps/<key>.json              a step's key → the layer it gave (or none: it changed nothing)
      recipes/<name>.json           a template's name → definition, arguments, context folder, policy

A step whose layer was collected is built again; a recipe whose template is gone is nobody's. Both go with
:func:`prune`. Nothing here makes a layer stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ringfence.images import names, records
from ringfence.images.contract import Layer
from ringfence.images.store import TemplateStore
from ringfence.images.troubles import host_limit
from ringfence.model.errors import WrongState
from ringfence.model.values import dataclass

FORMAT = 1  # raise when the same step gives another layer


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a template is made again. ``kind``: ``build`` or ``add``.

    ``definition``: its text; ``file``: what it is called. ``context``: the folder. ``policy`` is a policy's
    ``to_dict``. ``options`` of an added one: packages, mirror, insecure, authfile.
    """

    kind: str
    definition: str = ""
    file: str = ""
    context: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    epoch: int | None = None
    policy: dict[str, Any] | None = None
    options: dict[str, Any] | None = None


def step_key(content: dict[str, Any]) -> str:
    """The digest of everything that a step's layer depends on. ``content`` is JSON-able."""
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find_step(store: TemplateStore, key: str) -> tuple[Layer | None] | None:
    """(its layer, or None if it changed nothing); None if it has to be built."""
    try:
        record = records.read(_steps(store) / f"{key}.json")
    except (OSError, WrongState):
        return None
    digest = record.get("layer")
    if digest == "":
        return (None,)
    if not isinstance(digest, str) or not names.is_digest(digest):
        return None
    layer = store.layer(digest)
    return None if layer is None else (layer,)


def keep_step(store: TemplateStore, key: str, layer: Layer | None) -> None:
    """Remember what a step gave.

    Raises:
        HostLimit: the disk is full.
    """
    _write(store, _steps(store) / f"{key}.json", {"layer": layer.digest if layer else ""})


def keep_recipe(store: TemplateStore, name: str, recipe: Recipe) -> None:
    """Remember how the template of this name is made.

    Raises:
        HostLimit: the disk is full.
    """
    value = {field: getattr(recipe, field) for field in _FIELDS}
    _write(store, _recipe_file(store, name), value)


def recipe(store: TemplateStore, name: str) -> Recipe | None:
    """How the template of this name is made; None if nobody knows.

    Raises:
        WrongState: the record is damaged.
    """
    try:
        value = records.read(_recipe_file(store, name))
    except FileNotFoundError:
        return None
    try:
        arguments = tuple((str(key), str(text)) for key, text in value.pop("arguments"))
        return Recipe(arguments=arguments, **value)
    except (KeyError, TypeError, ValueError):
        raise WrongState(
            f"what is remembered of the build of {name} is damaged",
            hint="build it again: ringfence template build",
        ) from None


def forget_recipe(store: TemplateStore, name: str) -> None:
    """Idempotent."""
    with contextlib.suppress(OSError):
        os.unlink(_recipe_file(store, name))


def prune(store: TemplateStore) -> int:
    """Remove what belongs to layers and templates that are gone. Returns how much."""
    here = set(store.layer_digests())
    gone = 0
    for path in _listed(_steps(store)):
        try:
            digest = records.read(path).get("layer")
        except (OSError, WrongState):
            digest = None
        if digest not in here and digest != "":
            gone += _remove(path)
    known = {name.replace("/", "%") for name in store.names()}
    for path in _listed(_folder(store) / "recipes"):
        if path.name.removesuffix(".json") not in known:
            gone += _remove(path)
    return gone


_FIELDS = ("kind", "definition", "file", "context", "arguments", "epoch", "policy", "options")


def _folder(store: TemplateStore) -> Path:
    return store.folder / "builds"


def _steps(store: TemplateStore) -> Path:
    return _folder(store) / "steps"


def _recipe_file(store: TemplateStore, name: str) -> Path:
    return _folder(store) / "recipes" / f"{names.full_name(name).replace('/', '%')}.json"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _remove(path: Path) -> int:
    try:
        os.unlink(path)
    except OSError:
        return 0
    return 1


def _write(store: TemplateStore, path: Path, value: dict[str, Any]) -> None:
    try:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(0o700, exist_ok=True)
        with store.working_folder() as aside:
            records.write(path, value, aside=aside)
    except OSError as error:
        raise host_limit(error, f"write {path}") from error
