"""Walls that runc, crun and nsjail build: what is left on the host, who dies with whom, what is told."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from wall_bench import Bench, bench

from ringfence.conformance.harness import eventually
from ringfence.model.errors import StartFailed
from ringfence.runtimes import nsjail
from ringfence.runtimes.contract import Bind, Health
from ringfence.runtimes.launching import foreign as foreign_module
from ringfence.runtimes.measuring import credentials, tree
from support.rootless import normal_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="rootless walls: conformance as a normal user")

NSJAIL_FOLDERS = ("/tmp/nsjail.*", "/run/user/*/nsjail*", "/run/user/nsjail*", "/dev/shm/nsjail*")
STATE_FOLDERS = ("/run/runc/*", "/run/crun/*", *NSJAIL_FOLDERS)


def traces() -> dict[str, object]:
    """What a program could leave on the host."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "mounts": sorted(line.split()[4] for line in mounts if "ringfence" in line or "/rf-" in line),
        "state": sorted(path for pattern in STATE_FOLDERS for path in glob.glob(pattern)),
        "cgroups": sorted(
            path for path in glob.glob("/sys/fs/cgroup/*/*/") if "ringfence" not in path and "sb-" in path
        ),
        "null": (os.stat("/dev/null").st_uid, os.stat("/dev/null").st_gid),
    }


async def test_nothing_of_it_is_on_the_host(foreign: Bench) -> None:
    before = traces()
    handle = await foreign.start()
    assert traces() == before
    own = os.readlink("/proc/self/ns/mnt")
    assert own not in {os.readlink(f"/proc/{pid}/ns/mnt") for pid in tree(handle.pid)}
    await foreign.runtime.destroy(handle)
    await eventually(lambda: traces() == before, "something of it stays")
    assert os.listdir(handle.folder) in ([], ["exit"])


async def test_killing_the_program_kills_the_wall(oci: Bench) -> None:
    handle = await oci.start()
    await oci.run(handle, "sleep 300 & sleep 300 & true")
    inside = tree(handle.pid)
    assert len(inside) >= 3
    os.kill(handle.data["monitor"], signal.SIGKILL)
    ended = await asyncio.wait_for(oci.runtime.wait(handle), 60)
    assert ended.signal == signal.SIGKILL
    await eventually(lambda: not any(_alive(pid) for pid in inside), "a process outlived its wall")


async def test_killing_the_agent_ends_the_program(oci: Bench) -> None:
    handle = await oci.start()
    os.kill(handle.pid, signal.SIGKILL)
    ended = await asyncio.wait_for(oci.runtime.wait(handle), 60)
    assert ended.signal == signal.SIGKILL
    await eventually(lambda: not _alive(handle.data["monitor"]), "the program outlived the agent")


async def test_no_process_keeps_a_bounding_set(foreign: Bench) -> None:
    handle = await foreign.start()
    code, text = await foreign.run(handle, "grep CapBnd /proc/self/status")
    assert (code, text.split()) == (0, ["CapBnd:", "0" * 16])
    agent = credentials(handle.pid)
    assert agent is not None
    assert agent.bounding == 0
    assert not agent.effective >> 8 & 1  # SETPCAP was lent


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8])
async def test_without_the_filter_there_is_no_wall(
    oci: Bench, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent installs it: it must refuse to serve if it can't. The control is every other test here."""
    broken = os.memfd_create("broken", os.MFD_CLOEXEC)
    os.write(broken, content)
    monkeypatch.setattr(oci.context, "filter_fd", lambda _name: broken)
    with pytest.raises(StartFailed, match="system call filter"):
        await oci.start()
    os.close(broken)


async def test_the_filter_is_the_jail_s_own(oci: Bench) -> None:
    handle = await oci.start()
    boundary = await oci.runtime.measure(handle)
    assert (boundary.seccomp, boundary.no_new_privs) == ("filter", True)
    code, text = await oci.run(handle, "grep -E 'Seccomp' /proc/self/status; unshare -U true 2>&1 || echo no")
    assert code == 0
    assert text.split() == ["Seccomp:", "2", "Seccomp_filters:", "1", *text.split()[4:]]
    assert text.endswith("no\n")


async def test_processes_stay_in_the_cgroup_that_the_node_made(foreign: Bench) -> None:
    folder = Path("/sys/fs/cgroup/pids/rf-oci-test")
    if not Path("/sys/fs/cgroup/pids/cgroup.procs").exists():
        pytest.skip("no version 1 pids controller here; version 2 is proved in a guest")
    from ringfence.runtimes.contract import CgroupPlace

    work = folder / "work"
    work.mkdir(parents=True)
    try:
        place = CgroupPlace(agent=(f"{folder}/cgroup.procs",), work=(f"{work}/cgroup.procs",))
        handle = await foreign.start(cgroup=place)
        await foreign.run(handle, "sleep 300 & true")
        agent, workload = _pids(folder), _pids(work)
        assert handle.pid in agent
        assert workload
        assert set(tree(handle.pid)) == (agent & set(tree(handle.pid))) | workload
        await foreign.runtime.destroy(handle)
        await eventually(lambda: not _pids(folder), "somebody lives on")
    finally:
        for group in (work, folder):
            await eventually(lambda group=group: _removed(group), f"{group} stays busy")  # type: ignore[misc]


async def test_mounts_of_a_hostile_template_stay_inside(foreign: Bench) -> None:
    """A folder of the template is a link to the host's: what is mounted there goes to the template's own."""
    spec = foreign.spec()
    lower = Path(spec.root.lowers[0])
    (lower / "trap").symlink_to("/etc")
    shown = foreign.folder / "shown"
    shown.write_text("shown")
    shown.chmod(0o644)
    before = Path("/etc/hostname").read_bytes() if Path("/etc/hostname").exists() else None
    handle = await foreign.start(binds=(Bind(str(shown), "/trap/hostname"),))
    assert await foreign.run(handle, "cat /etc/hostname") == (0, "shown")
    if before is not None:
        assert Path("/etc/hostname").read_bytes() == before
    assert not any("/etc/hostname" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


LOADED = """#include <fcntl.h>
__attribute__((constructor)) static void loaded(void) { open("%s", O_CREAT | O_WRONLY, 0666); }
"""


def listening_library(made: Bench) -> tuple[dict[str, str], Path]:
    """An environment that has a library loaded, and the file by which that tells."""
    folder = made.folder / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "loaded.c").write_text(LOADED % (folder / "mark"))
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "loaded.so"), str(folder / "loaded.c")]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(folder / "loaded.so")}, folder / "mark"


