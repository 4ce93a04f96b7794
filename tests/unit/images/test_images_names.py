"""Names of templates, and what people write for a source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.images import names, references
from ringfence.images.references import Reference
from ringfence.model.errors import InvalidRequest, NotFound


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("python", "python:latest"),
        ("python:3.12-slim", "python:3.12-slim"),
        ("team/base_image", "team/base_image:latest"),
        ("debian:bookworm", "debian:bookworm"),
        ("a.b-c__d/e", "a.b-c__d/e:latest"),
    ],
)
def test_a_name(text: str, full: str) -> None:
    assert names.full_name(text) == full


@pytest.mark.parametrize(
    "text",
    ["", ":", "UP", "a b", "a:", "a:b:c", "../x", "/x", "x/", "x//y", "-x", "host", "docker:x", "oci",
     "sha256:x", "x" * 181, "a:" + "t" * 129, "a\n", "ä", "a%b"],
)  # fmt: skip
def test_no_name(text: str) -> None:
    with pytest.raises(InvalidRequest):
        names.full_name(text)


def test_digests() -> None:
    assert names.is_digest("sha256:" + "0" * 64)
    assert not names.is_digest("sha256:" + "0" * 63)
    assert not names.is_digest("sha256:" + "G" * 64)
    assert names.is_digest_or_part("sha256:01234567")
    assert not names.is_digest_or_part("sha256:0123456")


@pytest.mark.parametrize(
    ("text", "known", "words"),
    [
        ("pyton", ["python:latest", "tools:1"], "did you mean python:latest?"),
        ("python", ["python:3.12", "tools:1"], "did you mean python:3.12?"),
        ("nope", ["ess:latest"], "template ls"),
        ("x", [], "template add"),
    ],
)
def test_what_was_meant(text: str, known: list[str], words: str) -> None:
    error = names.unknown(text, known)
    assert isinstance(error, NotFound)
    assert words in error.hint


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("team/tool:1", "docker.io/team/tool:1"),
        ("localhost/x", "localhost/x:latest"),
        ("127.0.0.1:5000/a/b:c", "127.0.0.1:5000/a/b:c"),
        ("[::1]:5000/a", "[::1]:5000/a:latest"),
        ("registry.example/x@sha256:" + "a" * 64, "registry.example/x@sha256:" + "a" * 64),
        ("x:1@sha256:" + "a" * 64, "docker.io/library/x:1@sha256:" + "a" * 64),
    ],
)
def test_references_to_registries(text: str, place: str) -> None:
    assert references.registry_reference(text) == place


@pytest.mark.parametrize(
    "text", ["", "A", "a b", "x:", "http://x/y", "x@sha256:1", "-x", "--help", "a/../b", "$(x)"]
)
def test_no_references(text: str) -> None:
    with pytest.raises(InvalidRequest):
        references.registry_reference(text)


@pytest.mark.parametrize(
    ("reference", "image", "name"),
    [
        (Reference("oci", "docker.io/library/python:3.12"), "", "python:3.12"),
        (Reference("oci", "127.0.0.1:5000/team/x:1"), "", "team/x:1"),
        (Reference("debian", "trixie"), "", "debian:trixie"),
        (Reference("docker-archive", "/a/image.tar"), "tools:1", "tools:1"),
        (Reference("docker-archive", "/a/Image_One.tar.gz"), "", "image-one"),
        (Reference("oci-layout", "/a/layout"), "3.12", "layout:3.12"),
        (Reference("rootfs", "/a/root.tar.zst"), "", "root"),
        (Reference("rootfs", "/a/host.tar"), "", "my-host"),
        (Reference("rootfs", "/a/---.tar"), "", "template"),
    ],
)
def test_default_names(reference: Reference, image: str, name: str) -> None:
    found = references.default_name(reference, image)
    assert found == name
    names.full_name(found)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image.tar").touch()
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b/index.json").touch()
    assert references.parse(f"{tmp_path}/image.tar") == Reference("archive", f"{tmp_path}/image.tar")
    assert references.parse(f"{tmp_path}/image.tar:x:1") == Reference(
        "archive", f"{tmp_path}/image.tar", "x:1"
    )
    assert references.parse(f"oci:{tmp_path}/a:b:tag") == Reference("oci-layout", f"{tmp_path}/a:b", "tag")
    assert references.parse(f"oci-layout:{tmp_path}/image.tar").kind == "oci-archive"
    monkeypatch.chdir(tmp_path.parent)  # a relative path needs no dot before it
    assert references.parse(f"{tmp_path.name}/a:b:tag") == Reference("oci-layout", f"{tmp_path}/a:b", "tag")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docker").mkdir()
    with pytest.raises(InvalidRequest, match="used where they are"):
        references.parse("docker:image")
    os.mkfifo(tmp_path / "pipe")
    for source in ("/dev/zero", "rootfs:/dev/zero", str(tmp_path / "pipe"), f"rootfs:{tmp_path}/pipe"):
        with pytest.raises(InvalidRequest, match="neither a file nor a folder"):
            references.parse(source)
    with pytest.raises(NotFound) as caught:
        references.parse(f"{tmp_path}/imag.tar")
    assert f"did you mean {tmp_path}/image.tar?" in caught.value.hint
    with pytest.raises(InvalidRequest, match="no OCI layout"):
        references.parse(str(tmp_path))
    with pytest.raises(InvalidRequest, match="a folder, not an archive"):
        references.parse(f"rootfs:{tmp_path}")
