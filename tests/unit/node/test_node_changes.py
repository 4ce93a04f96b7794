"""Reading a hostile layer: what is found, what is not followed, what is cut off."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
from pathlib import Path

import pytest

from ringfence.node.changes import Bounds, Changes, of_folders, of_upper

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts and trusted attributes need root")
EMPTY = "sha256:" + hashlib.sha256(b"").hexdigest()


class Layers:
    """An upper and one lower layer."""

    def __init__(self, folder: Path) -> None:
        self.upper, self.lower = folder / "upper", folder / "lower"
        self.upper.mkdir()
        self.lower.mkdir()

    def read(self, bounds: Bounds | None = None, *more: Path) -> Changes:
        upper = os.open(self.upper, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return of_upper(upper, (*map(str, more), str(self.lower)), bounds)
        finally:
            os.close(upper)

    def kinds(self) -> dict[str, str]:
        return {change.path: f"{change.kind} {change.type}" for change in self.read()}


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    return Layers(tmp_path)


def test_nothing(layers: Layers) -> None:
    assert layers.read() == ()
    assert layers.read().cut == ()


def test_added_modified_and_copied_up_unchanged(layers: Layers) -> None:
    (layers.lower / "etc").mkdir()
    (layers.lower / "etc/same").write_text("same")
    (layers.lower / "etc/hosts").write_text("old")
    (layers.lower / "etc/mode").write_text("x")
    (layers.upper / "etc").mkdir()
    (layers.upper / "etc/same").write_text("same")  # opened for writing, nothing written
    (layers.upper / "etc/hosts").write_text("new")  # same size
    (layers.upper / "etc/mode").write_text("x")
    (layers.upper / "etc/mode").chmod(0o600)
    (layers.upper / "workspace").mkdir()
    (layers.upper / "workspace/a").write_text("hello")
    (layers.upper / "workspace/link").symlink_to("/etc/passwd")
    changes = {change.path: change for change in layers.read()}
    assert {p: f"{c.kind} {c.type}" for p, c in changes.items()} == {
        "/etc/hosts": "modified file",
        "/etc/mode": "modified file",
        "/workspace": "added directory",
        "/workspace/a": "added file",
        "/workspace/link": "added symlink",
    }
    assert changes["/workspace/a"].size == 5
    assert changes["/workspace/a"].digest == "sha256:" + hashlib.sha256(b"hello").hexdigest()
    assert changes["/workspace/link"].digest is None
    assert list(changes) == sorted(changes)


@root_only
def test_whiteouts_say_what_is_deleted_with_all_that_was_in_it(layers: Layers) -> None:
    (layers.lower / "d/e").mkdir(parents=True)
    (layers.lower / "d/e/f").write_text("x")
    (layers.lower / "g").write_text("x")
    os.mknod(layers.upper / "d", 0o600 | 0o020000, 0)
    os.mknod(layers.upper / "g", 0o600 | 0o020000, 0)
    os.mknod(layers.upper / "never-was", 0o600 | 0o020000, 0)
    assert layers.kinds() == {
        "/d": "deleted directory",
        "/d/e": "deleted directory",
        "/d/e/f": "deleted file",
        "/g": "deleted file",
    }


@root_only
def test_what_a_workload_can_write_is_no_opaque_mark(layers: Layers) -> None:
    (layers.lower / "d").mkdir()
    (layers.lower / "d/kept").write_text("old")
    (layers.upper / "d").mkdir()
    os.setxattr(layers.upper / "d", "user.overlay.opaque", b"y")
    assert layers.kinds() == {}


@root_only
def test_opaque_folders_hide_what_was_below(layers: Layers) -> None:
    (layers.lower / "d").mkdir()
    for name in ("gone", "replaced", "same"):
        (layers.lower / "d" / name).write_text("old")
    (layers.upper / "d").mkdir()
    os.setxattr(layers.upper / "d", "trusted.overlay.opaque", b"y")
    (layers.upper / "d/replaced").write_text("new")
    (layers.upper / "d/same").write_text("old")
    assert layers.kinds() == {"/d/gone": "deleted file", "/d/replaced": "modified file"}


@root_only
def test_a_folder_that_became_a_file_and_the_reverse(layers: Layers) -> None:
    (layers.lower / "a").mkdir()
    (layers.lower / "a/in").write_text("x")
    (layers.lower / "b").write_text("x")
    (layers.upper / "a").write_text("now a file")
    (layers.upper / "b").mkdir()
    assert sorted((c.path, c.kind, c.type) for c in layers.read()) == [
        ("/a", "added", "file"),
        ("/a", "deleted", "directory"),
        ("/a/in", "deleted", "file"),
        ("/b", "modified", "directory"),
    ]


def test_the_topmost_lower_layer_counts(layers: Layers, tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (top / "f").write_text("new")
    (layers.lower / "f").write_text("old")
    (layers.upper / "f").write_text("new")
    assert layers.read(None, top) == ()


def test_hostile_names_come_out_as_they_are(layers: Layers) -> None:
    names = [b"new\nline", b"\xff\xfe", b"x" * 255, b"-rf", b"a b", "ä".encode(), b"\x1b[31m", b"..."]
    for name in names:
        with open(os.fsencode(layers.upper) + b"/" + name, "wb"):
            pass
    assert sorted(os.fsencode(change.path) for change in layers.read()) == sorted(b"/" + n for n in names)


def test_nothing_but_files_is_opened(layers: Layers) -> None:
    os.mkfifo(layers.upper / "fifo")  # opening it for reading would wait for ever
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(layers.upper / "socket"))
    (layers.upper / "link").symlink_to("/proc/self/environ")
    (layers.upper / "folder-link").symlink_to("/etc")
    assert layers.kinds() == {
        "/fifo": "added other",
        "/socket": "added other",
        "/link": "added symlink",
        "/folder-link": "added symlink",
    }


def test_a_symlink_in_place_of_a_lower_folder_is_not_followed(layers: Layers) -> None:
    (layers.lower / "d").symlink_to("/etc")
    (layers.upper / "d").mkdir()
    (layers.upper / "d/passwd").write_text("x")
    assert layers.kinds() == {"/d": "modified directory", "/d/passwd": "added file"}


def test_a_sparse_giant_is_not_hashed(layers: Layers) -> None:
    with open(layers.upper / "giant", "wb") as file:
        file.truncate(1 << 42)
    (layers.upper / "small").write_text("")
    found = layers.read()
    assert [(c.path, c.size, c.digest) for c in found] == [("/giant", 1 << 42, None), ("/small", 0, EMPTY)]
    assert found.cut == ("digests of large files are left out",)


def test_bytes_are_bounded_in_all(layers: Layers) -> None:
    for number in range(4):
        (layers.upper / str(number)).write_bytes(b"x" * 100)
    found = layers.read(Bounds(size=250))
    assert sum(change.digest is not None for change in found) == 2
    assert found.cut


def test_entries_are_bounded(layers: Layers) -> None:
    for number in range(50):
        (layers.upper / str(number)).write_text("")
    found = layers.read(Bounds(entries=20))
    assert len(found) == 20
    assert "more than 20 entries" in found.cut[0]


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder itself, and what others close meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_depth_is_bounded(layers: Layers) -> None:
    here = os.open(layers.upper, os.O_RDONLY)
    for _ in range(1500):  # far beyond PATH_MAX
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        found = layers.read()
    finally:
        subprocess.run(["rm", "-rf", str(layers.upper)], check=True)  # too deep for pytest's own cleaning
    assert not [path for path in _open_files() if path.startswith(str(layers.upper))]
    assert len(found) == 200
    assert "deeper" in found.cut[0]


def test_a_folder_that_vanishes_is_no_error(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    (layers.upper / "d").mkdir()
    real = os.open

    def racing(path: object, *args: object, **kwargs: object) -> int:
        if path == "d":
            raise FileNotFoundError(2, "gone")
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", racing)
    assert layers.kinds() == {"/d": "added directory"}


def test_writable_folders_without_overlay(tmp_path: Path) -> None:
    inside, lower = tmp_path / "inside", tmp_path / "lower"
    for top in (inside, lower):
        (top / "workspace").mkdir(parents=True)
        (top / "workspace/same").write_text("s")
    (lower / "workspace/gone").write_text("g")
    (inside / "workspace/new").write_text("n")
    (inside / "elsewhere").write_text("not a writable folder")
    (inside / "tmp").symlink_to("/etc")
    root = os.open(inside, os.O_RDONLY)
    try:
        found = of_folders(root, ("/workspace", "/tmp", "/missing", "/workspace"), (str(lower),))
    finally:
        os.close(root)
    assert [(c.path, c.kind) for c in found] == [("/workspace/gone", "deleted"), ("/workspace/new", "added")]
