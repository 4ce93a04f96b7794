"""kill -9 of the node at every step of a sandbox's life: the next adopts what shall live, sweeps the rest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ringfence
from ringfence.model.levels import Cause
from ringfence.node import cgroups, disks
from ringfence.node.service import Node
from ringfence.node.state import StateRoot
from support.leaks import Leaks
from support.nodes import ask, run

SOURCES = [str(Path(ringfence.__file__).parents[1]), str(Path(__file__).parents[2])]
# A node that kills itself before or after one call of its own: (words, "before" or "after") → dead there.
CHILD = """
import asyncio, os, signal, sys, time
step, moment, keep, runtime, timeout, disk = sys.argv[1:7]
from support.nodes import ask, run
from ringfence.node import cgroups, disks, groups, identities, journal, service, state, templates
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def arm(owner, name):
    real = getattr(owner, name)
    if asyncio.iscoroutinefunction(real):
        async def call(*a, **k):
            if moment == "before": die()
            result = await real(*a, **k)
            die()
    else:
        def call(*a, **k):
            if moment == "before": die()
            result = getattr(real, "__func__", real)(*a, **k)
            die()
        if isinstance(owner.__dict__.get(name) if isinstance(owner, type) else None, classmethod):
            call = classmethod(call)
    setattr(owner, name, call)

STEPS = {
    "folder": (state.StateRoot, "take_folder"),
    "range": (identities.Ranges, "take"),
    "journal": (journal.Journal, "begin"),
    "group": (groups.GroupPool, "take"),
    "disk": (disks, "prepare"),
    "root": (templates.HostTemplate, "root"),
    "handle": (service, "handle_as_json"),
    "group-back": (groups.GroupPool, "give_back"),
    "folder-back": (state.StateRoot, "give_folder"),
    "range-back": (identities.Ranges, "give_back"),
}

async def main():
    node = await Node.open(adopt=False)
    driver = await node.runtime(runtime)
    if step in STEPS and not step.endswith("-back"):
        arm(*STEPS[step])
    if step == "start":
        arm(driver, "start")
    words = {"runtime": runtime, "keep": keep == "keep", "timeout": float(timeout), "disk": int(disk)}
    sandbox = await node.create(ask(**words))
    print(sandbox.id, sandbox.handle.pid, flush=True)
    if step == "running":
        (await sandbox.link())
        await run(sandbox, "sh", "-c", "(sleep 600 &) ; echo x > /workspace/x", on_start=None)
        die()
    if step == "idle":
        await asyncio.sleep(600)
    if step == "short":  # from now on, and nobody is there to see it end
        sandbox.set_deadline(time.time() + 4)
        die()
    if step.endswith("-back"):
        arm(*STEPS[step])
    if step == "destroy":
        arm(driver, "_destroy")
    if step == "close":
        await node.close()
        return
    await sandbox.destroy()

