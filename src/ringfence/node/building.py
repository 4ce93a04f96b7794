"""Building templates: each RUN in a sandbox of its own, over the layers before it; its result is a layer.

A RUN sees no network and nothing of the host: the template as it is so far, and what it brings. What it wrote
is copied out of its wall by the host as of any sandbox that is saved (``node.saving``), made an archive in
which nothing depends on the time or on this machine, and unpacked into the store as anybody else's layer.
COPY and WORKDIR need no sandbox: nothing of the template is executed for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ringfence.images import importing, names, references
from ringfence.images.building import archives, copying, keeping, steps
from ringfence.images.building.context import Context
from ringfence.images.building.definition import Definition, wrong
from ringfence.images.building.keeping import Recipe
from ringfence.images.building.steps import Step
from ringfence.images.contract import ENGINE, HOST, ImportLimits, Layer, Template, TemplateConfig
from ringfence.images.manifests import MOST_LAYERS, machine
from ringfence.images.merged import Merged
from ringfence.images.store import TemplateStore
from ringfence.model.errors import BuildFailed, GuestRefused, InvalidRequest, NotFound, RingfenceError
from ringfence.model.levels import Cause
from ringfence.model.policy import Policy
from ringfence.model.quantities import format_size
from ringfence.model.sandbox import SandboxRequest
from ringfence.model.values import dataclass
from ringfence.node import saving
from ringfence.runtimes.contract import Layered

if TYPE_CHECKING:
    from ringfence.guest.processes import Output
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.node.service import Node

SOURCE = "build"  # what a template that was built says of where it comes from
KEPT_OUTPUT = 16 << 10  # bytes of a step's last output that an error carries
_LABEL = "ringfence.building"  # makes a template that is half built differ from everybody else's
_NO_NETWORK = (
    b"could not resolve", b"temporary failure in name resolution", b"temporary failure resolving",
    b"name or service not known", b"network is unreachable", b"no address associated with hostname",
    b"getaddrinfo", b"failed to establish a new connection", b"unable to resolve host", b"bad address",
    b"unable to connect", b"connection refused",
)  # fmt: skip
_ACCOUNTS = frozenset((b"etc/passwd", b"etc/group", b"etc/passwd-", b"etc/group-"))
_Result = TypeVar("_Result")


class Listener(Protocol):
    """Who follows a build."""

    def step(self, number: int, count: int, text: str) -> None:
        """A step begins."""

    def output(self, stream: int, data: bytes) -> None:
        """A piece of what its command prints: 1 or 2; hostile."""

    def ended(self, number: int, seconds: float, layer: Layer | None, *, cached: bool) -> None:
        """A step is done. ``layer``: what it brought, if anything."""

    def note(self, text: str) -> None:
        """Something that should be known."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build. ``epoch``: seconds, no file's time is later. ``policy``: of each RUN but its user."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    cache: bool = True
    epoch: int | None = None
    insecure: bool = False  # a FROM oci: by plain HTTP
    authfile: str = ""


@dataclass(frozen=True, slots=True)
class Built:
    """A finished build: the template, how many steps there were, and how many of them were known before."""

    template: Template
    steps: int
    cached: int
    notes: tuple[str, ...]


async def build(
    node: Node,
    store: TemplateStore,
    definition: Definition,
    context_folder: str,
    options: BuildOptions,
    listener: Listener,
) -> Built:
    """Build a template and let the name point at it. After an error the name is as it was.

    Layers of steps that were done stay for the next build, until a collection.

    Raises:
        InvalidRequest: the definition makes no sense; names file, line and instruction.
        NotFound: no such base, or nothing to copy.
        BuildFailed: a RUN failed; the message has its last words.
        Unsupported, RuntimeUnavailable, StartFailed, HostLimit: no sandbox can be had, or the disk is full.
    """
    names.full_name(options.name)
    with Context(context_folder) as context:
        work = _Build(node, store, definition, context, options, listener)
        try:
            return await work.run()
        finally:
            await saving.to_the_end(asyncio.to_thread(keeping.prune, store))


