"""Who has which GPU: never two sandboxes the same, and nobody once the sandbox's folder is gone."""

from __future__ import annotations

import functools
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import ringfence
from ringfence.model.errors import HostLimit
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.gpu import cdi, handing, leases, vfio
from ringfence.runtimes.launching.probing import specimen
from support import gpu_tree

UNITS = {"gpu=0": "gpu=0", "gpu=1": "gpu=1"}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    place = tmp_path / "host"
    place.mkdir()
    return place


def take(host: Path, sandbox: str, count: int = 1, units: dict[str, str] | None = None) -> list[str]:
    folder = host.parent / sandbox
    folder.mkdir(exist_ok=True)
    return leases.take(str(folder), UNITS if units is None else units, count, root=str(host))


def test_each_gets_another_and_the_next_is_refused(host: Path) -> None:
    assert take(host, "one") == ["gpu=0"]
    assert take(host, "two") == ["gpu=1"]
    with pytest.raises(HostLimit, match=r"0 of 2 are free: gpu=0 is one's, gpu=1 is two's") as refused:
        take(host, "three")
    assert "until a sandbox that has one ends" in refused.value.hint
    assert not (host.parent / "three" / leases.FOLDER).exists()


def test_some_but_not_enough_are_left_alone(host: Path) -> None:
    take(host, "one")
    with pytest.raises(HostLimit, match="1 of 2 are free"):
        take(host, "two", 2)
    assert take(host, "three") == ["gpu=1"]


def test_what_ended_gives_back(host: Path) -> None:
    take(host, "one", 2)
    handing.forget(str(host.parent / "one"))
    assert take(host, "two") == ["gpu=0"]
    shutil.rmtree(host.parent / "two")  # as the sweep of a node does, which knows nothing of GPUs
    assert take(host, "three", 2) == ["gpu=0", "gpu=1"]


def test_a_new_sandbox_in_an_old_one_s_place_has_only_its_own(host: Path) -> None:
    assert take(host, "one", 2) == ["gpu=0", "gpu=1"]
    shutil.rmtree(host.parent / "one")
    assert take(host, "one") == ["gpu=0"]
    assert take(host, "two") == ["gpu=1"]


def test_a_second_try_of_the_same_sandbox_takes_nothing_more(host: Path) -> None:
    assert take(host, "one") == take(host, "one") == ["gpu=0"]
    assert take(host, "two") == ["gpu=1"]


def test_devices_of_one_group_are_never_divided(host: Path) -> None:
    units = {"0000:01:00.0": "group-2", "0000:02:00.0": "group-2", "0000:03:00.0": "group-3"}
    assert take(host, "one", 1, units) == ["0000:01:00.0"]
    assert take(host, "two", 1, units) == ["0000:03:00.0"]
    with pytest.raises(HostLimit, match="0 of 3"):
        take(host, "three", 1, units)


def test_a_record_that_can_not_be_read_counts(host: Path) -> None:
    take(host, "one")
    (host.parent / "one" / leases.FOLDER / leases.MARK).write_text("not what we write")
    assert take(host, "two") == ["gpu=1"]


def test_the_records_are_nobody_else_s(host: Path) -> None:
    take(host, "one")
    place = host / leases.PLACE
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in place.iterdir())


def test_no_record_no_gpu(host: Path) -> None:
    (host / "run").write_text("a file where a folder is needed")
    with pytest.raises(HostLimit, match="no record"):
        take(host, "one")


PROGRAM = """
import sys
from ringfence.model.errors import HostLimit
from ringfence.runtimes.gpu import leases
folder, root = sys.argv[1:]
sys.stdin.readline()
try:
    print(*leases.take(folder, {f"gpu={n}": f"gpu={n}" for n in range(4)}, 1, root=root))
except HostLimit:
    print("refused")
"""


def test_processes_that_ask_at_once(host: Path) -> None:
    started = []
    for number in range(6):
        folder = host.parent / f"sandbox-{number}"
        folder.mkdir()
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder), str(host)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(Path(ringfence.__file__).parents[1])},
            )
        )
    for process in started:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0].decode().strip() for process in started]
    assert sorted(told) == ["gpu=0", "gpu=1", "gpu=2", "gpu=3", "refused", "refused"]


def test_whole_groups_for_virtual_machines(tmp_path: Path, host: Path) -> None:
    for address, group in (("0000:01:00.0", "2"), ("0000:03:00.0", "3")):
        gpu_tree.add_pci(host, address, "0x030200", group, "vfio-pci")

    def chosen(name: str) -> tuple[str, ...]:
        folder = tmp_path / name
        folder.mkdir()
        lease = functools.partial(leases.take, str(folder), root=str(host))
        return vfio.choose(1, root=str(host), lease=lease).addresses

    assert (chosen("one"), chosen("two")) == (("0000:01:00.0",), ("0000:03:00.0",))
    with pytest.raises(HostLimit, match="0 of 2"):
        chosen("three")


@pytest.mark.skipif(os.geteuid() != 0, reason="a made-up device tree needs root for its nodes")
class TestWithNodes:
    """What a runtime asks for, on a made-up host with two GPUs."""

    def spec(self, host: Path, name: str) -> StartSpec:
        folder = host.parent / name
        folder.mkdir()
        return replace(specimen(str(folder), True), id=name, gpus=1)

    def nodes(self, host: Path, spec: StartSpec) -> set[str]:
        found = handing.prepare(spec, root=str(host))[1]
        assert found is not None
        return {node.path for node in found.nodes if node.path[-1].isdigit()}

    def test_two_walls_have_different_nodes(self, host: Path) -> None:
        gpu_tree.make_host(host)
        one, two, three = (self.spec(host, name) for name in ("one", "two", "three"))
        assert self.nodes(host, one) == {"/dev/nvidia0"}
        assert self.nodes(host, two) == {"/dev/nvidia1"}
        with pytest.raises(HostLimit, match="0 of 2 are free"):
            handing.prepare(three, root=str(host))
        handing.forget(one.folder)
        assert self.nodes(host, three) == {"/dev/nvidia0"}

    def test_a_preparation_that_fails_gives_back(self, host: Path) -> None:
        document = gpu_tree.cdi_document()
        document["devices"][0]["containerEdits"]["deviceNodes"] = [{"path": "/dev/mem"}]
        gpu_tree.make_host(host, document)
        with pytest.raises(HostLimit, match="not a device of a GPU"):
            handing.prepare(self.spec(host, "one"), root=str(host))
        assert not (host.parent / "one" / leases.FOLDER).exists()
        gpu_tree.write_cdi(host, gpu_tree.cdi_document())
        assert self.nodes(host, self.spec(host, "two")) == {"/dev/nvidia0"}

    def test_what_is_shown_inside_has_no_lease(self, host: Path) -> None:
        gpu_tree.make_host(host)
        made, _ = handing.prepare(self.spec(host, "one"), root=str(host))
        shown = next(bind.source for bind in made.root.binds if bind.target == cdi.LIBRARIES)
        assert leases.MARK not in os.listdir(shown)
        assert leases.of(str(host.parent / "one")) == ["nvidia.com/gpu=0"]