@pytest.mark.parametrize("name", ["nsjail", "bubblewrap"])
async def test_a_sandbox_s_environment_does_not_act_on_the_program(name: str) -> None:
    """It still sees the host's files when it starts: a library of the sandbox's choice would, too."""
    async with bench(name) as made:
        env, mark = listening_library(made)
        handle = await made.start(env=env)
        assert env["LD_PRELOAD"] in (await made.run(handle, "echo $LD_PRELOAD"))[1].splitlines()
        assert not mark.exists()
        program = str(made.runtime.program)  # type: ignore[attr-defined]
        subprocess.run([program, "--help"], env=env, check=False, capture_output=True)
        assert mark.exists()


async def test_what_nsjail_is_kept_from(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench("nsjail") as made:
        env, mark = listening_library(made)
        monkeypatch.setattr(nsjail, "_acts_on_programs", lambda _: False)
        await made.start(env=env)
        assert mark.exists()


async def test_what_the_program_says_is_told(foreign: Bench) -> None:
    program = _script(foreign, "echo 'strange: it does not like this' >&2; exit 1")
    foreign.runtime.program = program
    with pytest.raises(StartFailed, match="does not like this"):
        await foreign.start()
    assert not os.listdir(foreign.folder / "sb-0")


async def test_a_program_that_hangs_is_ended(foreign: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = foreign.folder / "pid"
    foreign.runtime.program = _script(foreign, f"echo started > {marker}; exec sleep 600")
    monkeypatch.setattr(foreign_module, "START_TIMEOUT", 1.0)
    with pytest.raises(StartFailed) as caught:
        await foreign.start()
    assert caught.value.details["step"] in ("agent", foreign.runtime.program_name)
    assert not os.listdir(foreign.folder / "sb-0")
    launcher = foreign.context.launcher.pid
    await eventually(
        lambda: not any(_command(pid).startswith("sleep") for pid in tree(launcher)), "the program lives on"
    )


async def test_a_missing_program_and_an_old_one(oci: Bench) -> None:
    name = oci.runtime.program_name
    oci.runtime.program = _script(oci, f"echo '{name} version 0.1.0'")
    probe = await oci.runtime.probe()
    assert (probe.health, probe.version) == (Health.UNAVAILABLE, "0.1.0")
    assert "too old" in probe.reason
    assert probe.vulnerabilities
    oci.runtime.program = None
    probe = await oci.runtime.probe()
    assert (probe.health, probe.remedy) == (Health.UNAVAILABLE, f"apt-get install {name}")


async def test_crun_works_where_it_refuses_by_itself(tmp_path: Path) -> None:
    from wall_bench import bench

    if not Path("/sys/fs/cgroup/unified/cgroup.procs").exists() or shutil.which("crun") is None:
        pytest.skip("no crun, or not a host with both versions of cgroups")
    subprocess.run(["crun", "spec"], cwd=tmp_path, check=True)
    (tmp_path / "rootfs").mkdir()
    bare = subprocess.run(
        ["crun", "--root", str(tmp_path / "state"), "run", "rf-oci-bare"],
        cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.PIPE, timeout=30,
    )  # fmt: skip
    assert "hybrid" in bare.stderr, bare.stderr  # the control
    async with bench("crun") as made:
        probe = await made.runtime.probe()
        assert probe.health == Health.HEALTHY, probe


def test_runc_says_what_a_normal_user_without_ids_lacks() -> None:
    if shutil.which("runc") is None:
        pytest.skip("runc is not installed")
    script = textwrap.dedent("""
        import asyncio
        from ringfence.runtimes import registry
        from ringfence.runtimes.context import RuntimeContext
        from ringfence.runtimes.launching.probing import specimen
        async def main():
            import os, tempfile
            context = await RuntimeContext.open()
            runtime = registry.load("runc", context)
            probe = await runtime.probe()
            print(probe.health, probe.reason)
            folder = tempfile.mkdtemp()
            os.chmod(folder, 0o711)
            try:
                await runtime.start(specimen(folder, False))
            except Exception as error:
                print(type(error).__name__, error.hint)
            await context.close()
        asyncio.run(main())
    """)
    with normal_user(ids=False) as user:
        done = user.python("-c", script)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    assert lines[0].startswith("degraded without subordinate ids")
    assert lines[1].startswith("HostLimit install the package uidmap")


def _script(bench: Bench, text: str) -> str:
    path = bench.folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _removed(group: Path) -> bool:
    """What dies in it keeps it busy for a moment."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _pids(folder: Path) -> set[int]:
    return {int(line) for line in (folder / "cgroup.procs").read_text().split()}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
