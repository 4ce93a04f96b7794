"""Copies in and out; what comes out is hostile."""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from types import SimpleNamespace

import pytest

from ringfence.cli import transfer
from ringfence.cli.requesting import Transfer
from ringfence.cli.transfer import Destination, copy_in, copy_out
from ringfence.model.errors import GuestRefused, InvalidRequest


class Pieces:
    """What ``files.read`` and ``files.tar_out`` give."""

    def __init__(self, *pieces):
        self.pieces = list(pieces)
        self.closed = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.pieces:
            raise StopAsyncIteration
        piece = self.pieces.pop(0)
        return piece() if callable(piece) else piece

    async def aclose(self):
        self.closed = True


class Files:
    """A guest's files: one path, of one type."""

    def __init__(self, kind="file", mode=0o644, pieces=(b"data",)):
        self.info = SimpleNamespace(type=kind, mode=mode)
        self.reading = Pieces(*pieces)
        self.written = {}

    async def stat(self, path, follow=True):
        if self.info.type == "missing":
            raise GuestRefused(errno.ENOENT, f"stat {path}")
        return self.info

    def read(self, path):
        return self.reading

    def tar_out(self, path):
        return self.reading

    async def write(self, path, data, mode, parents):
        self.written[path] = (b"".join([piece async for piece in data]), mode)

    async def tar_in(self, path, archive):
        self.written[path] = b"".join([piece async for piece in archive])


def sandbox(files):
    async def link():
        return SimpleNamespace(files=files)

    ended = SimpleNamespace(done=lambda: False)
    return SimpleNamespace(link=link, ended=ended)


async def out(files, local, disk=1 << 20):
    destination = Destination(Transfer(str(local), "/workspace/x"))
    try:
        return await copy_out(sandbox(files), destination, disk)
    finally:
        destination.close()


