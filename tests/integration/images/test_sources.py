"""Templates from every source, made by the real tools, and what is wrong with a source said in words."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.images import importing, manifests
from ringfence.images.contract import ImportLimits, Template
from ringfence.images.importing import ImportOptions
from ringfence.images.merged import Merged
from ringfence.images.store import TemplateStore
from ringfence.model.errors import HostLimit, InvalidRequest, NotFound, RingfenceError, RuntimeUnavailable
from support import engines, images

FORMS = {
    "layout": images.layout,
    "docker save": images.docker_archive,
    "OCI archive": images.oci_archive,
    "zstd": images.zstd_layout,
}


def check_content(template: Template) -> None:
    """What the image ``tools:1`` is, whatever way it came."""
    seen = Merged(template.lowers)
    assert len(template.layers) == 4
    assert seen.read("/etc/keep/one") == b"changed\n"
    assert seen.read("/etc/keep/hello") == b"hello from the second layer\n"
    assert seen.find("/etc/gone") is None
    assert seen.list("/var/lib/old") == ["hello"]
    assert seen.list("/etc/keep") == ["hello", "one"]
    config = template.config
    assert (config.user, config.uid, config.gid) == ("app", 1234, 1234)
    assert dict(config.env)["GREETING"] == "hello there"
    assert config.workdir == "/srv/work"
    assert config.command == ("/bin/sh", "-c", "echo $GREETING in $(pwd)")
    assert dict(config.labels) == {"made.by": "umoci"}
    assert template.architecture == manifests.machine()
    assert template.base_made_at > 1_600_000_000
    found = seen.find("/home/app/owned")
    assert found is not None
    assert found[1].st_uid == (1234 if os.geteuid() == 0 else os.geteuid())


@pytest.mark.parametrize("form", FORMS)
def test_the_same_image_in_every_form(form: str, store: TemplateStore) -> None:
    lines: list[str] = []
    added = importing.add(store, str(FORMS[form]()), ImportOptions(name="tools:x"), lines.append)
    check_content(added.template)
    assert added.reused == 0
    assert lines[0] == "unpacking layer 1 of 4"
    assert store.resolve("tools:x") == added.template


def test_all_forms_are_one_template_unpacked_once(store: TemplateStore) -> None:
    added = [importing.add(store, str(make())) for make in FORMS.values()]
    assert len({each.template.digest for each in added}) == 1
    assert [each.reused for each in added] == [0, 4, 4, 4]
    assert len(store.layer_digests()) == 4
    names = [each.template.name for each in added]
    assert names[1] == "tools:1"  # what docker save wrote into it
    assert store.names() == sorted(set(names))


def test_layers_that_are_links_in_the_archive(store: TemplateStore, tmp_path: Path) -> None:
    """Older archives name a folder for each layer; one that was there before is a link to it."""
    old = tmp_path / "old.tar"
    with tarfile.open(images.docker_archive()) as source, tarfile.open(old, "w") as target:
        links = {
            os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname)): member.name
            for member in source
            if member.issym()
        }
        for member in source:
            content = source.extractfile(member) if member.isfile() else None
            if member.name == "manifest.json":
                assert content is not None
                listed = json.loads(content.read())
                listed[0]["Layers"] = [links[name] for name in listed[0]["Layers"]]
                images.add(target, "manifest.json", json.dumps(listed).encode())
            else:
                target.addfile(member, content)
    check_content(importing.add(store, str(old)).template)
    outside = images.tar_of(
        [
            ("manifest.json", {"data": json.dumps([{"Config": "c", "Layers": ["l"]}]).encode()}),
            ("c", {"kind": tarfile.SYMTYPE, "link": "/etc/passwd"}),
            ("l", {"kind": tarfile.SYMTYPE, "link": "l"}),
        ]
    )
    old.write_bytes(outside)
    with pytest.raises(InvalidRequest, match="lacks c"):
        importing.add(store, str(old))


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_what_an_engine_saves(
    name: str, store: TemplateStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if os.geteuid() != 0:
        pytest.skip("engines are started as root")
    engine = request.getfixturevalue(f"{name}_engine")
    client = (
        [engines.DOCKER, "--host", engine.address]
        if name == "docker"
        else ["podman", "--remote", "--url", engine.address]
    )
    saved = tmp_path / "saved.tar"
    images.call(*client, "load", "--input", str(images.docker_archive()))
    images.call(*client, "save", "--output", str(saved), "docker.io/library/tools:1")
    added = importing.add(store, str(saved))
    check_content(added.template)
    assert added.template.source == f"docker-archive:{saved}"
    # The same layers, whoever wrote them down.
    again = importing.add(store, str(images.layout()), ImportOptions(name="again"))
    assert again.reused == 4 and again.template.layers == added.template.layers


def test_a_registry(store: TemplateStore, registry: str) -> None:
    place = f"{registry}/team/tools"
    images.call(
        "skopeo",
        "copy",
        "--quiet",
        "--dest-tls-verify=false",
        f"oci:{images.layout()}:1",
        f"docker://{place}:1",
    )
    added = importing.add(store, f"oci:{place}:1", ImportOptions(insecure=True))
    check_content(added.template)
    assert added.template.name == "team/tools:1" or added.template.name.endswith("/team/tools:1")
    assert added.template.source == f"oci:{place}:1"
    assert added.template.base_digest.startswith("sha256:")
    by_digest = importing.add(
        store, f"oci:{place}@{added.template.base_digest}", ImportOptions(name="pinned", insecure=True)
    )
    assert by_digest.template.digest == added.template.digest
    assert by_digest.reused == 4
    with pytest.raises(HostLimit, match=r"certificate|HTTPS") as caught:
        importing.add(store, f"oci:{place}:1")
    assert "--insecure" in caught.value.hint
    with pytest.raises(NotFound):
        importing.add(store, f"oci:{place}:2", ImportOptions(insecure=True))
    with pytest.raises(RingfenceError):
        importing.add(store, f"oci:{place}@sha256:{'0' * 64}", ImportOptions(name="x", insecure=True))


def test_a_registry_that_is_not_there(store: TemplateStore) -> None:
    images.need("skopeo")
    with pytest.raises(HostLimit, match="can't fetch"):
        importing.add(store, "oci:127.0.0.1:1/nothing:1", ImportOptions(insecure=True))
    assert store.layer_digests() == []


def test_a_tar_of_a_root(store: TemplateStore, tmp_path: Path) -> None:
    tar = tmp_path / "Base_System.tar"
    shutil.copy(images.busybox(), tar)
    added = importing.add(store, str(tar))
    assert added.template.name == "base-system:latest"
    assert added.template.source == f"rootfs:{tar}"
    assert Merged(added.template.lowers).find("/bin/busybox") is not None
    explicit = importing.add(store, f"rootfs:{tar}", ImportOptions(name="base:1", start=("/bin/true",)))
    assert explicit.template.digest != added.template.digest  # another configuration
    assert explicit.template.layers == added.template.layers


def test_debian(store: TemplateStore) -> None:
    images.need("mmdebstrap")
    # Setting packages up takes half a minute on an idle machine: their files will do.
    options = ImportOptions(epoch=1_700_000_000, variant="extract", packages=("busybox-static", "base-files"))
    try:
        added = importing.add(store, "debian:bookworm", options)
    except HostLimit as error:
        pytest.skip(f"no packages of Debian can be had here: {error.message[:300]}")
    assert added.template.name == "debian:bookworm"
    seen = Merged(added.template.lowers)
    assert b"bookworm" in (seen.read("/etc/os-release") or b"")
    found = seen.find("/etc/debian_version")
    assert found is not None
    assert found[1].st_mtime <= 1_700_000_000


def test_a_suite_that_does_not_exist(store: TemplateStore) -> None:
    images.need("mmdebstrap")
    with pytest.raises(HostLimit, match="mmdebstrap could not make nosuchsuite"):
        importing.add(store, "debian:nosuchsuite")
    with pytest.raises(InvalidRequest, match="no name of a Debian package"):
        importing.add(store, "debian:bookworm", ImportOptions(packages=("--aptopt=x",)))
    assert store.layer_digests() == []


@pytest.mark.parametrize(
    ("program", "source"), [("skopeo", "oci:127.0.0.1:1/x"), ("mmdebstrap", "debian:sid")]
)
def test_a_missing_program(
    store: TemplateStore, program: str, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match=program) as caught:
        importing.add(store, source)
    assert caught.value.hint == f"apt-get install {program}"


def test_zstd_without_its_program(
    store: TemplateStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout = images.zstd_layout()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match="zstd"):
        importing.add(store, str(layout))
    assert store.layer_digests() == []


# -- broken images: real ones, with one thing changed


class Layout:
    """A copy of the real layout whose documents can be changed; digests follow unless told not to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(images.layout(), folder)

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.replace(":", "/")

    @property
    def index(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "index.json").read_text())
        return found

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.blob(self.index["manifests"][0]["digest"]).read_text())
        return found

    def write(self, value: Any) -> dict[str, Any]:
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        digest = "sha256:" + hashlib.sha256(text).hexdigest()
        self.blob(digest).write_bytes(text)
        return {"digest": digest, "size": len(text)}

    def put_manifest(self, manifest: dict[str, Any], **more: Any) -> None:
        index = self.index
        index["manifests"][0] |= self.write(manifest) | more
        (self.folder / "index.json").write_text(json.dumps(index))

    def change_config(self, change: Callable[[dict[str, Any]], object]) -> None:
        manifest = self.manifest
        config = json.loads(self.blob(manifest["config"]["digest"]).read_text())
        change(config)
        manifest["config"] |= self.write(config)
        self.put_manifest(manifest)


