"""A GPU for gVisor as far as it goes without one: the devices are there, and the refusal names the driver."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit
from ringfence.model.errors import StartFailed
from ringfence.runtimes.gpu import handing
from ringfence.runtimes.gvisor_parts import sandboxes
from support import gpu_tree
from support.nodes import ask, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up host's files in place of this one's. Without libraries: the host's /usr is shown anyway."""
    document = gpu_tree.cdi_document()
    del document["containerEdits"]["mounts"], document["containerEdits"]["hooks"]
    root = str(gpu_tree.make_host(tmp_path, document))
    monkeypatch.setattr(handing, "prepare", functools.partial(handing.prepare, root=root))
    return tmp_path


def with_gpu():  # type: ignore[no-untyped-def]
    request = ask(runtime="gvisor")
    resources = replace(request.policy.wall.resources, gpus=1)
    return replace(request, policy=request.policy.with_wall(resources=resources))


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="there is a driver here")
async def test_without_the_driver_the_reason_is_told(kit: Kit) -> None:
    with pytest.raises(StartFailed, match=r"(?i)nvidia|nvproxy|driver"):
        await kit.node.create(with_gpu())


async def test_the_nodes_are_in_its_kernel(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "NVPROXY", "--debug=false")  # all but the proxy, which wants a driver
    sandbox = await kit.node.create(with_gpu())
    try:
        _, text = await run(sandbox, "ls", "/dev")
        assert {"nvidia0", "nvidiactl", "nvidia-uvm", "null"} <= set(text.split())
        assert "nvidia1" not in text.split()
    finally:
        await sandbox.destroy()
