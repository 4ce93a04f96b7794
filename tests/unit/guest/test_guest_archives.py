"""Unpacking hostile archives: every trick that leaves the folder, each beside a control that works."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.guest.archives import ArchiveLimits, Extracted, extract_tar
from ringfence.model.errors import HostLimit, InvalidRequest, ProtocolViolation, RingfenceError

LIMITS = ArchiveLimits()


def member(name: str, kind: bytes = tarfile.REGTYPE, **values: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in values.items():
        setattr(info, key, value)
    return info


def make(*members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, errors="surrogateescape") as tar:
        for item in members:
            info, data = item if isinstance(item, tuple) else (item, b"")
            if data:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data) if data else None)
    return out.getvalue()


async def pieces(data: bytes, size: int = 700) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]
        yield b""


async def unpack(
    data: bytes, folder: Path, limits: ArchiveLimits = LIMITS, *, replace: bool = False
) -> Extracted:
    return await extract_tar(pieces(data), folder, limits, replace=replace)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("host")
    return tmp_path / "out"


def untouched(out: Path) -> None:
    """Nothing but the destination changed."""
    assert (out.parent / "secret").read_text() == "host"
    assert {path.name for path in out.parent.iterdir()} <= {"secret", "out"}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
async def test_an_honest_archive_comes_out(out: Path, form: int) -> None:
    long = "deep/" * 20 + "file-" + "n" * 90
    data = make(
        member("./", tarfile.DIRTYPE, mode=0o755),
        member("./sub", tarfile.DIRTYPE, mode=0o500),
        (member("./sub/a.txt", mode=0o640, mtime=1_700_000_000), b"hello" * 1000),
        member("sub/empty"),
        (member(long), b"x") if form != tarfile.USTAR_FORMAT else member("short"),
        member("sub/link", tarfile.SYMTYPE, linkname="../sub/a.txt"),
        member("sub/hard", tarfile.LNKTYPE, linkname="./sub/a.txt"),
        form=form,
    )
    got = await unpack(data, out)
    assert (out / "sub/a.txt").read_bytes() == b"hello" * 1000
    assert (out / "sub/a.txt").stat().st_mtime == 1_700_000_000
    assert (out / "sub/link").read_bytes() == b"hello" * 1000
    assert (out / "sub/hard").stat().st_ino == (out / "sub/a.txt").stat().st_ino
    assert (out / "sub").stat().st_mode & 0o700 == 0o700
    if form != tarfile.USTAR_FORMAT:
        assert (out / long).read_bytes() == b"x"
    assert (got.files, got.links, got.skipped, got.skipped_count) == (3, 2, (), 0)
    untouched(out)


async def test_what_gnu_tar_writes_comes_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = [b"new\nline", b"\xff\xfe\x80", b"x" * 255, b"\xe2\x82\xac", b"-rf", b" space ", b"\x1b[2J"]
    for name in names:
        (source / os.fsdecode(name)).write_bytes(name)
    (source / "big").write_bytes(os.urandom(300_000))
    for form in ("gnu", "pax"):
        data = subprocess.run(
            ["tar", "-C", source, "-c", f"--format={form}", "."], capture_output=True, check=True
        )
        out = tmp_path / form
        await unpack(data.stdout, out)
        assert sorted(os.listdir(os.fsencode(out))) == sorted([*names, b"big"])
        for name in names:
            assert (out / os.fsdecode(name)).read_bytes() == name
        assert (out / "big").read_bytes() == (source / "big").read_bytes()


@pytest.mark.parametrize(
    "name", ["/etc/x", "../x", "a/../../x", "..", "a/..", "//x", "./../x", "sub/../../secret"]
)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
async def test_names_that_leave_are_refused(out: Path, name: str, kind: bytes) -> None:
    with pytest.raises(ProtocolViolation, match=r"absolute|climbs"):
        await unpack(make(member("control"), member(name, kind, linkname="control")), out)
    assert (out / "control").exists()
    untouched(out)


@pytest.mark.parametrize(
    "target",
    ["/etc/passwd", "../../secret", "..", "../..", "a/../../secret", "a/b/../..", "./../secret", "", "/"],
)
async def test_symlinks_that_leave_are_left_out(out: Path, target: str) -> None:
    data = make(
        member("evil", tarfile.SYMTYPE, linkname=target), member("good", tarfile.SYMTYPE, linkname="x/y")
    )
    got = await unpack(data, out)
    assert got.skipped == (("evil", "a symlink that leaves the folder"),)
    assert not (out / "evil").is_symlink()
    assert (out / "good").is_symlink()  # the control


async def test_a_symlink_through_a_symlink_can_not_leave(out: Path) -> None:
    # ``deep/er/up`` leads to the root of the tree, so what climbs after it is outside, whatever a look at the
    # text says.
    data = make(
        member("deep/er/up", tarfile.SYMTYPE, linkname="../.."),
        member("evil", tarfile.SYMTYPE, linkname="deep/er/up/../secret"),
    )
    got = await unpack(data, out)
    assert [name for name, _ in got.skipped] == ["evil"]
    assert (out / "deep/er/up").resolve() == out.resolve()


@pytest.mark.parametrize("target", [".", "sub", "../out"])
async def test_nothing_is_written_through_a_symlink(out: Path, target: str) -> None:
    out.mkdir()
    (out / "sub").mkdir()
    (out / "door").symlink_to(target)  # as if an earlier archive or the user had put it there
    for name in ("door/x", "door/x/y"):
        with pytest.raises(ProtocolViolation, match="passes through door"):
            await unpack(make((member(name), b"evil")), out)
    with pytest.raises(ProtocolViolation, match="passes through door"):
        await unpack(make(member("door", tarfile.DIRTYPE)), out)
    assert not list((out / "sub").iterdir())
    data = make(member("own", tarfile.SYMTYPE, linkname="sub"), (member("own/x"), b"evil"))
    with pytest.raises(ProtocolViolation, match="passes through own"):
        await unpack(data, out)
    untouched(out)


async def test_a_file_does_not_follow_what_is_there(out: Path) -> None:
    out.mkdir()
    (out / "x").symlink_to("../secret")
    with pytest.raises(InvalidRequest, match="there already"):
        await unpack(make((member("x"), b"evil")), out)
    untouched(out)
    await unpack(make((member("x"), b"fine")), out, replace=True)
    assert not (out / "x").is_symlink()
    assert (out / "x").read_text() == "fine"
    untouched(out)


async def test_a_hard_link_to_what_the_archive_did_not_make_is_refused(out: Path) -> None:
    out.mkdir()
    (out / "mine").write_text("host")
    (out / "door").symlink_to("../secret")
    for target in ("mine", "door", "nothing", "folder"):
        data = make(member("folder", tarfile.DIRTYPE), member("evil", tarfile.LNKTYPE, linkname=target))
        with pytest.raises(ProtocolViolation, match="hard link"):
            await unpack(data, out)
    assert not (out / "evil").exists()


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
async def test_devices_and_pipes_are_left_out(out: Path, kind: bytes) -> None:
    got = await unpack(make(member("dev", kind, devmajor=1, devminor=3), member("control")), out)
    assert got.skipped == (("dev", "neither a file, a folder nor a link"),)
    assert os.listdir(out) == ["control"]


async def test_setuid_and_open_permissions_are_dropped(out: Path) -> None:
    before = os.umask(0o022)
    try:
        await unpack(make(member("x", mode=0o6777), member("d", tarfile.DIRTYPE, mode=0o7777)), out)
    finally:
        os.umask(before)
    assert stat.S_IMODE((out / "x").stat().st_mode) == 0o755
    assert stat.S_IMODE((out / "d").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "second",
    [
        member("x"),
        member("./x"),
        member("x", tarfile.SYMTYPE, linkname="y"),
        member("x", tarfile.LNKTYPE, linkname="y"),
        member("x", tarfile.DIRTYPE),
        member("x/y"),
    ],
)
@pytest.mark.parametrize("replace", [False, True])
async def test_an_entry_comes_once(out: Path, second: tarfile.TarInfo, replace: bool) -> None:
    with pytest.raises(ProtocolViolation, match=r"twice|not a folder"):
        await unpack(make(member("y"), member("x"), second), out, replace=replace)


async def test_a_file_does_not_replace_a_folder(out: Path) -> None:
    with pytest.raises(ProtocolViolation, match="where a folder is"):
        await unpack(make(member("d/x"), member("d")), out, replace=True)


async def test_budgets_hold(out: Path) -> None:
    data = make(*((member(f"f{n}"), b"x" * 100) for n in range(20)))
    await unpack(data, out / "control", ArchiveLimits(bytes=2000, entries=20))
    with pytest.raises(HostLimit, match="1999 bytes"):
        await unpack(data, out / "a", ArchiveLimits(bytes=1999))
    with pytest.raises(HostLimit, match="19 entries"):
        await unpack(data, out / "b", ArchiveLimits(entries=19))
    assert len(list((out / "b").iterdir())) == 19
    with pytest.raises(HostLimit, match="deep"):
        await unpack(make(member("a/b/c/d")), out, ArchiveLimits(depth=3))
    # Folders that are there already cost nothing but time; that ends, too.
    with pytest.raises(HostLimit, match="entries"):
        await unpack(make(*(member("d", tarfile.DIRTYPE) for _ in range(20))), out, ArchiveLimits(entries=5))


async def test_an_absurd_size_is_refused_before_anything_is_written(out: Path) -> None:
    info = member("huge")
    info.size = 2**62
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(HostLimit, match="bytes"):
        await unpack(header, out)
    assert not os.listdir(out)


async def test_a_sparse_file_is_refused(out: Path) -> None:
    for data in (
        make(member("x", tarfile.GNUTYPE_SPARSE)),
        make(member("x", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.realsize": str(2**60)})),
    ):
        with pytest.raises(ProtocolViolation, match="sparse"):
            await unpack(data, out)


async def test_a_name_with_nul_is_refused(out: Path) -> None:
    with pytest.raises(ProtocolViolation, match="impossible"):
        await unpack(make(member("x", pax_headers={"path": "a\0b"})), out)
    with pytest.raises(ProtocolViolation, match="impossible"):
        await unpack(make(member("x", pax_headers={"path": "n" * 256})), out)
    await unpack(make(member("x", pax_headers={"path": "n" * 255})), out)


async def test_an_archive_cut_anywhere_is_an_error(out: Path) -> None:
    data = make((member("a" * 120), b"x" * 600), (member("b"), b"y"))
    end = data.rindex(b"y")
    for at in range(0, end, 97):
        with pytest.raises(ProtocolViolation, match="cut off"):
            await unpack(data[:at], out / str(at))
        assert not list((out / str(at)).glob("b"))
    await unpack(data, out / "control")


async def test_what_can_not_be_completed_is_removed(out: Path) -> None:
    data = make((member("a"), b"x" * 5000))
    with pytest.raises(ProtocolViolation, match="cut off"):
        await unpack(data[:2048], out)
    assert os.listdir(out) == []


async def test_the_destination_must_be_a_folder(out: Path) -> None:
    out.write_text("file")
    with pytest.raises(InvalidRequest):
        await unpack(make(member("x")), out)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_garbled_archives_never_leave_the_folder(tmp_path: Path, data: st.DataObject) -> None:
    good = bytearray(
        make(
            (member("a/b"), b"x" * 10),
            member("a/l", tarfile.SYMTYPE, linkname="b"),
            (member("é" * 60), b"y"),
            member("h", tarfile.LNKTYPE, linkname="a/b"),
        )
    )
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # make the checksums right, so that the garbage is looked at
        for at in range(0, len(good), 512):
            block = good[at : at + 512]
            block[148:156] = b" " * 8
            if any(block[:148]):
                good[at + 148 : at + 156] = b"%06o\0 " % (sum(block) & 0o777777)
    out = tmp_path / os.urandom(8).hex() / "out"
    out.parent.mkdir()
    with contextlib.suppress(RingfenceError):  # refused is fine, anything else would be a crash
        await unpack(bytes(good), out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
