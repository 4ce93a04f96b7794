"""config.json from a start specification."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.runtimes.contract import AGENT_UID, Bind, CgroupPlace, Disk, Identity, IdMap, RootFs, StartSpec
from ringfence.runtimes.launching.steps import MASKED
from ringfence.runtimes.oci import bundle
from ringfence.runtimes.oci.driver import OciRuntime

ROOT = Identity(1000, 1000, (IdMap(0, 1_900_000_000, 65536),), AGENT_UID)
USER = Identity(1000, 1000, (IdMap(1000, 501, 1),), 1000, gid_maps=(IdMap(1000, 20, 1),))


def spec(identity: Identity = ROOT, **changes: object) -> StartSpec:
    files = RootFs(("/lower",), (Bind("/usr", "/usr"), Bind("/host/out", "/out", read_only=False)),
                   Disk("tmpfs", 1 << 20, 256))  # fmt: skip
    made = StartSpec("sb", "/nowhere", "box", files, identity, CgroupPlace(), 100, 256)
    return replace(made, **changes)  # type: ignore[arg-type]


def made(given: StartSpec, **options: object) -> dict[str, object]:
    text = bundle.text(bundle.document(given, rootfs="/root", command=["/agent", "listen=3"], **options))  # type: ignore[arg-type]
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_the_agent_holds_only_what_it_needs_and_what_it_gives_up() -> None:
    process = made(spec())["process"]
    wanted = {"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"}
    for kind in ("bounding", "permitted", "effective", "inheritable", "ambient"):
        assert set(process["capabilities"][kind]) == wanted | {"CAP_SETPCAP"}, kind  # type: ignore[index]
    assert process["noNewPrivileges"] is True  # type: ignore[index]
    assert process["user"]["uid"] == process["user"]["gid"] == AGENT_UID  # type: ignore[index]


def test_where_agent_and_workload_are_one_user_there_is_no_capability() -> None:
    process = made(spec(USER))["process"]
    assert not any(process["capabilities"].values())  # type: ignore[index]
    assert (process["user"]["uid"], process["user"]["gid"]) == (1000, 1000)  # type: ignore[index]


def test_user_zero_keeps_what_its_identity_says() -> None:
    identity = replace(ROOT, uid=0, gid=0, capabilities=1 << 10)
    held = made(spec(identity))["process"]["capabilities"]["inheritable"]  # type: ignore[index]
    assert "CAP_NET_BIND_SERVICE" in held
    assert "CAP_SYS_ADMIN" not in held


def test_namespaces_maps_and_no_cgroup_of_its_own() -> None:
    linux = made(spec(USER))["linux"]
    kinds = [each["type"] for each in linux["namespaces"]]  # type: ignore[index]
    assert sorted(kinds) == sorted(["pid", "network", "ipc", "uts", "mount", "user", "cgroup"])
    assert not any("path" in each for each in linux["namespaces"])  # type: ignore[index]
    assert linux["uidMappings"] == [{"containerID": 1000, "hostID": 501, "size": 1}]  # type: ignore[index]
    assert linux["gidMappings"] == [{"containerID": 1000, "hostID": 20, "size": 1}]  # type: ignore[index]
    assert "cgroupsPath" not in linux  # type: ignore[operator]
    assert "resources" not in linux  # type: ignore[operator]
    assert made(spec(), cgroups_path="/a")["linux"]["cgroupsPath"] == "/a"  # type: ignore[index]


def test_proc_is_covered_and_sysfs_never_shown() -> None:
    found = made(spec())
    assert found["linux"]["maskedPaths"] == list(MASKED)  # type: ignore[index]
    assert "/proc/sys" in found["linux"]["readonlyPaths"]  # type: ignore[index]
    mounts = {each["destination"]: each for each in found["mounts"]}  # type: ignore[attr-defined]
    assert set(mounts) == {"/proc", "/dev", "/dev/pts", "/dev/shm", "/run/secrets"}
    assert "ro" in mounts["/dev"]["options"]
    for path in ("/proc", "/dev/shm", "/run/secrets"):
        assert {"nosuid", "nodev", "noexec"} <= set(mounts[path]["options"]), path
    assert any(option.startswith("nr_inodes=") for option in mounts["/dev/shm"]["options"])


def test_the_filter_is_the_policy_s_whatever_the_policy_is_called() -> None:
    plain = made(spec())["linux"]["seccomp"]  # type: ignore[index]
    assert plain["defaultAction"] == "SCMP_ACT_ERRNO"
    assert len(plain["syscalls"]) > 50
    named = made(spec(hostname="@seccomp@"), mounts=[{"destination": "@seccomp@"}])
    assert named["hostname"] == "@seccomp@"
    assert named["linux"]["seccomp"] == plain  # type: ignore[index]


def test_a_filter_that_somebody_else_installs_is_left_out() -> None:
    assert "seccomp" not in made(spec(hostname="@seccomp@"), seccomp=False)["linux"]  # type: ignore[operator]


def test_binds_only_where_the_runtime_mounts_them() -> None:
    found = {each["destination"]: each for each in made(spec(), binds=True)["mounts"]}  # type: ignore[attr-defined]
    assert found["/usr"]["options"] == ["rbind", "nosuid", "nodev", "ro"]
    assert found["/out"]["options"] == ["rbind", "nosuid", "nodev", "rw"]
    assert "/usr" not in {each["destination"] for each in made(spec())["mounts"]}  # type: ignore[attr-defined]


def test_a_read_only_root_with_what_stays_writable() -> None:
    given = spec()
    given = replace(given, root=replace(given.root, readonly=True, read_write=("/workspace", "/out"),
                                        read_only=("/etc",)))  # fmt: skip
    found = made(given, binds=True)
    assert found["root"]["readonly"] is True  # type: ignore[index]
    mounts = [(each["source"], each["destination"], each["options"][-1]) for each in found["mounts"][5:]]  # type: ignore[index]
    assert ("/root/workspace", "/workspace", "rw") in mounts
    assert ("/root/etc", "/etc", "ro") in mounts
    assert sum(target == "/out" for _, target, _ in mounts) == 1  # a bind of its own already


def test_limits_are_lowered_to_what_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (64, 64))
    found = {each["type"]: each for each in bundle.rlimits(spec())}
    assert found["RLIMIT_NOFILE"] == {"type": "RLIMIT_NOFILE", "soft": 64, "hard": 64}
    assert found["RLIMIT_CORE"]["hard"] == 0
    assert "RLIMIT_NPROC" in found
    in_cgroup = spec(cgroup=CgroupPlace(agent=("/sys/fs/cgroup/x/cgroup.procs",)))
    assert "RLIMIT_NPROC" not in {each["type"] for each in bundle.rlimits(in_cgroup)}


def test_a_bundle_is_written_for_nobody_else_and_removed(tmp_path: Path) -> None:
    given = spec(folder=str(tmp_path))
    folder = Path(bundle.write(given, bundle.document(given, rootfs="/root", command=["/agent"])))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o600
    bundle.remove(str(tmp_path))
    bundle.remove(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('time="x" level=warning msg="w"\ntime="x" level=error msg="runc run failed: \\"a\\""\n',
         'runc run failed: "a"'),
        ("2026 open `/x`: No such file\n", "2026 open `/x`: No such file"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_the_runtime_said(text: str, said: str) -> None:
    assert OciRuntime.said(object.__new__(OciRuntime), text) == said
