"""What foreign programs had forked before whoever started them was gone: it must go, too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from wall_bench import bench

from ringfence.model.errors import StartFailed
from ringfence.runtimes.launching.launcher import Child, Launcher
from ringfence.runtimes.launching.plan import Plan
from ringfence.runtimes.launching.processes import ProcessRef, kill_tree
from ringfence.runtimes.measuring import children

# As bwrap does before it has mapped its users: a child that waits for its parent, and holds both ends.
FORKS = "import os\nr, w = os.pipe()\nif os.fork():\n    os.waitpid(-1, 0)\nelse:\n    os.read(r, 1)\n"


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


async def test_what_bwrap_has_forked_dies_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first process of a namespace; the control is the same program without one."""
    async with bench("bubblewrap") as made:
        stand_in = made.folder / "bwrap"
        stand_in.write_text(f"#!/usr/bin/python3 -IS\n{FORKS}")
        stand_in.chmod(0o755)
        made.runtime.program = str(stand_in)  # type: ignore[attr-defined]
        started: list[Child] = []
        spawn = made.context.launcher.spawn

        async def noted(plan: Plan, **options: Any) -> Child:
            started.append(await spawn(plan, **options))
            return started[-1]

        monkeypatch.setattr(made.context.launcher, "spawn", noted)
        start = asyncio.create_task(made.start())
        await until(lambda: started and children(started[0].pid))
        forked = ProcessRef.of(children(started[0].pid)[0])
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(StartFailed, match="bwrap"):
            await start
        await forked.wait()

        plan = Plan()
        plan.add("ARG", str(stand_in))
        plan.add("EXEC", str(stand_in))
        child = await spawn(plan)
        await until(lambda: children(child.pid))
        forked = ProcessRef.of(children(child.pid)[0])
        os.kill(child.pid, signal.SIGKILL)
        await child.exited
        child.close()
        assert forked.alive()
        os.kill(forked.pid, signal.SIGKILL)
        await forked.wait()
