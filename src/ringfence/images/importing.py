"""Bringing a template into the store from any source."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path
from typing import BinaryIO

from ringfence.images import blobs, manifests, references, users
from ringfence.images.contract import ImportLimits, Layer, Template, TemplateConfig
from ringfence.images.merged import Merged
from ringfence.images.references import Reference
from ringfence.images.store import TemplateStore
from ringfence.images.troubles import host_limit
from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass
from ringfence.runtimes.context import privileged


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What an import is told besides its source.

    ``start`` and ``ready`` become the template's. ``insecure``: a registry by plain HTTP, or with a
    certificate that nobody vouches for. ``authfile``: credentials in the form of Docker's ``config.json``.
    ``packages``, ``mirror``, ``epoch`` (seconds: no file is younger) and ``variant`` are for ``debian:``.
    """

    name: str = ""
    limits: ImportLimits = field(default_factory=ImportLimits)
    start: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    insecure: bool = False
    authfile: str = ""
    packages: tuple[str, ...] = ()
    mirror: str = ""
    epoch: int | None = None
    variant: str = "minbase"


@dataclass(frozen=True, slots=True)
class Added:
    """A template that was added, how many of its layers were here before, and what was noticed."""

    template: Template
    reused: int
    notes: tuple[str, ...]


Progress = Callable[[str], object]  # called with one line that says what is being done


def add(
    store: TemplateStore, source: str, options: ImportOptions | None = None, progress: Progress | None = None
) -> Added:
    """Add a template from a source as people write it (``references.parse``).

    Raises:
        InvalidRequest: broken, hostile, not for this machine, or no source at all; nothing is left of it.
        NotFound: no such file, or no such image in the registry.
        HostLimit: over a limit, or the disk is full.
        RuntimeUnavailable: a program is missing (skopeo, mmdebstrap, zstd); the hint says how to get it.
    """
    return add_reference(store, references.parse(source), options, progress)


def add_reference(
    store: TemplateStore,
    reference: Reference,
    options: ImportOptions | None = None,
    progress: Progress | None = None,
) -> Added:
    """As :func:`add`, for a source that was parsed before."""
    options = options or ImportOptions()
    work = _Import(store, reference, options, progress or (lambda line: None))
    try:
        added = work.run()
        _remember(store, added.template, options)
        return added
    except OSError as error:
        raise host_limit(error, f"add {reference.text}") from error


def _remember(store: TemplateStore, template: Template, options: ImportOptions) -> None:
    """What `template refresh` has to know beside the source."""
    from ringfence.images.building import keeping

    if not template.name:
        return
    known = {
        "source": template.source,
        "packages": list(options.packages),
        "mirror": options.mirror,
        "variant": options.variant,
        "insecure": options.insecure,
        "authfile": os.path.abspath(options.authfile) if options.authfile else "",
    }
    keeping.keep_recipe(store, template.name, keeping.Recipe("add", options=known))


