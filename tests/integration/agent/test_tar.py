"""Tar streams in and out: what honest archivers write goes through, what others write is refused."""

from __future__ import annotations

import errno
import io
import os
import struct
import tarfile

import pytest
from test_files import stream
from wall import CLOSE, ERROR, REPLY, AgentError, Client, Value, Wall, numbers

TAR_IN, TAR_OUT = 24, 25


def unpack(client: Client, folder: str, data: bytes) -> int:
    """Send an archive; the number of entries."""
    channel = client.open(TAR_IN, (1, folder))
    offset, credit = 0, 65536
    while True:
        while credit and offset < len(data):
            piece = data[offset : offset + min(credit, 50_000)]
            offset = client.data(channel, piece, offset)
            credit -= len(piece)
        if offset == len(data):
            client.eof(channel, offset)
            break
        frame = client.frame(channel)
        if frame.type == ERROR:
            raise AgentError(frame)
        credit += struct.unpack("<BI", frame.payload)[1]
    while True:
        frame = client.frame(channel)
        if frame.type == ERROR:
            raise AgentError(frame)
        if frame.type == REPLY:
            assert client.frame(channel).type == CLOSE
            client.send(CLOSE, channel)
            return numbers(frame.payload)[1]


def archive(*entries: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of these entries."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as made:
        for info, data in entries:
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def entry(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    """One member."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, link, mode, 1_700_000_000
    return info, data


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats(walled: Wall, client: Client, kind: int) -> None:
    long = "/".join(["n" * 60] * (2 if kind == tarfile.USTAR_FORMAT else 3)) + "/" + "f" * 90
    data = archive(
        entry("dir", kind=tarfile.DIRTYPE, mode=0o755),
        entry("./dir/file", b"content", mode=0o6750),
        entry(long, b"far"),
        entry("link", kind=tarfile.SYMTYPE, link="dir/file"),
        entry("hard", kind=tarfile.LNKTYPE, link="dir/file"),
        entry("closed", kind=tarfile.DIRTYPE, mode=0o500),
        entry("closed/in", b"x"),
        entry("pipe", kind=tarfile.FIFOTYPE),
        kind=kind,
    )
    assert unpack(client, "new/folder", data) == 8
    root = walled.work / "new/folder"
    assert (root / "dir/file").read_bytes() == b"content"
    assert (root / "dir/file").stat().st_mode & 0o7777 == 0o750, "setuid bits are dropped"
    assert (root / "dir/file").stat().st_mtime == 1_700_000_000
    assert (root / long).read_bytes() == b"far"
    assert os.readlink(root / "link") == "dir/file"
    assert (root / "hard").stat().st_ino == (root / "dir/file").stat().st_ino
    assert (root / "closed").stat().st_mode & 0o777 == 0o500
    (root / "closed").chmod(0o700)


def test_round_trip(walled: Wall, client: Client) -> None:
    (walled.work / "src/sub/empty").mkdir(parents=True)
    big = os.urandom(300_001)
    (walled.work / "src/big").write_bytes(big)
    (walled.work / "src/sub/é").write_bytes(b"accent")
    (walled.work / "src/skipped").mkdir()
    (walled.work / "src/skipped/file").write_bytes(b"no")
    (walled.work / "src/sub/skipped").write_bytes(b"yes: only top-level names are left out")
    os.symlink("t" * 200, walled.work / "src/link")
    os.mkfifo(walled.work / "src/pipe")
    hostile = os.fsdecode(b"\xff\n\x01")
    (walled.work / "src" / hostile).write_bytes(b"bytes")
    data = stream(client, client.open(TAR_OUT, (1, "src"), (2, "skipped")))
    with tarfile.open(fileobj=io.BytesIO(data)) as got:
        names = set(got.getnames())
        assert names == {"sub", "sub/empty", "big", "sub/é", "sub/skipped", "link", hostile}
        assert got.extractfile("big").read() == big  # type: ignore[union-attr]
        assert got.getmember("link").linkname == "t" * 200
    assert unpack(client, "dst", data) == 7
    assert (walled.work / "dst/big").read_bytes() == big
    assert (walled.work / "dst" / hostile).read_bytes() == b"bytes"
    single = stream(client, client.open(TAR_OUT, (1, "src/sub/é")))
    with tarfile.open(fileobj=io.BytesIO(single)) as got:
        assert got.getnames() == ["é"]


def test_holes_stay_holes(walled: Wall, client: Client) -> None:
    assert (
        unpack(
            client,
            "d",
            archive(entry("sparse", b"a" + bytes(3_000_000) + b"b"), entry("zeros", bytes(100_000))),
        )
        == 2
    )
    found = (walled.work / "d/sparse").stat()
    assert found.st_size == 3_000_002
    assert found.st_blocks * 512 < 100_000
    assert (walled.work / "d/zeros").read_bytes() == bytes(100_000)


REFUSED: dict[str, list[tuple[tarfile.TarInfo, bytes]]] = {
    "absolute": [entry("/tmp/rf-evil", b"x")],
    "climbing": [entry("a/../../evil", b"x")],
    "dots at the end": [entry("a/..", kind=tarfile.DIRTYPE)],
    "through own link": [entry("l", kind=tarfile.SYMTYPE, link=".."), entry("l/evil", b"x")],
    "through own link deeper": [entry("a/l", kind=tarfile.SYMTYPE, link="../.."), entry("a/l/b/evil", b"x")],
    "through a hard link to it": [
        entry("l", kind=tarfile.SYMTYPE, link=".."),
        entry("h", kind=tarfile.LNKTYPE, link="l"),
        entry("h/evil", b"x"),
    ],
    "folder over own link": [entry("l", kind=tarfile.SYMTYPE, link=".."), entry("l", kind=tarfile.DIRTYPE)],
    "climbing hard link": [entry("h", kind=tarfile.LNKTYPE, link="../outside")],
    "absolute hard link": [entry("h", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "hard link through own link": [
        entry("l", kind=tarfile.SYMTYPE, link=".."),
        entry("h", kind=tarfile.LNKTYPE, link="l/outside"),
    ],
    "character device": [entry("dev", kind=tarfile.CHRTYPE)],
    "block device": [entry("dev", kind=tarfile.BLKTYPE)],
    "GNU sparse": [entry("s", kind=tarfile.GNUTYPE_SPARSE)],
    "unknown type": [entry("u", kind=b"Z")],
}


@pytest.mark.parametrize("what", REFUSED)
def test_hostile_entries_are_refused(walled: Wall, client: Client, what: str) -> None:
    (walled.work / "outside").write_bytes(b"mine")
    with pytest.raises(AgentError) as caught:
        unpack(client, "in", archive(*REFUSED[what]))
    assert caught.value.errno == errno.EINVAL
    assert sorted(os.listdir(walled.work)) == ["in", "outside"]
    assert (walled.work / "outside").read_bytes() == b"mine"


def test_a_link_that_was_there_before_is_followed(walled: Wall, client: Client) -> None:
    """The positive control of the refusals: the name goes through where the link is the workload's own."""
    (walled.work / "in").mkdir(mode=0o777)
    (walled.work / "in").chmod(0o777)
    (walled.work / "real").mkdir()
    (walled.work / "real").chmod(0o777)
    os.symlink("../real", walled.work / "in/l")
    unpack(client, "in", archive(entry("l/file", b"x")))
    assert (walled.work / "real/file").read_bytes() == b"x"


def damaged() -> dict[str, bytes]:
    """Archives that end early or lie."""
    good = archive(entry("a", b"x" * 1000))
    pax = archive(entry("p" * 150, b"x"))
    at = pax.index(b" path=")
    return {
        "cut in a header": good[:300],
        "cut in data": good[:700],
        "wrong checksum": b"b" + good[1:],
        "no tar": b"hello" * 200,
        "pax length too long": pax[: at - 3] + b"999" + pax[at:],
        "pax length none": pax[: at - 3] + b"xyz" + pax[at:],
    }


@pytest.mark.parametrize("what", damaged())
def test_damaged_archives_are_refused(walled: Wall, client: Client, what: str) -> None:
    with pytest.raises(AgentError) as caught:
        unpack(client, "in", damaged()[what])
    assert caught.value.errno == errno.EINVAL


def test_errors_of_packing(walled: Wall, client: Client) -> None:
    items: list[tuple[tuple[int, Value], int]] = [
        ((1, "nope"), errno.ENOENT),
        ((1, "/dev/null"), errno.EINVAL),
    ]
    for item, error in items:
        with pytest.raises(AgentError) as caught:
            stream(client, client.open(TAR_OUT, item))
        assert caught.value.errno == error
