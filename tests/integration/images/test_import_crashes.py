"""``kill -9`` at any moment of an import, a full disk, and collections beside imports and sandboxes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.images import collecting, importing
from ringfence.images.collecting import Cache
from ringfence.images.importing import ImportOptions
from ringfence.images.store import TemplateStore
from ringfence.model.errors import HostLimit
from ringfence.node.collecting import collect, templates_in_use
from ringfence.node.service import Node
from support import images
from support.commands import ROOT as CHECKOUT
from support.leaks import Leaks
from support.nodes import ask, run

ROOT = os.geteuid() == 0

# For each number a child that imports an image and dies before that call which makes, renames or flushes
# something. Prints how many calls the whole takes.
DYING = """
import os, sys
sys.path.insert(0, {source!r})
from ringfence.images import collecting, importing, layering
from ringfence.images.store import TemplateStore

left = 0

def counted(real):
    def call(*args, **words):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return real(*args, **words)
    return call

def work(folder):
    with TemplateStore.open(folder) as store:
        importing.add(store, sys.argv[2])
        if {remove!r}:
            store.remove("tools:1")
            collecting.collect(store, set)

for name in ("open", "mkdir", "rename", "unlink", "symlink", "mknod", "fsync", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
layering.flush = counted(layering.flush)
if not sys.argv[3:]:
    work(f"{{sys.argv[1]}}/at0")
for number in map(int, sys.argv[3:]):
    child = os.fork()
    if not child:
        left = number
        work(f"{{sys.argv[1]}}/at{{number}}")
        print(number - left, flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if number < 1_000_000:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, (number, status)
"""


def die(folder: Path, *numbers: int, remove: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    script = DYING.format(source=f"{CHECKOUT}/src", remove=remove)
    command = [sys.executable, "-c", script, str(folder), str(images.docker_archive()), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_sound(folder: Path, *, again: bool = True) -> None:
    """Everything that has a name is whole; a collection leaves nothing else, and an import works."""
    with TemplateStore.open(folder) as store:
        for template in store.templates():
            for layer in template.layers:
                assert Path(layer.folder).is_dir()
        for digest in store.layer_digests():
            record = json.loads((store.layers / digest.removeprefix("sha256:") / "layer.json").read_text())
            assert record["digest"] == digest
        found = collecting.collect(store, set)
        assert found.failures == ()
        needed = {layer.digest for template in store.templates() for layer in template.layers}
        assert set(store.layer_digests()) == needed
        for name in ("tmp", "trash"):
            assert os.listdir(folder / name) == []
        if again:
            added = importing.add(store, str(images.docker_archive())).template
            assert len(store.layer_digests()) == 4
            assert store.resolve("tools:1").digest == added.digest


def test_killed_at_many_moments(tmp_path: Path) -> None:
    total = int(die(tmp_path / "whole", 1_000_000))
    # The beginning and the end call by call, the unpacking in between at some places.
    moments = sorted({*range(1, 14), *range(14, total, max(1, total // 10)), *range(total - 10, total + 1)})
    die(tmp_path / "killed", *moments)
    for number in moments:
        is_sound(tmp_path / f"killed/at{number}", again=number % 3 == 0)


def test_killed_while_removing(tmp_path: Path) -> None:
    total = int(die(tmp_path / "whole", 1_000_000, remove=True))
    before = int(die(tmp_path / "import", 1_000_000))
    moments = range(before, total + 1, max(1, (total - before) // 12))
    die(tmp_path / "killed", *moments, remove=True)
    for number in moments:
        is_sound(tmp_path / f"killed/at{number}", again=number % 3 == 0)


def test_killed_from_outside(tmp_path: Path) -> None:
    """No call is singled out: the process is killed as soon as something of its import can be seen."""
    for what in ("tmp/*.lock", "tmp/*/new*", "tmp/*/new*/fs/bin", "private-*/layers/*", "templates/*"):
        folder = tmp_path / what.replace("/", "_").replace("*", "x")
        folder.mkdir()
        script = DYING.format(source=f"{CHECKOUT}/src", remove=False)
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(images.docker_archive())],
            stdout=subprocess.DEVNULL,
        )
        folder /= "at0"
        try:
            end = time.monotonic() + 60
            while not any(folder.glob(what)) and process.poll() is None:
                assert time.monotonic() < end
        finally:
            process.kill()
            process.wait()
        is_sound(folder)


# -- a full disk


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes; it is gone afterwards."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(not ROOT, reason="only root can mount a small disk")
@pytest.mark.parametrize("form", ["docker save", "OCI layout", "a tar"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, form: str) -> None:
    source = {
        "docker save": images.docker_archive,
        "OCI layout": images.layout,
        "a tar": images.busybox,
    }[form]()
    with small_disk(tmp_path / "small", 1 << 20) as place:
        with TemplateStore.open(place / "images") as store:
            used = shutil.disk_usage(place).used
            with pytest.raises(HostLimit, match="the disk is full") as caught:
                importing.add(store, str(source), ImportOptions(name="x"))
            assert "ringfence template gc" in caught.value.hint
            assert store.layer_digests() == []
            assert store.names() == []
        assert shutil.disk_usage(place).used <= used + (64 << 10)
    with small_disk(tmp_path / "enough", 64 << 20) as place, TemplateStore.open(place / "images") as store:
        importing.add(store, str(source), ImportOptions(name="x"))  # control


@pytest.mark.skipif(not ROOT, reason="only root can mount a small disk")
def test_a_disk_that_fills_up_at_any_moment(tmp_path: Path) -> None:
    """Inodes run out at each place in turn."""
    for inodes in range(12, 60, 6):
        folder = tmp_path / f"small{inodes}"
        folder.mkdir()
        options = f"size=64m,nr_inodes={inodes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(folder)], check=True)
        try:
            with (
                pytest.raises(HostLimit, match="the disk is full"),
                TemplateStore.open(folder / "images") as store,
            ):
                importing.add(store, str(images.docker_archive()))
            if (folder / "images/lock").exists():
                with TemplateStore.open(folder / "images") as store:
                    assert store.layer_digests() == []
                    assert os.listdir(folder / "images/tmp") == []
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)


# -- collections


@pytest.fixture
async def node(no_leaks: Leaks) -> AsyncIterator[Node]:
    async with await Node.open() as made:
        yield made


@pytest.mark.parametrize("keep", [False, True])
async def test_a_running_sandbox_keeps_its_layers(
    keep: bool, home: TemplateStore, node: Node, no_leaks: Leaks
) -> None:
    assert no_leaks.home is not None
    template = importing.add(home, str(images.docker_archive())).template
    sandbox = await node.create(ask(template=template.name, keep=keep))
    home.remove(template.name)
    home.close()  # what we added ourselves is not held by us any more
    assert templates_in_use(no_leaks.home) == {template.digest}
    collect(no_leaks.home, home)
    assert home.layer_digests() == sorted(layer.digest for layer in template.layers)
    _, text = await run(sandbox, "cat", "/etc/keep/one")
    assert text == "changed\n"
    await sandbox.destroy()
    found = collect(no_leaks.home, home)
    assert {kind for kind, _, _ in found.removed} == {"template", "layer", "fittings"}
    assert home.layer_digests() == []
    assert os.listdir(home.private / "fittings") == []


def test_an_import_under_way_keeps_its_layers(tmp_path: Path) -> None:
    with TemplateStore.open(tmp_path / "images") as adding, TemplateStore.open(tmp_path / "images") as other:
        with open(images.busybox(), "rb") as file:
            layer = adding.add_layer_from(file)
        assert collecting.collect(other, set).removed == ()
        template = adding.put("base", [layer])
        assert collecting.collect(other, set).removed == ()
        other.remove("base")
        adding.pin(template.digest, "snapshot-1")
        adding.close()
        assert collecting.collect(other, set).removed == ()
        other.unpin(template.digest, "snapshot-1")
        assert collecting.collect(other, set, dry_run=True).freed > 1_000_000
        assert other.layer_digests() == [layer.digest]
        assert collecting.collect(other, set).freed > 1_000_000
        assert other.layer_digests() == []


def test_an_import_that_begins_while_a_collection_looks_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.listdir
    begun: list[object] = []
    with TemplateStore.open(tmp_path / "images") as adding, TemplateStore.open(tmp_path / "images") as other:

        def listing(path: str | Path) -> list[str]:
            found = real(path)
            if Path(path).name == "tmp" and not begun:
                begun.append(adding.layer("sha256:" + "0" * 64))
            return found

        monkeypatch.setattr(os, "listdir", listing)
        assert collecting.collect(other, set).removed == ()
        monkeypatch.undo()
        assert begun == [None]
        with open(images.busybox(), "rb") as file:
            adding.put("base", [adding.add_layer_from(file)])


def test_collections_and_imports_at_once(tmp_path: Path) -> None:
    """Two that add and remove without end, two that collect: a name never points at something incomplete."""
    folder = tmp_path / "images"
    TemplateStore.open(folder)
    failures: list[BaseException] = []
    stop = threading.Event()

    def adding(name: str) -> None:
        try:
            for _ in range(6):
                with TemplateStore.open(folder) as store:
                    importing.add(store, str(images.docker_archive()), ImportOptions(name=name))
                    template = store.resolve(name)
                    for layer in template.layers:
                        assert (Path(layer.folder).parent / "layer.json").is_file()
                    store.remove(name)
        except BaseException as error:
            failures.append(error)

    def collecting_() -> None:
        try:
            while not stop.is_set():
                with TemplateStore.open(folder) as store:
                    assert collecting.collect(store, set).failures == ()
        except BaseException as error:
            failures.append(error)

    adders = [threading.Thread(target=adding, args=(name,)) for name in ("one", "two")]
    collectors = [threading.Thread(target=collecting_) for _ in range(2)]
    for thread in (*adders, *collectors):
        thread.start()
    for thread in adders:
        thread.join(110)
    stop.set()
    for thread in collectors:
        thread.join(60)
    assert failures == []
    with TemplateStore.open(folder) as store:
        collecting.collect(store, set)
        assert store.layer_digests() == []


def test_a_budget_takes_what_was_not_used_for_the_longest_time(tmp_path: Path) -> None:
    disks, modules = tmp_path / "vm", tmp_path / "modules"
    hour_ago = time.time() - 3600
    for number, path in enumerate(
        (disks / "template-a.erofs", disks / "template-b.erofs", modules / "m1", modules / "m2")
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(100_000))
        os.utime(path, (hour_ago + number, hour_ago + number))
    (disks / ".template-a.lock").touch()

    def caches() -> list[Cache]:
        return [Cache("disk", disks, lambda name: "-b" not in name), Cache("module", modules)]

    with TemplateStore.open(tmp_path / "images") as store:
        found = collecting.collect(store, set, caches=caches, budget=250_000, dry_run=True)
        assert [name for _, name, _ in found.removed] == ["template-b.erofs", "template-a.erofs"]
        found = collecting.collect(store, set, caches=caches)
        assert [name for _, name, _ in found.removed] == ["template-b.erofs"]  # of no template any more
        found = collecting.collect(store, set, caches=caches, budget=250_000)
        assert [name for _, name, _ in found.removed] == ["template-a.erofs"]
        assert sorted(os.listdir(modules)) == ["m1", "m2"]
        collecting.collect(store, set, caches=caches, budget=0)
        assert os.listdir(modules) == []
        assert os.listdir(disks) == [".template-a.lock"]


def test_disks_of_templates_that_are_gone(home: TemplateStore, no_leaks: Leaks) -> None:
    assert no_leaks.home is not None
    (no_leaks.home / "vm").mkdir()
    old = no_leaks.home / "vm/template-0123.erofs"
    young = no_leaks.home / "vm/template-4567.erofs"
    for path in (old, young):
        path.write_bytes(b"x" * 5000)
    os.utime(old, (1_700_000_000, 1_700_000_000))
    found = collect(no_leaks.home, home)
    assert [(kind, name) for kind, name, _ in found.removed] == [("disk", "template-0123.erofs")]
    assert young.exists()  # perhaps somebody is just about to open it
