"""A GPU for docker and podman, for real: what answers behind the made-up device is ``/dev/zero``."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.model.errors import HostLimit, Unsupported
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.service import Node
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.gpu import cdi, handing
from support.nodes import ask, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root")


def with_gpu(runtime: str) -> SandboxRequest:
    """A sandbox that asks for one."""
    request = ask(runtime=runtime)
    resources = replace(request.policy.wall.resources, gpus=1)
    return replace(request, policy=request.policy.with_wall(resources=resources))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU whose node is the zero device, which this host has."""
    found = cdi.Edits(
        ("nvidia.com/gpu=0",), (cdi.Node("/dev/nvidia0", "/dev/zero", 1, 5),), env=(("GPU", "made-up"),)
    )

    def prepare(spec: StartSpec, **options: Any) -> tuple[StartSpec, cdi.Edits]:
        return replace(spec, env=dict(found.env) | spec.env), found

    monkeypatch.setattr(handing, "prepare", prepare)


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> str:
    """The name of a running one."""
    request.getfixturevalue(f"{request.param}_engine")
    return str(request.param)


async def test_the_device_is_there_and_answers(engine: str, made_up: None) -> None:
    with tempfile.TemporaryDirectory(prefix="rf-engine-gpu-", dir="/tmp") as state:
        Path(state).chmod(0o711)
        async with await Node.open(state) as node:
            sandbox = await node.create(with_gpu(engine))
            try:
                _, text = await run(
                    sandbox, "sh", "-c", "head -c 3 /dev/nvidia0 | od -An -tx1; echo $GPU; ls /dev"
                )
            finally:
                await sandbox.destroy()
    words = text.split()
    assert words[:4] == ["00", "00", "00", "made-up"]
    assert "nvidia1" not in words


async def test_a_host_without_one_fails_with_the_reason(engine: str) -> None:
    if os.path.isdir("/etc/cdi") or os.path.isdir("/var/run/cdi"):
        pytest.skip("this host describes devices of its own")
    with tempfile.TemporaryDirectory(prefix="rf-engine-gpu-", dir="/tmp") as state:
        Path(state).chmod(0o711)
        async with await Node.open(state) as node:
            with pytest.raises(HostLimit, match="no GPU is described"):
                await node.create(with_gpu(engine))
            assert not os.listdir(Path(state) / "sandboxes")


async def test_an_engine_elsewhere_is_not_asked(
    engine: str, made_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringfence.runtimes.engines.driver import EngineRuntime

    monkeypatch.setattr(EngineRuntime, "_local", lambda self, info: False)
    with tempfile.TemporaryDirectory(prefix="rf-engine-gpu-", dir="/tmp") as state:
        Path(state).chmod(0o711)
        async with await Node.open(state) as node:
            with pytest.raises(Unsupported, match="can't be seen from here"):
                await node.create(with_gpu(engine))
