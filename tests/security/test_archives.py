"""Hostile archives as layers: each attack is refused or neutralised, and a naive unpacker falls for it.

The control of each attack unpacks the same bytes as tools do that trust an archive (every name joined, every
link followed, whiteouts applied by name; GNU tar with everything allowed), inside the test's own folder, and
shows the harm. Where a control needs root it is left out for a normal user; the attack never is.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ringfence.images.contract import ImportLimits, Layer
from ringfence.images.store import TemplateStore
from ringfence.model.errors import InvalidRequest, RingfenceError
from support.images import tar_of

ROOT = os.geteuid() == 0
FOREIGN = 0x7000_0000  # a host user of some sandbox's range
DIR, SYM, LNK = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
CHR, BLK, FIFO = tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemplateStore]:
    with TemplateStore.open(tmp_path / "images") as made:
        yield made
    assert os.listdir(tmp_path / "images/tmp") == []


class Place(NamedTuple):
    """Where a control works: ``into`` is what is unpacked to, all else must stay as it is."""

    folder: Path
    into: Path
    victim: Path  # a file outside
    outside: Path  # a folder outside


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = tmp_path / "control"
    made = Place(folder, folder / "deep/into", folder / "victim", folder / "outside")
    made.into.mkdir(parents=True)
    made.outside.mkdir()
    made.victim.write_text("precious")
    (made.outside / "precious").write_text("precious")
    return made


def add(store: TemplateStore, data: bytes, **words: Any) -> Layer:
    return store.add_layer_from(io.BytesIO(data), **words)


def naive(data: bytes, into: Path) -> None:
    """As an unpacker that trusts: names, links, modes, owners and devices as the archive says."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = os.path.join(into, member.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
            elif member.issym():
                os.symlink(member.linkname, path)
            elif member.islnk():
                os.link(os.path.join(into, member.linkname), path)
            elif member.isfifo():
                os.mkfifo(path)
            elif member.isdev():
                kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
                os.mknod(path, kind | member.mode, os.makedev(member.devmajor, member.devminor))
            else:
                content = archive.extractfile(member)
                assert content is not None
                with open(path, "wb") as file:
                    file.write(content.read())
                if ROOT:
                    os.chown(path, member.uid, member.gid)
                os.chmod(path, member.mode)


def naive_whiteouts(into: Path) -> None:
    """Whiteouts applied by name, as simple unpackers of layers do it."""
    for here, folders, files in os.walk(into, followlinks=True):
        for name in [*files, *folders]:
            if name == ".wh..wh..opq":
                for other in os.listdir(here):
                    _remove(os.path.join(here, other))
                return
            if name.startswith(".wh."):
                _remove(os.path.join(here, name[4:]))


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


class Attack(NamedTuple):
    entries: Callable[[Place], list[tuple[str, dict[str, Any]]]]
    harm: Callable[[Place], bool]  # whether the naive unpacker did it
    words: str = ""  # of the refusal; empty: it is neutralised
    safe: Callable[[Path], bool] = lambda fs: False  # whether what was unpacked is harmless
    whiteouts: bool = False
    root: bool = False  # the control needs root


def _touched(place: Place) -> bool:
    return place.victim.read_text() != "precious"


