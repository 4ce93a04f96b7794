"""Reading CDI specifications: what is obeyed, what is left out, what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringfence.model.errors import HostLimit
from ringfence.runtimes.gpu import cdi
from support import gpu_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a made-up device tree needs root for its nodes")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return gpu_tree.make_host(tmp_path)


def chosen(root: Path, count: int = 1) -> cdi.Edits:
    return cdi.edits(count, root=str(root))


def test_the_first_whole_gpu_is_chosen(host: Path) -> None:
    found = chosen(host)
    assert found.devices == ("nvidia.com/gpu=0",)
    assert [node.path for node in found.nodes] == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
    assert {(node.major, node.minor) for node in found.nodes} == {(1, 5)}


def test_two_gpus_have_the_nodes_of_both_and_common_ones_once(host: Path) -> None:
    paths = [node.path for node in chosen(host, 2).nodes]
    assert sorted(paths) == ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]


def test_more_than_there_are_is_refused_with_the_number(host: Path) -> None:
    with pytest.raises(HostLimit, match="3 GPUs are asked for and 2 are here"):
        chosen(host, 3)


def test_a_host_without_one_says_where_it_looked_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HostLimit, match="/etc/cdi or /var/run/cdi") as caught:
        chosen(tmp_path)
    assert "nvidia-ctk cdi generate" in caught.value.hint


def test_driver_files_are_read_only_whatever_the_options_say(host: Path) -> None:
    document = gpu_tree.cdi_document()
    document["containerEdits"]["mounts"][0]["options"] = ["rw", "suid", "dev"]
    gpu_tree.write_cdi(host, document)
    (bind,) = chosen(host).mounts
    assert (bind.target, bind.read_only) == (gpu_tree.LIBRARY, True)


def test_a_service_socket_is_left_out_and_said(host: Path) -> None:
    found = chosen(host)
    assert not any("persistenced" in bind.source for bind in found.mounts)
    assert any("persistenced" in note for note in found.notes)


def test_no_hook_is_run_and_its_links_are_made_here(host: Path) -> None:
    found = chosen(host)
    assert dict(found.links) == {
        f"{cdi.LIBRARIES}/libcuda.so": "/opt/gpu/lib/libcuda.so.1",
        f"{cdi.LIBRARIES}/libcuda.so.1": gpu_tree.LIBRARY,
    }
    assert dict(found.env) == {"NVIDIA_VISIBLE_DEVICES": "void", "LD_LIBRARY_PATH": cdi.LIBRARIES}
    assert not hasattr(found, "hooks")


def test_links_are_written_into_one_folder(host: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    bind = cdi.write_links(chosen(host), str(folder))
    assert bind is not None
    assert (bind.target, bind.read_only) == (cdi.LIBRARIES, True)
    assert os.readlink(folder / "libcuda.so.1") == gpu_tree.LIBRARY


def test_yaml_is_read_as_json_is(host: Path) -> None:
    expected = chosen(host)
    (host / "etc/cdi/nvidia.json").unlink()
    gpu_tree.write_cdi(host, yaml.safe_dump(gpu_tree.cdi_document()), "nvidia.yaml")
    assert chosen(host) == expected


def test_the_later_folder_wins(host: Path) -> None:
    document = gpu_tree.cdi_document(1)
    document["devices"][0]["containerEdits"]["deviceNodes"] = [{"path": "/dev/nvidia1"}]
    gpu_tree.write_cdi(host, document, folder="var/run/cdi")
    assert "/dev/nvidia1" in {node.path for node in chosen(host).nodes}


def test_one_name_twice_in_a_folder_is_refused(host: Path) -> None:
    gpu_tree.write_cdi(host, gpu_tree.cdi_document(), "other.json")
    with pytest.raises(HostLimit, match="described twice"):
        chosen(host)


def test_other_kinds_of_devices_are_not_gpus(tmp_path: Path) -> None:
    document = gpu_tree.cdi_document() | {"kind": "vendor.example/net"}
    gpu_tree.make_host(tmp_path, document)
    with pytest.raises(HostLimit, match="no GPU is described"):
        chosen(tmp_path)


@pytest.mark.parametrize(
    "path",
    ["/dev/sda", "/dev/mem", "/dev/kvm", "/dev/nvidia0/../mem", "dev/nvidia0", "/dev/nvidia0x", "/dev/fuse"],
)
@pytest.mark.parametrize("key", ["path", "hostPath"])
def test_a_device_that_is_no_gpu_is_refused(host: Path, path: str, key: str) -> None:
    document = gpu_tree.cdi_document()
    document["devices"][0]["containerEdits"]["deviceNodes"] = [{"path": "/dev/nvidia0"} | {key: path}]
    gpu_tree.write_cdi(host, document)
    with pytest.raises(HostLimit, match=r"not a device of a GPU|not a plain absolute path"):
        chosen(host)


def test_a_link_in_dev_leads_nowhere(host: Path) -> None:
    (host / "dev/nvidia0").unlink()
    (host / "dev/nvidia0").symlink_to("/dev/zero")
    with pytest.raises(HostLimit, match="not a character device"):
        chosen(host)


def test_a_missing_node_asks_for_the_driver(host: Path) -> None:
    (host / "dev/nvidia0").unlink()
    with pytest.raises(HostLimit, match="is the driver loaded"):
        chosen(host)


@pytest.mark.parametrize("source", ["/etc/shadow", "/root", "/var/run/docker.sock", "/", "/proc", "/home"])
def test_other_files_of_the_host_are_never_shown(host: Path, source: str) -> None:
    document = gpu_tree.cdi_document()
    place = host / source[1:]
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    document["containerEdits"]["mounts"] = [{"hostPath": source, "containerPath": "/usr/lib/x"}]
    gpu_tree.write_cdi(host, document)
    found = chosen(host)
    assert not found.mounts
    assert any(source in note for note in found.notes)


def test_a_link_among_driver_files_does_not_lead_out(host: Path) -> None:
    (host / "etc").mkdir(exist_ok=True)
    (host / "etc/shadow").write_text("root:…\n")
    (host / gpu_tree.LIBRARY[1:]).unlink()
    (host / gpu_tree.LIBRARY[1:]).symlink_to("../../../etc/shadow")
    assert not chosen(host).mounts


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "PATH"])
def test_variables_that_decide_what_is_loaded_are_not_set(host: Path, name: str) -> None:
    document = gpu_tree.cdi_document()
    document["containerEdits"]["env"] = [f"{name}=/tmp/evil.so"]
    gpu_tree.write_cdi(host, document)
    found = chosen(host)
    assert "/tmp/evil.so" not in dict(found.env).values()
    assert any(name in note for note in found.notes)


@pytest.mark.parametrize(
    ("path", "args"),
    [
        ("/tmp/evil", ["evil"]),
        ("/usr/bin/nvidia-ctk", ["nvidia-ctk", "hook", "surprise"]),
        ("/usr/bin/nvidia-ctk", []),
    ],
)
def test_an_unknown_hook_is_refused(host: Path, path: str, args: list[str]) -> None:
    document = gpu_tree.cdi_document()
    document["containerEdits"]["hooks"] = [{"hookName": "createRuntime", "path": path, "args": args}]
    gpu_tree.write_cdi(host, document)
    with pytest.raises(HostLimit, match="not known here"):
        chosen(host)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_file_that_others_can_write_is_not_believed(host: Path, what: str) -> None:
    path = host / "etc/cdi"
    (path / "nvidia.json" if what == "file" else path).chmod(0o777)
    with pytest.raises(HostLimit, match="others than root can write"):
        chosen(host)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_file_of_somebody_else_is_not_believed(host: Path, what: str) -> None:
    path = host / "etc/cdi"
    os.chown(path / "nvidia.json" if what == "file" else path, 12345, 12345)
    with pytest.raises(HostLimit, match="others than root can write"):
        chosen(host)


def changed(**parts: Any) -> dict[str, Any]:
    return gpu_tree.cdi_document() | parts


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{",
        "[]",
        "null",
        changed(cdiVersion="0.1.0"),
        changed(cdiVersion="2.0.0"),
        changed(cdiVersion=None),
        changed(devices=[]),
        changed(devices={}),
        changed(devices=["0"]),
        changed(devices=[{"name": "../x"}]),
        changed(devices=[{"name": None}]),
        changed(containerEdits=[]),
        changed(containerEdits={"deviceNodes": {}}),
        changed(containerEdits={"deviceNodes": [None]}),
        changed(containerEdits={"mounts": ["/"]}),
        changed(containerEdits={"env": ["=x"]}),
        "[" * 100_000,
        " " * (cdi.MOST_BYTES + 1),
    ],
    ids=range(19),
)
def test_a_damaged_file_is_refused_by_name(host: Path, document: Any) -> None:
    gpu_tree.write_cdi(host, document)
    with pytest.raises(HostLimit, match="nvidia") as caught:
        chosen(host)
    assert caught.value.hint
    assert len(str(caught.value)) < 1000


def test_a_yaml_file_makes_no_objects(host: Path) -> None:
    (host / "etc/cdi/nvidia.json").unlink()
    gpu_tree.write_cdi(host, "!!python/object/apply:os.system ['touch /tmp/never']", "nvidia.yaml")
    with pytest.raises(HostLimit, match="no CDI specification"):
        chosen(host)
