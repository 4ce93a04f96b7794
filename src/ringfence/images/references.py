"""What people write for a source: which kind it is, and the name a template of it gets."""

from __future__ import annotations

import os
import re

from ringfence.images.names import LATEST, RESERVED
from ringfence.model.errors import InvalidRequest, NotFound
from ringfence.model.values import dataclass

KINDS = ("oci", "oci-layout", "oci-archive", "docker-archive", "rootfs", "debian")
SUITE = re.compile(r"[a-z][a-z0-9-]{1,30}", re.ASCII)
_REFERENCE = re.compile(
    r"(?:(?P<registry>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?)/)?"
    r"(?P<path>[a-z0-9]+(?:(?:[._]|__|-+|/)[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
DEFAULT_REGISTRY = "docker.io"


@dataclass(frozen=True, slots=True)
class Reference:
    """A source. ``kind``: one of ``KINDS``. ``place``: path, suite, or ``registry/path[:tag][@digest]``.

    ``tag``: which image of a layout or an archive, empty for the only one.
    """

    kind: str
    place: str
    tag: str = ""

    @property
    def text(self) -> str:
        """As it is written down with the template."""
        return f"{self.kind}:{self.place}" + (f":{self.tag}" if self.tag else "")


def parse(text: str) -> Reference:
    """What a source means. A bare path is told apart by what is there.

    Raises:
        InvalidRequest: it is none of them.
        NotFound: the path does not exist.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind in KINDS:
        if not rest:
            raise InvalidRequest(f"{text}: nothing after {kind}:", hint=_example(kind))
        if kind == "debian":
            if not SUITE.fullmatch(rest):
                raise InvalidRequest(f"{rest!r} is no suite of Debian", hint="as in debian:bookworm")
            return Reference(kind, rest)
        if kind == "oci" and not rest.startswith(("/", ".")):
            return Reference(kind, registry_reference(rest))
        return _file("oci-layout" if kind == "oci" else kind, rest)
    engines = RESERVED | {"docker-daemon", "docker"}
    there = os.path.exists(text) or (kind not in engines and _longest_there(text))
    if text.startswith(("/", ".", "~")) or there:
        path = os.path.expanduser(text)
        return _file(_kind_of(path) if os.path.exists(path) else "", path)
    if colon and kind in engines:
        raise InvalidRequest(
            f"{text}: images of a container engine are not added, but used where they are",
            hint=f"ringfence run --runtime docker --template {text} -- COMMAND",
        )
    raise InvalidRequest(
        f"{text!r} is no source of a template, and there is no such file",
        hint="sources: oci:IMAGE (registry), a folder or archive of an image, rootfs:TAR, debian:SUITE",
    )


def registry_reference(text: str) -> str:
    """``registry/path:tag`` or ``registry/path[:tag]@digest`` of an image in a registry, completed as usual.

    Raises:
        InvalidRequest: it is none.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            f"{text!r} names no image in a registry", hint="as in oci:docker.io/library/debian:bookworm"
        )
    registry, path = found["registry"], found["path"]
    if registry and not ("." in registry or ":" in registry or registry == "localhost"):
        registry, path = None, f"{registry}/{path}"
    if registry is None:
        registry = DEFAULT_REGISTRY
        if path != path.lower():
            raise InvalidRequest(
                f"{text!r} names no image in a registry: its name has capital letters",
                hint="as in oci:docker.io/library/debian:bookworm",
            )
    if registry == DEFAULT_REGISTRY and "/" not in path:
        path = f"library/{path}"
    tag = found["tag"] or ("" if found["digest"] else LATEST)
    return (
        f"{registry}/{path}" + (f":{tag}" if tag else "") + (f"@{found['digest']}" if found["digest"] else "")
    )


def split_registry(place: str) -> tuple[str, str]:
    """(registry, path with tag and digest) of what :func:`registry_reference` gave."""
    registry, _, path = place.partition("/")
    return registry, path


def default_name(reference: Reference, image_name: str = "") -> str:
    """The name of a template that was given none; ``image_name`` is what the source itself calls it."""
    if reference.kind == "debian":
        return f"debian:{reference.place}"
    if reference.kind == "oci":
        name = _without_registry(reference.place.partition("@")[0])
    elif image_name and _REFERENCE.fullmatch(image_name) and reference.kind != "oci-layout":
        name = _without_registry(registry_reference(image_name))
    else:
        base = os.path.basename(os.path.abspath(reference.place))
        base = re.sub(r"(\.(tar|tgz|gz|zst|oci|docker))+$", "", base, flags=re.IGNORECASE)
        tag = image_name or reference.tag
        tag = tag.rpartition(":")[2] if ":" in tag else tag
        name = base + (f":{tag}" if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag) else "")
    name, colon, tag = name.partition(":")
    name = re.sub(r"[^a-z0-9/]+", "-", name.lower()).strip("-/") or "template"
    if name in RESERVED:
        name = f"my-{name}"
    return name + colon + tag


def _without_registry(place: str) -> str:
    registry, path = split_registry(place)
    return path.removeprefix("library/") if registry == DEFAULT_REGISTRY else path


def _file(kind: str, text: str) -> Reference:
    """A path, perhaps with the name of an image after a colon."""
    path, tag = os.path.expanduser(text), ""
    if not os.path.exists(path) and ":" in path:
        there = _longest_there(path)
        if there:
            path, tag = there, path[len(there) + 1 :]
    if not os.path.exists(path):
        raise NotFound(f"there is no {text}", hint=_similar(path))
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise InvalidRequest(
            f"{text} is a device, a pipe or a socket: neither a file nor a folder",
            hint="write what comes out of it to a file first, and name that",
        )
    kind = kind or _kind_of(path)
    if kind == "oci-layout" and not os.path.isdir(path):
        kind = "oci-archive"
    if kind in ("oci-archive", "docker-archive", "rootfs") and os.path.isdir(path):
        raise InvalidRequest(
            f"{text} is a folder, not an archive",
            hint="a layout: oci-layout:FOLDER; files of a root: tar them, then rootfs:TAR",
        )
    return Reference(kind, os.path.abspath(path), tag)


def _longest_there(text: str) -> str:
    """The longest path that exists before a colon (names of images hold colons too); empty if none does."""
    parts = text.split(":")
    paths = (":".join(parts[:cut]) for cut in range(len(parts) - 1, 0, -1))
    return next((path for path in paths if path and os.path.exists(path)), "")


def _kind_of(path: str) -> str:
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "index.json")):
            return "oci-layout"
        raise InvalidRequest(
            f"{path} is a folder, but no OCI layout (there is no index.json in it)",
            hint="a root file system is added as a tar: tar -C FOLDER -cf FILE ., then rootfs:FILE",
        )
    return "archive"


def _similar(path: str) -> str:
    from difflib import get_close_matches

    try:
        names = os.listdir(os.path.dirname(path) or ".")
    except OSError:
        return "see if the path is right"
    close = get_close_matches(os.path.basename(path), names, n=1, cutoff=0.6)
    return (
        f"did you mean {os.path.join(os.path.dirname(path), close[0])}?"
        if close
        else "see if the path is right"
    )


def _example(kind: str) -> str:
    return {
        "oci": "as in oci:docker.io/library/debian:bookworm",
        "debian": "as in debian:bookworm",
        "rootfs": "as in rootfs:root.tar",
    }.get(kind, f"as in {kind}:PATH")