asyncio.run(main())
"""
CREATE = ["folder", "range", "journal", "group", "disk", "root", "start", "handle"]
DESTROY = ["destroy", "group-back", "folder-back", "range-back"]


def child(
    step: str,
    moment: str = "after",
    *,
    keep: bool = False,
    runtime: str = "jail",
    timeout: float = 60,
    disk: int = 32 << 20,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, "-c", CHILD, step, moment, "keep" if keep else "ephemeral", runtime, str(timeout),
            str(disk),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
    )  # fmt: skip


def dead(process: subprocess.Popen[str]) -> list[str]:
    """Wait for its death; what it printed: id and pid of its sandbox, if it came so far."""
    with process:
        assert process.stdout is not None
        words = process.stdout.read().split()
        assert process.wait(60) == -signal.SIGKILL
    return words


async def check_swept(leaks: Leaks) -> None:
    """The next node opens, nothing of the dead one is left, and it works."""
    assert leaks.home is not None
    names = os.listdir(leaks.home / "nodes")
    assert names
    node = await Node.open()
    try:
        assert node.leftovers == ""
        assert node.sandboxes() == []
        assert os.listdir(node.state.sandboxes) == []
        assert os.listdir(node.state.ranges) == []
        assert os.listdir(node.state.nodes) == [node.state.owner]
        # Others use this machine's cgroups too: the dead node's have its name.
        assert not [g for g in cgroups.detect().names() if any(g.startswith(name + ".") for name in names)]
        assert disks.loop_devices(node.state.path) == {}
        sandbox = await node.create(ask())
        assert (await run(sandbox, "echo", "on"))[1] == "on\n"
        await sandbox.destroy()
    finally:
        await node.close()


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", CREATE)
async def test_killed_while_creating(no_leaks: Leaks, step: str, moment: str, keep: bool) -> None:
    if step == "range" and os.geteuid() != 0:
        pytest.skip("only root leases ranges")
    assert dead(child(step, moment, keep=keep)) == []
    await check_swept(no_leaks)


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", DESTROY)
async def test_killed_while_destroying(no_leaks: Leaks, step: str, moment: str, keep: bool) -> None:
    if step == "range-back" and os.geteuid() != 0:
        pytest.skip("only root leases ranges")
    assert len(dead(child(step, moment, keep=keep))) == 2
    await check_swept(no_leaks)  # a kept one whose end has begun is not adopted


@pytest.mark.parametrize("runtime", ["jail", "bubblewrap", "fake"])
async def test_killed_while_a_command_ran(no_leaks: Leaks, runtime: str) -> None:
    assert len(dead(child("running", runtime=runtime))) == 2
    await check_swept(no_leaks)


@pytest.mark.skipif(os.geteuid() != 0, reason="images need root")
async def test_killed_with_a_disk_image_mounted(no_leaks: Leaks) -> None:
    assert len(dead(child("running", disk=300 << 20))) == 2
    await check_swept(no_leaks)


async def test_a_kept_sandbox_is_adopted_with_its_files_and_limits(no_leaks: Leaks) -> None:
    name, pid = dead(child("running", keep=True))
    async with await Node.open() as node:
        (sandbox,) = node.sandboxes()
        assert (sandbox.id, sandbox.handle.pid) == (name, int(pid))
        assert sandbox.request.keep
        assert 0 < sandbox.deadline - time.time() < 60
        assert (await run(sandbox, "cat", "/workspace/x"))[1] == "x\n"
        assert [change.path for change in await sandbox.changes()] == ["/workspace/x"]
        limits = (await sandbox.boundary()).limits
        assert limits["memory"] == cgroups.detect().enforced()["memory"]
        result, _ = await run(sandbox, "python3", "-c", "x = bytearray(900 << 20)")
        assert result.end.cause is Cause.OUT_OF_MEMORY
        await sandbox.destroy()


async def test_a_node_that_does_not_adopt_leaves_it_alone(no_leaks: Leaks) -> None:
    name, pid = dead(child("running", keep=True))
    async with await Node.open(adopt=False) as node:
        assert node.sandboxes() == []
        assert Path(f"/proc/{pid}").exists()
    async with await Node.open() as node:
        assert [sandbox.id for sandbox in node.sandboxes()] == [name]
        await node.get(name).destroy()
    assert os.listdir(node.state.ranges) == []


async def test_a_deadline_outlives_the_node(no_leaks: Leaks) -> None:
    name, _ = dead(child("short", keep=True))
    async with await Node.open() as node:  # in time: the rest of the time counts
        sandbox = node.get(name)
        end = await asyncio.wait_for(sandbox.ended, 60)
        assert (end.cause, end.exit_code) == (Cause.DEADLINE, 124)
        assert time.time() >= sandbox.deadline - 0.1


@pytest.mark.parametrize("adopt", [False, True])
async def test_a_deadline_that_passed_meanwhile_is_kept_at_recovery(no_leaks: Leaks, adopt: bool) -> None:
    name, pid = dead(child("short", keep=True))
    await asyncio.sleep(4.5)  # the deadline passes, and nobody is there
    assert Path(f"/proc/{pid}").exists()  # nobody was there to kill it
    async with await Node.open(adopt=adopt) as node:
        if adopt:
            end = await asyncio.wait_for(node.get(name).ended, 60)
            assert end.cause is Cause.DEADLINE
        else:
            assert os.listdir(node.state.sandboxes) == []
        for _ in range(6000):
            if not Path(f"/proc/{pid}").exists():
                break
            await asyncio.sleep(0.01)
        assert not Path(f"/proc/{pid}").exists()


async def test_closed_in_good_order_a_kept_one_waits_for_the_next(no_leaks: Leaks) -> None:
    with child("close", keep=True) as process:
        assert process.stdout is not None
        name, pid = process.stdout.read().split()
        assert process.wait(60) == 0
    assert Path(f"/proc/{pid}").exists()
    async with await Node.open() as node:
        sandbox = node.get(name)
        assert (await run(sandbox, "echo", "hello"))[1] == "hello\n"
        await sandbox.destroy()


async def test_a_living_nodes_sandboxes_are_nobody_elses_business(no_leaks: Leaks) -> None:
    process = child("idle")
    assert process.stdout is not None
    name, pid = process.stdout.readline().split()
    dead(child("running"))  # something to sweep beside it
    async with await Node.open() as node:
        assert os.listdir(node.state.sandboxes) == [name]
        assert Path(f"/proc/{pid}").exists()
        assert await node.recover() == []
        assert Path(f"/proc/{pid}").exists()
    process.kill()
    dead(process)
    await check_swept(no_leaks)


async def test_a_sweeper_that_is_killed_is_no_trouble(no_leaks: Leaks) -> None:
    dead(child("running"))
    dead(child("running"))  # opens the state root, sweeps, runs, dies
    code = (
        "import asyncio, os, signal\nfrom ringfence.node import state\n"
        "from ringfence.node.service import Node\n"
        "state.StateRoot.give_folder = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(Node.open())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    await check_swept(no_leaks)


async def test_nodes_that_open_at_once_do_not_disturb_each_other(no_leaks: Leaks) -> None:
    dead(child("running"))
    code = (
        "import asyncio\nfrom support.nodes import ask, run\nfrom ringfence.node.service import Node\n"
        "async def main():\n for _ in range(4):\n  async with await Node.open() as node:\n"
        "   sandbox = await node.create(ask())\n   _, text = await run(sandbox, 'echo', 'fine')\n"
        "   assert text == 'fine\\n'\n   await sandbox.destroy()\nasyncio.run(main())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(4)]
    assert [process.wait(100) for process in processes] == [0] * 4
    node = await Node.open()
    assert os.listdir(node.state.sandboxes) == os.listdir(node.state.ranges) == []
    await node.close()


async def test_after_a_reboot_nothing_is_taken_for_alive(no_leaks: Leaks) -> None:
    name, pid = dead(child("running", keep=True))
    assert no_leaks.home is not None
    journal = no_leaks.home / "sandboxes" / name / "journal"
    journal.write_text(journal.read_text() + '{"boot":"00000000-0000-0000-0000-000000000000"}\n')
    assert Path(f"/proc/{pid}").exists()  # the control: by its number alone it would be taken for alive
    async with await Node.open() as node:
        assert node.sandboxes() == []
        assert os.listdir(node.state.sandboxes) == []
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)


async def test_a_journal_that_makes_no_sense_is_swept(no_leaks: Leaks) -> None:
    state = StateRoot.open()
    for number, text in enumerate(
        ["", "nonsense\n", '{"v":1,"keep":true,"state":"handle","owner":5}\n', '{"v":9}\n']
    ):
        folder = state.take_folder(f"sb-0000000000000000000{number}")
        (folder / "journal").write_text(text)
    state.close(leave=True)
    node = await Node.open()
    assert os.listdir(node.state.sandboxes) == []
    await node.close()


async def test_a_folder_that_somebody_is_just_making_is_left_alone(no_leaks: Leaks) -> None:
    StateRoot.open().close(leave=True)  # something dead, so that there is a sweep at all
    other = StateRoot.open()
    folder = other.take_folder("sb-00000000000000000000")
    node = await Node.open()
    assert folder.is_dir()
    other.give_folder(folder)
    other.close()
    await node.close()
