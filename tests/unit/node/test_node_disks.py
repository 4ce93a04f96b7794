"""Where writes go: the choice, and images that can be promised."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.model.policy import GIB, MIB, SIZES, Resources
from ringfence.node import disks
from ringfence.node.state import StateRoot


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateRoot]:
    made = StateRoot.open(tmp_path / "state")
    yield made
    made.close()


def size(memory: int, disk: int) -> Resources:
    return Resources(memory=memory, disk=disk)


@pytest.mark.parametrize(
    ("memory", "disk", "kind"),
    [(GIB, 512 * MIB, "tmpfs"), (GIB, 512 * MIB + 1, "image"), (64 * MIB, MIB, "tmpfs"), (MIB, GIB, "image")],
)
def test_the_choice(memory: int, disk: int, kind: str) -> None:
    assert disks.choose(size(memory, disk), root=True) == kind
    if kind == "tmpfs":
        assert disks.choose(size(memory, disk), root=False) == kind
    else:
        with pytest.raises(HostLimit, match="only root") as caught:
            disks.choose(size(memory, disk), root=False)
        assert "or run as root" in caught.value.hint


def test_every_named_size_works_without_root() -> None:
    for named in SIZES.values():
        assert disks.choose(size(named.memory, named.disk), root=False) == "tmpfs"


def test_too_small_is_a_mistake() -> None:
    with pytest.raises(InvalidRequest, match="too small"):
        disks.choose(size(GIB, 1000), root=True)


def test_a_tmpfs_has_an_inode_limit(state: StateRoot, tmp_path: Path) -> None:
    disk = disks.prepare(state, tmp_path, size(GIB, 512 * MIB), root=True)
    assert (disk.kind, disk.size, disk.inodes, disk.image) == ("tmpfs", 512 * MIB, 65536, None)
    assert disks.prepare(state, tmp_path, size(GIB, MIB), root=True).inodes == 1024


def test_an_image_is_a_reserved_copy_of_a_formatted_one(state: StateRoot, tmp_path: Path) -> None:
    disk = disks.prepare(state, tmp_path, size(GIB, GIB), root=True)
    assert disk.kind == "image"
    assert disk.image == str(tmp_path / "disk.img")
    info = os.stat(disk.image)
    assert info.st_size == GIB
    assert info.st_blocks * 512 >= GIB  # promised inside, reserved outside
    assert info.st_mode & 0o777 == 0o600
    found = subprocess.run(["/sbin/e2fsck", "-fn", disk.image], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    os.unlink(disk.image)
    # The formatted one is there now, almost empty, and is not formatted again.
    (template,) = state.disks.iterdir()
    assert template.stat().st_blocks * 512 < 8 * MIB
    before = template.stat().st_mtime_ns
    again = disks.prepare(state, tmp_path, size(GIB, GIB), root=True)
    assert again.image is not None
    os.unlink(again.image)
    assert template.stat().st_mtime_ns == before


def test_a_full_host_is_said_and_nothing_stays(
    state: StateRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disks, "_reserve", full)
    with pytest.raises(HostLimit, match="the disk is full"):
        disks.prepare(state, tmp_path, size(16 * MIB, 16 * MIB), root=True)
    assert not (tmp_path / "disk.img").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB of its own: nothing that goes wrong here can fill the machine's disk."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "small", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("reserve", [0, 256 * MIB])
def test_more_than_the_host_has_is_refused_and_nothing_is_taken(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, reserve: int
) -> None:
    monkeypatch.setattr(disks, "HOST_RESERVE", reserve)
    with open(small_disk / "x", "wb") as file:
        with pytest.raises(OSError, match="space") as caught:
            disks._reserve(file.fileno(), 64 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert os.fstat(file.fileno()).st_blocks == 0
        if not reserve:
            disks._reserve(file.fileno(), 8 * MIB)  # the control: what there is can be had
            assert os.fstat(file.fileno()).st_blocks * 512 == 8 * MIB


def test_without_mkfs_the_remedy_is_named(
    state: StateRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(HostLimit, match=r"mkfs\.ext4") as caught:
        disks.prepare(state, tmp_path, size(16 * MIB, 16 * MIB), root=True)
    assert "e2fsprogs" in caught.value.hint


def test_a_failing_mkfs_leaves_no_half_made_image(
    state: StateRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/bin/false")
    with pytest.raises(HostLimit, match=r"mkfs\.ext4 failed"):
        disks.prepare(state, tmp_path, size(16 * MIB, 16 * MIB), root=True)
    assert list(state.disks.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="loop devices need root")
def test_loop_devices_are_found_by_folder_and_let_go(tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(bytes(MIB))
    made = subprocess.run(
        ["/sbin/losetup", "--find", "--show", str(tmp_path / "disk.img")],
        capture_output=True,
        text=True,
        check=True,
    )
    device = made.stdout.strip().removeprefix("/dev/")
    try:
        assert disks.loop_devices(tmp_path) == {device: str(tmp_path / "disk.img")}
        assert disks.loop_devices(tmp_path / "other") == {}
    finally:
        assert disks.detach(device)
    assert disks.loop_devices(tmp_path) == {}
