"""Taking the kernel out of a bzImage: a real one in QEMU's tests, made-up and damaged ones here."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import struct
from pathlib import Path

import pytest

from ringfence.model.errors import RuntimeUnavailable
from ringfence.runtimes.firecracker import images
from ringfence.runtimes.vm import kernel
from ringfence.runtimes.vm.kernel import Kernel

ELF = b"\x7fELF\x02\x01" + bytes(range(250)) * 40


def image(payload: bytes, size: int | None = None, sectors: int = 2, version: int = 0x20F) -> bytes:
    """A bzImage's skeleton around a compressed payload."""
    whole = payload + struct.pack("<I", len(ELF) if size is None else size)
    head = bytearray((sectors + 1) * 512)
    head[0x1F1] = sectors
    struct.pack_into("<I", head, 0x202, 0x53726448)
    struct.pack_into("<H", head, 0x206, version)
    struct.pack_into("<II", head, 0x248, 64, len(whole))
    return bytes(head) + bytes(64) + whole + b"after"


@pytest.mark.parametrize(
    "payload",
    [
        gzip.compress(ELF),
        lzma.compress(ELF, lzma.FORMAT_XZ),
        lzma.compress(ELF, lzma.FORMAT_ALONE),
        bz2.compress(ELF),
    ],
    ids=["gzip", "xz", "lzma", "bzip2"],
)
def test_each_compression(payload: bytes) -> None:
    assert images.uncompressed(image(payload)) == ELF


def test_an_elf_is_its_own() -> None:
    assert images.uncompressed(ELF) == ELF


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no bzImage"),
        (b"MZ" + bytes(5000), "no bzImage"),
        (image(gzip.compress(ELF), version=0x200), "too old"),
        (image(gzip.compress(ELF))[:1700], "cut off"),
        (image(gzip.compress(ELF), size=0), "0 bytes"),
        (image(gzip.compress(ELF), size=1 << 31), "bytes uncompressed"),
        (image(gzip.compress(ELF), size=len(ELF) + 1), "not the kernel"),
        (image(gzip.compress(b"x" * len(ELF))), "not the kernel"),
        (image(gzip.compress(bytes(64 << 20)), size=len(ELF)), "not the kernel"),  # a bomb is not unpacked
        (image(b"\xfd7zXZ\0" + bytes(100)), "damaged"),
        (image(b"????" + bytes(100)), "not known"),
    ],
    ids=range(11),
)
def test_what_is_none(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        images.uncompressed(content)


def test_it_is_made_once_and_nothing_stays_of_a_failure(tmp_path: Path) -> None:
    store = tmp_path / "vm"
    store.mkdir()
    (tmp_path / "vmlinuz").write_bytes(image(gzip.compress(ELF)))
    good = Kernel(str(tmp_path / "vmlinuz"), "6.1", (), "a" * 64)
    path = images.vmlinux(good, str(store))
    assert Path(path).read_bytes() == ELF
    (tmp_path / "vmlinuz").unlink()
    assert images.vmlinux(good, str(store)) == path
    (tmp_path / "bad").write_bytes(b"no")
    with pytest.raises(RuntimeUnavailable, match="no bzImage"):
        images.vmlinux(Kernel(str(tmp_path / "bad"), "6.1", (), "b" * 64), str(store))
    assert os.listdir(store) == [os.path.basename(path)]


def test_the_guest_kernel_of_this_machine(tmp_path: Path) -> None:
    try:
        found = kernel.find()
    except RuntimeUnavailable as error:
        pytest.skip(f"no guest kernel: {error.message}")
    path = images.vmlinux(found, str(tmp_path))
    with open(path, "rb") as file:
        assert file.read(6) == b"\x7fELF\x02\x01"
    assert os.path.getsize(path) > os.path.getsize(found.image)
