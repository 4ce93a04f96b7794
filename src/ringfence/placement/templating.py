"""Templates at the node: what is there, imports and builds that somebody without rights here asks for.

Whoever asks is an API without privileges, and the node may be root: of files and folders of this machine it
takes only what every user of it may read.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from ringfence.images.contract import Layer, Template
    from ringfence.node.service import Node

BUILD = "build:"  # begins a source that is a definition, or a folder with one
_ADD = ("start", "ready", "packages", "mirror", "variant", "insecure", "authfile", "max_size", "max_ratio")
_BUILD = ("arguments", "cache", "epoch", "insecure", "authfile", "policy")
_DEFINITIONS = ("Ringfile", "Dockerfile", "Containerfile")


def listed(node: Node) -> list[dict[str, Any]]:
    """Every template with a name, the built-in one first. Blocks."""
    host = {"name": "host", "digest": "host", "size": 0, "source": "host", "made_at": 0.0}
    if not (node.state.path / "images").is_dir():
        return [host]
    return [host, *(facts(each) for each in node.images.store.templates() if each.name)]


def facts(template: Template) -> dict[str, Any]:
    """A template as the contract has it."""
    return {
        "name": template.name,
        "digest": template.digest,
        "size": template.size,
        "source": template.source,
        "made_at": template.made_at,
        "base_digest": template.base_digest,
        "base_made_at": template.base_made_at,
        "architecture": template.architecture,
        "layers": len(template.layers),
    }


async def add(node: Node, source: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Import or build one.

    Args:
        node: whose store it goes to.
        source: as for ``ringfence template add``; ``snapshot:NAME``; or ``build:`` and the path of a
            definition, or of a folder with one.
        name: of the template.
        options: of an import ``start``, ``ready`` (shell commands), ``packages``, ``mirror``, ``variant``,
            ``insecure``, ``authfile``, ``max_size``, ``max_ratio``; of a build ``arguments``, ``cache``,
            ``epoch``, ``insecure``, ``authfile``, ``policy``.

    Raises:
        InvalidRequest: an option that is none, or a path that not everybody may read; and what imports raise.
    """
    from ringfence.images import names

    names.full_name(name)
    known = _BUILD if source.startswith(BUILD) else _ADD
    for option in options:
        if option not in known:
            raise InvalidRequest(f"there is no option {option!r} here", hint=f"options: {', '.join(known)}")
    if authfile := options.get("authfile"):
        _public(_text(authfile, "authfile"))
    if source.startswith(BUILD):
        return await _build(node, source.removeprefix(BUILD), name, options)
    if source.startswith("snapshot:"):
        from ringfence.node.templating import template_from

        made, notes = await template_from(node, source.partition(":")[2], name)
        return facts(made) | {"notes": list(notes)}
    return await asyncio.to_thread(_import, node, source, name, options)


def _import(node: Node, source: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from dataclasses import replace

    from ringfence.images import importing, references
    from ringfence.images.contract import ImportLimits

    reference = references.parse(source)
    if reference.kind not in ("oci", "debian"):
        _public(reference.place)
    limits = ImportLimits()
    if "max_size" in options:
        limits = replace(limits, size=_number(options["max_size"], "max_size"))
    if "max_ratio" in options:
        limits = replace(limits, ratio=_number(options["max_ratio"], "max_ratio"))
    packages = options.get("packages", ())
    if not isinstance(packages, list | tuple):
        raise InvalidRequest("packages is no list")
    added = importing.add_reference(
        node.images.store,
        reference,
        importing.ImportOptions(
            name=name,
            limits=limits,
            start=_shell(options.get("start")),
            ready=_shell(options.get("ready")),
            insecure=bool(options.get("insecure", False)),
            authfile=_text(options.get("authfile", ""), "authfile"),
            packages=tuple(_text(each, "packages") for each in packages),
            mirror=_text(options.get("mirror", ""), "mirror"),
            variant=_text(options.get("variant", "minbase"), "variant"),
        ),
    )
    return facts(added.template) | {"notes": list(added.notes)}


async def _build(node: Node, path: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from ringfence.images.building.definition import LARGEST, parse
    from ringfence.node.building import BuildOptions, build
    from ringfence.placement.policies import policy_of

    def read() -> tuple[str, str, bytes]:
        definition, context = _definition(path)
        with open(definition, "rb") as file:
            return definition, context, file.read(LARGEST + 1)

    given = options.get("arguments", {})
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise InvalidRequest("arguments is no mapping of texts")
    wanted = BuildOptions(
        name,
        arguments=given,
        cache=bool(options.get("cache", True)),
        epoch=None if options.get("epoch") is None else _number(options["epoch"], "epoch"),
        insecure=bool(options.get("insecure", False)),
        authfile=_text(options.get("authfile", ""), "authfile"),
        policy=policy_of(options.get("policy") or {}),
    )
    file, context, text = await asyncio.to_thread(read)
    definition = parse(text, os.path.basename(file))
    built = await build(node, node.images.store, definition, context, wanted, _Silent())
    return facts(built.template) | {"notes": list(built.notes), "steps": built.steps, "cached": built.cached}


def _definition(path: str) -> tuple[str, str]:
    """The definition and its context folder, both for everybody to read."""
    context = path
    if os.path.isdir(path):
        found = [each for each in _DEFINITIONS if os.path.exists(os.path.join(path, each))]
        if not found:
            raise InvalidRequest(f"there is no definition in {path}", hint=f"call it {_DEFINITIONS[0]}")
        path = os.path.join(path, found[0])
    else:
        context = os.path.dirname(path)
    _public(context)
    _public(path)
    return path, context


class _Silent:
    """Nobody watches."""

    def step(self, number: int, count: int, text: str) -> None:
        """See ``ringfence.node.building.Listener``."""

    def output(self, stream: int, data: bytes) -> None:
        """See the Listener."""

    def ended(self, number: int, seconds: float, layer: Layer | None, *, cached: bool) -> None:
        """See the Listener."""

    def note(self, text: str) -> None:
        """See the Listener."""


def remove(node: Node, name: str) -> None:
    """Forget a name. Idempotent. Blocks."""
    if not (node.state.path / "images").is_dir():
        return
    try:
        node.images.store.remove(name)
    except NotFound:
        return


def _public(path: str) -> None:
    """Refuse what not every user of this machine may read.

    Raises:
        InvalidRequest: it is not absolute, or somebody may not read it. NotFound: it is not there.
    """
    if not path.startswith("/"):
        raise InvalidRequest(f"{path!r} is no absolute path", hint="as the node sees it: /srv/images/x.tar")
    real = os.path.realpath(path)
    parts = real.strip("/").split("/")
    try:
        for count in range(len(parts) + 1):
            place = "/" + "/".join(parts[:count])
            info = os.stat(place)
            last = count == len(parts)
            need = 0o005 if last and stat.S_ISDIR(info.st_mode) else 0o004 if last else 0o001
            if info.st_mode & need != need:
                raise InvalidRequest(
                    f"{path}: not every user of the node's machine may read {place}",
                    hint="the node takes only what everybody may read: chmod it, or put it elsewhere",
                )
    except FileNotFoundError:
        raise NotFound(f"there is no {path} on the node's machine", hint="paths are the node's") from None


def _shell(text: Any) -> tuple[str, ...]:
    return ("/bin/sh", "-c", _text(text, "a command")) if text else ()


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidRequest(f"{name} is no text")
    return value


def _number(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        raise InvalidRequest(f"{name} is no whole number")
    return value
