"""A GPU for runc and crun, for real: what answers behind the made-up device nodes is ``/dev/zero``."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from wall_bench import Bench

from ringfence.model.errors import HostLimit
from ringfence.runtimes.gpu import cdi, handing
from support import gpu_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up host's files in place of this one's."""
    tmp_path.chmod(0o755)
    root = str(gpu_tree.make_host(tmp_path))
    monkeypatch.setattr(handing, "prepare", functools.partial(handing.prepare, root=root))
    return tmp_path


async def test_the_device_is_there_and_answers(oci: Bench, host: Path) -> None:
    handle = await oci.start(gpus=1)
    code, text = await oci.run(handle, "stat -c %t:%T /dev/nvidia0; head -c 4 /dev/nvidia0 | od -An -tx1")
    assert (code, text.split()) == (0, ["1:5", "00", "00", "00", "00"])
    code, text = await oci.run(
        handle, f"cat {gpu_tree.LIBRARY}; readlink {cdi.LIBRARIES}/libcuda.so.1; ls /dev"
    )
    assert code == 0
    assert text.splitlines()[:2] == ["a driver's library", gpu_tree.LIBRARY]
    assert "nvidia1" not in text.split()  # of the other GPU
    await oci.runtime.destroy(handle)
    assert not os.path.exists(os.path.join(handle.folder, "gpu"))


async def test_driver_files_can_not_be_written(oci: Bench, host: Path) -> None:
    handle = await oci.start(gpus=1)
    code, _ = await oci.run(handle, f"echo evil > {gpu_tree.LIBRARY}")
    assert code != 0
    assert (host / gpu_tree.LIBRARY[1:]).read_text() == "a driver's library\n"


async def test_without_asking_there_is_none(oci: Bench, host: Path) -> None:
    handle = await oci.start()
    code, text = await oci.run(handle, "ls /dev")
    assert code == 0
    assert not any(name.startswith("nvidia") for name in text.split())


async def test_a_host_without_one_fails_with_the_reason(oci: Bench) -> None:
    if os.path.isdir("/etc/cdi") or os.path.isdir("/var/run/cdi"):
        pytest.skip("this host describes devices of its own")
    with pytest.raises(HostLimit, match="no GPU is described"):
        await oci.start(gpus=1)


async def test_too_many_leave_nothing(oci: Bench, host: Path) -> None:
    with pytest.raises(HostLimit, match="3 GPUs"):
        await oci.start(gpus=3)
