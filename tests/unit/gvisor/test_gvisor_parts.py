"""The parts of the gvisor driver that need no gVisor."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import CgroupPlace, Disk, Health, Identity, IdMap, RootFs, StartSpec
from ringfence.runtimes.gvisor import GvisorRuntime
from ringfence.runtimes.gvisor_parts import links, sandboxes
from ringfence.runtimes.launching import probing


def _spec(folder: Path, user: int = 1000) -> StartSpec:
    return StartSpec(
        id="sb-1",
        folder=str(folder),
        hostname="host",
        root=RootFs(("/lower",), (), Disk("tmpfs", 1 << 20, 256), readonly=True),
        identity=Identity(user, user, (IdMap(0, 100_000, 65536),), 64999),
        cgroup=CgroupPlace(),
        max_processes=17,
        max_open_files=256,
    )


def test_the_bundle_makes_no_user_namespace_and_bounds_processes(tmp_path: Path) -> None:
    found = sandboxes.document(_spec(tmp_path))
    assert "user" not in {each["type"] for each in found["linux"]["namespaces"]}
    assert "uidMappings" not in found["linux"]
    limits = {each["type"]: each["hard"] for each in found["process"]["rlimits"]}
    assert limits["RLIMIT_NPROC"] == 17
    assert found["process"]["noNewPrivileges"] is True
    assert found["process"]["user"]["uid"] == 0  # the agent; the workload is another
    assert "uid=1000" in found["process"]["args"]


def test_the_platform_is_never_one_that_hangs() -> None:
    assert "--platform=systrap" in sandboxes.OPTIONS
    assert "--network=none" in sandboxes.OPTIONS
    assert "--host-uds=create" in sandboxes.OPTIONS


def test_the_filter_denies_what_ours_denies_but_threads() -> None:
    names = {name for entry in sandboxes.call_filter("x86_64")["syscalls"] for name in entry["names"]}
    assert {"unshare", "setns", "mount", "ptrace", "bpf", "clone"} <= names
    assert not {"clone3", "sethostname", "read"} & names


def test_only_a_socket_is_dialled(tmp_path: Path) -> None:
    folder = tmp_path / links.FOLDER
    folder.mkdir()
    with pytest.raises(FileNotFoundError):
        links.dial(str(tmp_path))
    (folder / "guest.sock").write_text("no socket")
    with pytest.raises(OSError, match="no socket"):
        links.dial(str(tmp_path))
    (folder / "guest.sock").unlink()
    real = socket.socket(socket.AF_UNIX)
    real.bind(str(folder / "real"))
    real.listen()
    os.symlink("real", folder / "guest.sock")
    with pytest.raises(OSError, match="no socket"):
        links.dial(str(tmp_path))
    (folder / "guest.sock").unlink()
    (folder / "real").rename(folder / "guest.sock")
    links.dial(str(tmp_path)).close()  # the control
    real.close()


def test_the_folder_may_have_a_long_name(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    (deep / links.FOLDER).mkdir(parents=True)
    real = socket.socket(socket.AF_UNIX)
    descriptor = os.open(deep / links.FOLDER, os.O_PATH)
    real.bind(f"/proc/self/fd/{descriptor}/guest.sock")
    os.close(descriptor)
    real.listen()
    links.dial(str(deep)).close()
    real.close()


async def test_without_root_a_probe_says_so_and_starts_nothing() -> None:
    class Driver:
        name, level, boundary = "gvisor", Level.L3, Boundary.USERSPACE_KERNEL
        context = SimpleNamespace(root=False)
        capabilities = GvisorRuntime.capabilities

    found = await probing.probe(Driver(), "1.0")
    assert (found.health, found.reason) == (Health.UNAVAILABLE, "it needs root")
    assert found.remedy
