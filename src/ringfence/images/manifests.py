"""What the documents of an image say: index, manifest, configuration; OCI's and Docker's words for the same.

They are hostile: every value is looked at before it is used, and what a digest names must have that digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from datetime import datetime
from typing import Any, Protocol

from ringfence.images.contract import TemplateConfig
from ringfence.images.names import is_digest
from ringfence.images.tarstream import Readable
from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

LARGEST = 4 << 20  # bytes of one document, as registries limit them
MOST_LAYERS = 400  # overlay takes 500 lower layers
_DEEPEST = 3  # indexes in indexes
REF_NAME = "org.opencontainers.image.ref.name"
_MACHINES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "riscv64": "riscv64",
}
_VARIABLE = re.compile(r"[^=\0]+=[^\0]*", re.DOTALL)
_MOST_WORDS = 1000


class Blobs(Protocol):
    """Where the parts of an image lie: a folder, or an archive."""

    def open(self, name: str) -> Readable:
        """The file of that name (``blobs/sha256/…``, ``manifest.json``).

        Raises:
            InvalidRequest: there is none.
        """

    def has(self, name: str) -> bool:
        """Whether there is one."""


@dataclass(frozen=True, slots=True)
class LayerSource:
    """One layer to fetch: the file's name, what it must hash to (empty: unknown) and what its tar must."""

    name: str
    blob_digest: str
    diff_id: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image, its documents read and verified. ``digest``: of its manifest, or as Docker's image id."""

    digest: str
    layers: tuple[LayerSource, ...]
    config: TemplateConfig
    architecture: str
    made_at: float
    name: str = ""  # as the source calls it, with its tag


def machine() -> str:
    """This machine's architecture, as images name it."""
    return _MACHINES.get(os.uname().machine, os.uname().machine)


def read_layout(blobs: Blobs, tag: str = "") -> Image:
    """The image in an OCI layout: that of a tag, or the only one.

    Raises:
        InvalidRequest: damaged, not for this machine, or no such image in it.
    """
    index = _document(_whole(blobs, "index.json"), "index.json")
    found = [each for each in _objects(index.get("manifests"), "index.json") if not _is_attestation(each)]
    names = [str(_of(each.get("annotations"), dict).get(REF_NAME, "")) for each in found]
    if tag:
        chosen = [each for each, name in zip(found, names, strict=True) if tag in (name, _tag_of(name))]
    else:
        chosen = found
        if len(chosen) > 1 and not any(names):
            chosen = [each for each in found if _fits(each)]
    if len(chosen) != 1:
        listed = ", ".join(sorted(filter(None, names))) or "none has a name"
        if tag:
            raise InvalidRequest(f"no image {tag!r} in the layout", hint=f"those in it: {listed}")
        raise InvalidRequest(
            f"{len(chosen) or 'no'} images in the layout" if len(chosen) != 1 else "",
            hint=f"add its name after a colon, one of: {listed}",
        )
    name = names[found.index(chosen[0])]
    return _image(blobs, chosen[0], name, 0)


def read_docker(blobs: Blobs, tag: str = "") -> Image:
    """The image in what ``docker save`` wrote.

    Raises:
        InvalidRequest: damaged, not for this machine, or no such image in it.
    """
    listed = json_of(_whole(blobs, "manifest.json"), "manifest.json")
    images = _objects(listed, "manifest.json")
    names = [
        [str(name) for name in _of(each.get("RepoTags"), list) if isinstance(name, str)] for each in images
    ]
    if tag:
        chosen = [at for at, tags in enumerate(names) if any(tag in (one, _tag_of(one)) for one in tags)]
    else:
        chosen = list(range(len(images)))
    if len(chosen) != 1:
        known = ", ".join(name for tags in names for name in tags) or "none has a name"
        raise InvalidRequest(
            f"no image {tag!r} in the archive" if tag else f"{len(chosen) or 'no'} images in the archive",
            hint=f"add its name after a colon, one of: {known}",
        )
    entry = images[chosen[0]]
    text = _whole(blobs, _string(entry.get("Config"), "manifest.json"))
    digest = "sha256:" + hashlib.sha256(text).hexdigest()
    config, diff_ids, architecture, made_at = read_config(text)
    files = [_string(each, "manifest.json") for each in _of(entry.get("Layers"), list)]
    _same_count(len(files), len(diff_ids))
    layers = tuple(LayerSource(name, "", diff_id) for name, diff_id in zip(files, diff_ids, strict=True))
    tags = names[chosen[0]]
    return Image(digest, layers, config, architecture, made_at, tag if ":" in tag else (tags or [""])[0])


