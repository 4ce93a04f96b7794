"""The node's own tests once more as a normal user, and a normal user with delegated cgroups of version 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringfence.node import cgroups
from support import rootless
from support.rootless import normal_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this session is a normal user's already")
TESTS = [
    f"tests/integration/node/test_node_{name}.py"
    for name in ("limits", "lifecycle", "changes_real", "crashes")
]
# What differs for a normal user; the rest is the same code on the same paths.
CHOSEN = (
    "limits and not image or test_files_of_the_policy or without_any_cgroup or many_at_once or test_added "
    "or run_that_was_killed or killed_while_a_command_ran or (creating and after and kept) or adopted"
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ids", [False, True], ids=["one-id", "subordinate-ids"])
def test_as_a_normal_user(ids: bool) -> None:
    with normal_user(ids=ids) as user:
        outcomes, done = user.pytest(*TESTS, "-k", CHOSEN, timeout=1100)
    failed = [f"{found.test}\n{found.text}" for found in outcomes if found.outcome == "failed"]
    assert not failed, "\n\n".join(failed)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len([found for found in outcomes if found.outcome == "passed"]) > 30


@contextmanager
def delegated(user: int) -> Iterator[None]:
    """Folders of the user's own in the hierarchies of version 1."""
    made = []
    try:
        for name in ("memory", "pids", "cpu", "cpuacct"):
            folder = Path(f"/sys/fs/cgroup/{name}/ringfence-{user}")
            folder.mkdir()
            made.append(folder)
            for path in (folder, *folder.iterdir()):
                os.chown(path, user, user)
        yield
    finally:
        for folder in made:
            for below in sorted(folder.rglob("*"), reverse=True):
                if below.is_dir():
                    below.rmdir()
            folder.rmdir()


SCRIPT = """
import asyncio, json, sys
from ringfence.node import cgroups
from ringfence.node.service import Node
from support.nodes import ask, run

async def main():
    async with await Node.open() as node:
        sandbox = await node.create(ask(memory=64 << 20, cpu_time=0.5))
        limits = (await sandbox.boundary()).limits
        result, _ = await run(sandbox, "python3", "-c", "x = bytearray(800 << 20)")
        _, text = await run(sandbox, "echo", "still here")
        spun, _ = await run(sandbox, "sh", "-c", "while :; do :; done")
        await sandbox.destroy()
    print(json.dumps([limits, result.end.cause, text, spun.end.cause, sorted(cgroups.detect().names())]))

asyncio.run(main())
"""


@pytest.mark.skipif(cgroups.detect().mode not in ("v1", "hybrid"), reason="version 1 is not mounted here")
@pytest.mark.parametrize("ids", [False, True], ids=["one-id", "subordinate-ids"])
def test_with_cgroups_of_version_1_of_his_own(ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    # Of another number than the other tests' user: they are to go without.
    monkeypatch.setattr(rootless, "UID", 54377)
    with delegated(54377), normal_user(ids=ids) as user:
        done = user.run(["python", "-c", "import sys; sys.path.insert(0, 'tests')\n" + SCRIPT])
        assert done.returncode == 0, done.stderr
        limits, cause, text, spun, names = json.loads(done.stdout)
    assert limits["memory"] == limits["cpu"] == limits["pids"] == limits["cpu_time"] == "cgroup-v1"
    assert (cause, text, spun) == ("out_of_memory", "still here\n", "cpu_time")
    assert names == []