def archive(*members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, value in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
            else:
                info.linkname = value
                tar.addfile(info)
    return stream.getvalue()


async def test_a_file_comes_out(tmp_path):
    shown = await out(Files(pieces=(b"one ", b"two")), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"one two"
    assert (shown["bytes"], shown["files"]) == (7, 1)
    assert os.listdir(tmp_path) == ["x"]


async def test_only_whether_it_can_be_executed_is_taken_from_its_mode(tmp_path):
    await out(Files(mode=0o6755), tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) & 0o7111 == 0o111 & ~transfer._umask()
    await out(Files(mode=0o666), tmp_path / "y")
    assert not stat.S_IMODE((tmp_path / "y").stat().st_mode) & 0o111


async def test_an_ordinary_file_is_replaced(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    await out(Files(), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"data"


async def test_a_symlink_is_never_followed(tmp_path):
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "x").symlink_to("target")
    with pytest.raises(InvalidRequest, match="symlink"):
        await out(Files(), tmp_path / "x")
    assert (tmp_path / "target").read_bytes() == b"precious"


async def test_a_symlink_that_appears_meanwhile_is_not_followed_either(tmp_path):
    (tmp_path / "target").write_bytes(b"precious")

    def swap():
        (tmp_path / "x").symlink_to("target")
        return b"evil"

    shown = await out(Files(pieces=(b"a", swap)), tmp_path / "x")
    assert "symlink" in shown["error"]["message"]
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["target", "x"]


async def test_the_folder_is_the_one_that_was_there_before(tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "evil").mkdir()

    def swap():
        os.rename(tmp_path / "good", tmp_path / "gone")
        (tmp_path / "good").symlink_to("evil")
        return b"data"

    await out(Files(pieces=(swap,)), tmp_path / "good" / "x")
    assert (tmp_path / "gone" / "x").read_bytes() == b"data"
    assert os.listdir(tmp_path / "evil") == []


@pytest.mark.parametrize("kind", ["symlink", "other"])
async def test_what_is_neither_file_nor_folder_stays_inside(kind, tmp_path):
    shown = await out(Files(kind=kind), tmp_path / "x")
    assert "neither a file nor a folder" in shown["error"]["message"]
    assert os.listdir(tmp_path) == []


async def test_a_file_without_end_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "SLACK", 0)
    shown = await out(Files(pieces=[bytes(1000)] * 50), tmp_path / "x", disk=10_000)
    assert "more than" in shown["error"]["message"]
    assert os.listdir(tmp_path) == []


async def test_missing(tmp_path):
    shown = await out(Files(kind="missing"), tmp_path / "x")
    assert "No such file" in shown["error"]["message"]
    assert os.listdir(tmp_path) == []


async def test_a_folder_comes_out(tmp_path):
    data = archive(("a", tarfile.REGTYPE, b"1"), ("d", tarfile.DIRTYPE, ""), ("d/b", tarfile.REGTYPE, b"22"))
    shown = await out(Files("directory", pieces=(data,)), tmp_path / "x")
    assert (tmp_path / "x" / "d" / "b").read_bytes() == b"22"
    assert shown["files"] == 2
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", tarfile.REGTYPE, b"x")],
        [("/tmp/evil", tarfile.REGTYPE, b"x")],
    ],
)
async def test_a_hostile_archive_writes_nothing_outside_and_nothing_at_all(members, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    shown = await out(Files("directory", pieces=(archive(*members),)), place / "x")
    assert "error" in shown
    assert sorted(os.listdir(tmp_path)) == ["place"]
    assert os.listdir(place) == []


async def test_a_link_that_the_archive_makes_is_never_a_way_out(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    data = archive(("l", tarfile.SYMTYPE, ".."), ("l/evil", tarfile.REGTYPE, b"x"))
    await out(Files("directory", pieces=(data,)), place / "x")
    assert sorted(os.listdir(tmp_path)) == ["place"]
    assert os.listdir(place) == ["x"]


async def test_links_that_leave_are_left_out_and_named(tmp_path):
    data = archive(("a", tarfile.REGTYPE, b"1"), ("evil", tarfile.SYMTYPE, "/etc/passwd"))
    shown = await out(Files("directory", pieces=(data,)), tmp_path / "x")
    assert os.listdir(tmp_path / "x") == ["a"]
    assert shown["skipped_count"] == 1


async def test_an_empty_folder_is_filled_and_a_full_one_is_not(tmp_path):
    (tmp_path / "x").mkdir()
    data = archive(("a", tarfile.REGTYPE, b"1"))
    assert "error" not in await out(Files("directory", pieces=(data,)), tmp_path / "x")
    with pytest.raises(InvalidRequest, match="something in it"):
        await out(Files("directory", pieces=(data,)), tmp_path / "x")
    assert os.listdir(tmp_path / "x") == ["a"]


async def test_a_place_that_is_not_there_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(InvalidRequest, match="No such file"):
        Destination(Transfer(str(tmp_path / "no" / "x"), "x"))


async def test_a_device_is_not_written(tmp_path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(InvalidRequest, match="no ordinary file"):
        Destination(Transfer(str(tmp_path / "x"), "x"))


async def test_in(tmp_path):
    (tmp_path / "tool").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o4755)
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "f").write_bytes(b"x" * 700)
    (folder / "odd\nname").write_bytes(b"")
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    files = Files()
    await copy_in(
        SimpleNamespace(files=files),
        [Transfer(str(tmp_path / "tool"), "tool"), Transfer(str(folder), "/data")],
    )
    assert files.written["tool"] == (b"#!/bin/sh\n", 0o755)
    with tarfile.open(fileobj=io.BytesIO(files.written["/data"])) as tar:
        found = {member.name: member for member in tar.getmembers()}
        assert tar.extractfile("sub/f").read() == b"x" * 700
    assert set(found) == {"sub", "sub/f", "odd\nname", "link"}  # the pipe stays here
    assert found["link"].issym()
    assert found["link"].linkname == "/etc/passwd"


async def test_in_refused(tmp_path):
    (tmp_path / "f").touch()

    async def refuse(*_, **__):
        raise GuestRefused(errno.EACCES, "write /etc/f")

    files = SimpleNamespace(write=refuse)
    with pytest.raises(GuestRefused) as caught:
        await copy_in(SimpleNamespace(files=files), [Transfer(str(tmp_path / "f"), "/etc/f")])
    assert str(tmp_path / "f") in caught.value.hint