ATTACKS = {
    "a name that climbs": Attack(
        lambda p: [("../../victim", {"data": b"evil"})], _touched, "climbs out of its folder"
    ),
    "a name that climbs in the middle": Attack(
        lambda p: [("a", {"kind": DIR}), ("a/../../../victim", {"data": b"evil"})], _touched, "climbs"
    ),
    "an absolute name": Attack(
        lambda p: [(str(p.victim), {"data": b"evil"})],
        _touched,
        safe=lambda fs: [f.read_text() for f in fs.rglob("victim")] == ["evil"],
    ),
    "a file through an absolute link": Attack(
        lambda p: [("link", {"kind": SYM, "link": str(p.folder)}), ("link/victim", {"data": b"evil"})],
        _touched,
        "goes through the link",
    ),
    "a file through a climbing link": Attack(
        lambda p: [("link", {"kind": SYM, "link": "../.."}), ("link/victim", {"data": b"evil"})],
        _touched,
        "goes through the link",
    ),
    "a folder's mode through a link": Attack(
        lambda p: [
            ("link", {"kind": SYM, "link": str(p.outside)}),
            ("link/new", {"kind": DIR, "mode": 0o777}),
        ],
        lambda p: (p.outside / "new").is_dir(),
        "goes through the link",
    ),
    "a file in place of a link": Attack(
        lambda p: [("link", {"kind": SYM, "link": str(p.victim)}), ("link", {"data": b"evil"})],
        _touched,
        safe=lambda fs: not (fs / "link").is_symlink() and (fs / "link").read_text() == "evil",
    ),
    "a hard link to an absolute name": Attack(
        lambda p: [("stolen", {"kind": LNK, "link": str(p.victim)})],
        lambda p: (p.into / "stolen").exists() and os.path.samefile(p.into / "stolen", p.victim),
        "which this layer has not",
    ),
    "a hard link that climbs": Attack(
        lambda p: [("stolen", {"kind": LNK, "link": "../../victim"})],
        lambda p: (p.into / "stolen").exists() and os.path.samefile(p.into / "stolen", p.victim),
        "climbs",
    ),
    "a hard link through a link": Attack(
        lambda p: [
            ("link", {"kind": SYM, "link": str(p.folder)}),
            ("stolen", {"kind": LNK, "link": "link/victim"}),
        ],
        lambda p: (p.into / "stolen").exists() and os.path.samefile(p.into / "stolen", p.victim),
        "goes through the link",
    ),
    "a device node": Attack(
        lambda p: [
            ("memory", {"kind": CHR, "device": (1, 3), "mode": 0o666}),
            ("disk", {"kind": BLK, "device": (7, 250), "mode": 0o666}),
        ],
        lambda p: stat.S_ISCHR((p.into / "memory").lstat().st_mode),
        safe=lambda fs: os.listdir(fs) == [],
        root=True,
    ),
    "a whiteout that is a device": Attack(
        lambda p: [("etc", {"kind": CHR, "device": (0, 0)})],
        lambda p: stat.S_ISCHR((p.into / "etc").lstat().st_mode),
        safe=lambda fs: os.listdir(fs) == [],
        root=True,
    ),
    "a pipe": Attack(
        lambda p: [("pipe", {"kind": FIFO})],
        lambda p: stat.S_ISFIFO((p.into / "pipe").lstat().st_mode),
        safe=lambda fs: os.listdir(fs) == [],
    ),
    "a setuid program": Attack(
        lambda p: [("su", {"data": b"#!", "mode": 0o6755})],
        lambda p: (p.into / "su").stat().st_mode & 0o6000 == 0o6000,
        safe=lambda fs: stat.S_IMODE((fs / "su").stat().st_mode) == 0o755,
    ),
    "a file of another sandbox's user": Attack(
        lambda p: [("mine", {"data": b"x", "uid": FOREIGN, "gid": FOREIGN})],
        lambda p: (p.into / "mine").stat().st_uid == FOREIGN,
        safe=lambda fs: (fs / "mine").stat().st_uid == (65534 if ROOT else os.geteuid()),
        root=True,
    ),
    "a whiteout of the parent": Attack(
        lambda p: [("a", {"kind": DIR}), ("a/.wh...", {})],
        lambda p: not p.into.exists() or os.listdir(p.into) == [],
        "a whiteout of ..",
        whiteouts=True,
    ),
    "a whiteout of the folder itself": Attack(
        lambda p: [("a", {"kind": DIR}), ("a/file", {"data": b"x"}), ("a/.wh.", {})],
        lambda p: not (p.into / "a/file").exists(),
        "a whiteout of nothing",
        whiteouts=True,
    ),
    "a whiteout of everything": Attack(
        lambda p: [("file", {"data": b"x"}), (".wh..wh..opq", {})],
        lambda p: not (p.into / "file").exists(),
        "hides the root",
        whiteouts=True,
    ),
    "a whiteout through a link": Attack(
        lambda p: [("link", {"kind": SYM, "link": str(p.outside)}), ("link/.wh.precious", {})],
        lambda p: not (p.outside / "precious").exists(),
        "goes through the link",
        whiteouts=True,
    ),
    "a whiteout with things in it": Attack(
        lambda p: [(".wh.etc", {"kind": DIR}), (".wh.etc/passwd", {"data": b"evil"})],
        lambda p: (p.into / ".wh.etc/passwd").exists(),
        "whiteout",
    ),
    "a folder in place of a link": Attack(
        lambda p: [
            ("link", {"kind": SYM, "link": str(p.outside)}),
            ("link", {"kind": DIR, "mode": 0o777}),
            ("link/planted", {"data": b"evil"}),
        ],
        lambda p: (p.outside / "planted").exists(),
        safe=lambda fs: not (fs / "link").is_symlink() and (fs / "link/planted").is_file(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_no_harm(name: str, store: TemplateStore, place: Place) -> None:
    attack = ATTACKS[name]
    before = _picture(place)
    data = tar_of(attack.entries(place))
    if attack.words:
        with pytest.raises(InvalidRequest, match=attack.words):
            add(store, data)
        assert store.layer_digests() == []
    else:
        layer = add(store, data)
        assert attack.safe(Path(layer.folder))
        for path in Path(layer.folder).rglob("*"):
            info = path.lstat()
            assert not info.st_mode & 0o6000 or stat.S_ISDIR(info.st_mode)
            assert stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)
    assert _picture(place) == before


@pytest.mark.parametrize("name", ATTACKS)
def test_a_naive_unpacker_is_harmed(name: str, place: Place) -> None:
    attack = ATTACKS[name]
    if attack.root and not ROOT:
        pytest.skip("a normal user can't make devices, nor give files away")
    naive(tar_of(attack.entries(place)), place.into)
    if attack.whiteouts:
        naive_whiteouts(place.into)
    assert attack.harm(place)


def _picture(place: Place) -> dict[str, Any]:
    return {
        str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(place.folder.rglob("*"))
    }


# -- attributes

CAPABILITY = "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
ATTRIBUTES = {
    "SCHILY.xattr.security.capability": CAPABILITY,
    "SCHILY.xattr.trusted.overlay.opaque": "y",
    "SCHILY.xattr.trusted.overlay.redirect": "/etc",
    "SCHILY.xattr.user.overlay.opaque": "y",
    "SCHILY.xattr.user.overlay.redirect": "/etc",
    "SCHILY.xattr.user.note": "harmless",
}


def _attributed() -> bytes:
    return tar_of(
        [
            ("etc", {"kind": DIR, "mode": 0o755, "pax": ATTRIBUTES}),
            ("ping", {"data": b"x", "mode": 0o755, "pax": ATTRIBUTES}),
        ]
    )


def test_only_harmless_attributes_stay(store: TemplateStore) -> None:
    notes: list[str] = []
    layer = add(store, _attributed(), notes=notes)
    for name in ("etc", "ping"):
        found = os.listxattr(f"{layer.folder}/{name}")
        assert set(found) <= {"user.note"}
        if found:
            assert os.getxattr(f"{layer.folder}/{name}", "user.note") == b"harmless"
    assert any("security.capability is left out" in note for note in notes)


def test_a_naive_unpacker_takes_every_attribute(tmp_path: Path) -> None:
    archive = tmp_path / "attributes.tar"
    archive.write_bytes(_attributed())
    into = tmp_path / "into"
    into.mkdir()
    subprocess.run(
        ["tar", "-C", str(into), "--xattrs", "--xattrs-include=*", "-xf", str(archive)],
        capture_output=True,
        timeout=60,
    )
    found = os.listxattr(into / "etc")
    if not found:
        pytest.skip("this file system keeps no attributes")
    assert any(".overlay." in name for name in found)


# -- names


def test_odd_names_are_kept_to_the_byte(store: TemplateStore) -> None:
    names = [
        b"\xff\xfe",
        b"line\nbreak",
        b"\x1b[31mred",
        b"-rf",
        b"x" * 255,
        "ä".encode() * 127,
        b"a\\b",
        b" ",
    ]
    data = b""
    for name in names:
        entry = tarfile.TarInfo(os.fsdecode(name))
        entry.size = 1
        data += entry.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape") + b"x".ljust(512, b"\0")
    layer = add(store, data + bytes(1024))
    assert set(os.listdir(os.fsencode(layer.folder))) == set(names)


@pytest.mark.parametrize("name", ["x" * 256, "a/" + "y" * 300, "d/" * 3000 + "z"])
def test_names_that_the_kernel_would_not_take(store: TemplateStore, name: str) -> None:
    with pytest.raises(InvalidRequest):
        add(store, tar_of([(name, {"data": b"x"})]))
    assert store.layer_digests() == []


def test_a_name_with_a_zero_byte(store: TemplateStore) -> None:
    with pytest.raises(InvalidRequest, match="zero byte"):
        add(store, tar_of([("x", {"data": b"x", "pax": {"path": "good\0/../../evil"}})]))


def test_a_name_that_would_fill_the_memory(store: TemplateStore) -> None:
    with pytest.raises(InvalidRequest, match="a name of 100000 bytes"):
        add(store, tar_of([("x", {"data": b"x", "pax": {"path": "n" * 100_000}})]))


@pytest.mark.parametrize(
    ("name", "kept"), [("user.a\0b", False), ("user.", True), ("user." + "x" * 300, True)]
)
def test_attributes_with_impossible_names(store: TemplateStore, name: str, kept: bool) -> None:
    data = tar_of([("x", {"data": b"x", "pax": {f"SCHILY.xattr.{name}": "value"}})])
    if kept:
        assert os.listxattr(f"{add(store, data).folder}/x") == []
    else:
        with pytest.raises(InvalidRequest, match="zero byte"):
            add(store, data)
        assert store.layer_digests() == []


@pytest.mark.parametrize(
    "when", [b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7, b"\x80" + bytes(5) + b"\x01" + bytes(5)]
)
def test_times_that_no_clock_has_are_none(store: TemplateStore, when: bytes) -> None:
    data = bytearray(tar_of([("x", {"data": b"x"})]))
    data[136:148], data[148:156] = when, b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert os.stat(f"{add(store, bytes(data)).folder}/x").st_mtime == 0


def test_what_is_refused_is_named_without_its_tricks(store: TemplateStore) -> None:
    with pytest.raises(InvalidRequest) as caught:
        add(store, tar_of([("../\x1b[2Jcleared", {"data": b"x"})]))
    assert "\x1b" not in caught.value.message


# -- duplicates


def test_the_last_of_several_files_counts_and_folders_are_not_thrown_away(
    store: TemplateStore, tmp_path: Path
) -> None:
    layer = add(store, tar_of([("file", {"data": b"first"}), ("file", {"data": b"second"})]))
    assert Path(layer.folder, "file").read_text() == "second"
    data = tar_of([("etc/passwd", {"data": b"root"}), ("etc", {"data": b"a file now"})])
    with pytest.raises(InvalidRequest, match="comes twice"):
        add(store, data)
    # Control: with its option for it, tar empties the folder.
    archive, into = tmp_path / "twice.tar", tmp_path / "twice"
    archive.write_bytes(data)
    into.mkdir()
    command = ["tar", "-C", str(into), "--recursive-unlink", "-xf", str(archive)]
    subprocess.run(command, check=True, timeout=60)
    assert (into / "etc").is_file()


def test_a_second_hard_link_does_not_write_into_the_first(store: TemplateStore) -> None:
    layer = add(
        store,
        tar_of(
            [
                ("one", {"data": b"one"}),
                ("two", {"kind": LNK, "link": "one"}),
                ("two", {"data": b"evil"}),
            ]
        ),
    )
    assert Path(layer.folder, "one").read_text() == "one"
    assert Path(layer.folder, "two").read_text() == "evil"


# -- whiteouts in overlay's form


def test_whiteouts_become_overlays_own(store: TemplateStore) -> None:
    layer = add(
        store,
        tar_of(
            [
                ("gone/.wh.file", {}),
                ("both", {"kind": DIR}),
                ("both/new", {"data": b"new"}),
                (".wh.both", {}),  # what was below goes, what is new stays
                (".wh.later", {}),
                ("later/new", {"data": b"new"}),
                ("opaque/.wh..wh..opq", {}),
                (".wh..wh.plnk", {}),  # of another storage driver
            ]
        ),
    )
    fs = Path(layer.folder)
    attribute = "trusted.overlay.opaque" if ROOT else "user.overlay.opaque"
    assert stat.S_ISCHR((fs / "gone/file").lstat().st_mode)
    assert (fs / "gone/file").lstat().st_rdev == 0
    for name in ("both", "later", "opaque"):
        assert os.getxattr(fs / name, attribute) == b"y"
    assert (fs / "both/new").is_file() and (fs / "later/new").is_file()
    assert not list(fs.rglob(".wh.*"))


# -- damage


def test_damage_anywhere_is_an_error_or_a_layer(store: TemplateStore, place: Place) -> None:
    """Headers changed at random (always the same way): never another error, never a file outside."""
    entries = [
        ("etc", {"kind": DIR}),
        ("etc/passwd", {"data": b"root"}),
        ("link", {"kind": SYM, "link": "etc"}),
        ("hard", {"kind": LNK, "link": "etc/passwd"}),
        ("n" * 150, {"data": b"x" * 600, "pax": {"SCHILY.xattr.user.a": "b"}}),
        (".wh.gone", {}),
    ]
    whole = tar_of(entries)
    used = len(whole.rstrip(b"\0"))
    before = _picture(place)
    chance = random.Random(20261129)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(used if chance.random() < 0.9 else len(data))
            data[at] = chance.choice((0, 0x2E, 0x2F, 0x30, 0x31, 0x37, 0x80, 0xFF, chance.randrange(256)))
        for at in range(0, len(data), 512):  # what was changed passes for a header
            block = data[at : at + 512]
            if block[257:262] == b"ustar":
                block[148:156] = b" " * 8
                data[at + 148 : at + 156] = b"%06o\0 " % sum(block)
        limits = ImportLimits(size=1 << 20, entries=100)
        try:
            add(store, bytes(data), limits=limits)
        except RingfenceError:
            refused += 1
    assert 0 < refused < 150
    assert _picture(place) == before
