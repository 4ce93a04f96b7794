"""kill -9 during a snapshot, a restore, a fork, a reset, a removal: the next start finds the store sound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ringfence
from ringfence.model.errors import RingfenceError
from ringfence.node import cgroups
from ringfence.node.service import Node
from support.leaks import Leaks
from support.nodes import run

SOURCES = [str(Path(ringfence.__file__).parents[1]), str(Path(__file__).parents[2])]
# A node that kills itself before or after one call of its own. It prints the sandbox's id before.
CHILD = """
import asyncio, os, signal, sys
verb, step, moment, runtime = sys.argv[1:5]
from support.nodes import ask, run
from ringfence.node import layers, resetting, restoring, saving, snapshots, specs
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.runtimes.gvisor_parts import images
from ringfence.runtimes.guarding import Guarded
from ringfence.runtimes.launching import freezing

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def arm(owner, name):
    real = getattr(owner, name)
    if asyncio.iscoroutinefunction(real):
        async def call(*a, **k):
            if moment == "before": die()
            await real(*a, **k)
            die()
    else:
        def call(*a, **k):
            if moment == "before": die()
            real(*a, **k)
            die()
    setattr(owner, name, call)

STEPS = {
    "work": (snapshots.SnapshotStore, "work"),
    "freeze": (freezing, "freeze"),
    "copy": (layers, "copy"),
    "commit": (snapshots.SnapshotStore, "commit"),
    "write": (snapshots, "_write"),
    "quiesce": (images, "save"),
    "checkpoint": (images, "_copy"),
    "noting": (snapshots.SnapshotStore, "noting"),
    "identity": (restoring, "identity_layer"),
    "start": (Guarded, "start"),
    "restore": (images, "check"),
    "build": (resetting, "_build"),
    "leave": (NodeSandbox, "leave_wall"),
    "enter": (NodeSandbox, "enter_wall"),
    "bury": (resetting, "_bury"),
    "take": (snapshots.SnapshotStore, "_take_away"),
}

async def main():
    node = await Node.open()
    sandbox = await node.create(ask(runtime=runtime, keep=True))
    await run(sandbox, "sh", "-c", "echo kept > /workspace/x")
    if verb in ("restore", "remove"):
        await sandbox.snapshot("whole")
    print(sandbox.id, flush=True)
    arm(*STEPS[step])
    if verb == "snapshot":
        await sandbox.snapshot("half")
    elif verb == "restore":
        await node.restore("whole", keep=True)
    elif verb == "fork":
        await sandbox.fork(2)
    elif verb == "reset":
        await sandbox.reset()
        await asyncio.sleep(60)
    elif verb == "remove":
        node.snapshots.remove("whole")
    raise SystemExit("it was to die")

asyncio.run(main())
"""


def killed(verb: str, step: str, moment: str = "after", runtime: str = "jail") -> str:
    """The id of the sandbox that the dead node has left."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, verb, step, moment, runtime],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
    ) as process:
        assert process.stdout is not None
        words = process.stdout.read().split()
        assert process.wait(100) == -signal.SIGKILL
    (name,) = words
    return name


