"""The store's records, the merged view of layers, and what a sandbox gets on top."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringfence.images import records
from ringfence.images.contract import Layer, Template, TemplateConfig
from ringfence.images.merged import Merged
from ringfence.images.store import TemplateStore
from ringfence.model.errors import HostLimit, InvalidRequest, NotFound, WrongState
from ringfence.node.fittings import environment
from ringfence.runtimes import bubblewrap
from support.images import tar_of

CONFIG = TemplateConfig(
    env=(("B", "2"), ("A", "1 \udcff")),
    user="app",
    uid=3,
    gid=None,
    workdir="/srv",
    entrypoint=("a", "b"),
    cmd=("c",),
    start=("/bin/sh", "-c", "x"),
    labels=(("k", "v"),),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemplateStore]:
    with TemplateStore.open(tmp_path / "images") as made:
        yield made


def layer(store: TemplateStore, *names: str) -> Layer:
    return store.add_layer_from(io.BytesIO(tar_of([(name, {"data": name.encode()}) for name in names])))


def test_a_template_is_found_as_it_was_put(store: TemplateStore) -> None:
    parts = [layer(store, "one"), layer(store, "two")]
    put = store.put("Base".lower(), parts, CONFIG, source="test", base_digest="x", base_made_at=5.0)
    assert put.config == CONFIG
    assert put.layers == tuple(parts)
    assert put.lowers == (parts[1].folder, parts[0].folder)
    assert put.size == 6
    for name in ("base", "base:latest"):
        assert store.resolve(name) == put
    assert store.resolve(put.digest).config == CONFIG
    assert store.resolve(put.digest[:16]).digest == put.digest
    assert store.templates() == [put]


def test_a_digest_is_over_content_alone(store: TemplateStore, tmp_path: Path) -> None:
    part = layer(store, "one")
    put = store.put("a", [part], CONFIG, source="here")
    assert store.put("b:1", [part], CONFIG, source="there").digest == put.digest
    assert store.put("c", [part], CONFIG, architecture="arm64").digest != put.digest
    assert store.put("c", [part]).digest != put.digest
    with TemplateStore.open(tmp_path / "another") as other:
        assert other.put("x", [layer(other, "one")], CONFIG).digest == put.digest


def test_a_name_can_be_moved(store: TemplateStore) -> None:
    first, second = store.put("a", [layer(store, "one")]), store.put("a", [layer(store, "two")])
    assert store.resolve("a").digest == second.digest
    assert store.resolve(first.digest).name == ""
    assert store.tag(first, "b").digest == first.digest
    assert store.remove("a") == ["a:latest"]
    assert store.remove(first.digest) == ["b:latest"]
    with pytest.raises(NotFound):
        store.remove("a")
    with pytest.raises(NotFound):
        store.remove("sha256:" + "0" * 64)


def test_what_is_not_put(store: TemplateStore) -> None:
    with pytest.raises(InvalidRequest, match="without layers"):
        store.put("a", [])
    with pytest.raises(WrongState, match="not in the store"):
        store.put("a", [Layer("sha256:" + "0" * 64, "/nowhere")])
    with pytest.raises(InvalidRequest):
        store.put("NO NAME", [layer(store, "one")])
    assert store.names() == [] and store.digests() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": 5}', '{"digest": "sha256:../../etc/passwd"}'])
def test_a_damaged_pointer(store: TemplateStore, text: str) -> None:
    store.put("a", [layer(store, "one")])
    (store.folder / "names/a:latest.json").write_text(text)
    with pytest.raises(WrongState, match="damaged"):
        store.resolve("a")
    assert [template.name for template in store.templates()] == [""]
    assert store.remove("a") == ["a:latest"]


@pytest.mark.parametrize("text", ["", "{}", '{"layers": [{"digest": "../x", "size": 1}]}', '{"layers": 7}'])
def test_a_damaged_template(store: TemplateStore, text: str) -> None:
    put = store.put("a", [layer(store, "one")])
    (store.folder / "templates" / f"{put.digest[7:]}.json").write_text(text)
    with pytest.raises((WrongState, InvalidRequest)):
        store.resolve("a")


def test_the_folder_with_layers_can_not_be_found_by_others(store: TemplateStore) -> None:
    assert store.folder.stat().st_mode & 0o777 == 0o711
    assert len(store.private.name) == len("private-") + 32
    for name in ("names", "templates", "pins", "tmp", "trash"):
        assert (store.folder / name).stat().st_mode & 0o777 == 0o700
    made = layer(store, "one")
    assert Path(made.folder).parent.stat().st_mode & 0o777 == 0o711
    assert TemplateStore.open(store.folder).private == store.private


def test_a_store_that_was_half_made_is_finished(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/private-00").mkdir()
    assert TemplateStore.open(tmp_path / "images").private.name == "private-00"
    assert sorted(os.listdir(tmp_path / "images/private-00")) == ["fittings", "layers"]


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostLimit):
        TemplateStore.open(tmp_path / "file/images")


@pytest.mark.parametrize("holder", ["", "a/b", "../x", "a b"])
def test_pins(store: TemplateStore, holder: str) -> None:
    put = store.put("a", [layer(store, "one")])
    with pytest.raises(InvalidRequest):
        store.pin(put.digest, holder)
    store.pin(put.digest, "snapshot-1")
    store.pin(put.digest, "pool_2")
    assert store.pinned(put.digest) == ["pool_2", "snapshot-1"]
    store.unpin(put.digest, "pool_2")
    store.unpin(put.digest, "pool_2")
    assert store.pinned(put.digest) == ["snapshot-1"]
    with pytest.raises(NotFound):
        store.pin("sha256:" + "0" * 64, "x")


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    records.write(target, {"a": 1}, aside=tmp_path)
    with pytest.raises(OSError, match="No such file"):
        records.write(target, {"a": 2}, aside=tmp_path / "nowhere")
    assert records.read(target) == {"a": 1}
    with pytest.raises(TypeError):
        records.write(target, {"a": object()}, aside=tmp_path)
    assert os.listdir(tmp_path) == ["record.json"]


# -- layers seen as one


@pytest.fixture
def stacked(tmp_path: Path) -> tuple[str, ...]:
    """Two layers, topmost first, with links among them. Plain folders: no right is needed to make them."""
    top, bottom = tmp_path / "top", tmp_path / "bottom"
    for folder in ("top/etc", "bottom/etc/deep", "bottom/usr/bin", "bottom/data"):
        (tmp_path / folder).mkdir(parents=True)
    (bottom / "etc/passwd").write_text("below")
    (top / "etc/passwd").write_text("above")
    (bottom / "etc/deep/file").write_text("deep")
    (bottom / "bin").symlink_to("usr/bin")
    (bottom / "usr/bin/sh").write_text("shell")
    (top / "absolute").symlink_to("/etc/passwd")
    (top / "climbing").symlink_to("../../../../etc/deep/../passwd")
    (top / "circle").symlink_to("/circle")
    (top / "data").write_text("a file above a folder")
    (bottom / "data/hidden").write_text("hidden")
    return str(top), str(bottom)


def test_merged(stacked: tuple[str, ...]) -> None:
    seen = Merged(stacked)
    assert seen.read("/etc/passwd") == b"above"
    assert seen.read("/etc/deep/file") == b"deep"
    assert seen.list("/etc") == ["deep", "passwd"]
    assert seen.list("/") == ["absolute", "bin", "circle", "climbing", "data", "etc", "usr"]
    assert seen.resolve("/bin/sh") == "/usr/bin/sh"
    assert seen.resolve("/bin", last=False) == "/bin"
    assert seen.read("/bin/sh") == b"shell"
    assert seen.resolve("/climbing") == "/etc/passwd"
    for link in ("/absolute", "/climbing"):  # the root's own /etc/passwd, not the host's
        assert seen.read(link) == b"above"
    assert seen.find("/bin/sh") is None  # through a link
    assert seen.find("/data/hidden") is None
    assert seen.list("/data") == [] and seen.read("/data") == b"a file above a folder"
    assert seen.resolve("/new/../../x") == "/x"
    assert seen.read("/etc") is None and seen.read("/nothing") is None and seen.read("/circle") is None
    with pytest.raises(InvalidRequest, match="circle"):
        seen.resolve("/circle")


def test_a_pipe_in_a_layer_blocks_nobody(stacked: tuple[str, ...]) -> None:
    os.mkfifo(f"{stacked[0]}/etc/group")
    assert Merged(stacked).read("/etc/group") is None


def test_whiteouts_in_both_views(store: TemplateStore) -> None:
    """As overlay shows them, here and where bubblewrap takes folders apart."""
    bottom = layer(store, "etc/gone", "etc/stays", "old/below", "both/below", "file/inside")
    data = tar_of(
        [
            ("etc/.wh.gone", {}),
            ("old/.wh..wh..opq", {}),
            ("old/new", {"data": b"new"}),
            (".wh.both", {}),
            ("file", {"data": b"now a file"}),
        ]
    )
    top = store.add_layer_from(io.BytesIO(data))
    lowers = (top.folder, bottom.folder)
    seen = Merged(lowers)
    assert seen.list("/") == ["etc", "file", "old"]
    assert seen.list("/etc") == ["stays"]
    assert seen.list("/old") == ["new"]
    assert seen.find("/etc/gone") is None and seen.find("/old/below") is None and seen.find("/both") is None
    words = list(bubblewrap._entries(lowers, ""))
    shown = {words[at + 2] for at, word in enumerate(words) if word == "--ro-bind"}
    assert shown == {"/etc/stays", "/file", "/old"}
    assert f"{top.folder}/old" in words


# -- the environment


@pytest.mark.parametrize(
    ("uid", "user", "home"), [(0, 1000, None), (1000, 1000, "/app"), (None, 0, None), (0, 0, "/app")]
)
def test_the_environment_of_an_image(uid: int | None, user: int, home: str | None) -> None:
    config = TemplateConfig(env=(("HOME", "/app"), ("X", "1"), ("PYTHONHASHSEED", "7")), uid=uid)
    found = dict(environment(Template("sha256:0", "x", (), config), user))
    assert found.get("HOME") == home
    assert found["X"] == "1" and found["PYTHONHASHSEED"] == "7"
    plain = dict(environment(Template("sha256:0", "x", ()), user))
    assert plain == {"PYTHONHASHSEED": "0"}


def test_threads_may_put_at_once(store: TemplateStore) -> None:
    parts = [layer(store, f"file{number}") for number in range(4)]
    begin = threading.Barrier(4)

    def put(number: int) -> None:
        begin.wait(30)
        for turn in range(10):
            config = dataclasses.replace(CONFIG, workdir=f"/{number}/{turn}")
            store.put(f"t{number}-{turn}", [parts[number]], config, source="test")

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(put, number) for number in range(4)]:
            done.result()
    for number in range(4):
        for turn in range(10):
            found = store.resolve(f"t{number}-{turn}")
            assert (found.layers, found.config.workdir) == ((parts[number],), f"/{number}/{turn}")
