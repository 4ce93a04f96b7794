"""kill -9 of a node at every step of what it does: the next one adopts, and the same call again succeeds.

What is left is looked for outside the product: processes, mounts, cgroups, network namespaces, loop devices,
folders.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringfence
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import NotFound
from ringfence.model.ids import new_id
from ringfence.node import cgroups
from ringfence.placement.hosting import Hosting
from support import placement_nursery as nursery
from support.leaks import Leaks, loop_devices, mounts

CASES = [
    (operation, step, moment)
    for operation, steps in nursery.STEPS.items()
    for step in steps
    for moment in ("before", "after")
    if os.geteuid() == 0 or not {operation, step} & nursery.ROOT_ONLY
]
SOURCES = [str(Path(ringfence.__file__).parents[1]), str(Path(__file__).parents[2])]


class Nursery:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.placement_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
        )

    def die(self, *case: str) -> int:
        """A node that died there; its pid."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        pid, status = json.loads(self.process.stdout.readline())
        assert os.WIFSIGNALED(status), f"it did not die there: {status}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        return int(pid)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def leaks(nodes: Nursery) -> Iterator[Leaks]:
    with Leaks() as made:
        yield made


async def run(node: Hosting, id: str, *argv: str) -> tuple[int, bytes]:
    async with await GuestLink.open(await node.connect(id), timeout=60) as link:
        process = await link.start(ProcessSpec(argv))
        output = b"".join([piece.data async for piece in process])
        return (await process.wait()).status, output


@pytest.mark.parametrize(("operation", "step", "moment"), CASES, ids=lambda part: str(part))
async def test_killed_in_the_middle(
    nodes: Nursery, leaks: Leaks, operation: str, step: str, moment: str
) -> None:
    id = new_id("sb")
    pid = nodes.die(str(leaks.home), operation, step, moment, id)
    node = await Hosting.open(leaks.home, "crash", lambda *_: None)
    try:
        assert node.node.leftovers == ""
        await check(node, operation, id)
        if operation not in ("ended", "destroy", "detach", "make_volume", "import", "remove_volume"):
            assert [each.id for each in node.all()] == [id]  # not lost, not doubled
            assert (await node.destroy(id, 0.0))["cause"] == "killed"
        assert node.all() == []
        for name in node.volumes.volumes.names():
            await node.volumes.remove(name)
        await node.remove_snapshot(nursery.SNAPSHOT)
    finally:
        await node.close()
    leaks.check()
    # Idle groups that the dead node had ready are gone as well.
    assert not [name for name in cgroups.detect().names() if f".{pid}." in name]
    assert not [line for line in mounts() if str(leaks.home) in line]
    assert not [file for file in loop_devices().values() if str(leaks.home) in file]
    assert leaks.home is not None
    for folder in ("sandboxes", "ranges", "nodes", "services/crash/ended", "services/crash/volumes"):
        assert os.listdir(leaks.home / folder) == [], folder
    assert [name for name in os.listdir(leaks.home / "snapshots") if not name.startswith(".lock")] == []


async def check(node: Hosting, operation: str, id: str) -> None:
    """What was asked for is done when it is asked for again."""
    if operation == "ended":
        assert node.get(id).end is not None or node.node.get(id)
        while node.get(id).state != "ended":  # adopted before its end was known: it is past its deadline
            await node._watches[id]
        end = node.get(id).end
        assert end is not None
        assert end["cause"] == "deadline"
        assert (await node.destroy(id, 0.0))["cause"] == "deadline"
        return
    await nursery.operate(node, operation, id)
    if operation in ("destroy", "detach", "make_volume", "import", "remove_volume"):
        with pytest.raises(NotFound):
            node.get(id)
    if operation == "bind":
        script = "echo $BOUND; cat /run/secrets/s"
        assert await run(node, id, "sh", "-c", script) == (0, b"yes\nx")
        assert node.node.get(id).request.labels == {"a": "b"}
    elif operation == "pause":
        assert node.get(id).state == "paused"
        await node.resume(id)
    if operation == "import":
        data = b"".join([piece async for piece in node.volumes.export(nursery.VOLUME)])
        assert b"abc" in data
    elif operation == "make_volume":
        assert await node.volumes.size(nursery.VOLUME) >= 0
    elif operation == "attach":
        assert await run(node, id, "sh", "-c", "echo x > /data/x; cat /data/x") == (0, b"x\n")
    elif operation in ("start", "bind", "pause", "resume", "snapshot", "reset"):
        assert await run(node, id, "echo", "on") == (0, b"on\n")
