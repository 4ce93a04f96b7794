"""Making templates again from where they came from: bases first, then what is built on them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from ringfence.images import importing, names, references
from ringfence.images.building import keeping, steps
from ringfence.images.building.definition import Definition, parse
from ringfence.images.building.keeping import Recipe
from ringfence.images.contract import Template
from ringfence.images.importing import ImportOptions
from ringfence.images.refreshing import BUILD
from ringfence.images.store import TemplateStore
from ringfence.model.errors import InvalidRequest, NotFound, RingfenceError
from ringfence.model.policies import from_dict
from ringfence.model.policy import Policy
from ringfence.model.values import dataclass
from ringfence.node import building
from ringfence.node.building import BuildOptions, Listener

if TYPE_CHECKING:
    from ringfence.node.service import Node

_DEEPEST = 20  # templates built on one another


@dataclass(frozen=True, slots=True)
class Refreshed:
    """One template that was made again. ``changed``: it has another content now."""

    name: str
    before: str
    template: Template
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the name points at something else now."""
        return self.before != self.template.digest


class Refreshing:
    """One run over any number of templates: each is made again once, also if several are built on it."""

    def __init__(
        self, node: Node, store: TemplateStore, listener: Listener, *, insecure: bool = False
    ) -> None:
        self._node = node
        self._store = store
        self._listener = listener
        self._insecure = insecure
        self._done: dict[str, Refreshed] = {}
        self._under_way: list[str] = []

    async def refresh(self, name: str) -> Refreshed:
        """Make a template again, and before it what it is built on. After an error the name is as it was.

        Raises:
            NotFound: no such template, or its source is gone.
            InvalidRequest: nobody knows how it was made, or it is built on itself.
            What adding and building raise.
        """
        if names.is_digest_or_part(name):
            raise InvalidRequest(f"{name} is a digest: its content never changes", hint="refresh a name")
        full = names.full_name(name)
        if full in self._done:
            return self._done[full]
        template = self._store.resolve(full)
        if full in self._under_way or len(self._under_way) >= _DEEPEST:
            raise InvalidRequest(f"{full} is built on itself: {' on '.join([*self._under_way, full])}")
        self._under_way.append(full)
        try:
            recipe = keeping.recipe(self._store, full)
            if template.source == BUILD:
                made = await self._build(full, template, recipe)
            else:
                made = await self._add(full, template, recipe)
        finally:
            self._under_way.pop()
        self._done[full] = made
        return made

    async def _add(self, name: str, template: Template, recipe: Recipe | None) -> Refreshed:
        kind = template.source.partition(":")[0]
        if kind not in references.KINDS:
            raise InvalidRequest(
                f"template {name} comes from {template.source or 'who knows where'}: it can't be made again",
                hint="add one from a source that can: an image of a registry, a Debian suite, an archive",
            )
        reference = references.parse(template.source)
        known: dict[str, Any] = {}
        if (
            recipe is not None
            and recipe.kind == "add"
            and (recipe.options or {}).get("source") == template.source
        ):
            known = recipe.options or {}
        options = ImportOptions(
            name=name,
            start=template.config.start,
            ready=template.config.ready,
            insecure=self._insecure or bool(known.get("insecure")),
            authfile=str(known.get("authfile", "")),
            packages=tuple(map(str, known.get("packages", ()))),
            mirror=str(known.get("mirror", "")),
            variant=str(known.get("variant", "minbase")),
        )
        added = await building.in_thread(
            lambda _: importing.add_reference(self._store, reference, options, self._listener.note)
        )
        return Refreshed(name, template.digest, added.template, added.notes)

    async def _build(self, name: str, template: Template, recipe: Recipe | None) -> Refreshed:
        if recipe is None or recipe.kind != BUILD:
            raise InvalidRequest(
                f"how template {name} was built is not known here",
                hint=f"ringfence template build … -t {name}",
            )
        if not await asyncio.to_thread(os.path.isdir, recipe.context):
            raise NotFound(
                f"the folder that template {name} was built from is gone: {recipe.context}",
                hint=f"build it again from another one: ringfence template build … -t {name}",
            )
        definition = parse(recipe.definition.encode("utf-8", "surrogateescape"), recipe.file)
        arguments = dict(recipe.arguments)
        await self._base(definition, arguments)
        options = BuildOptions(
            name,
            arguments=arguments,
            policy=from_dict(recipe.policy) if recipe.policy else Policy(),
            epoch=recipe.epoch,
            insecure=self._insecure,
        )
        built = await building.build(
            self._node, self._store, definition, recipe.context, options, self._listener
        )
        return Refreshed(name, template.digest, built.template, built.notes)

    async def _base(self, definition: Definition, arguments: dict[str, str]) -> None:
        """Refresh what the template is built on, if it has a name and can be."""
        base = steps.base_of(definition, arguments)
        if base == steps.SCRATCH or names.is_digest_or_part(base):
            return
        try:
            found = self._store.resolve(base)
        except (NotFound, InvalidRequest):
            reference = references.parse(base)  # as the build does
            try:
                found = self._store.resolve(references.default_name(reference))
            except NotFound:
                return  # the build fetches it anew
        kind = found.source.partition(":")[0]
        if found.source != BUILD and kind not in ("oci", "debian"):
            self._listener.note(
                f"its base {found.name} comes from {found.source or 'a snapshot'}: taken as it is"
            )
            return
        await self.refresh(found.name)


async def refresh_all(
    refreshing: Refreshing, wanted: list[str]
) -> tuple[list[Refreshed], list[tuple[str, RingfenceError]]]:
    """Refresh one after the other; (those that were, those that failed and why)."""
    done: list[Refreshed] = []
    failed: list[tuple[str, RingfenceError]] = []
    for name in wanted:
        try:
            done.append(await refreshing.refresh(name))
        except RingfenceError as error:
            failed.append((name, error))
        await asyncio.sleep(0)
    return done, failed


__all__ = ["Refreshed", "Refreshing", "refresh_all"]
