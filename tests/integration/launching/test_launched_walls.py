"""Walls of jail and bubblewrap around the real agent. Also run as a normal user: see test_walls_as_user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from wall_bench import Bench, bench

from ringfence.model.errors import HostLimit, LinkLost, StartFailed, Unsupported
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.context import CHILDREN_READY, privileged
from ringfence.runtimes.contract import Bind, Disk, Exit, Health
from ringfence.runtimes.launching.processes import ProcessRef

needs_root = pytest.mark.skipif(not privileged(), reason="only root can do this")


@pytest.fixture(params=["jail", "bubblewrap"])
async def any_bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with bench(request.param) as made:
        yield made


@pytest.fixture
async def jail() -> AsyncIterator[Bench]:
    async with bench("jail") as made:
        yield made


async def test_a_probe_starts_a_wall(any_bench: Bench) -> None:
    probe = await any_bench.runtime.probe()
    assert probe.health == Health.HEALTHY, probe
    assert probe.cold_start_ms is not None
    assert probe.cold_start_ms > 0


async def test_a_command_runs_as_nobody_special(any_bench: Bench) -> None:
    handle = await any_bench.start()
    code, text = await any_bench.run(handle, "id -u; hostname; cat /proc/self/status; exit 3")
    assert code == 3
    lines = text.splitlines()
    assert lines[:2] == ["1000", "box"]
    facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[kind], 16) == 0, kind
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == "2"
    assert (await any_bench.runtime.stats(handle)).processes >= 1


async def test_the_boundary_is_measured(any_bench: Bench) -> None:
    handle = await any_bench.start()
    found = await any_bench.runtime.measure(handle)
    assert (found.level, found.boundary, found.runtime) == (
        Level.L2,
        Boundary.NAMESPACES,
        any_bench.runtime.name,
    )
    assert {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} <= set(found.namespaces)
    assert (found.seccomp, found.no_new_privs, found.network) == ("filter", True, "none")
    assert found.capabilities == ()
    assert found.host_uid == handle.data["uid"] != 0
    # Measured, not repeated: this process has no wall, and the same code says so.
    import dataclasses

    bare = dataclasses.replace(handle, pid=os.getpid(), data={})
    plain = await any_bench.runtime.measure(bare)
    assert (plain.level, plain.boundary, plain.network) == (Level.L1, Boundary.NONE, "open")


async def test_the_host_is_not_inside(any_bench: Bench) -> None:
    secret = any_bench.folder / "secret"
    secret.write_text("host")
    secret.chmod(0o644)
    handle = await any_bench.start()
    script = (
        f"cat {secret}; ls /work /root/.ssh /var/lib; ls /proc | grep -c '^[0-9]'; cat /proc/net/dev; true"
    )
    _, text = await any_bench.run(handle, script)
    assert "host\n" not in text
    assert text.count("No such file") >= 2
    assert [line.split(":")[0].strip() for line in text.splitlines() if ":" in line and "lo" in line] == [
        "lo"
    ]
    assert secret.read_text() == "host"


@pytest.mark.parametrize("path", ["/proc/kcore", "/proc/keys", "/proc/kallsyms", "/proc/timer_list"])
async def test_kernel_files_are_masked(any_bench: Bench, path: str) -> None:
    if not os.path.exists(path):
        assert path == "/proc/kcore", "the others are in every kernel we know"
        return
    handle = await any_bench.start()
    _, text = await any_bench.run(handle, f"head -c 100 {path}")
    assert text == "" or "Permission denied" in text


async def test_kernel_folders_are_masked(any_bench: Bench) -> None:
    handle = await any_bench.start()
    for path in ("/proc/acpi", "/proc/asound", "/proc/scsi"):
        if os.path.isdir(path):
            assert (await any_bench.run(handle, f"ls -A {path}"))[1] == "", path
            assert (await any_bench.run(handle, f"touch {path}/x"))[0] != 0, path


async def test_nothing_can_be_mounted_or_entered(any_bench: Bench) -> None:
    handle = await any_bench.start()
    for attempt in (
        "mount -t tmpfs x /tmp",
        "mount -o remount,rw /usr",
        "umount /proc",
        "unshare -U true",
        "unshare -m true",
        "chroot / true",
        "mknod /tmp/null c 1 3",
        "hostname other",
        "echo 1 > /proc/sys/vm/drop_caches",
        "touch /usr/x",
        "echo b > /proc/sysrq-trigger && grep -q nothing /proc/sysrq-trigger",
    ):
        code, text = await any_bench.run(handle, attempt)
        assert code != 0, (attempt, text)


async def test_binds_show_what_they_should(any_bench: Bench) -> None:
    readable, writable = any_bench.folder / "readable", any_bench.folder / "writable"
    for folder in (readable, writable):
        folder.mkdir()
        (folder / "file").write_text("shown")
        (folder / "file").chmod(0o644)
    readable.chmod(0o777)
    writable.chmod(0o777)
    handle = await any_bench.start(
        binds=(Bind(str(readable), "/data"), Bind(str(writable), "/workspace", read_only=False))
    )
    code, text = await any_bench.run(
        handle, "cat /data/file; touch /data/x; echo made > /workspace/new; cp /bin/true /workspace/true"
    )
    assert code == 0
    assert text.startswith("shown")
    assert "Read-only file system" in text
    assert (writable / "new").read_text() == "made\n"
    assert not (readable / "x").exists()


async def test_a_missing_target_is_made_on_the_overlay(jail: Bench) -> None:
    source = jail.folder / "source"
    source.write_text("here")
    source.chmod(0o644)
    handle = await jail.start(binds=(Bind(str(source), "/opt/deep/er/file"),))
    assert (await jail.run(handle, "cat /opt/deep/er/file"))[1] == "here"


async def test_a_link_in_a_layer_does_not_lead_out(jail: Bench) -> None:
    """A template may hold a symlink where something is to be mounted: it is followed inside."""
    name = f"made-{os.getpid()}"
    spec = jail.spec(binds=(Bind("/usr/share", f"/trap/{name}"),))
    os.symlink("/var/tmp", Path(spec.root.lowers[0]) / "trap")
    handle = await jail.start(spec)
    assert (await jail.run(handle, f"ls -d /var/tmp/{name}/zoneinfo"))[0] == 0
    assert not os.path.lexists(f"/var/tmp/{name}")


async def test_a_source_that_became_a_link_is_refused(jail: Bench) -> None:
    real, link = jail.folder / "real", jail.folder / "link"
    real.mkdir()
    os.symlink(real, link)
    with pytest.raises(StartFailed) as caught:
        await jail.start(binds=(Bind(str(link), "/data"),))
    assert caught.value.details == {"step": "bind", "errno": "ELOOP"}
    assert "real path" in caught.value.hint


async def test_layers_may_be_reached_through_a_link(jail: Bench) -> None:
    """The state folder may lie below a link, as /home does on many hosts."""
    spec = jail.spec()
    os.symlink(Path(spec.root.lowers[0]).parent, jail.folder / "moved")
    lower = str(jail.folder / "moved" / "skeleton")
    handle = await jail.start(replace(spec, root=replace(spec.root, lowers=(lower,))))
    assert (await jail.run(handle, "cat /etc/passwd"))[1].startswith("agent:")


@pytest.mark.parametrize("name", ["jail", "bubblewrap"])
async def test_readonly_leaves_what_the_policy_names(name: str) -> None:
    async with bench(name) as made:
        handle = await made.start(readonly=True, read_write=("/workspace",))
        code, text = await made.run(
            handle, "touch /workspace/yes && echo fine; touch /home/agent/no; touch /tmp/no"
        )
        assert code == 1
        assert "fine" in text
        assert text.count("cannot touch") == 2
        # The positive control: without the policy the same writes succeed.
        handle = await made.start()
        assert (await made.run(handle, "touch /home/agent/no /tmp/no"))[0] == 0


async def test_read_only_paths_hold_in_an_overlay(jail: Bench) -> None:
    handle = await jail.start(read_only=("/data",))
    _, text = await jail.run(handle, "touch /data/no; touch /workspace/yes && echo fine")
    assert "Read-only file system" in text
    assert "fine" in text


async def test_the_disk_is_limited(any_bench: Bench) -> None:
    handle = await any_bench.start(disk=Disk("tmpfs", 8 << 20, 256))
    _, text = await any_bench.run(handle, "head -c 20000000 /dev/zero > /workspace/big; ls -l /workspace")
    assert "No space left" in text


async def test_the_overlay_limits_inodes(jail: Bench) -> None:
    handle = await jail.start(disk=Disk("tmpfs", 8 << 20, 64))
    _, text = await jail.run(handle, "for i in $(seq 100); do : > /workspace/$i || exit; done")
    assert "No space left" in text


async def test_the_upper_layer_is_read_from_the_host_even_after_the_end(jail: Bench) -> None:
    handle = await jail.start()
    await jail.run(handle, "echo new > /workspace/new; rm /etc/passwd")
    upper = jail.runtime.open_upper(handle)
    try:
        await jail.runtime.destroy(handle)
        assert "workspace" in os.listdir(upper)
        assert os.listdir(os.open("workspace", os.O_RDONLY, dir_fd=upper)) == ["new"]
    finally:
        os.close(upper)
    # Inside, the layers below are neither writable nor (as root) even readable.
    handle = await jail.start()
    _, text = await jail.run(handle, "touch /.ringfence/upper/x; ls /.ringfence && echo seen")
    assert "cannot touch" in text
    assert ("seen" in text) == (not privileged())


async def test_limits_of_one_process(any_bench: Bench) -> None:
    handle = await any_bench.start(max_open_files=99)
    _, text = await any_bench.run(handle, "ulimit -n; ulimit -c; ulimit -l; ulimit -Hn")
    assert text.split() == ["99", "0", "64", "99"]


async def test_user_zero_is_root_of_its_own_namespace_only(jail: Bench) -> None:
    handle = await jail.start(user=0)
    code, text = await jail.run(
        handle, "id -u; echo x > /etc/made && cat /etc/made; grep CapEff /proc/self/status"
    )
    assert code == 0
    assert text.split()[:2] == ["0", "x"]
    mask = int(text.split()[-1], 16)
    assert mask == 0b11101011
    assert handle.data["uid"] != 0
    for attempt in (
        "mount -t tmpfs x /mnt",
        "unshare -m true",
        "hostname other",
        "ip link add type dummy",
        "mknod /null c 1 3",
        "echo 1 > /proc/sys/kernel/panic",
    ):
        assert (await jail.run(handle, attempt))[0] != 0, attempt


async def test_bubblewrap_refuses_user_zero() -> None:
    async with bench("bubblewrap") as made:
        with pytest.raises(Unsupported) as caught:
            await made.start(user=0)
        assert caught.value.details["capability"] == "user_zero"
        assert not made.runtime.capabilities().user_zero


async def test_the_end_is_told_as_the_host_saw_it(any_bench: Bench) -> None:
    handle = await any_bench.start(any_bench.spec(ephemeral=False))
    waiting = [asyncio.create_task(any_bench.runtime.wait(handle)) for _ in range(2)]
    os.kill(handle.pid, signal.SIGKILL)
    assert await asyncio.gather(*waiting) == [Exit(signal=9)] * 2
    with pytest.raises(LinkLost):
        await any_bench.runtime.connect(handle)
    assert not await any_bench.runtime.recover(handle)
    assert (Path(handle.folder) / "exit").read_text().strip().isdigit()


async def test_stop_asks_first(any_bench: Bench) -> None:
    handle = await any_bench.start()
    await any_bench.runtime.stop(handle, 5)
    assert await any_bench.runtime.wait(handle) == Exit(code=0)
    await any_bench.runtime.stop(handle, 5)


async def test_destroy_twice_and_nothing_is_left(any_bench: Bench) -> None:
    handle = await any_bench.start()
    await any_bench.run(handle, "sleep 100 & sleep 100 & true")
    await any_bench.runtime.destroy(handle)
    await any_bench.runtime.destroy(handle)
    assert not os.path.exists(f"/proc/{handle.pid}")
    assert not handle.socket_path.exists()


async def test_links_are_independent(any_bench: Bench) -> None:
    handle = await any_bench.start()
    results = await asyncio.gather(*[any_bench.run(handle, f"echo {n}") for n in range(8)])
    assert results == [(0, f"{n}\n") for n in range(8)]


def living_children(process: Path) -> int:
    """Without those not yet reaped: they hold nothing, and one made ahead is still to come for each."""
    count = 0
    for child in (process / f"task/{process.name}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            count += Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return count


async def open_files(made: Bench, most: int | None = None) -> int:
    """Of the launcher, once it has made its children ahead; waits a while until there are at most so many."""
    process = Path(f"/proc/{made.context.launcher.pid}")
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        # First: a child that is made ahead after the descriptors were counted has some of its own.
        ready = not made.context.root or living_children(process) == CHILDREN_READY + 1  # and the janitor
        count = 0
        for each in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += not os.readlink(each).startswith("user:")
        if (ready and (most is None or count <= most)) or asyncio.get_running_loop().time() > deadline:
            return count
        await asyncio.sleep(0.005)


async def test_a_failing_step_is_named_and_undone(jail: Bench) -> None:
    await jail.runtime.destroy(await jail.start())
    before = await open_files(jail)
    for _ in range(5):
        with pytest.raises(StartFailed) as caught:
            await jail.start(binds=(Bind("/does/not/exist", "/data"),))
        assert caught.value.details == {"step": "bind", "errno": "ENOENT"}
        assert "/does/not/exist" in caught.value.message
    assert not (jail.folder / "sb-1" / "guest.sock").exists()
    assert (await jail.run(await jail.start(), "echo still"))[1] == "still\n"
    await jail.runtime.destroy(jail.made[-1])
    assert await open_files(jail, before) <= before


async def test_bubblewrap_tells_what_bwrap_said() -> None:
    async with bench("bubblewrap") as made:
        with pytest.raises(StartFailed) as caught:
            await made.start(binds=(Bind("/does/not/exist", "/data"),))
        assert "/does/not/exist" in caught.value.message


async def test_what_only_root_can_do_is_refused_with_the_remedy(jail: Bench) -> None:
    if privileged():
        assert jail.context.root
        return
    with pytest.raises(HostLimit) as caught:
        await jail.start(disk=Disk("image", 64 << 20, 100, "/nowhere"))
    assert "root" in caught.value.hint


@needs_root
async def test_a_disk_image(jail: Bench) -> None:
    image = jail.folder / "disk.img"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    handle = await jail.start(disk=Disk("image", 16 << 20, 1000, str(image)))
    code, text = await jail.run(
        handle, "echo hi > /workspace/x && head -c 30000000 /dev/zero > /workspace/big"
    )
    assert code != 0
    assert "No space left" in text
    await jail.runtime.destroy(handle)
    backing = [Path(f).read_text() for f in map(str, Path("/sys/block").glob("loop*/loop/backing_file"))]
    assert not any(str(image) in each for each in backing)


async def until_removed(group: Path) -> None:
    """What dies in it keeps it busy for a moment."""
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        try:
            return group.rmdir()
        except OSError:
            assert asyncio.get_running_loop().time() < deadline, group
        await asyncio.sleep(0.01)


@needs_root
async def test_cgroups_are_joined_and_frozen(jail: Bench) -> None:
    from ringfence.runtimes.contract import CgroupPlace

    base = Path("/sys/fs/cgroup/freezer")
    if not base.is_dir():
        pytest.skip("no version 1 freezer here")
    group = base / f"ringfence-test-{os.getpid()}"
    (group / "work").mkdir(parents=True)
    try:
        place = CgroupPlace(agent=(f"{group}/cgroup.procs",), work=(f"{group}/work/cgroup.procs",))
        handle = await jail.start(cgroup=place)
        assert (group / "cgroup.procs").read_text().split() == [str(handle.pid)]
        command = asyncio.create_task(jail.run(handle, "read line", stdin=True))
        while not (group / "work/cgroup.procs").read_text():
            await asyncio.sleep(0.005)
        await jail.runtime.pause(handle)
        assert (group / "freezer.state").read_text() == "FROZEN\n"
        await jail.runtime.resume(handle)
        assert (group / "freezer.state").read_text() == "THAWED\n"
        await jail.runtime.pause(handle)
        # A frozen wall can be destroyed: no resume is needed first.
        await jail.runtime.destroy(handle)
        with pytest.raises(LinkLost):
            await command
        # Also one that somebody else froze.
        other = await jail.start(id="sb-2", cgroup=place)
        (group / "freezer.state").write_text("FROZEN")
        await jail.runtime.destroy(other)
        assert (group / "freezer.state").read_text() == "THAWED\n"
    finally:
        for each in (group / "work", group):
            await until_removed(each)


OWNER = """
import asyncio, dataclasses, json, os, signal, sys
from pathlib import Path
from wall_bench import Bench
from ringfence.runtimes.context import RuntimeContext

