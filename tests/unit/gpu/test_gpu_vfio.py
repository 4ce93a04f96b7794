"""Which GPUs may be handed to a virtual machine, on a made-up ``/sys``."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from ringfence.model.errors import HostLimit
from ringfence.runtimes.gpu import vfio
from ringfence.runtimes.launching.probing import specimen
from ringfence.runtimes.vm import vmm
from support.gpu_tree import add_pci

GPU, SOUND, BRIDGE, NET = "0x030200", "0x040300", "0x060400", "0x020000"


def test_a_gpu_and_the_other_functions_of_its_slot(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:65:00.0", GPU, "30", "vfio-pci")
    add_pci(tmp_path, "0000:65:00.1", SOUND, "30", "vfio-pci")
    found = vfio.choose(1, root=str(tmp_path))
    assert found.addresses == ("0000:65:00.0", "0000:65:00.1")
    assert found.nodes == ("/dev/vfio/vfio", "/dev/vfio/30")
    assert found.arguments == (
        "-device", "vfio-pci,host=0000:65:00.0", "-device", "vfio-pci,host=0000:65:00.1",
    )  # fmt: skip


def test_a_bridge_in_the_group_does_no_harm(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:00:01.0", BRIDGE, "2", "pcieport")
    add_pci(tmp_path, "0000:01:00.0", GPU, "2", "vfio-pci")
    assert vfio.choose(1, root=str(tmp_path)).addresses == ("0000:01:00.0",)


def test_a_neighbour_that_the_host_uses_forbids_the_group(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:01:00.0", GPU, "2", "vfio-pci")
    add_pci(tmp_path, "0000:02:00.0", NET, "2", "e1000e")
    with pytest.raises(
        HostLimit, match=r"shares group 2 with 0000:02:00\.0, which is in the hands of e1000e"
    ):
        vfio.choose(1, root=str(tmp_path))


@pytest.mark.parametrize(("driver", "words"), [("nvidia", "in the hands of nvidia"), (None, "no driver")])
def test_a_gpu_that_the_host_uses_is_not_taken_away(tmp_path: Path, driver: str | None, words: str) -> None:
    add_pci(tmp_path, "0000:01:00.0", GPU, "2", driver)
    with pytest.raises(HostLimit, match=words) as caught:
        vfio.choose(1, root=str(tmp_path))
    assert "driverctl" in caught.value.hint


def test_the_hosts_own_display_stays(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:01:00.0", GPU, "2", "vfio-pci", display=True)
    with pytest.raises(HostLimit, match="own display"):
        vfio.choose(1, root=str(tmp_path))


def test_without_an_iommu(tmp_path: Path) -> None:
    with pytest.raises(HostLimit, match="IOMMU is off") as caught:
        vfio.choose(1, root=str(tmp_path))
    assert "intel_iommu=on" in caught.value.hint


def test_an_iommu_without_a_gpu(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:02:00.0", NET, "2", "vfio-pci")
    with pytest.raises(HostLimit, match="no GPU on this host"):
        vfio.choose(1, root=str(tmp_path))


def test_a_group_without_an_iommu_behind_it(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:01:00.0", GPU, "2", "vfio-pci")
    (tmp_path / "sys/kernel/iommu_groups/2/name").write_text("vfio-noiommu\n")
    with pytest.raises(HostLimit, match="without an IOMMU"):
        vfio.choose(1, root=str(tmp_path))


def test_unsafe_interrupts(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:01:00.0", GPU, "2", "vfio-pci")
    option = tmp_path / "sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"
    option.parent.mkdir(parents=True)
    option.write_text("Y\n")
    with pytest.raises(HostLimit, match="interrupt"):
        vfio.choose(1, root=str(tmp_path))
    option.write_text("N\n")
    assert vfio.choose(1, root=str(tmp_path)).addresses


def test_a_missing_node(tmp_path: Path) -> None:
    add_pci(tmp_path, "0000:01:00.0", GPU, "2", "vfio-pci")
    (tmp_path / "dev/vfio/2").unlink()
    with pytest.raises(HostLimit, match="has no node"):
        vfio.choose(1, root=str(tmp_path))


def test_two_of_three(tmp_path: Path) -> None:
    for number, driver in enumerate(("vfio-pci", "nvidia", "vfio-pci")):
        add_pci(tmp_path, f"0000:0{number + 1}:00.0", GPU, str(number), driver)
    assert vfio.choose(2, root=str(tmp_path)).addresses == ("0000:01:00.0", "0000:03:00.0")
    with pytest.raises(HostLimit, match="3 GPUs are asked for and 2"):
        vfio.choose(3, root=str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")
def test_numbers_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "dev/vfio").mkdir(parents=True)
    os.mknod(tmp_path / "dev/vfio/30", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    assert vfio.numbers(("/dev/vfio/30",), root=str(tmp_path)) == (("/dev/vfio/30", 1, 3),)


def test_a_node_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(HostLimit, match="No such file"):
        vfio.numbers(("/dev/vfio/30",), root=str(tmp_path))
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/30").touch()
    with pytest.raises(HostLimit, match="no character device"):
        vfio.numbers(("/dev/vfio/30",), root=str(tmp_path))


def test_memory_that_may_not_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    vfio.check_lock(8 << 20)
    monkeypatch.setattr(vfio, "credentials", lambda pid: None)
    with pytest.raises(HostLimit, match="may lock 8MiB") as caught:
        vfio.check_lock(9 << 20)
    assert "LimitMEMLOCK" in caught.value.hint
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, resource.RLIM_INFINITY))
    vfio.check_lock(1 << 40)


def test_qemus_plan(tmp_path: Path) -> None:
    spec = specimen(str(tmp_path / "sandbox"), True)

    def made(**more: Any) -> bytes:
        plan = vmm.plan(spec, str(tmp_path), {}, [], {}, [], exit_file="exit", kvm=False, **more)
        return bytes(plan.encode())

    bare, full = made(), made(devices=[("/dev/vfio/30", 1, 3)], locked=1 << 30)
    assert b"/dev/vfio/30" in full
    assert b"sysfs" in full
    assert b"vfio" not in bare
    assert b"sysfs" not in bare