def _image(blobs: Blobs, descriptor: dict[str, Any], name: str, depth: int) -> Image:
    digest, text = _blob(blobs, descriptor)
    document = _document(text, "the manifest")
    if isinstance(document.get("manifests"), list):
        if depth >= _DEEPEST:
            raise InvalidRequest("an index in an index in an index: no honest image has that")
        return _image(blobs, _choose(document), name, depth + 1)
    _, text = _blob(blobs, _of(document.get("config"), dict))
    config, diff_ids, architecture, made_at = read_config(text)
    found = _objects(document.get("layers"), "the manifest")
    _same_count(len(found), len(diff_ids))
    layers = []
    for each, diff_id in zip(found, diff_ids, strict=True):
        kind = str(each.get("mediaType", ""))
        if "tar" not in kind.replace("+", ".").split(".") or "encrypted" in kind:
            raise InvalidRequest(
                f"a layer of the type {kind or 'unknown'!r}: not one of an image with files",
                hint="encrypted images and other artifacts have no files that a sandbox could use",
            )
        blob = _digest(each.get("digest"))
        path = _blob_path(blob)
        if not blobs.has(path):
            raise InvalidRequest(
                f"the image lacks its layer {blob}",
                hint="the copy is not whole" + (", or the layer lies elsewhere" if each.get("urls") else ""),
            )
        layers.append(LayerSource(path, blob, diff_id))
    return Image(digest, tuple(layers), config, architecture, made_at, name)


def _choose(index: dict[str, Any]) -> dict[str, Any]:
    listed = [each for each in _objects(index.get("manifests"), "the index") if not _is_attestation(each)]
    fitting = [each for each in listed if _fits(each)]
    if not fitting:
        kinds = sorted({str(_of(each.get("platform"), dict).get("architecture", "?")) for each in listed})
        raise _wrong_machine(", ".join(kinds) or "nothing")
    return fitting[0]


def _fits(descriptor: dict[str, Any]) -> bool:
    platform = _of(descriptor.get("platform"), dict)
    if not platform:
        return True
    return bool(platform.get("os") == "linux" and platform.get("architecture") == machine())


def _is_attestation(descriptor: dict[str, Any]) -> bool:
    platform = _of(descriptor.get("platform"), dict)
    return bool(platform.get("os") == platform.get("architecture") == "unknown")


def read_config(text: bytes) -> tuple[TemplateConfig, list[str], str, float]:
    """(configuration, digests of the uncompressed layers, architecture, when it was made) of an image.

    Raises:
        InvalidRequest: it makes no sense, or is not for this machine.
    """
    document = _document(text, "the image's configuration")
    architecture = str(document.get("architecture", ""))
    if document.get("os", "linux") != "linux":
        raise InvalidRequest(f"the image is for {document.get('os')!r}, not for Linux")
    if architecture and architecture != machine():
        raise _wrong_machine(architecture)
    rootfs = _of(document.get("rootfs"), dict)
    diff_ids = [_digest(each) for each in _of(rootfs.get("diff_ids"), list)]
    if len(diff_ids) > MOST_LAYERS:
        raise InvalidRequest(f"an image of {len(diff_ids)} layers: more than {MOST_LAYERS} can't be mounted")
    config = _of(document.get("config"), dict)
    return _template_config(config), diff_ids, architecture or machine(), _seconds(document.get("created"))


