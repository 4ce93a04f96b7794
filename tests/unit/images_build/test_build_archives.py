"""Layers as archives: the same content has the same bytes, and they unpack to what they were made of."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from ringfence.images.building import archives, copying, keeping
from ringfence.images.building.archives import Placed, Stream, of_context, of_folder, of_upper
from ringfence.images.building.context import Context
from ringfence.images.building.keeping import Recipe
from ringfence.images.building.steps import Step
from ringfence.images.contract import TemplateConfig
from ringfence.images.merged import Merged
from ringfence.images.store import TemplateStore
from ringfence.model.errors import HostLimit, InvalidRequest

ROOT = os.geteuid() == 0
OPAQUE = "trusted.overlay.opaque" if ROOT else "user.overlay.opaque"
EPOCH = 1_000_000_000


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: member for member in archive}


def upper(top: Path, *, when: int) -> Path:
    """As an overlay's, made in an order and at a time that must not matter."""
    top.mkdir()
    for name in ("b", "a") if when % 2 else ("a", "b"):
        (top / name).mkdir()
        (top / name / "file").write_text(name)
        os.utime(top / name / "file", (when, when))
        os.utime(top / name, (when, when))
    os.link(top / "a/file", top / "b/same")
    (top / "link").symlink_to("/etc/passwd")
    os.utime(top / "link", (when, when), follow_symlinks=False)
    (top / "old").write_text("o")
    os.utime(top / "old", (5, 5))
    return top


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    made = [
        b"".join(of_upper(str(upper(tmp_path / str(when), when=when)), epoch=EPOCH, limit=1 << 20))
        for when in (1_700_000_001, 1_800_000_002)
    ]
    assert made[0] == made[1]
    found = members(made[0])
    assert list(found) == ["a", "a/file", "b", "b/file", "b/same", "link", "old"]
    assert (found["a/file"].mtime, found["old"].mtime) == (EPOCH, 5)
    assert found["b/same"].islnk() and found["b/same"].linkname == "a/file"
    assert found["link"].issym() and found["link"].linkname == "/etc/passwd"
    other = b"".join(of_upper(str(tmp_path / "1700000001"), epoch=EPOCH + 1, limit=1 << 20))
    assert other != made[0]  # the control: what is in it counts


def test_deletions_come_back_as_deletions(tmp_path: Path) -> None:
    top = tmp_path / "upper"
    (top / "gone-in").mkdir(parents=True)
    try:
        os.mknod(top / "gone-in/file", 0o020600, 0)
        (top / "new").mkdir()
        os.setxattr(top / "new", OPAQUE, b"y")
    except OSError as error:
        pytest.skip(f"overlay's marks can't be made here: {error}")
    data = b"".join(of_upper(str(top), epoch=EPOCH, limit=1 << 20))
    assert {"gone-in/.wh.file", "new/.wh..wh..opq"} < set(members(data))
    with TemplateStore.open(tmp_path / "images") as store:
        layer = store.add_layer_from(Stream([data]))
        assert os.lstat(f"{layer.folder}/gone-in/file").st_rdev == 0
        assert os.getxattr(f"{layer.folder}/new", OPAQUE) == b"y"


def test_a_file_that_looks_like_a_deletion_is_left_out(tmp_path: Path) -> None:
    top = tmp_path / "upper"
    top.mkdir()
    (top / ".wh.etc").write_text("")
    (top / ".wh..wh..opq").write_text("")
    os.mkfifo(top / "pipe")
    (top / "kept").write_text("")
    left_out: list[str] = []
    found = members(b"".join(of_upper(str(top), epoch=0, limit=1 << 20, left_out=left_out)))
    assert list(found) == ["kept"]
    assert len(left_out) == 3


