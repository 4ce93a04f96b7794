"""What only a wall that is a machine has: QEMU's own wall, its helper process, and faults of the start."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.conformance.harness import Kit, alive, eventually, nothing_left, python, request_for, run
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import RuntimeUnavailable, StartFailed, Unsupported
from ringfence.model.levels import Cause
from ringfence.runtimes.contract import Health
from ringfence.runtimes.vm import disks, driver, kernel, probing

pytestmark = pytest.mark.timeout(900)

INSIDE = """
import os, socket
print("interfaces", [name for _, name in socket.if_nameindex()])
print("devices", sorted(os.listdir("/dev")))
print("user", os.getuid(), os.getgroups())
for line in open("/proc/self/status"):
    if line.startswith(("Seccomp:", "NoNewPrivs:", "CapEff:", "CapBnd:")):
        print(*line.split())
for path in ("/config", "/filter", "/modules", "/disk", "/lower", "/cgroup"):
    print(path, os.path.exists(path))
PATHS = {"program": "/usr/bin/python3", "sysctl": "/proc/sys/kernel/modprobe", "sysrq": "/proc/sysrq-trigger"}
for name, path in PATHS.items():
    try:
        os.open(path, os.O_WRONLY)
        print(name, "opened")
    except OSError as error:
        print(name, error.errno)
"""


def status_of(pid: int) -> dict[str, str]:
    """``/proc/PID/status`` as a dictionary."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


async def test_a_machine_in_a_wall(kit: Kit) -> None:
    sandbox = await kit.sandbox(memory=128 << 20, disk=64 << 20)
    link = await kit.link(sandbox)
    found = dict(line.split(" ", 1) for line in (await python(link, INSIDE)).text.splitlines())
    assert found["interfaces"] == "['lo']"
    assert "vport" not in found["devices"]
    assert "vda" not in found["devices"]
    assert found["user"] == "1000 []"
    assert (found["Seccomp:"], found["NoNewPrivs:"]) == ("2", "1")
    assert int(found["CapEff:"], 16) == int(found["CapBnd:"], 16) == 0
    assert {found[path] for path in ("/config", "/filter", "/modules", "/disk", "/lower", "/cgroup")} == {
        "False"
    }
    assert found["program"] == "13"
    assert found["sysctl"] in ("13", "30")
    assert found["sysrq"] in ("13", "30")
    words = Path(f"/proc/{sandbox.handle.pid}/cmdline").read_text().split("\0")
    kind = "microvm," if sandbox.handle.data["kvm"] else "q35,"
    assert words[words.index("-M") + 1].startswith(kind)
    # And QEMU itself: nobody on the host, with nothing but what it opens.
    pid = sandbox.handle.pid
    status = status_of(pid)
    assert int(status["Uid"].split()[1]) == sandbox.handle.data["uid"] != 0
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["Seccomp"], status["NoNewPrivs"], status["NSpid"].split()[-1]) == ("2", "1", "1")
    root = Path(f"/proc/{pid}/root")
    assert sorted(os.listdir(root)) == ["dev", "firmware", "lib64", "proc", "qemu", "tmp", "usr", "vm"] or (
        "etc" not in os.listdir(root) and "vm" in os.listdir(root)
    )
    assert sorted(os.listdir(root / "vm")) == ["disk", "initrd", "kernel", "template"]
    assert sorted(os.listdir(root / "dev")) == ["null", "urandom"]
    largest = Path(f"/proc/{pid}/limits").read_text().partition("Max file size")[2].split()[0]
    assert int(largest) < 4 << 30  # it can't fill the host's disk through its own
    groups = Path(f"/proc/{pid}/cgroup").read_text()
    assert sandbox.id in groups or kit.node.state.owner in groups
    for path in sandbox.handle.data["cgroups"]:
        inside = Path(path).read_text().split()
        assert str(pid) in inside
    # A host process that is root sees it all: what is shut in is QEMU, not the look from outside.
    assert (root / "qemu").exists()


async def test_the_process_behind_its_socket_may_be_killed(kit: Kit) -> None:
    sandbox = await kit.sandbox(memory=128 << 20, disk=64 << 20)
    link = await kit.link(sandbox)
    await link.start(ProcessSpec(("sleep", "600"), id="sleeping", detached=True))
    pid = int(sandbox.handle.data["link"][0])
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: link.failure is not None, "the link lives on", 30)
    again = await kit.link(sandbox)
    assert "sleeping" in [process.id for process in await again.processes()]
    assert (await run(again, "echo", "on")).text == "on"
    assert alive(sandbox.handle)


