"""A GPU for runc and crun, for real: what answers behind the made-up device nodes is ``/dev/zero``."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from wall_bench import Bench

import ringfence
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


async def test_each_wall_has_a_gpu_of_its_own(oci: Bench, host: Path) -> None:
    one, two = await oci.start(gpus=1), await oci.start(gpus=1)
    seen = []
    for handle in (one, two):
        code, text = await oci.run(handle, "ls /dev/nvidia[0-9]")
        assert code == 0, text
        seen.append(text.split())
    assert seen == [["/dev/nvidia0"], ["/dev/nvidia1"]]
    with pytest.raises(HostLimit, match="0 of 2 are free"):
        await oci.start(gpus=1)
    await oci.runtime.destroy(one)
    third = await oci.start(gpus=1)
    code, text = await oci.run(third, "ls /dev/nvidia[0-9]")
    assert (code, text.split()) == (0, ["/dev/nvidia0"])


NODE = """
import asyncio, functools, os, signal, sys
from dataclasses import replace
from ringfence.model.policy import Resources
from ringfence.node.service import Node
from ringfence.runtimes.gpu import handing
from support.nodes import ask, run
root, act = sys.argv[1:]
handing.prepare = functools.partial(handing.prepare, root=root)

async def main():
    async with await Node.open(adopt=act == "after") as node:
        request = ask(runtime="runc", keep=act == "keep")
        resources = replace(request.policy.wall.resources, gpus=1)
        request = replace(request, policy=request.policy.with_wall(resources=resources))
        sandbox = await node.create(request)
        result, text = await run(sandbox, "sh", "-c", "ls /dev/nvidia[0-9]")
        print(text.strip(), flush=True)
        if act != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        for each in node.sandboxes():
            await each.destroy()

asyncio.run(main())
"""


def test_kill_9_of_the_node_frees_what_died_with_it_and_nothing_else(tmp_path: Path) -> None:
    if shutil.which("runc") is None:
        pytest.skip("runc is not installed")
    tmp_path.chmod(0o755)
    place = tmp_path / "host"
    place.mkdir(mode=0o755)
    document = gpu_tree.cdi_document()
    document["containerEdits"] |= {"mounts": [], "hooks": []}  # this host has no such driver to show
    gpu_tree.make_host(place, document)
    state = Path(tempfile.mkdtemp(prefix="rf-gpu-", dir="/tmp"))
    state.chmod(0o711)
    sources = [str(Path(ringfence.__file__).parents[1]), str(Path(__file__).parents[2])]
    env = os.environ | {"RINGFENCE_HOME": str(state), "PYTHONPATH": os.pathsep.join(sources)}

    def node(act: str) -> tuple[int, str]:
        argv = [sys.executable, "-c", NODE, str(place), act]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=110)
        assert done.returncode == -9 or act == "after", done.stderr
        assert done.returncode in (0, -9), done.stderr
        return done.returncode, done.stdout.strip()

    try:
        assert node("ephemeral") == (-9, "/dev/nvidia0")
        assert node("keep") == (-9, "/dev/nvidia0")  # the ephemeral one died with its node
        assert node("after") == (0, "/dev/nvidia1")  # the kept one lives, and has its own
        assert node("after") == (0, "/dev/nvidia0")  # destroyed
    finally:
        shutil.rmtree(state, ignore_errors=True)
