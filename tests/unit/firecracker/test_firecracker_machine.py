"""Every request that the driver makes, against the published API description; and what the guest is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.firecracker import links, machine
from ringfence.runtimes.launching.probing import specimen
from ringfence.runtimes.vm.kernel import Kernel
from support.firecracker_api import DEFINITIONS, problem

MODULES = (
    "virtio_mmio", "virtio_pci", "virtio_blk", "virtio_console", "vsock", "vmw_vsock_virtio_transport",
    "erofs",
)  # fmt: skip
KERNEL = Kernel("/k/vmlinuz", "6.1.0", tuple(f"/k/modules/{name}.ko" for name in MODULES), "0" * 64)


@pytest.fixture
def spec(tmp_path: Path) -> StartSpec:
    return replace(specimen(str(tmp_path / "sandbox"), True), memory=256 << 20, cpus=1.5)


def everything(spec: StartSpec) -> list[machine.Request]:
    states = [machine.state(running=True), machine.state(running=False)]
    return [*machine.boot(spec), *machine.load(), machine.save(), *states]


def test_each_is_as_described(spec: StartSpec) -> None:
    for request in everything(spec):
        assert problem(request.method, request.path, request.body) == "", request


def test_the_description_can_say_no(spec: StartSpec) -> None:
    for request in everything(spec):
        assert problem(request.method, request.path, request.body | {"surprise": 1})
        assert problem(request.method, "/elsewhere", request.body)
        for key, value in request.body.items():
            assert problem(request.method, request.path, request.body | {key: [value]}), (request, key)
    assert problem("PUT", "/machine-config", {"vcpu_count": 33, "mem_size_mib": 1})
    assert problem("PUT", "/machine-config", {"vcpu_count": True, "mem_size_mib": 1})
    assert problem("PUT", "/machine-config", {"vcpu_count": 1})
    assert problem("PUT", "/drives/a", {"drive_id": "b", "is_root_device": False})
    assert problem("PUT", "/vsock", {"guest_cid": 2, "uds_path": "/v"})
    assert len(DEFINITIONS) == 10


def test_the_machine_is_configured_before_it_starts(spec: StartSpec) -> None:
    paths = [request.path for request in machine.boot(spec)]
    assert paths[-1] == "/actions"
    assert {
        "/machine-config",
        "/boot-source",
        "/drives/template",
        "/drives/disk",
        "/vsock",
        "/entropy",
    } <= set(paths)
    assert paths.index("/drives/template") < paths.index("/drives/disk")  # vda, then vdb


def test_there_is_no_network_card(spec: StartSpec) -> None:
    assert not any("network" in request.path or "mmds" in request.path for request in everything(spec))


def test_the_template_is_read_only(spec: StartSpec) -> None:
    drives = {r.body["drive_id"]: r.body for r in machine.boot(spec) if r.path.startswith("/drives/")}
    assert drives["template"]["is_read_only"] is True
    assert drives["disk"]["is_read_only"] is False
    assert drives["disk"]["cache_type"] == "Writeback"


def test_a_snapshot_is_loaded_into_a_fresh_machine() -> None:
    assert [request.path for request in machine.load()] == ["/logger", "/snapshot/load"]


@pytest.mark.parametrize(("cpus", "most"), [(0.5, 1), (1, 1), (1000, 32)])
def test_processors(spec: StartSpec, cpus: float, most: int) -> None:
    assert 1 <= machine.processors(replace(spec, cpus=cpus)) <= most


def test_memory_is_in_mebibytes_and_holds_the_workload(spec: StartSpec) -> None:
    assert 256 < machine.memory(spec) < 512
    assert machine.overhead(spec.memory) > (machine.memory(spec) << 20) - spec.memory


def test_the_jailer(spec: StartSpec) -> None:
    words = machine.jailer("/bin/jailer", "/bin/firecracker", spec)
    own, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    options = dict(zip(own[1::2], own[2::2], strict=True))
    user = str(spec.identity.host_uid(spec.identity.agent_uid))
    assert options["--uid"] == options["--gid"] == user != "0"
    assert options["--exec-file"] == "/bin/firecracker"
    assert options["--id"] == spec.id
    assert machine.place(spec.folder, "/bin/firecracker", spec.id).startswith(
        options["--chroot-base-dir"] + "/"
    )
    assert rest == ["--api-sock", "/api.sock"]
    assert "--daemonize" not in words
    assert "--netns" not in words  # it is in an empty one of its own when it starts


def test_what_the_guests_init_is_told(spec: StartSpec) -> None:
    found = machine.config(spec, KERNEL, b"rules", "erofs")
    lines = dict(found.lines)
    assert (lines["link"], lines["control"]) == (f"vsock:{links.AGENT}", f"vsock:{links.CONTROL}")
    assert (lines["root"], lines["disk"]) == ("/dev/vda:erofs", "/dev/vdb:ext4")
    modules = {Path(value).stem for key, value in found.lines if key == "module"}
    assert modules == set(MODULES) - {"virtio_pci", "virtio_console"}
    arguments = [value for key, value in found.lines if key == "arg"]
    assert arguments[0] == "ringfence-agent"
    assert "listen=3" in arguments
    assert not any(word.startswith(("mux=", "stream=")) for word in arguments)
    assert found.filter == b"rules"