class _Build:
    def __init__(
        self,
        node: Node,
        store: TemplateStore,
        definition: Definition,
        context: Context,
        options: BuildOptions,
        listener: Listener,
    ) -> None:
        self._node = node
        self._store = store
        self._definition = definition
        self._context = context
        self._options = options
        self._listener = listener
        self._layers: list[Layer] = []
        self._notes: list[str] = []
        self._base: Template | None = None
        self._cached = 0
        epoch = options.epoch
        if epoch is None and os.environ.get("SOURCE_DATE_EPOCH", "").isdigit():
            epoch = int(os.environ["SOURCE_DATE_EPOCH"])
        self._epoch = archives.EARLIEST if epoch is None else epoch

    async def run(self) -> Built:
        definition, options = self._definition, self._options
        for note in definition.notes:
            self._note(note)
        base_name = steps.base_of(definition, options.arguments)
        line = next(each.line for each in definition.instructions if each.name == "FROM")
        with self._at(line, "FROM"):
            self._base = await self._find_base(base_name)
        if self._base is not None:
            self._layers = [self._here(layer) for layer in self._base.layers]
        config = self._base.config if self._base is not None else TemplateConfig()
        todo = steps.work_out(definition, config, options.arguments)
        for number, step in enumerate(todo, start=1):
            self._listener.step(number, len(todo), step.text)
            started = time.monotonic()
            with self._at(step.line, step.name):
                layer, cached = await self._step(step)
            if layer is not None:
                self._layers.append(layer)
                if len(self._layers) > MOST_LAYERS:
                    raise InvalidRequest(
                        f"more than {MOST_LAYERS} layers can't be mounted",
                        hint="write several commands in one RUN",
                    )
            self._cached += cached
            self._listener.ended(number, time.monotonic() - started, layer, cached=cached)
        return Built(
            self._put(todo[-1].config if todo else config), len(todo), self._cached, tuple(self._notes)
        )

    # -- the base

    async def _find_base(self, name: str) -> Template | None:
        if name == steps.SCRATCH:
            return None
        if name == HOST or name.startswith(ENGINE):
            raise InvalidRequest(
                f"no template can be built on {name}: its files are not layers of the template store",
                hint="begin with a template of `ringfence template ls`, or FROM debian:bookworm",
            )
        is_source = name.partition(":")[0] in references.KINDS
        try:
            return self._store.resolve(name)
        except (NotFound, InvalidRequest):
            if not is_source:
                raise
        reference = references.parse(name)
        if reference.kind not in ("oci", "debian"):
            raise InvalidRequest(
                f"FROM {name}: only oci: and debian: are fetched", hint="add it as a template first"
            )
        with contextlib.suppress(NotFound):
            found = self._store.resolve(references.default_name(reference))
            if found.source == reference.text:
                return found
        self._note(
            f"{reference.text} is no template yet: it is added as {references.default_name(reference)}"
        )
        added = await in_thread(
            lambda _: importing.add_reference(
                self._store,
                reference,
                importing.ImportOptions(insecure=self._options.insecure, authfile=self._options.authfile),
                lambda text: self._listener.note(text),
            )
        )
        return added.template

    def _here(self, layer: Layer) -> Layer:
        found = self._store.layer(layer.digest)
        if found is None:
            raise NotFound(
                f"layer {layer.digest} of the base was removed meanwhile", hint="add the base again"
            )
        return found

    # -- steps

    async def _step(self, step: Step) -> tuple[Layer | None, bool]:
        """(the layer that it gives, whether it was known)."""
        if step.kind == "run":
            return await self._run_step(step)
        if step.kind == "copy":
            copy = await in_thread(lambda _: copying.prepare(step, self._context, self._below()))
            if not copy.found:
                return None, False
            return await self._known_or(
                {"copy": copy.content()},
                lambda: copying.archive(copy, self._context, self._below(), self._epoch),
            )
        if step.kind == "folder":
            path = copying.folder_to_make(step, self._below())
            if path:
                return await self._known_or(
                    {"folder": path}, lambda: archives.of_folder(path, self._below(), epoch=self._epoch)
                )
        return None, False

    async def _known_or(
        self, content: dict[str, Any], pieces: Callable[[], Iterable[bytes]]
    ) -> tuple[Layer | None, bool]:
        key = self._key(content)
        known = keeping.find_step(self._store, key) if self._options.cache else None
        if known is not None:
            return known[0], True
        layer = await self._add(pieces(), ImportLimits())
        keeping.keep_step(self._store, key, layer)
        return layer, False

    async def _run_step(self, step: Step) -> tuple[Layer | None, bool]:
        below = self._below()
        if below is None:
            raise InvalidRequest("there is no program in an empty template", hint="begin with FROM TEMPLATE")
        user = copying.run_as(step.config, below)
        key = self._key(
            {"run": [step.argv, step.env, step.config.user, user, step.config.workdir], "machine": machine()}
        )
        known = keeping.find_step(self._store, key) if self._options.cache else None
        if known is not None:
            return known[0], True
        with self._unnamed(step.config) as digest:
            layer = await self._in_sandbox(step, user, digest)
        keeping.keep_step(self._store, key, layer)
        return layer, False

    async def _in_sandbox(self, step: Step, user: int, digest: str) -> Layer | None:
        from ringfence.guest.processes import ProcessSpec

        policy = self._options.policy
        policy = policy.with_wall(process=replace(policy.wall.process, user=user))
        env = {"SOURCE_DATE_EPOCH": str(self._epoch)} | dict(step.env)
        request = SandboxRequest(policy=policy, template=digest, labels={"build": self._options.name})
        sandbox = await self._node.create(request)
        try:
            saving.choose(sandbox, "disk")  # before the command has worked for an hour
            tail = bytearray()

            def follow(output: Output) -> None:
                self._listener.output(output.stream, output.data)
                tail.extend(output.data)
                del tail[:-KEPT_OUTPUT]

            try:
                result = await sandbox.run(
                    ProcessSpec(step.argv, env=env, cwd=step.config.workdir or "/"), on_output=follow
                )
            except GuestRefused as error:
                what = f"{step.argv[0]!r} can't be started: {os.strerror(error.errno)}"
                if "(program" in error.message:
                    error.message = what
                    error.hint = "name a program that the template has by now, with its interpreter"
                raise
            if result.end.cause is not Cause.EXITED or result.end.exit_code:
                raise self._failed(step, sandbox, result.end, bytes(tail))
            saved = await saving.snapshot(self._node, sandbox, kind="disk", temporary=True)
            try:
                assert saved.layer is not None
                return await self._keep(saved.layer, policy)
            finally:
                await saving.to_the_end(asyncio.to_thread(self._node.snapshots.drop, saved.name))
        finally:
            await sandbox.destroy()

    async def _keep(self, folder: os.PathLike[str], policy: Policy) -> Layer | None:
        """Turn what a sandbox wrote into a layer; None if it wrote nothing."""
        left_out: list[str] = []
        disk = policy.wall.resources.disk
        fittings = _Fittings(self._below())
        pieces = archives.of_upper(
            os.fspath(folder), epoch=self._epoch, limit=disk, left_out=left_out, rewrite=fittings.without
        )
        first = next(pieces)
        if first == archives.END:
            return None
        layer = await self._add(_chain(first, pieces), ImportLimits())
        for text in left_out[:20]:
            self._note(text)
        return layer

    async def _add(self, pieces: Iterable[bytes], limits: ImportLimits) -> Layer:
        return await in_thread(
            lambda stop: self._store.add_layer_from(archives.Stream(pieces, stop), limits=limits)
        )

    @contextlib.contextmanager
    def _unnamed(self, config: TemplateConfig) -> Iterator[str]:
        """The template so far, for one sandbox: nobody else's, and gone afterwards."""
        from ringfence.images.removing import remove_tree

        label = (_LABEL, os.urandom(16).hex())
        made = self._store.put(
            "",
            self._layers,
            replace(config, labels=(*config.labels, label), start=(), ready=()),
            source=SOURCE,
            architecture=machine(),
            hold=True,  # a collection may come before its sandbox does
        )
        try:
            yield made.digest
        finally:
            self._store.let_go(made.digest)
            with contextlib.suppress(OSError), self._store.exclusive():
                self._store.drop(made.digest)
            fittings = self._store.private / "fittings"
            for entry in os.listdir(fittings):
                if entry.startswith(made.digest.removeprefix("sha256:")):
                    with contextlib.suppress(OSError):
                        remove_tree(fittings / entry)

    # -- the result

    def _put(self, config: TemplateConfig) -> Template:
        from ringfence.images import users
        from ringfence.images.refreshing import fresh_at
        from ringfence.model.policies import to_dict

        base, options, definition = self._base, self._options, self._definition
        below = self._below()
        if below is None:
            raise InvalidRequest(f"{definition.file}: the template would have no files", hint="COPY some")
        made = self._store.put(
            options.name,
            self._layers,
            users.resolve(config, below),
            source=SOURCE,
            base_digest=base.digest if base is not None else "",
            base_made_at=fresh_at(base) if base is not None else time.time(),
            architecture=base.architecture if base is not None and base.architecture else machine(),
        )
        keeping.keep_recipe(
            self._store,
            options.name,
            Recipe(
                "build",
                definition=definition.source,
                file=definition.file,
                context=self._context.folder,
                arguments=tuple(sorted(options.arguments.items())),
                epoch=options.epoch,
                policy=to_dict(options.policy),
            ),
        )
        return made

    # -- parts

    def _below(self) -> Merged | None:
        if not self._layers:
            return None
        return Merged(tuple(layer.folder for layer in reversed(self._layers)))

    def _key(self, content: dict[str, Any]) -> str:
        return keeping.step_key(
            {"below": [layer.digest for layer in self._layers], "epoch": self._epoch, **content}
        )

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._listener.note(text)

    @contextlib.contextmanager
    def _at(self, line: int, name: str) -> Iterator[None]:
        """Say which instruction it was."""
        try:
            yield
        except BuildFailed:
            raise
        except RingfenceError as error:
            if "line" not in error.details:
                error.message = f"{self._definition.file} line {line}, {name}: {error.message}"
                error.args = (error.message,)
                error.details |= {"file": self._definition.file, "line": line, "instruction": name}
            raise

    def _failed(self, step: Step, sandbox: NodeSandbox, end: Any, tail: bytes) -> BuildFailed:
        words = tail.decode("utf-8", "replace").rstrip()
        last = "\n".join(words.splitlines()[-20:])
        policy = sandbox.request.policy
        what, hint = f"its command ended with {end.exit_code}", "the template is as it was before"
        if end.cause is Cause.OUT_OF_MEMORY:
            what, hint = end.detail or "it ran out of memory", "give it more: --memory 4G"
        elif end.cause is Cause.DEADLINE:
            what, hint = "its time was up", "give it more: --timeout 2h"
        elif end.cause is not Cause.EXITED:
            what = f"its command was ended: {end.cause.value}" + (f" ({end.detail})" if end.detail else "")
        elif _is_full(sandbox):
            disk = format_size(policy.wall.resources.disk)
            what, hint = f"the step's disk of {disk} is full", "give it more: --disk 4G"
        elif any(sign in tail.lower() for sign in _NO_NETWORK):
            hint = (
                "build steps have no network, and it looks as if it wanted one: fetch what it needs before, "
                "and bring it in with COPY"
            )
        error = wrong(self._definition.file, step.line, step.name, what + (f":\n{last}" if last else ""))
        return BuildFailed(
            error.message,
            hint=hint,
            **error.details,
            cause=end.cause.value,
            exit_code=end.exit_code,
            output=words,
        )


