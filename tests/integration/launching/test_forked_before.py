"""What foreign programs had forked before whoever started them was gone: it must go, too."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from wall_bench import bench

from ringfence.runtimes.launching.launcher import Child, Launcher
from ringfence.runtimes.launching.plan import Plan
from ringfence.runtimes.launching.processes import ProcessRef, kill_tree
from ringfence.runtimes.measuring import children

# As bwrap does before it has mapped its users: a child that waits for its parent, and holds both ends.
FORKS = "import os\nr, w = os.pipe()\nif os.fork():\n    os.waitpid(-1, 0)\nelse:\n    os.read(r, 1)\n"

# What bwrap does then: it tells its child's pid to whoever may not be there any more.
TELLS = """#!/usr/bin/python3 -IS
import os, signal, sys, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
folder = "{folder}"
open(folder + "/forked", "w").close()
while not os.path.exists(folder + "/gone"):
    time.sleep(0.005)
os.write(6, b"{{}}")
open(folder + "/told", "w").close()
time.sleep(60)
"""


async def until(check: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not check():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
async def test_what_was_forked_goes_with_the_node(keep: bool) -> None:
    """The kept one is the control: nothing but the launcher ends the forked process."""
    launcher = await Launcher.start()
    plan = Plan()
    if keep:
        plan.add("KEEP")
    for word in ("/usr/bin/python3", "-ISc", FORKS):
        plan.add("ARG", word)
    plan.add("ENV", "PATH=/usr/bin:/bin")
    plan.add("EXEC", "/usr/bin/python3")
    child = await launcher.spawn(plan, keep=keep)
    await until(lambda: children(child.pid))
    forked = ProcessRef.of(children(child.pid)[0])
    parent = ProcessRef.of(child.pid)
    await launcher.close()
    if keep:
        assert parent.alive()
        assert forked.alive()
        kill_tree(child.pid, child.pidfd)
    await parent.wait()
    await forked.wait()
    child.close()


async def test_bwrap_does_not_die_of_a_start_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench("bubblewrap") as made:
        folder: Path = made.folder / "told"
        folder.mkdir()
        folder.chmod(0o777)
        stand_in = made.folder / "bwrap"
        stand_in.write_text(TELLS.format(folder=folder))
        stand_in.chmod(0o755)
        made.runtime.program = str(stand_in)  # type: ignore[attr-defined]
        started: list[Child] = []
        spawn = made.context.launcher.spawn

        async def held(plan: Plan, **options: object) -> Child:
            started.append(await spawn(plan))
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(made.context.launcher, "spawn", held)
        start = asyncio.create_task(made.start())
        await until((folder / "forked").exists)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        (folder / "gone").touch()
        (child,) = started
        await until(lambda: (folder / "told").exists() or child.exited.done())
        assert not child.exited.done(), "nobody would know any more what it has forked"
        kill_tree(child.pid, child.pidfd)
        await child.exited
        child.close()
        assert os.path.exists(folder / "told")
