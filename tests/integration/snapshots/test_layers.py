"""Copying a sandbox's files as data: hostile names, kinds, attributes, holes, and what does not fit."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from ringfence.model.errors import InvalidRequest, WrongState
from ringfence.node import layers, trees
from ringfence.node.layers import Owners

ROOT = os.geteuid() == 0
OWN = Owners(0x7000_0000, 65536) if ROOT else Owners(0, 1 << 32)
LIMIT = 64 << 20


def copied(source: Path, target: Path, *, limit: int = LIMIT, most: int = 1000) -> layers.Copied:
    opened = os.open(source, layers.FOLDER)
    try:
        return layers.copy(opened, str(target), OWN, limit=limit, most=most)
    finally:
        os.close(opened)


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    made = tmp_path / "upper"
    made.mkdir()
    return made


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    return tmp_path / "layer"


def test_symlinks_are_text_and_nothing_is_followed(upper: Path, layer: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    (upper / "file").symlink_to(secret)
    (upper / "folder").symlink_to(tmp_path)
    (upper / "climb").symlink_to("../../../../../../etc")
    copied(upper, layer)
    assert {path.name: os.readlink(path) for path in layer.iterdir()} == {
        "file": str(secret), "folder": str(tmp_path), "climb": "../../../../../../etc",
    }  # fmt: skip


def test_names_of_any_bytes(upper: Path, layer: Path) -> None:
    names = [b"x" * 255, b"\xff\xfe", b"new\nline", b"-rf", b"a\\b", "ü".encode(), b" "]
    for name in names:
        with open(os.path.join(os.fsencode(upper), name), "wb") as file:
            file.write(name)
    copied(upper, layer)
    found = {name: Path(os.fsdecode(os.path.join(os.fsencode(layer), name))).read_bytes() for name in names}
    assert found == {name: name for name in names}
    listing = trees.listing(str(layer), root=ROOT)
    trees.check(str(layer), listing, root=ROOT)
    assert len(listing.splitlines()) == len(names) + 1


def test_holes_stay_holes_and_cost_nothing(upper: Path, layer: Path) -> None:
    with open(upper / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"here")
    done = copied(upper, layer)
    found = (layer / "sparse").stat()
    assert found.st_size == 1 << 40
    assert found.st_blocks * 512 < 1 << 20
    assert done.size <= 1 << 16
    listing = trees.listing(str(layer), root=ROOT)  # ends at once, or this test never does
    with open(layer / "sparse", "r+b") as file:
        file.seek(1 << 35)
        file.write(b"\0" * 4096)  # a hole that is filled with zeros is still the same file
    trees.check(str(layer), listing, root=ROOT)
    with open(layer / "sparse", "r+b") as file:
        file.seek(1 << 35)
        file.write(b"\1")
    with pytest.raises(InvalidRequest, match="sparse"):
        trees.check(str(layer), listing, root=ROOT)


def test_more_than_the_disk_could_hold_is_refused(upper: Path, layer: Path) -> None:
    (upper / "big").write_bytes(b"x" * (2 << 20))
    copied(upper, layer, limit=2 << 20)  # the control
    with pytest.raises(InvalidRequest, match="more than its disk"):
        copied(upper, layer.parent / "other", limit=(1 << 20) - layers.SLACK)


def test_too_many_and_too_deep_are_refused(upper: Path, layer: Path) -> None:
    for number in range(20):
        (upper / str(number)).touch()
    with pytest.raises(InvalidRequest, match="more than 10 files"):
        copied(upper, layer, most=10)
    here = os.open(upper, layers.FOLDER)
    for _ in range(layers.DEEPEST + 1):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", layers.FOLDER, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(InvalidRequest, match="deeper"):
        copied(upper, layer.parent / "other")
    assert len(os.listdir("/proc/self/fd")) < 100  # no descriptor of the many folders stays open


def test_links_of_one_file_stay_one_file(upper: Path, layer: Path) -> None:
    (upper / "a").write_text("x")
    (upper / "folder").mkdir()
    os.link(upper / "a", upper / "folder" / "b")
    done = copied(upper, layer)
    assert (layer / "a").stat().st_ino == (layer / "folder" / "b").stat().st_ino
    assert done.size == os.path.getsize(upper / "a") or done.size <= 4096


def test_pipes_and_sockets_are_made_anew(upper: Path, layer: Path) -> None:
    import socket

    os.mkfifo(upper / "pipe", 0o640)
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(upper)
        listening.bind("socket")
        copied(upper, layer)
    assert stat.S_ISFIFO((layer / "pipe").lstat().st_mode)
    assert stat.S_ISSOCK((layer / "socket").lstat().st_mode)


def test_attributes_of_users_only(upper: Path, layer: Path) -> None:
    (upper / "file").write_text("x")
    os.setxattr(upper / "file", "user.mine", b"1")
    os.setxattr(upper / "file", "user.overlay.opaque", b"y")  # a workload's own bytes, or a forged mark
    done = copied(upper, layer)
    assert os.getxattr(layer / "file", "user.mine") == b"1"
    assert "user.overlay.opaque" not in os.listxattr(layer / "file")
    assert done.left_out == ()


def test_set_user_id_is_dropped(upper: Path, layer: Path) -> None:
    (upper / "file").write_text("x")
    (upper / "file").chmod(0o6755)
    (upper / "folder").mkdir()
    (upper / "folder").chmod(0o3777)
    copied(upper, layer)
    assert stat.S_IMODE((layer / "file").stat().st_mode) == 0o755
    assert stat.S_IMODE((layer / "folder").stat().st_mode) == 0o3777  # says only whose group new files get


@pytest.mark.skipif(not ROOT, reason="only root makes devices, and owners")
def test_devices_are_left_out_whiteouts_made_anew_owners_taken_inside(upper: Path, layer: Path) -> None:
    os.mknod(upper / "disk", stat.S_IFBLK | 0o666, os.makedev(8, 0))
    os.mknod(upper / "memory", stat.S_IFCHR | 0o666, os.makedev(1, 1))
    os.mknod(upper / "gone", stat.S_IFCHR, 0)
    for name, owner in (("mine", OWN.first + 1000), ("hosts", 0), ("others", OWN.first - 1)):
        (upper / name).touch()
        os.chown(upper / name, owner, owner)
    (upper / "opaque").mkdir()
    os.setxattr(upper / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(upper / "opaque", "trusted.overlay.origin", b"somewhere")
    (upper / "capable").touch()
    os.setxattr(
        upper / "capable", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000")
    )
    done = copied(upper, layer)
    assert not (layer / "disk").exists()
    assert not (layer / "memory").exists()
    assert (layer / "gone").lstat().st_rdev == 0
    assert stat.S_ISCHR((layer / "gone").lstat().st_mode)
    owners = {name: (layer / name).stat().st_uid for name in ("mine", "hosts", "others")}
    assert owners == {"mine": 1000, "hosts": layers.NOBODY, "others": layers.NOBODY}
    assert os.listxattr(layer / "opaque") == ["trusted.overlay.opaque"]
    assert os.listxattr(layer / "capable") == []
    assert done.left_out == ("attributes other than user.*", "devices")


def test_told_to_stop_it_stops(upper: Path, layer: Path) -> None:
    (upper / "file").touch()
    stop = threading.Event()
    stop.set()
    opened = os.open(upper, layers.FOLDER)
    with pytest.raises(WrongState, match="given up"):
        layers.copy(opened, str(layer), OWN, limit=LIMIT, stop=stop)
    os.close(opened)


def at_rest(opened: int, target: Path) -> layers.Copied:
    """A copy during which nothing changed: what was written a moment ago may be taken for changing."""
    end = time.monotonic() + 30
    for number in itertools.count():
        done = layers.copy(opened, f"{target}-{number}", OWN, limit=LIMIT)
        if not layers.changed(opened, done):
            return done
        assert time.monotonic() < end
    raise AssertionError


def test_what_changes_while_it_is_copied_is_found(upper: Path, layer: Path) -> None:
    (upper / "folder").mkdir()
    (upper / "folder" / "a").write_text("1")
    (upper / "b").write_text("1")
    opened = os.open(upper, layers.FOLDER)
    changes = {
        "/b": lambda: (upper / "b").write_text("2"),
        "/folder": lambda: (upper / "folder" / "a").unlink(),
        "/": lambda: (upper / "c").touch(),
        "/c": lambda: (upper / "c").chmod(0o600),
    }
    for path, change in changes.items():
        done = at_rest(opened, layer.parent / f"copy{path.replace('/', '-')}")
        change()
        assert layers.changed(opened, done) == path
    (upper / "new").touch()
    done = layers.copy(opened, str(layer), OWN, limit=LIMIT)
    if done.began - (upper / "new").stat().st_ctime_ns < layers.COARSE:
        assert layers.changed(opened, done)  # perhaps it changed within the copy's tick of the clock
    os.close(opened)


def test_a_full_disk_is_an_error_of_the_system(
    upper: Path, layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (upper / "file").write_text("x")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        copied(upper, layer)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "file to link", "file to pipe"])
def test_what_goes_between_two_looks_is_said_to_have_moved(
    upper: Path, layer: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = upper / "victim"
    {"folder": victim.mkdir, "link": lambda: victim.symlink_to("x")}.get(kind, victim.touch)()
    look = os.stat

    def then_it_goes(name: object, **how: object) -> os.stat_result:
        seen = look(name, **how)  # type: ignore[arg-type]
        if name == "victim":
            victim.rmdir() if kind == "folder" else victim.unlink()
            if kind == "file to link":
                victim.symlink_to("/etc/passwd")
            elif kind == "file to pipe":
                os.mkfifo(victim)
        return seen

    opened = os.open(upper, layers.FOLDER)
    monkeypatch.setattr(layers.os, "stat", then_it_goes)
    with pytest.raises(layers.Moved) as caught:
        layers.copy(opened, str(layer), OWN, limit=LIMIT)
    monkeypatch.undo()
    assert caught.value.path == "/victim"
    os.close(opened)
