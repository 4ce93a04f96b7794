"""Archives that are too much: sparse files, bombs, endless headers; and those that are cut off or changed."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.images.contract import ImportLimits, Layer
from ringfence.images.store import TemplateStore
from ringfence.model.errors import HostLimit, InvalidRequest, RingfenceError
from support.images import tar_of

DIR = tarfile.DIRTYPE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemplateStore]:
    with TemplateStore.open(tmp_path / "images") as made:
        yield made
    assert os.listdir(tmp_path / "images/tmp") == []


def add(store: TemplateStore, data: bytes, **words: Any) -> Layer:
    return store.add_layer_from(io.BytesIO(data), **words)


# -- sizes


def test_a_huge_sparse_file_is_refused(store: TemplateStore, tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        os.truncate(file.fileno(), 64 << 30)
    for form in ("gnu", "pax"):
        archive = tmp_path / f"{form}.tar"
        command = ["tar", "-C", str(tmp_path), "--sparse", f"--format={form}", "-cf", str(archive), "huge"]
        subprocess.run(command, check=True, timeout=60)
        assert archive.stat().st_size < 1 << 20
        with pytest.raises(InvalidRequest, match="sparse file"):
            add(store, archive.read_bytes())
        # Control: a few kilobytes become a file that claims to be 64 GiB.
        into = tmp_path / form
        into.mkdir()
        subprocess.run(["tar", "-C", str(into), "-xf", str(archive)], check=True, timeout=60)
        assert (into / "huge").stat().st_size == 64 << 30
    assert store.layer_digests() == []


def test_a_claim_of_size_is_judged_before_a_byte_is_written(store: TemplateStore) -> None:
    header = tarfile.TarInfo("huge")
    header.size = 1 << 50
    data = header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    with pytest.raises(HostLimit, match="limit of an import"):
        add(store, data)
    with pytest.raises(InvalidRequest, match="cut off"):
        add(store, data, limits=ImportLimits(size=1 << 60))


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_decompression_bomb_stops_early(store: TemplateStore, kind: str) -> None:
    plain = tar_of([("zeros", {"data": bytes(64 << 20)})])
    if kind == "gzip":
        bomb = gzip.compress(plain, 9)
    elif shutil.which("zstd") is None:
        pytest.skip("not installed: zstd")
    else:
        bomb = subprocess.run(
            ["zstd", "-qc"], input=plain, capture_output=True, check=True, timeout=60
        ).stdout
    limits = ImportLimits(ratio_floor=4 << 20)
    read = 0

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal read
            data = super().read(size)
            read += len(data)
            return data

    with pytest.raises(HostLimit, match="decompression bomb"):
        store.add_layer_from(Counted(bomb), limits=limits)
    assert store.layer_digests() == []
    # Control: the bytes are what they claim to be, hundreds of times as many; and allowed, they are unpacked.
    assert len(plain) > 250 * len(bomb)
    layer = add(store, bomb, limits=ImportLimits(ratio_floor=4 << 20, ratio=1_000_000))
    assert layer.size == 64 << 20
    assert os.stat(f"{layer.folder}/zeros").st_blocks * 512 < 1 << 20  # nothing but a hole


def test_an_extension_header_is_bounded(store: TemplateStore) -> None:
    data = tar_of([("file", {"data": b"x", "pax": {"comment": "c" * (8 << 20)}})])
    with pytest.raises(InvalidRequest, match="extension header of"):
        add(store, data)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:  # control: others keep all of it in memory
        member = archive.next()
        assert member is not None
        assert len(member.pax_headers["comment"]) == 8 << 20


def test_a_chain_of_extension_headers_is_bounded(store: TemplateStore) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = b"L", 4
    one = header.tobuf(tarfile.GNU_FORMAT) + b"name".ljust(512, b"\0")
    with pytest.raises(InvalidRequest, match="extension headers for one entry"):
        add(store, one * 5000)
    last = tarfile.TarInfo("short").tobuf(tarfile.GNU_FORMAT)
    layer = add(store, one * 3 + last + bytes(1024))  # control: a few are nothing unusual
    assert os.listdir(layer.folder) == ["name"]


def test_entries_are_counted(store: TemplateStore) -> None:
    data = tar_of([(f"file{number}", {}) for number in range(50)])
    with pytest.raises(HostLimit, match="more than 49 entries"):
        add(store, data, limits=ImportLimits(entries=49))
    deep = tar_of([("/".join(["d"] * 60), {"kind": DIR})])  # one entry, sixty folders
    with pytest.raises(HostLimit, match="entries"):
        add(store, deep, limits=ImportLimits(entries=50))
    assert add(store, data, limits=ImportLimits(entries=50)).size == 0


def test_depth_is_bounded(store: TemplateStore) -> None:
    deep = tar_of([("/".join(["d"] * 201), {"kind": DIR})])
    with pytest.raises(InvalidRequest, match="more than 200 folders"):
        add(store, deep)


# -- damage


@pytest.mark.parametrize("form", ["plain", "gzip", "zstd"])
def test_what_is_cut_off_or_changed_leaves_nothing(store: TemplateStore, form: str) -> None:
    plain = tar_of([(f"file{number}", {"data": os.urandom(3000)}) for number in range(20)])
    data = plain
    if form == "gzip":
        data = gzip.compress(plain)
    elif form == "zstd":
        if shutil.which("zstd") is None:
            pytest.skip("not installed: zstd")
        data = subprocess.run(["zstd", "-qc"], input=plain, capture_output=True, check=True).stdout
    for cut in (1, 100, 600, len(data) // 2):
        with pytest.raises(RingfenceError):
            add(store, data[:cut])
    good = add(store, data)
    with pytest.raises(InvalidRequest, match="not what its digest says"):
        add(store, data, diff_id="sha256:" + "0" * 64)
    with pytest.raises(InvalidRequest, match="not what its digest says"):
        add(store, data, blob_digest="sha256:" + "0" * 64)
    changed = bytearray(data)
    changed[len(data) // 2] ^= 0x55
    with pytest.raises(RingfenceError):
        add(store, bytes(changed), diff_id=good.digest)
    assert store.layer_digests() == [good.digest]


@pytest.mark.parametrize("data", [b"", b"x", b"hello world" * 100, bytes(511), b"\x1f\x8b" + bytes(50)])
def test_what_is_no_archive(store: TemplateStore, data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        add(store, data)
    assert store.layer_digests() == []


@pytest.mark.parametrize(("head", "kind"), [(b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz")])
def test_other_compressions_are_named(store: TemplateStore, head: bytes, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=kind):
        add(store, head + bytes(100))