def test_huge_holes_are_refused(tmp_path: Path) -> None:
    top = tmp_path / "upper"
    top.mkdir()
    with open(top / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(HostLimit, match="most of it holes"):
        for _ in of_upper(str(top), epoch=0, limit=1 << 20):
            pass


def test_long_and_broken_names(tmp_path: Path) -> None:
    top = tmp_path / "upper"
    deep = os.fsencode(top) + b"/" + b"/".join([b"d" * 200] * 3)
    os.makedirs(deep)
    with open(deep + b"/\xff\xfe", "wb") as file:
        file.write(b"x")
    os.symlink(b"t" * 300, deep + b"/link")
    with TemplateStore.open(tmp_path / "images") as store:
        layer = store.add_layer_from(Stream(of_upper(str(top), epoch=0, limit=1 << 20)))
        inside = os.fsencode(layer.folder) + deep[len(os.fsencode(top)) :]
        assert sorted(os.listdir(inside)) == [b"link", b"\xff\xfe"]
        assert os.readlink(inside + b"/link") == b"t" * 300


def template(tmp_path: Path) -> Merged:
    """A template whose /lib is a link, and a folder of another's."""
    top = tmp_path / "below"
    (top / "usr/lib").mkdir(parents=True)
    (top / "lib").symlink_to("usr/lib")
    (top / "escape").symlink_to("../../../../..")
    (top / "tmp").mkdir()
    (top / "tmp").chmod(0o1777)
    (top / "file").write_text("")
    return Merged((str(top),))


def copy(
    tmp_path: Path, below: Merged | None, source: str, target: str, **words: object
) -> dict[str, tarfile.TarInfo]:
    step = Step(1, "COPY", "COPY", "copy", TemplateConfig(), sources=(source,), target=target, **words)  # type: ignore[arg-type]
    with Context(tmp_path / "context") as context:
        found = copying.prepare(step, context, below)
        return members(b"".join(copying.archive(found, context, below, EPOCH)))


@pytest.fixture
def context(tmp_path: Path) -> Path:
    top = tmp_path / "context"
    (top / "tree/lib").mkdir(parents=True)
    (top / "tree/lib/one").write_text("1")
    (top / "file").write_text("f")
    return top


def test_a_copy_goes_where_the_links_of_the_template_lead(tmp_path: Path, context: Path) -> None:
    below = template(tmp_path)
    assert list(copy(tmp_path, below, "file", "/lib/x")) == ["usr", "usr/lib", "usr/lib/x"]
    assert "usr/lib/one" in copy(tmp_path, below, "tree", "/")  # and does not replace the link by a folder
    assert list(copy(tmp_path, below, "file", "/escape/etc/x")) == ["etc", "etc/x"]  # inside the root, always
    found = copy(tmp_path, below, "file", "/tmp/")
    assert found["tmp"].mode == 0o1777  # a folder that is there stays as it is
    assert found["tmp/file"].mtime == EPOCH


def test_a_copy_in_place_of_something_else_is_refused(tmp_path: Path, context: Path) -> None:
    below = template(tmp_path)
    for source, target in (("tree", "/file"), ("file", "/file/"), ("file", "/file/x")):
        with pytest.raises(InvalidRequest, match="is a file in the template"):
            copy(tmp_path, below, source, target)
    (context / "tree/tmp").write_text("")
    with pytest.raises(InvalidRequest, match="is a folder in the template"):
        copy(tmp_path, below, "tree", "/")


def test_owner_and_mode(tmp_path: Path, context: Path) -> None:
    below = template(tmp_path)
    found = copy(tmp_path, below, "tree", "/new/", owner="7:8", mode=0o640)
    assert {(member.uid, member.gid) for name, member in found.items() if name != "usr"} == {(7, 8)}
    assert found["new/lib/one"].mode == 0o640
    assert copy(tmp_path, below, "file", "/x", owner="7")["x"].gid == 7
    with pytest.raises(InvalidRequest, match="knows no such user"):
        copy(tmp_path, below, "file", "/x", owner="nobody-here")
    with pytest.raises(InvalidRequest, match="no users in an empty template"):
        copy(tmp_path, None, "file", "/x", owner="app")


def test_documents(tmp_path: Path, context: Path) -> None:
    step = Step(1, "COPY", "COPY", "copy", TemplateConfig(), target="/etc/", inline=(("motd", "hi\n"),))
    with Context(context) as opened:
        found = copying.prepare(step, opened, None)
        data = b"".join(copying.archive(found, opened, None, EPOCH))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile("etc/motd")
        assert member is not None and member.read() == b"hi\n"


def test_folders(tmp_path: Path) -> None:
    assert list(members(b"".join(of_folder("/a/b", None, epoch=0)))) == ["a", "a/b"]
    assert b"".join(of_context(None, [], {}, Placed("/"), None, epoch=0)) == archives.END


def test_steps_are_known_until_their_layer_is_gone(tmp_path: Path) -> None:
    key = keeping.step_key({"run": ["x"]})
    assert key == keeping.step_key({"run": ["x"]}) != keeping.step_key({"run": ["y"]})
    with TemplateStore.open(tmp_path / "images") as store:
        assert keeping.find_step(store, key) is None
        layer = store.add_layer_from(Stream(of_folder("/x", None, epoch=0)))
        keeping.keep_step(store, key, layer)
        keeping.keep_step(store, "f" * 64, None)
        assert keeping.find_step(store, key) == (layer,)
        assert keeping.find_step(store, "f" * 64) == (None,)
        (store.folder / "builds/steps" / f"{'e' * 64}.json").write_text("{")
        assert keeping.find_step(store, "e" * 64) is None
        store.put("t", [layer])
        keeping.keep_recipe(store, "t", Recipe("build", definition="FROM x\n", arguments=(("A", "1"),)))
        assert keeping.recipe(store, "t:latest") == Recipe(
            "build", definition="FROM x\n", arguments=(("A", "1"),)
        )
        assert keeping.prune(store) == 1  # the damaged one
        store.remove("t")
        os.rename(store.layers / layer.digest[7:], tmp_path / "gone")
        assert keeping.find_step(store, key) is None
        assert keeping.prune(store) == 2
        assert keeping.recipe(store, "t") is None