def _template_config(config: dict[str, Any]) -> TemplateConfig:
    env = []
    for text in _strings(config.get("Env"), "Env"):
        if not _VARIABLE.fullmatch(text):
            raise InvalidRequest(f"the image's configuration: {text[:100]!r} is no variable")
        name, _, value = text.partition("=")
        env.append((name, value))
    workdir = config.get("WorkingDir") or ""
    if not isinstance(workdir, str) or "\0" in workdir or ".." in workdir.split("/") or len(workdir) > 4000:
        raise InvalidRequest(f"the image's configuration: {str(workdir)[:100]!r} is no working directory")
    user = config.get("User") or ""
    if not isinstance(user, str) or len(user) > 256 or any(ord(letter) < 33 for letter in user):
        raise InvalidRequest("the image's configuration: its user makes no sense")
    labels = _of(config.get("Labels"), dict)
    return TemplateConfig(
        env=tuple(dict(env).items()),
        user=user,
        workdir="" if workdir in ("", "/") else "/" + os.path.normpath(workdir).strip("/"),
        entrypoint=tuple(_strings(config.get("Entrypoint"), "Entrypoint")),
        cmd=tuple(_strings(config.get("Cmd"), "Cmd")),
        labels=tuple(sorted((str(key), str(value)) for key, value in labels.items())),
    )


def _strings(value: Any, what: str) -> list[str]:
    found: list[str] = _of(value, list)
    if isinstance(value, str):
        found = ["/bin/sh", "-c", value]
    if len(found) > _MOST_WORDS or not all(isinstance(each, str) and "\0" not in each for each in found):
        raise InvalidRequest(f"the image's configuration: {what} is no list of words")
    return found


def json_of(text: bytes, what: str) -> Any:
    """A JSON document of any shape.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"the image is damaged: {what} is not JSON", hint="fetch it again") from None


def _document(text: bytes, what: str) -> dict[str, Any]:
    value = json_of(text, what)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the image is damaged: {what} is no object", hint="fetch it again")
    return value


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidRequest(f"the image is damaged: {what} lists no images or layers", hint="fetch it again")
    return value


def _of(value: Any, kind: type[Any]) -> Any:
    """The value if it is of that kind, else an empty one."""
    return value if isinstance(value, kind) else kind()


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"the image is damaged: {what} lacks a name", hint="fetch it again")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not is_digest(value):
        raise InvalidRequest(
            f"the image names {str(value)[:100]!r} where a sha256 digest should be", hint="fetch it again"
        )
    return value


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _blob(blobs: Blobs, descriptor: dict[str, Any]) -> tuple[str, bytes]:
    digest = _digest(descriptor.get("digest"))
    text = _whole(blobs, _blob_path(digest))
    found = "sha256:" + hashlib.sha256(text).hexdigest()
    if found != digest:
        raise InvalidRequest(
            f"a document of the image is not what its digest says: {found} instead of {digest}",
            hint="it is damaged, or somebody has changed it: fetch it again from a source you trust",
        )
    return digest, text


def _whole(blobs: Blobs, name: str) -> bytes:
    stream = blobs.open(name)
    parts: list[bytes] = []
    size = 0
    while data := stream.read(1 << 16):
        parts.append(data)
        size += len(data)
        if size > LARGEST:
            raise InvalidRequest(f"{name} of the image is larger than any honest one")
    return b"".join(parts)


def _tag_of(name: str) -> str:
    return name.rpartition(":")[2] if ":" in name.rpartition("/")[2] else ""


def _same_count(layers: int, diff_ids: int) -> None:
    if layers != diff_ids:
        raise InvalidRequest(
            f"the image is damaged: {layers} layers, and digests for {diff_ids}", hint="fetch it again"
        )
    if not layers:
        raise InvalidRequest("the image has no layers, so no files", hint="choose another image")


def _seconds(text: Any) -> float:
    if not isinstance(text, str):
        return 0.0
    # Nine digits of a second are usual there; Python reads six.
    short = re.sub(r"(\.\d{6})\d+", r"\1", text)
    try:
        return max(0.0, datetime.fromisoformat(short).timestamp())
    except (ValueError, OverflowError):
        return 0.0


def _wrong_machine(kinds: str) -> InvalidRequest:
    return InvalidRequest(
        f"the image is for {kinds}, and this machine is {machine()}",
        hint=f"choose one that is made for linux/{machine()}",
    )