@pytest.fixture
def broken(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "broken")


def refuse(store: TemplateStore, broken: Layout, words: str) -> RingfenceError:
    with pytest.raises(InvalidRequest, match=words) as caught:
        importing.add(store, str(broken.folder))
    assert store.names() == []
    return caught.value


def test_another_architecture(store: TemplateStore, broken: Layout) -> None:
    other = "arm64" if manifests.machine() != "arm64" else "amd64"
    broken.change_config(lambda config: config.update(architecture=other))
    error = refuse(store, broken, f"the image is for {other}, and this machine is {manifests.machine()}")
    assert f"linux/{manifests.machine()}" in error.hint


def test_another_system(store: TemplateStore, broken: Layout) -> None:
    broken.change_config(lambda config: config.update(os="windows"))
    refuse(store, broken, "not for Linux")


def test_an_index_of_several_machines(store: TemplateStore, broken: Layout) -> None:
    ours = {**broken.index["manifests"][0], "annotations": {}}
    ours["platform"] = {"os": "linux", "architecture": manifests.machine()}
    other = {**ours, "digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "mips"}}
    proof = {**other, "platform": {"os": "unknown", "architecture": "unknown"}}
    broken.put_manifest({"schemaVersion": 2, "manifests": [other, proof, ours]})
    check_content(importing.add(store, str(broken.folder), ImportOptions(name="a")).template)
    broken.put_manifest({"schemaVersion": 2, "manifests": [other, proof]})
    with pytest.raises(InvalidRequest, match="the image is for mips"):
        importing.add(store, str(broken.folder))


def test_indexes_without_an_end(store: TemplateStore, broken: Layout) -> None:
    manifest: dict[str, Any] = {"schemaVersion": 2, "manifests": [broken.index["manifests"][0]]}
    for _ in range(5):
        manifest = {"schemaVersion": 2, "manifests": [broken.write(manifest)]}
    broken.put_manifest(manifest)
    refuse(store, broken, "index in an index")


def test_a_layer_that_was_changed(store: TemplateStore, broken: Layout) -> None:
    path = broken.blob(broken.manifest["layers"][1]["digest"])
    shutil.copy(broken.blob(broken.manifest["layers"][3]["digest"]), path)
    error = refuse(store, broken, "not what its digest says")
    assert "somebody has changed it" in error.hint


def test_a_layer_under_a_false_name(store: TemplateStore, broken: Layout) -> None:
    """The blob has its digest, and is not what the configuration says."""
    manifest = broken.manifest
    manifest["layers"][1] = manifest["layers"][3]
    broken.put_manifest(manifest)
    refuse(store, broken, "the unpacked layer is not what its digest says")


def test_documents_that_were_changed(store: TemplateStore, broken: Layout) -> None:
    manifest = broken.blob(broken.index["manifests"][0]["digest"])
    manifest.write_bytes(manifest.read_bytes().replace(b'"schemaVersion"', b'"schemaversion"'))
    refuse(store, broken, "a document of the image is not what its digest says")


@pytest.mark.parametrize("what", ["layer", "config", "manifest"])
def test_something_is_missing(store: TemplateStore, broken: Layout, what: str) -> None:
    digest = {
        "layer": broken.manifest["layers"][2]["digest"],
        "config": broken.manifest["config"]["digest"],
        "manifest": broken.index["manifests"][0]["digest"],
    }[what]
    broken.blob(digest).unlink()
    refuse(store, broken, "lacks")


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder"])
def test_a_blob_that_is_no_file(store: TemplateStore, broken: Layout, kind: str, tmp_path: Path) -> None:
    path = broken.blob(broken.manifest["layers"][2]["digest"])
    if kind == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path) if kind == "a pipe" else path.mkdir()
    refuse(store, broken, "lacks")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["rootfs"]["diff_ids"].pop(), "4 layers, and digests for 3"),
        (lambda c: c["rootfs"].update(diff_ids=["x"] * 4), "where a sha256 digest should be"),
        (lambda c: c["rootfs"].update(diff_ids=["sha256:../../../etc/passwd"] * 4), "sha256 digest"),
        (lambda c: c["config"].update(Env=["no variable"]), "no variable"),
        (lambda c: c["config"].update(Env="A=B", Cmd=[1]), "no list of words|no variable"),
        (lambda c: c["config"].update(WorkingDir="/a/../../etc"), "working directory"),
        (lambda c: c["config"].update(User="app\nroot"), "its user makes no sense"),
    ],
)
def test_a_configuration_that_makes_no_sense(
    store: TemplateStore, broken: Layout, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    broken.change_config(change)
    refuse(store, broken, words)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b'{"manifests": 1}', b'{"manifests": [1]}', b"[" * 100_000]
)
def test_an_index_that_makes_no_sense(store: TemplateStore, broken: Layout, text: bytes) -> None:
    (broken.folder / "index.json").write_bytes(text)
    refuse(store, broken, "damaged|image")