async def main(runtime, folder):
    made = Bench(runtime, Path(folder), await RuntimeContext.open())
    kept = await made.start(made.spec(ephemeral=False))
    loose = await made.start(made.spec(ephemeral=True))
    print(json.dumps([dataclasses.asdict(kept), dataclasses.asdict(loose)]), flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_owner_leaves_only_what_was_to_be_kept(any_bench: Bench) -> None:
    import json

    from ringfence.runtimes.contract import Handle

    theirs = any_bench.folder / "theirs"
    theirs.mkdir(mode=0o711)
    here = Path(__file__).parent
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, any_bench.runtime.name, str(theirs)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
    )
    assert owner.stdout is not None
    kept, loose = (Handle(**each) for each in json.loads(await asyncio.to_thread(owner.stdout.readline)))
    owner.kill()
    owner.communicate()
    await ProcessRef(loose.pid, loose.birth, loose.boot_id).wait()
    assert not await any_bench.runtime.recover(loose)
    assert await any_bench.runtime.recover(kept)
    any_bench.made.append(kept)
    assert (await any_bench.run(kept, "echo alive"))[1] == "alive\n"
    ending = asyncio.create_task(any_bench.runtime.wait(kept))
    await any_bench.runtime.destroy(kept)
    assert await ending == Exit(signal=9), "its launcher outlived the owner and wrote down how it ended"