async def test_a_machine_that_dies_has_a_cause_and_leaves_nothing(kit: Kit) -> None:
    sandbox = await kit.sandbox(memory=128 << 20, disk=64 << 20)
    link = await kit.link(sandbox)
    await link.start(ProcessSpec(("sleep", "600"), detached=True))
    os.kill(sandbox.handle.pid, signal.SIGKILL)
    end = await sandbox.ended
    assert end.cause is Cause.RUNTIME_CRASH
    assert "SIGKILL" in end.detail
    helper = int(sandbox.handle.data["link"][0])
    await sandbox.destroy()
    await nothing_left(kit.state, [sandbox.id])
    await eventually(lambda: not Path(f"/proc/{helper}").exists(), "its helper stays")


async def test_a_disk_that_is_no_file_system(kit: Kit) -> None:
    spec = await kit.spec(memory=128 << 20, disk=64 << 20)
    root = replace(spec.root, template="sha256:broken")
    store = disks.store(spec.folder)
    image = Path(store) / f"{disks.name_of(root)}.erofs"
    image.write_bytes(bytes(1 << 20))
    try:
        with pytest.raises(StartFailed, match="vda:erofs") as caught:
            await kit.start(replace(spec, root=root))
    finally:
        image.unlink()
    assert caught.value.details["step"] in ("boot", "agent")
    assert os.listdir(spec.folder) == []


async def test_a_guest_that_hangs(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = kit.runtime.driver  # type: ignore[attr-defined]
    monkeypatch.setattr(real, "start_timeout", 0.05)
    spec = await kit.spec(memory=128 << 20, disk=64 << 20)
    with pytest.raises(StartFailed, match="does not come up") as caught:
        await kit.start(spec)
    assert caught.value.details["step"] == "agent"
    assert os.listdir(spec.folder) == []
    os.rmdir(spec.folder)
    await nothing_left(kit.state, [spec.id], 30)


async def test_no_kernel(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match="no kernel folder") as caught:
        await kit.sandbox()
    assert "ringfence setup" in caught.value.hint


async def test_no_qemu_and_an_old_one(kit: Kit, tmp_path: Path) -> None:
    real: Any = kit.runtime.driver  # type: ignore[attr-defined]
    program = real.program
    try:
        real.program = None
        with pytest.raises(RuntimeUnavailable, match="not installed"):
            await kit.sandbox()
        assert (await kit.runtime.probe()).health == Health.UNAVAILABLE
        old = tmp_path / "qemu"
        old.write_text("#!/bin/sh\necho QEMU emulator version 4.2.1\n")
        old.chmod(0o755)
        real.program = str(old)
        probe = await kit.runtime.probe()
        assert (probe.health, probe.version) == (Health.UNAVAILABLE, "4.2.1")
        assert "too old" in probe.reason
        assert probe.remedy == driver.REMEDY
    finally:
        real.program = program


async def test_what_a_machine_is_not_given(kit: Kit) -> None:
    with pytest.raises(Unsupported, match="template of its own"):
        await kit.node.create(request_for(kit.name, template="host"))
    request = request_for(kit.name)
    wall = request.policy.wall
    strict = replace(wall, isolation=replace(wall.isolation, allow_emulated=False))
    if not kit.runtime.driver.kvm:  # type: ignore[attr-defined]
        with pytest.raises(RuntimeUnavailable, match="emulation"):
            await kit.node.create(replace(request, policy=replace(request.policy, wall=strict)))


async def test_files_that_changed_are_not_told(kit: Kit) -> None:
    sandbox = await kit.sandbox(memory=128 << 20, disk=64 << 20)
    with pytest.raises(Unsupported, match="disk is its guest's alone"):
        await sandbox.changes()


async def test_the_probe_boots_a_guest_once(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_PROVED", str(tmp_path / "machine"))
    probe = await kit.runtime.probe()
    assert probe.health in (Health.HEALTHY, Health.DEGRADED), probe
    assert probe.cold_start_ms
    assert probe.health == Health.HEALTHY or "emulated" in probe.reason
    assert probe.version
    assert "remembered" not in probe.reason
    for name in (kit.name, "qemu"):  # the same machine, and it says so
        again = await (await kit.node.runtime(name)).probe()
        assert (again.health, again.cold_start_ms) == (probe.health, probe.cold_start_ms)
        assert "remembered: a guest booted" in again.reason
    monkeypatch.setattr(probing, "_PROVED", str(tmp_path / "nowhere" / "machine"))
    monkeypatch.setattr(type(kit.runtime.driver), "start_timeout", 0.01)  # type: ignore[attr-defined]
    failed = await kit.runtime.probe()
    assert failed.health == Health.UNAVAILABLE, failed
    assert not (tmp_path / "nowhere").exists()
