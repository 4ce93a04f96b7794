"""What a template is, and what the store promises. Plain values; the work is in the other modules.

The rules of the store (``ringfence.images.store.TemplateStore``):

* A layer is named by the SHA-256 of its *uncompressed* tar (the ``diff_id`` of an OCI image). It is unpacked
  once into a folder that nobody writes to again, in overlay's own form: a deleted file is a character
  device 0:0, an opaque folder has the attribute ``trusted.overlay.opaque`` (``user.overlay.opaque`` as a
  normal user).
* A template is named by the SHA-256 over its layers, architecture and configuration: the same content has
  the same digest on every machine. Names (``python:3.12``) point at digests and can be moved.
* What is there is whole: everything is made aside, flushed, and renamed into place.
* What is in use stays: layers of templates, of imports under way, of sandboxes that live, and what is pinned.
"""

from __future__ import annotations

from dataclasses import field

from ringfence.model.values import dataclass

HOST = "host"  # the built-in template made of this host's programs
ENGINE = "docker:"  # prefix of a template that a container engine has itself: ``docker:python:3.12``


@dataclass(frozen=True, slots=True)
class Layer:
    """One unpacked layer. ``digest``: ``sha256:…`` of its uncompressed tar. ``size``: bytes of its files."""

    digest: str
    folder: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class TemplateConfig:
    """What a template brings besides files: defaults, which policy and request may override.

    ``env`` in the image's order. ``user`` is what the image says (``app``, ``1000:1000``, empty: root),
    ``uid`` and ``gid`` what that is by the image's own ``/etc/passwd`` and ``/etc/group`` (``None``: not in
    there). It is told, never obeyed: the policy's ``process.user`` decides who the workload is. ``workdir``:
    absolute, or empty. ``start``: a command that is started with the sandbox; ``ready``: one that succeeds
    once it is up.
    """

    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    uid: int | None = None
    gid: int | None = None
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """What runs where nobody says what: the entry point with its default arguments."""
        return (*self.entrypoint, *self.cmd)


@dataclass(frozen=True, slots=True)
class Template:
    """An immutable root file system and its defaults.

    ``layers``: lowest first. ``name``: the name it was found by, with its tag (empty if found by digest).
    ``source``: where it came from (``oci:registry.example/python:3.12``, ``rootfs:base.tar``, ``build``).
    ``base_digest``: digest of the image or template it was made from, ``base_made_at`` when *that* was made,
    by its own account, ``made_at`` when it was put into this store; seconds since the epoch, 0 where unknown.
    """

    digest: str
    name: str
    layers: tuple[Layer, ...]
    config: TemplateConfig = field(default_factory=TemplateConfig)
    source: str = ""
    base_digest: str = ""
    base_made_at: float = 0.0
    made_at: float = 0.0
    architecture: str = ""  # as in OCI images: amd64, arm64

    @property
    def size(self) -> int:
        """Bytes of the files of all its layers; shared layers count in every template."""
        return sum(layer.size for layer in self.layers)

    @property
    def lowers(self) -> tuple[str, ...]:
        """Folders for an overlay mount, topmost first."""
        return tuple(layer.folder for layer in reversed(self.layers))


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """How much one layer may be. Beyond any of them the import fails and leaves nothing.

    ``size``: bytes of its files, holes counted as written. ``entries``: files, folders and links.
    ``ratio``: bytes unpacked for each compressed one, looked at beyond ``ratio_floor`` bytes.
    """

    size: int = 64 << 30
    entries: int = 4_000_000
    ratio: int = 250
    ratio_floor: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """What unpacking a layer came upon. ``notes``: sentences, the first hundred."""

    files: int = 0
    folders: int = 0
    links: int = 0
    whiteouts: int = 0
    size: int = 0
    skipped: int = 0  # device nodes, pipes
    stripped: int = 0  # setuid and setgid bits
    notes: tuple[str, ...] = ()