async def check_sound(name: str, *, files: str = "kept\n", whole: tuple[str, ...] = ()) -> None:
    """The sandbox goes on, the store holds what is whole and nothing else, and both work."""
    node = await Node.open()
    try:
        assert node.leftovers == ""
        store = node.snapshots
        assert {each.name for each in store.all(temporary=True)} == set(whole)
        assert store.damaged() == {}
        assert sorted(os.listdir(store.folder)) in (sorted(whole), sorted([".lock", *whole]))
        (sandbox,) = [each for each in node.sandboxes() if each.id == name]
        assert (await run(sandbox, "sh", "-c", "cat /workspace/x 2>&1 || true"))[1] == files
        for each in node.sandboxes():
            assert (await run(each, "echo", "on"))[1] == "on\n"
        made = await sandbox.snapshot("next")
        copy = await node.restore(made.name)
        assert (await run(copy, "echo", "on"))[1] == "on\n"
        await sandbox.reset()
        for each in node.sandboxes():
            await each.destroy()
        for snapshot in store.all(temporary=True):
            store.verify(snapshot)
            store.remove(snapshot.name)
        assert [entry for entry in os.listdir(store.folder) if entry != ".lock"] == []
    finally:
        await node.close()  # waits for the cleaning
    assert [group for group in cgroups.detect().names() if group.startswith(name)] == []
    assert os.listdir(node.state.sandboxes) == []


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["work", "freeze", "copy", "write", "commit"])
async def test_killed_while_saving(no_leaks: Leaks, step: str, moment: str) -> None:
    if step == "freeze" and os.geteuid() != 0:
        pytest.skip("freezing needs a cgroup")
    name = killed("snapshot", step, moment)
    await check_sound(name, whole=("half",) if (step, moment) == ("commit", "after") else ())


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["noting", "identity", "start"])
async def test_killed_while_restoring(no_leaks: Leaks, step: str, moment: str) -> None:
    name = killed("restore", step, moment)
    await check_sound(name, whole=("whole",))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["commit", "start"])
async def test_killed_while_forking(no_leaks: Leaks, step: str, moment: str) -> None:
    await check_sound(killed("fork", step, moment))  # what was temporary went with its maker


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["start", "build", "leave", "enter", "bury"])
async def test_killed_while_beginning_anew(no_leaks: Leaks, step: str, moment: str) -> None:
    name = killed("reset", step, moment)
    exchanged = (step, moment) not in (("start", "before"), ("start", "after"), ("build", "before"),
                                       ("build", "after"))  # fmt: skip
    gone = "cat: /workspace/x: No such file or directory\n"
    await check_sound(name, files=gone if exchanged else "kept\n")


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_killed_while_removing(no_leaks: Leaks, moment: str) -> None:
    await check_sound(killed("remove", "take", moment), whole=("whole",) if moment == "before" else ())


@pytest.mark.skipif(os.geteuid() != 0, reason="walls of gVisor need root")
@pytest.mark.parametrize(
    ("verb", "step", "moment"),
    [
        ("snapshot", "quiesce", "before"),
        ("snapshot", "checkpoint", "after"),
        ("snapshot", "quiesce", "after"),
        ("restore", "restore", "after"),
    ],
)
async def test_killed_with_memory_half_saved(no_leaks: Leaks, verb: str, step: str, moment: str) -> None:
    import shutil

    if shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    name = killed(verb, step, moment, "gvisor")
    await check_sound(name, whole=("whole",) if verb == "restore" else ())


async def test_killed_at_any_moment(no_leaks: Leaks) -> None:
    # Not at our steps but at odd times: whatever is found is whole, or is not there.
    code = CHILD.replace("arm(*STEPS[step])", "pass").replace(
        'await sandbox.snapshot("half")',
        'for n in range(1000): await sandbox.snapshot(f"s{n}"); print(n, flush=True)',
    )
    for delay in (0.0, 0.003, 0.011):
        process = subprocess.Popen(
            [sys.executable, "-c", code, "snapshot", "-", "-", "jail"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "0\n"
        time.sleep(delay)
        process.kill()
        process.stdout.read()
        process.stdout.close()
        process.wait()
        async with await Node.open() as node:
            store = node.snapshots
            assert store.damaged() == {}
            for snapshot in store.all():
                store.verify(snapshot)
                try:
                    copy = await node.restore(snapshot.name)
                except RingfenceError as error:
                    pytest.fail(f"{snapshot.name}: {error}")
                await copy.destroy()
                store.remove(snapshot.name)
            (sandbox,) = node.sandboxes()
            assert (await run(sandbox, "cat", "/workspace/x"))[1] == "kept\n"
            await sandbox.destroy()