class _Fittings:
    """Accounts that a sandbox got on top of its template (``node.fittings``) are not the template's."""

    def __init__(self, below: Merged | None) -> None:
        self._below = below

    def without(self, path: bytes, data: bytes) -> bytes:
        """The content of a file of /etc that a step changed, without our lines."""
        if path not in _ACCOUNTS or self._below is None:
            return data
        had = set((self._below.read("/" + os.fsdecode(path.rstrip(b"-"))) or b"").splitlines())
        lines = data.splitlines(keepends=True)
        return b"".join(line for line in lines if line.rstrip(b"\n") in had or not _is_ours(line))


def _is_ours(line: bytes) -> bool:
    fields = line.rstrip(b"\n").split(b":")
    if fields[0] == b"ringfence" and fields[2:3] == [b"64999"]:
        return True
    if len(fields) == 7:
        return fields[0].startswith(b"agent") and fields[4] == b"agent" and fields[5] == b"/home/agent"
    return len(fields) == 4 and fields[0] == b"agent" and fields[3] == b""


def _is_full(sandbox: NodeSandbox) -> bool:
    """Whether the disk that the sandbox writes to has no room left, or next to none."""
    try:
        if not isinstance(sandbox.runtime, Layered) or not sandbox.runtime.capabilities().overlay:
            return False
        upper = sandbox.runtime.open_upper(sandbox.handle)
    except (OSError, RingfenceError):
        return False
    try:
        space = os.fstatvfs(upper)
    finally:
        os.close(upper)
    return space.f_bavail * space.f_frsize < 64 << 10 or space.f_favail == 0


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


async def in_thread(work: Callable[[threading.Event], _Result]) -> _Result:
    """Run it in a thread to its end, also when cancelled: then it is told to stop first."""
    stop = threading.Event()
    task = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(Exception):
            await saving.to_the_end(task)
        raise