def made_ahead(jail: Bench) -> tuple[list[int], int]:
    """The launcher's children that wait for a wall, and its janitor."""
    launcher = jail.context.launcher.pid
    text = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    ours = os.readlink(f"/proc/{launcher}/ns/pid")
    walls = {handle.pid for handle in jail.made}
    waiting, janitors = [], []
    for pid in map(int, text.split()):
        if os.readlink(f"/proc/{pid}/ns/pid") == ours:
            janitors.append(pid)
        elif pid not in walls:
            waiting.append(pid)
    (janitor,) = janitors
    return waiting, janitor


def mounts(pid: int) -> dict[str, list[str]]:
    """Mount point → file systems, of a process."""
    found: dict[str, list[str]] = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        head, tail = line.split(" - ")
        found.setdefault(head.split()[4], []).append(tail.split()[0])
    return found


@needs_root
async def test_the_root_of_the_host_is_gone_before_anything_runs(jail: Bench) -> None:
    """Also when the janitor, which detaches it, is stuck or dead."""
    assert await jail.runtime.stats(await jail.start())
    expected = mounts(jail.made[-1].pid)
    assert expected["/"] == ["overlay"]
    _, janitor = made_ahead(jail)
    os.kill(janitor, signal.SIGSTOP)
    try:
        handle = await jail.start()
        assert mounts(handle.pid) == expected
    finally:
        os.kill(janitor, signal.SIGCONT)
    os.kill(janitor, signal.SIGKILL)
    await ProcessRef.of(janitor).wait()
    handle = await jail.start()
    assert mounts(handle.pid) == expected
    assert (await jail.run(handle, "ls /.."))[1] == (await jail.run(handle, "ls /"))[1]


@needs_root
async def test_what_is_made_ahead_is_not_needed(jail: Bench) -> None:
    for _ in range(3):
        waiting, _ = made_ahead(jail)
        for pid in waiting:
            os.kill(pid, signal.SIGKILL)
        while any(os.path.exists(f"/proc/{pid}") for pid in waiting):
            await asyncio.sleep(0.002)
        handle = await jail.start()
        assert (await jail.run(handle, "cat /proc/net/dev | grep -c :; tty; ls /proc/acpi | wc -l"))[0] == 0
        assert (await jail.runtime.measure(handle)).network == "none"


@needs_root
async def test_walls_made_ahead_share_nothing(jail: Bench) -> None:
    handles = [await jail.start() for _ in range(6)]
    for name in ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user", "time"):
        inodes = {os.readlink(f"/proc/{handle.pid}/ns/{name}") for handle in handles}
        assert len(inodes) == 6, name
    await jail.run(handles[0], "echo mine > /tmp/mine; echo x > /dev/shm/mine; sleep 60 &")
    for other in handles[1:]:
        assert "mine" not in (await jail.run(other, "ls /tmp /dev/shm; cat /proc/[0-9]*/cmdline"))[1]
