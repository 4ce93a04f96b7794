"""A GPU for a virtual machine, for real but for the GPU: nodes, ``/sys`` and locked memory of QEMU's wall."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit, RuntimeUnavailable
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.gpu import vfio
from ringfence.runtimes.launching.probing import specimen
from ringfence.runtimes.qemu import FullRuntime
from ringfence.runtimes.vm import kernel


@pytest.fixture
async def machine() -> AsyncIterator[tuple[FullRuntime, StartSpec]]:
    """A driver and a machine with an empty root that asks for a GPU."""
    if os.geteuid() != 0:
        pytest.skip("virtual machines need root")
    try:
        kernel.find()
    except RuntimeUnavailable as error:
        pytest.skip(f"no guest kernel: {error.message}")
    folder = Path(tempfile.mkdtemp(prefix="rf-vm-gpu-", dir="/tmp"))
    folder.chmod(0o711)
    context = await RuntimeContext.open()
    try:
        driver = FullRuntime(context)
        if driver.program is None:
            pytest.skip("qemu-system-x86_64 is not installed")
        place = folder / "sandboxes" / "probe"
        place.mkdir(parents=True, mode=0o711)
        spec = specimen(str(place), True)
        yield driver, replace(spec, gpus=1, memory=32 << 20, root=replace(spec.root, template="probe"))
    finally:
        await context.close()
        shutil.rmtree(folder)


async def test_a_host_without_one_fails_with_the_reason(machine: tuple[FullRuntime, StartSpec]) -> None:
    driver, spec = machine
    if os.path.isdir("/sys/kernel/iommu_groups") and os.listdir("/sys/kernel/iommu_groups"):
        pytest.skip("this host has an IOMMU")
    before = sorted(os.listdir(spec.folder))
    with pytest.raises(HostLimit, match="IOMMU is off"):
        await driver.start(spec)
    assert sorted(os.listdir(spec.folder)) == before


async def test_its_wall_has_what_vfio_needs(
    machine: tuple[FullRuntime, StartSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, spec = machine
    found = vfio.Passthrough(("0000:65:00.0",), ("/dev/vfio/vfio", "/dev/vfio/30"), ())
    monkeypatch.setattr(vfio, "choose", lambda count, lease: found)
    # What answers behind the nodes is the null device.
    monkeypatch.setattr(vfio, "numbers", lambda nodes: tuple((path, 1, 3) for path in nodes))
    monkeypatch.setattr(vfio, "check_lock", lambda size: None)
    handle = await driver.start(spec)
    try:
        root = Path(f"/proc/{handle.pid}/root")
        assert sorted(os.listdir(root / "dev/vfio")) == ["30", "vfio"]
        assert os.stat(root / "dev/vfio/30").st_rdev == os.makedev(1, 3)
        assert (root / "sys/bus").is_dir()
        limits = Path(f"/proc/{handle.pid}/limits").read_text()
        most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        least = 128 << 20 if most == resource.RLIM_INFINITY else min(128 << 20, most)
        found_limit = limits.partition("Max locked memory")[2].split()[0]
        assert found_limit == "unlimited" or int(found_limit) >= least
    finally:
        await driver.destroy(handle)