def test_a_huge_document(store: TemplateStore, broken: Layout) -> None:
    (broken.folder / "index.json").write_bytes(b" " * (5 << 20))
    refuse(store, broken, "larger than any honest one")


def test_other_artifacts(store: TemplateStore, broken: Layout) -> None:
    manifest = broken.manifest
    manifest["layers"][0]["mediaType"] = "application/vnd.cncf.helm.chart.content.v1"
    broken.put_manifest(manifest)
    refuse(store, broken, "not one of an image with files")


def test_several_images_in_one_place(store: TemplateStore, broken: Layout) -> None:
    images.call("umoci", "tag", "--image", f"{broken.folder}:1", "two")
    error = refuse(store, broken, "2 images in the layout")
    assert "1, two" in error.hint
    with pytest.raises(InvalidRequest, match="no image 'three'"):
        importing.add(store, f"{broken.folder}:three")
    assert importing.add(store, f"{broken.folder}:two").template.name == "broken:two"


def test_a_limit_holds_for_images_too(store: TemplateStore) -> None:
    limits = ImportLimits(size=100_000)
    with pytest.raises(HostLimit, match="limit of an import"):
        importing.add(store, str(images.docker_archive()), ImportOptions(limits=limits))
    assert store.layer_digests() == []


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("nothing.tar", InvalidRequest, "no source of a template"),
        ("./nothing.tar", NotFound, "there is no"),
        ("rootfs:nothing.tar", NotFound, "there is no"),
        ("docker:python:3", InvalidRequest, "used where they are"),
        ("oci:UPPER/case", InvalidRequest, "names no image"),
        ("oci:", InvalidRequest, "nothing after oci:"),
        ("debian:../etc", InvalidRequest, "no suite"),
        ("--help", InvalidRequest, "no source"),
    ],
)
def test_what_is_no_source(store: TemplateStore, source: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        importing.add(store, source)


def test_a_tar_without_programs(store: TemplateStore, tmp_path: Path) -> None:
    tar = tmp_path / "x.tar"
    tar.write_bytes(images.tar_of([("rootfs/bin/sh", {"data": b"#!"})]))
    with pytest.raises(InvalidRequest, match="no programs in it") as caught:
        importing.add(store, str(tar))
    assert "tar -C" in caught.value.hint
    assert store.names() == []