class _Import:
    def __init__(
        self, store: TemplateStore, reference: Reference, options: ImportOptions, progress: Progress
    ) -> None:
        self._store = store
        self._reference = reference
        self._options = options
        self._say = progress
        self._notes: list[str] = []

    def run(self) -> Added:
        kind = self._reference.kind
        if kind == "oci":
            return self._from_registry()
        if kind == "debian":
            return self._from_debian()
        path = Path(self._reference.place)
        if kind == "oci-layout":
            return self._from_layout(path)
        if kind == "rootfs":
            with open(path, "rb") as file:
                return self._from_tar(file, os.fstat(file.fileno()).st_size)
        return self._from_archive(path)

    def _from_registry(self) -> Added:
        from ringfence.images import registry

        with self._store.working_folder() as folder:
            self._say(f"fetching {self._reference.place}")
            digest = registry.fetch(
                self._reference.place,
                folder / "layout",
                insecure=self._options.insecure,
                authfile=self._options.authfile,
            )
            return self._from_layout(folder / "layout", digest)

    def _from_debian(self) -> Added:
        from ringfence.images import debian

        options = self._options
        self._say(f"making {self._reference.text}: Debian's packages are fetched and unpacked")
        with debian.build(
            self._reference.place,
            packages=options.packages,
            mirror=options.mirror,
            epoch=options.epoch,
            variant=options.variant,
        ) as built:
            layer = self._layer(built, "", "", "the root file system", 0)
            built.check()
        config = TemplateConfig(cmd=("/bin/bash",), start=options.start, ready=options.ready)
        return self._put([layer], 0, config, manifests.machine(), layer.digest, 0.0, "")

    def _from_layout(self, folder: Path, digest: str = "") -> Added:
        source = blobs.FolderBlobs(folder)
        try:
            return self._image(source, manifests.read_layout(source, self._reference.tag), digest)
        finally:
            source.close()

    def _from_archive(self, path: Path) -> Added:
        kind = self._reference.kind
        with self._store.working_folder() as folder, contextlib.ExitStack() as stack:
            file = blobs.uncompressed_file(path, folder / "archive", self._options.limits)
            stack.callback(file.close)
            archive = blobs.ArchiveBlobs(file)
            # What `docker save` writes nowadays is both; its own list names the images as people know them.
            if kind != "oci-archive" and archive.has("manifest.json"):
                self._reference = replace(self._reference, kind="docker-archive")
                return self._image(archive, manifests.read_docker(archive, self._reference.tag))
            if kind != "docker-archive" and archive.has("index.json"):
                self._reference = replace(self._reference, kind="oci-archive")
                return self._image(archive, manifests.read_layout(archive, self._reference.tag))
            if kind != "archive":
                what = "manifest.json" if kind == "docker-archive" else "index.json"
                raise InvalidRequest(
                    f"{path} is no archive of an image: there is no {what} in it",
                    hint="a tar of a root file system is added as rootfs:FILE",
                )
            file.seek(0)
            self._reference = replace(self._reference, kind="rootfs")
            return self._from_tar(file, os.fstat(file.fileno()).st_size)

    def _from_tar(self, file: BinaryIO, size: int) -> Added:
        layer = self._layer(file, "", "", "the root file system", size)
        self._need_programs([layer])
        config = TemplateConfig(start=self._options.start, ready=self._options.ready)
        return self._put([layer], 0, config, manifests.machine(), layer.digest, 0.0, "")

    def _image(self, source: manifests.Blobs, image: manifests.Image, digest: str = "") -> Added:
        layers: list[Layer] = []
        reused = 0
        for number, part in enumerate(image.layers, start=1):
            here = self._store.layer(part.diff_id)
            if here is not None:
                reused += 1
                layers.append(here)
                continue
            what = f"layer {number} of {len(image.layers)}"
            stream = source.open(part.name)
            layers.append(self._layer(stream, part.diff_id, part.blob_digest, what, 0))
        config = users.resolve(image.config, Merged(tuple(layer.folder for layer in reversed(layers))))
        if self._options.start or self._options.ready:
            config = replace(config, start=self._options.start, ready=self._options.ready)
        return self._put(
            layers, reused, config, image.architecture, digest or image.digest, image.made_at, image.name
        )

    def _layer(self, stream: object, diff_id: str, blob: str, what: str, size: int) -> Layer:
        told = -1

        def progress(count: int) -> None:
            nonlocal told
            if count >> 26 != told:  # every 64 MiB
                told = count >> 26
                done = (
                    f", {count * 100 // size} %" if size and told else f", {count >> 20} MiB" if told else ""
                )
                self._say(f"unpacking {what}{done}")

        return self._store.add_layer_from(
            stream,  # type: ignore[arg-type]
            diff_id=diff_id,
            blob_digest=blob,
            limits=self._options.limits,
            progress=progress,
            notes=self._notes,
        )

    def _need_programs(self, layers: list[Layer]) -> None:
        root = Merged(tuple(layer.folder for layer in reversed(layers)))
        if not any(root.list(root.resolve(folder)) for folder in ("/bin", "/usr/bin", "/sbin", "/usr")):
            raise InvalidRequest(
                "there are no programs in it: neither /bin nor /usr has anything",
                hint="the root of the archive must be the root of the file system: tar -C FOLDER -cf FILE .",
            )

    def _put(
        self,
        layers: list[Layer],
        reused: int,
        config: TemplateConfig,
        architecture: str,
        base: str,
        made_at: float,
        image_name: str,
    ) -> Added:
        template = self._store.put(
            self._options.name or references.default_name(self._reference, image_name),
            layers,
            config,
            source=self._reference.text,
            base_digest=base,
            base_made_at=made_at,
            architecture=architecture,
        )
        if not privileged() and len(layers) > reused:
            self._notes.append("as a normal user you own every file of a template, whoever owned it there")
        return Added(template, reused, tuple(dict.fromkeys(self._notes)))
