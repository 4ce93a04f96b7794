"""Detection of cgroups from what other hosts look like, and what is written in version 2.

The real kernel of this machine is tested in tests/integration/node; this is for the hosts that it is not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit
from ringfence.node import cgroups
from ringfence.node.cgroups import Cgroups, GroupLimits, detect
from ringfence.node.groups import GroupPool, is_of

LIMITS = GroupLimits(memory=64 << 20, cpus=0.5, pids=32)


class Host:
    """A pretended host: files under a folder, and the two files that detection reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = ["22 1 0:20 / /proc rw shared:5 - proc proc rw"]
        self.own = ""

    def v1(self, names: str) -> Path:
        place = self.folder / names
        place.mkdir()
        self.lines.append(f"30 22 0:30 / {place} rw,nosuid - cgroup cgroup rw,{names}")
        return place

    def v2(self, top: str = "/", at: str = "v2") -> Path:
        place = self.folder / at
        place.mkdir()
        self.lines.append(f"31 22 0:31 {top} {place} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
        return place

    def node(self, place: Path, controllers: str, enabled: str = "", procs: str = "") -> Path:
        place.mkdir(parents=True, exist_ok=True)
        (place / "cgroup.controllers").write_text(controllers)
        (place / "cgroup.subtree_control").write_text(enabled)
        (place / "cgroup.procs").write_text(procs)
        (place / "cpu.stat").write_text("usage_usec 1\n")
        return place

    def detect(self, user: int) -> Cgroups:
        (self.folder / "mountinfo").write_text("\n".join(self.lines) + "\n")
        (self.folder / "own").write_text(self.own)
        return detect(str(self.folder / "mountinfo"), str(self.folder / "own"), user)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    # Root may write everywhere; the mode is what counts here.
    monkeypatch.setattr(
        cgroups.os, "access", lambda path, mode: os.path.exists(path) and bool(os.stat(path).st_mode & 0o200)
    )
    return made


@pytest.mark.parametrize("first", [True, False])
def test_what_others_mount_elsewhere_and_read_only_is_not_ours(host: Host, first: bool) -> None:
    theirs = [f"99 22 0:30 / {host.folder}/gone ro,nosuid - cgroup cgroup rw,{n}" for n in ("memory", "pids")]
    host.lines += theirs if first else []
    roots = {name: str(host.v1(name)) for name in ("memory", "pids", "cpu")}
    host.lines += theirs if not first else []
    found = host.detect(0)
    assert (found.mode, found.roots) == ("v1", roots)


def test_pure_v2_as_root(host: Host) -> None:
    place = host.node(host.v2(), "cpuset cpu io memory pids", "cpu memory pids", "1\n2\n")
    found = host.detect(0)
    assert found.mode == "v2"
    assert set(found.roots) == {"unified", "memory", "pids", "cpu", "io"}
    assert set(found.roots.values()) == {str(place)}
    assert found.enforced() == {
        "memory": "cgroup-v2",
        "cpu": "cgroup-v2",
        "pids": "cgroup-v2",
        "cpu_time": "cgroup-v2",
    }


def test_v2_of_a_container_with_processes_in_it_offers_what_is_on_already(host: Host) -> None:
    host.node(host.v2("/docker/abc"), "cpu memory pids", "memory pids", "1\n")
    found = host.detect(0)
    assert set(found.roots) == {"unified", "memory", "pids"}
    assert found.enforced()["cpu"] == "none"
    assert "cpu" in found.reason


def test_v2_of_a_user_below_systemd(host: Host) -> None:
    place = host.node(host.v2(), "cpu memory pids", "cpu memory pids")
    place.chmod(0o555)
    slice_ = host.node(place / "user.slice", "cpu memory pids", "memory pids")
    slice_.chmod(0o555)
    service = host.node(slice_ / "user@1000.service", "memory pids", "memory pids")
    host.node(service / "app.slice", "memory pids", "memory pids")
    host.own = "0::/user.slice/user@1000.service/app.slice\n"
    found = host.detect(1000)
    assert found.mode == "v2"
    assert found.roots["memory"] == str(service)  # the topmost that is ours
    assert found.reason == "not delegated: cpu"


def test_v2_of_a_login_session_is_not_delegated(host: Host) -> None:
    place = host.node(host.v2(), "cpu memory pids", "cpu memory pids")
    scope = host.node(place / "session-3.scope", "cpu memory pids", "", "7\n")
    for folder in (place, scope):
        folder.chmod(0o555)
    host.own = "0::/session-3.scope\n"
    found = host.detect(1000)
    assert found.mode == "none"
    assert "systemd-run --user --scope" in found.remedy
    assert found.enforced() == {"memory": "polled", "cpu": "none", "pids": "rlimit", "cpu_time": "polled"}
    assert not found.create("sb-x", LIMITS)
    assert found.create("sb-x", LIMITS).place().agent == ()


def test_a_v2_path_that_climbs_is_not_followed(host: Host) -> None:
    place = host.node(host.v2(at="a"), "memory", "memory")
    place.chmod(0o555)
    host.node(host.folder / "b", "memory pids", "memory")
    host.own = "0::/../b\n"  # what a cgroup namespace shows of a group outside of it
    assert host.detect(1000).mode == "none"


def test_pure_v1_with_shared_cpu_and_cpuacct(host: Host) -> None:
    for names in ("memory", "pids", "cpu,cpuacct", "freezer", "blkio"):
        host.v1(names)
    found = host.detect(0)
    assert found.mode == "v1"
    assert set(found.roots) == {"memory", "pids", "cpu", "cpuacct", "freezer"}
    assert found.roots["cpu"] == found.roots["cpuacct"]
    assert found.enforced()["cpu_time"] == "cgroup-v1"
    place = found.group("sb-x").place()
    assert len(place.agent) == 4  # one hierarchy, one file
    assert len(place.work) == 3


def test_hybrid_counts_and_freezes_by_version_1(host: Host) -> None:
    """What moves there locks nobody out."""
    for names in ("memory", "pids", "cpu", "cpuacct", "freezer"):
        host.v1(names)
    host.node(host.v2(), "")
    found = host.detect(0)
    assert found.mode == "hybrid"
    assert set(found.roots) == {"memory", "pids", "cpu", "cpuacct", "freezer"}
    assert found.enforced()["cpu_time"] == "cgroup-v1"
    assert found.group("sb-x").place().v2_fd_path is None


def test_hybrid_without_a_freezer_uses_the_v2_tree_for_counting(host: Host) -> None:
    for names in ("memory", "pids", "cpu", "cpuacct"):
        host.v1(names)
    host.node(host.v2(), "")
    found = host.detect(0)
    assert found.mode == "hybrid"
    assert set(found.roots) == {"memory", "pids", "cpu", "unified"}
    assert found.enforced()["cpu_time"] == "cgroup-v2"
    assert found.group("sb-x").place().v2_fd_path == str(host.folder / "v2/ringfence/sb-x")


def test_v1_as_a_user_needs_folders_of_his_own(host: Host) -> None:
    memory, pids = host.v1("memory"), host.v1("pids")
    found = host.detect(1000)
    assert found.mode == "none"
    assert "chown" in found.remedy
    (memory / "ringfence-1000").mkdir()
    (pids / "ringfence-1000").mkdir()
    found = host.detect(1000)
    assert found.mode == "v1"
    assert found.roots == {"memory": f"{memory}/ringfence-1000", "pids": f"{pids}/ringfence-1000"}
    assert "cpu" in found.reason


def test_nothing_mounted(host: Host) -> None:
    found = host.detect(0)
    assert (found.mode, found.reason) == ("none", "no cgroup hierarchy is mounted")


def test_version_2_is_told_every_limit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    place = host.node(host.v2(), "cpu io memory pids", "")
    found = host.detect(0)
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(
        cgroups, "_write", lambda path, text: written.append((path.removeprefix(f"{place}/"), text))
    )
    group = found.create("sb-x", LIMITS)
    assert written == [
        ("cgroup.subtree_control", "+memory +pids +cpu +io"),
        ("ringfence/cgroup.subtree_control", "+memory +pids +cpu +io"),
        ("ringfence/sb-x/cgroup.subtree_control", "+memory +pids +cpu +io"),
        ("ringfence/sb-x/memory.max", str((64 + 32) << 20)),
        ("ringfence/sb-x/memory.swap.max", "0"),
        ("ringfence/sb-x/work/memory.max", str(64 << 20)),
        ("ringfence/sb-x/work/memory.swap.max", "0"),
        ("ringfence/sb-x/pids.max", "96"),
        ("ringfence/sb-x/work/pids.max", "32"),
        ("ringfence/sb-x/cpu.max", "60000 100000"),
        ("ringfence/sb-x/work/cpu.max", "50000 100000"),
        ("ringfence/sb-x/io.weight", "default 50"),
    ]
    assert group.place().agent == (f"{place}/ringfence/sb-x/agent/cgroup.procs",)
    assert group.place().work == (f"{place}/ringfence/sb-x/work/cgroup.procs",)
    assert group.remove()
    assert not (place / "ringfence/sb-x").exists()


def test_version_2_counters(host: Host) -> None:
    place = host.node(host.v2(), "memory", "memory")
    base = place / "ringfence/sb-x"
    host.node(base, "memory")
    (base / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 0\n")
    (base / "memory.peak").write_text("4096\n")
    (base / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    group = host.detect(0).group("sb-x")
    assert (group.oom_kills(), group.memory_peak(), group.cpu_seconds()) == (3, 4096, 1.5)


def test_a_limit_that_the_kernel_refuses_leaves_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    place = host.node(host.v2(), "memory pids", "memory pids")
    found = host.detect(0)

    def refuse(path: str, _text: str) -> None:
        if path.endswith("pids.max"):
            raise OSError(22, "Invalid argument", path)

    monkeypatch.setattr(cgroups, "_write", refuse)
    with pytest.raises(HostLimit, match=r"pids\.max"):
        found.create("sb-x", LIMITS)
    assert [p.name for p in (place / "ringfence").iterdir() if p.is_dir()] == []


def test_a_number_that_is_none(host: Host) -> None:
    place = host.node(host.v2(), "memory", "memory")
    (place / "ringfence/sb-x").mkdir(parents=True)
    (place / "ringfence/sb-x/memory.peak").write_text("max\n")
    group = host.detect(0).group("sb-x")
    assert group.memory_peak() is None
    assert group.oom_kills() is None
    assert group.cpu_seconds() is None


def test_groups_are_their_owners() -> None:
    assert is_of("46772b68.7.9.0.3", "46772b68.7.9.0")
    assert not is_of("46772b68.7.91.0.3", "46772b68.7.9")
    assert not is_of("sb-00000000000000000000", "46772b68.7.9.0")


def test_version_2_groups_are_never_used_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    place = host.node(host.v2(), "memory", "memory")
    monkeypatch.setattr(cgroups, "_write", lambda *_: None)
    pool = GroupPool(host.detect(0), "owner")
    group = pool.take("sb-1", LIMITS, keep=False)
    assert group.name == "sb-1"
    assert pool.give_back(group)
    assert not (place / "ringfence/sb-1").exists()
