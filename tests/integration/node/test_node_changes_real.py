"""File changes of real walls: through the overlay of the jail, and the writable folders of bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable

import pytest

from ringfence.conformance.harness import eventually
from ringfence.model.errors import WrongState
from ringfence.model.levels import Cause
from ringfence.model.policy import MIB, Filesystem
from ringfence.node import changes
from ringfence.node.sandboxes import NodeSandbox
from support.nodes import run

Make = Callable[..., Awaitable[NodeSandbox]]
SCRIPT = """
set -e
mkdir -p /workspace/new/deep
printf hello > /workspace/new/deep/file
ln -s /etc/passwd /workspace/link
printf x > "$(printf '/tmp/new\\nline')"
printf x > "$(printf '/tmp/\\377')"
mkfifo /tmp/fifo
touch /home/agent/.empty
"""


def kinds(found: object) -> dict[str, str]:
    return {change.path: f"{change.kind} {change.type}" for change in found}  # type: ignore[attr-defined]


@pytest.mark.parametrize("runtime", ["jail", "bubblewrap"])
async def test_added(one: Make, runtime: str) -> None:
    sandbox = await one(runtime=runtime)
    assert await sandbox.changes() == ()
    result, text = await run(sandbox, "sh", "-c", SCRIPT)
    assert result.end.exit_code == 0, text
    found = await sandbox.changes()
    assert kinds(found) == {
        "/workspace/new": "added directory",
        "/workspace/new/deep": "added directory",
        "/workspace/new/deep/file": "added file",
        "/workspace/link": "added symlink",
        "/tmp/new\nline": "added file",
        "/tmp/\udcff": "added file",
        "/tmp/fifo": "added other",
        "/home/agent/.empty": "added file",
    }
    (file,) = [change for change in found if change.path == "/workspace/new/deep/file"]
    assert (file.size, file.digest) == (5, "sha256:" + hashlib.sha256(b"hello").hexdigest())
    await sandbox.destroy()


@pytest.mark.skipif(os.geteuid() != 0, reason="rootless, every file of the template is the caller's")
async def test_modified_and_deleted_by_the_sandboxs_root(one: Make) -> None:
    sandbox = await one(user=0)
    script = (
        "set -e; echo more >> /etc/hosts; rm /etc/services; rm -r /var/log; mkdir /var/log; "
        "touch /etc/shells; rm -r /etc/ssl/certs"
    )
    result, text = await run(sandbox, "sh", "-c", script)
    assert result.end.exit_code == 0, text
    found = kinds(await sandbox.changes())
    certificates = {path for path in found if path.startswith("/etc/ssl/certs/")}
    assert {path: kind for path, kind in found.items() if path not in certificates} == {
        "/etc/hosts": "modified file",
        "/etc/services": "deleted file",
        "/etc/ssl/certs": "deleted directory",
    }
    assert certificates
    assert all(found[path].startswith("deleted") for path in certificates)
    await sandbox.destroy()


async def test_of_a_run_that_was_killed(one: Make) -> None:
    sandbox = await one(timeout=6)
    result, _ = await run(sandbox, "sh", "-c", "echo x > /workspace/before; sleep 60")
    assert result.end.cause is Cause.DEADLINE
    assert kinds(await sandbox.changes()) == {"/workspace/before": "added file"}
    await sandbox.destroy()


async def test_of_a_wall_that_died_by_itself_they_are_gone(one: Make) -> None:
    sandbox = await one()
    os.kill(sandbox.handle.pid, 9)
    await sandbox.ended
    with pytest.raises(WrongState):
        await sandbox.changes()
    await sandbox.destroy()


async def test_while_the_workload_fights_back(one: Make) -> None:
    sandbox = await one()
    fight = (
        "cd /workspace; while :; do mkdir d; echo x > d/f; mv d e; ln -s /etc d; rm d; ln -s /proc/self e/l; "
        "rm -r e; done"
    )
    from ringfence.guest.processes import ProcessSpec

    process = await sandbox.start(ProcessSpec(("sh", "-c", fight)))
    for _ in range(30):
        for change in await sandbox.changes():
            assert change.path.startswith("/workspace")
            assert not change.path.startswith(("/workspace/d/passwd", "/workspace/d/shadow"))
    await process.close()
    await sandbox.destroy()


async def test_a_layer_larger_than_memory_is_no_problem(one: Make) -> None:
    if os.geteuid() != 0:
        pytest.skip("images need root")
    sandbox = await one(memory=64 * MIB, disk=128 * MIB)
    await run(sandbox, "sh", "-c", "head -c 90000000 /dev/zero > /workspace/big")
    (change,) = await sandbox.changes()
    assert change.size == 90_000_000
    assert change.digest == "sha256:" + hashlib.sha256(bytes(90_000_000)).hexdigest()
    await sandbox.destroy()


async def test_many_files(one: Make) -> None:
    sandbox = await one(disk=64 * MIB)
    code = "for n in range(7000): open(f'/workspace/{n}', 'w').close()"
    assert (await run(sandbox, "python3", "-c", code))[0].end.exit_code == 0
    found = await sandbox.changes()
    assert len(found) == 7000
    assert found.cut == ()
    await sandbox.destroy()


async def test_mounts_of_the_policy_are_no_changes(one: Make) -> None:
    sandbox = await one(files=Filesystem(read_write=("/workspace", "/data"), read_only=("/nothing",)))
    assert await sandbox.changes() == ()
    await run(sandbox, "sh", "-c", "echo x > /data/x")
    assert kinds(await sandbox.changes()) == {"/data/x": "added file"}
    await sandbox.destroy()


async def test_where_the_hosts_own_files_are_seen_they_are_left_out(one: Make) -> None:
    sandbox = await one(runtime="fake")
    await run(sandbox, "sh", "-c", "echo x > /workspace/x")
    found = await sandbox.changes()
    assert kinds(found) == {"/workspace/x": "added file"}
    assert any("/tmp is the host's own" in cut for cut in found.cut)
    await sandbox.destroy()


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel shows the option only where it could be otherwise")
@pytest.mark.parametrize("runtime", ["jail", "nsjail", "runc"])
async def test_the_upper_layer_is_complete_in_itself(one: Make, runtime: str) -> None:
    """A renamed folder of the template is copied, whatever the host's kernel would do by default."""
    sandbox = await one(runtime=runtime)
    _, mounts = await run(sandbox, "cat", "/proc/self/mounts")
    options = [
        line.split()[3].split(",") for line in mounts.splitlines() if line.startswith("root / overlay ")
    ]
    assert options
    assert all("redirect_dir=nofollow" in words for words in options)


async def test_the_layer_is_its_own_until_all_is_told(one: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await one()
    await run(sandbox, "sh", "-c", "echo x > /workspace/file")
    walking, ended = threading.Event(), threading.Event()
    seen: list[int] = []

    def slowly(upper: int, lowers: tuple[str, ...]) -> object:
        before = os.fstat(upper).st_ino
        walking.set()
        assert ended.wait(60)
        seen.extend((upper, before, os.fstat(upper).st_ino))
        return of_upper(upper, lowers)

    of_upper = changes.of_upper
    monkeypatch.setattr(changes, "of_upper", slowly)
    telling = asyncio.create_task(sandbox.changes())
    await asyncio.to_thread(walking.wait, 60)
    await sandbox.destroy()
    others = [os.open("/", os.O_RDONLY | os.O_CLOEXEC) for _ in range(64)]  # takes every number that is free
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    ended.set()
    await eventually(lambda: len(seen) == 3, "the walk does not end")
    upper, before, after = seen
    assert before == after
    assert upper not in others
    for each in others:
        os.close(each)

    def closed() -> bool:
        with contextlib.suppress(OSError):
            return os.fstat(upper).st_ino != before
        return True

    await eventually(closed, "its descriptor stays open")
