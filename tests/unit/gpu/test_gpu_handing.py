"""What the drivers are told: OCI bundles, gVisor, engines; and who refuses, and why."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit, Unsupported
from ringfence.model.policy import Policy, Resources
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.selecting import lacks
from ringfence.runtimes.contract import Capabilities, StartSpec
from ringfence.runtimes.gpu import cdi, handing, why_not
from ringfence.runtimes.gvisor_parts import sandboxes
from ringfence.runtimes.launching.plan import Plan
from ringfence.runtimes.launching.probing import specimen
from ringfence.runtimes.registry import BUILT_IN
from support import gpu_tree


def asked(gpus: int = 1) -> SandboxRequest:
    return SandboxRequest(policy=Policy().with_wall(resources=Resources(gpus=gpus)))


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("runc", "crun", "gvisor")])
def test_who_can_not_says_why(name: str) -> None:
    found = lacks(asked(), Capabilities(rootless=True), root=False, name=name)
    assert found is not None
    assert found[0] == "gpu"
    assert "can't give a sandbox a GPU" in found[1]
    assert "gvisor" in found[1]  # who can


def test_each_known_reason_is_its_own() -> None:
    assert "PCI" in why_not("firecracker")
    assert "WebAssembly" in why_not("wasm")
    assert why_not("jail") != why_not("wasm")


def test_nobody_is_refused_who_asked_for_none() -> None:
    assert lacks(asked(0), Capabilities(rootless=True), root=False, name="jail") is None
    assert lacks(asked(1), Capabilities(rootless=True, gpu=True), root=False, name="runc") is None


@pytest.fixture
def spec(tmp_path: Path) -> StartSpec:
    folder = tmp_path / "sandbox"
    folder.mkdir()
    return replace(specimen(str(folder), True), gpus=1)


class TestWithNodes:
    """On a made-up host."""

    pytestmark = pytest.mark.skipif(
        os.geteuid() != 0, reason="a made-up device tree needs root for its nodes"
    )

    @pytest.fixture
    def found(self, tmp_path: Path) -> cdi.Edits:
        root = tmp_path / "host"
        root.mkdir()
        return cdi.edits(1, root=str(gpu_tree.make_host(root)))

    def test_a_prepared_spec(self, spec: StartSpec, tmp_path: Path) -> None:
        root = tmp_path / "host"
        root.mkdir()
        gpu_tree.make_host(root)
        made, found = handing.prepare(replace(spec, env={"NVIDIA_VISIBLE_DEVICES": "0"}), root=str(root))
        assert found is not None
        assert [bind.target for bind in made.root.binds] == [gpu_tree.LIBRARY, cdi.LIBRARIES]
        assert all(bind.read_only for bind in made.root.binds)
        assert made.env == {"NVIDIA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": cdi.LIBRARIES}
        assert (Path(spec.folder) / handing.FOLDER).is_dir()
        handing.forget(spec.folder)
        assert os.listdir(spec.folder) == ["skeleton"]

    def test_an_oci_bundle(self, found: cdi.Edits) -> None:
        mounts = handing.oci_mounts(found, "/somewhere")
        assert [mount["destination"] for mount in mounts] == [
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            "/dev/nvidia0",
        ]
        assert mounts[2]["source"] == "/somewhere/nvidia0"
        assert "nodev" not in mounts[2]["options"]
        assert {"nosuid", "noexec"} <= set(mounts[2]["options"])

    def test_the_plan_makes_each_node_by_number(self, found: cdi.Edits) -> None:
        plan = Plan()
        handing.add_nodes(plan, found, "/somewhere")
        for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
            assert f"/somewhere/{name}".encode() in bytes(plan.encode())
        assert b"/dev/nvidia0" not in bytes(plan.encode())

    def test_nodes_in_folders_have_names_of_their_own(self, found: cdi.Edits) -> None:
        deep = cdi.Node("/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap1", 1, 5)
        assert list(handing.node_names(replace(found, nodes=(deep,)))) == ["nvidia-caps-nvidia-cap1"]

    def test_gvisor(self, spec: StartSpec, found: cdi.Edits) -> None:
        devices = sandboxes.document(spec, found)["linux"]["devices"]
        assert {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 5, "fileMode": 0o666} in devices
        assert "devices" not in sandboxes.document(spec)["linux"]

    def test_gvisor_knows_one_vendor(self, found: cdi.Edits) -> None:
        handing.only_nvidia(found)
        with pytest.raises(Unsupported, match="NVIDIA only"):
            handing.only_nvidia(replace(found, devices=("amd.com/gpu=0",)))

    def test_an_engine_by_its_interface(self, found: cdi.Edits) -> None:
        told = json.loads(json.dumps(handing.engine_host_config(found)))
        assert {
            "PathOnHost": "/dev/nvidia0",
            "PathInContainer": "/dev/nvidia0",
            "CgroupPermissions": "rw",
        } in told["Devices"]
        assert all("m" not in device["CgroupPermissions"] for device in told["Devices"])


def test_a_spec_without_gpus_stays_as_it_is(spec: StartSpec) -> None:
    plain = replace(spec, gpus=0)
    assert handing.prepare(plain) == (plain, None)


def test_a_failed_preparation_leaves_nothing(spec: StartSpec, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(HostLimit):
        handing.prepare(spec, root=str(tmp_path / "bare"))
    assert os.listdir(spec.folder) == ["skeleton"]
