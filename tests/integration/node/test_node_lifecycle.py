"""Create, and undo of everything at every step; selection; several nodes at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.conformance.harness import alive, eventually
from ringfence.model.errors import (
    HostLimit,
    InvalidRequest,
    NotFound,
    RingfenceError,
    RuntimeUnavailable,
    StartFailed,
)
from ringfence.model.levels import Cause, Level
from ringfence.model.policy import Filesystem, Isolation, Mount, Network, Policy, Resources
from ringfence.model.sandbox import SandboxRequest
from ringfence.node import cgroups, disks, journal, service
from ringfence.node.commands import NodeProcess
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.node.state import StateRoot
from ringfence.node.templates import HostTemplate
from ringfence.runtimes.launching import freezing
from support.leaks import Leaks
from support.nodes import ask, groups_of, run

Make = Callable[..., Awaitable[NodeSandbox]]


def empty(node: Node) -> list[str]:
    """What is there that should not be, with no sandbox alive."""
    left = [str(path) for path in node.state.sandboxes.iterdir()]
    idle = {group.name for groups in node.groups._idle.values() for group in groups}
    left += sorted(groups_of(node) - idle)
    taken = set(os.listdir(node.state.ranges)) - {str(number) for number in node.ranges._free}
    return left + sorted(taken)


STEPS: dict[str, tuple[Any, str]] = {
    "folder": (StateRoot, "take_folder"),
    "journal": (journal.Journal, "begin"),
    "cgroup": (cgroups.Cgroups, "create"),
    "disk": (disks, "prepare"),
    "template": (HostTemplate, "root"),
    "handle": (service, "handle_as_json"),
    "sandbox": (service, "NodeSandbox"),
}


@pytest.mark.parametrize("step", STEPS)
async def test_a_failing_step_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    owner, name = STEPS[step]

    def fail(*_: object, **__: object) -> None:
        raise HostLimit("injected")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(HostLimit, match="injected"):
            await node.create(ask())
    assert empty(node) == []
    sandbox = await node.create(ask())  # and it goes on as if nothing had been
    assert (await run(sandbox, "echo", "on"))[1] == "on\n"
    await sandbox.destroy()


async def test_a_driver_that_fails_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = await node.runtime("jail")

    async def fail(_: object) -> None:
        raise StartFailed("the wall could not be started: mount: No space left", step="mount", errno="ENOSPC")

    monkeypatch.setattr(runtime, "start", fail)
    with pytest.raises(StartFailed) as caught:
        await node.create(ask())
    assert caught.value.details["step"] == "mount"
    assert empty(node) == []


async def test_cancelled_in_the_middle_of_a_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = await node.runtime("jail")
    real = runtime.start
    handles = []

    async def slow(spec: Any) -> Any:
        handles.append(await real(spec))
        await asyncio.sleep(60)

    monkeypatch.setattr(runtime, "start", slow)
    creating = asyncio.ensure_future(node.create(ask()))
    while not handles:
        await asyncio.sleep(0.001)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    # The driver was never heard of again, so its wall is killed through the cgroup. A process leaves that
    # a moment before it counts as dead, and stays in /proc until its parent has heard of it.
    if node.cgroups.mode != "none":
        await eventually(lambda: not alive(handles[0]), "the wall is dead")
    await runtime.destroy(handles[0])
    await eventually(lambda: not empty(node), "everything is given back")


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.001, 0.002, 0.004, 0.008])
async def test_cancelled_at_any_moment(node: Node, delay: float) -> None:
    for _ in range(3):
        creating = asyncio.ensure_future(node.create(ask()))
        await asyncio.sleep(delay)
        creating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await creating).destroy()
    await asyncio.gather(*node._background)
    assert empty(node) == []


async def test_closing_while_a_start_is_under_way(no_leaks: Leaks) -> None:
    node = await Node.open()
    creating = [asyncio.ensure_future(node.create(ask())) for _ in range(4)]
    await asyncio.sleep(0.002)
    await node.close()
    for result in await asyncio.gather(*creating, return_exceptions=True):
        assert isinstance(result, HostLimit | StartFailed | NodeSandbox)
        if isinstance(result, NodeSandbox):
            assert (await result.ended).cause is Cause.KILLED
    assert groups_of(node) == set()
    with pytest.raises(HostLimit, match="closed"):
        await node.create(ask())


async def test_closing_destroys_what_lives(no_leaks: Leaks) -> None:
    node = await Node.open()
    sandboxes = [await node.create(ask()) for _ in range(3)]
    await node.close()
    assert [sandbox.ended.result().cause for sandbox in sandboxes] == [Cause.KILLED] * 3
    await node.close()


async def test_many_at_once(node: Node) -> None:
    async def life(number: int) -> str:
        sandbox = await node.create(ask(memory=64 << 20, disk=8 << 20))
        _, text = await run(sandbox, "sh", "-c", f"echo {number} > /workspace/x; cat /workspace/x; id -u")
        await sandbox.destroy()
        return text

    texts = await asyncio.gather(*(life(number) for number in range(24)))
    assert texts == [f"{number}\n1000\n" for number in range(24)]
    await asyncio.gather(*node._background)  # processes that still die
    assert empty(node) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="as a normal user all have the caller's id")
async def test_no_two_living_sandboxes_share_a_host_user(node: Node) -> None:
    other = await Node.open()
    sandboxes = [await n.create(ask()) for _ in range(3) for n in (node, other)]
    users = {(await sandbox.boundary()).host_uid for sandbox in sandboxes}
    assert len(users) == 6
    assert min(users) >= 0x7000_0000
    for sandbox in sandboxes:
        await sandbox.destroy()
    await other.close()


async def test_an_id_of_the_callers_and_only_once(node: Node) -> None:
    name = "sb-00000000000000000abc"
    sandbox = await node.create(ask(id=name))
    assert node.get(name) is sandbox
    with pytest.raises(InvalidRequest, match="already"):
        await node.create(ask(id=name))
    assert (await run(sandbox, "hostname"))[1].strip() == name
    await sandbox.destroy()
    with pytest.raises(NotFound):
        node.get(name)


async def test_files_of_the_policy(node: Node, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for path in (shared, *list(shared.parents)[:3]):
        path.chmod(path.stat().st_mode | 0o005)
    (shared / "in").write_text("from the host")
    files = Filesystem("readonly", read_write=("/workspace", "/data"), mounts=(Mount(str(shared), "/in"),))
    sandbox = await node.create(ask(files=files))
    script = (
        "cat /in/in; echo; echo x > /data/ok && echo data; echo x > /workspace/ok && echo workspace; "
        "echo x > /tmp/no || echo no-tmp; echo x > /in/no || echo no-in; echo x > /etc/no || echo no-etc"
    )
    _, text = await run(sandbox, "sh", "-c", f"({script}) 2>/dev/null")
    assert text.split() == ["from", "the", "host", "data", "workspace", "no-tmp", "no-in", "no-etc"]
    await sandbox.destroy()
    assert sorted(os.listdir(shared)) == ["in"]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"isolation": Isolation(runtime="jial")}, NotFound, "jial"),
        ({"isolation": Isolation(Level.L4)}, RuntimeUnavailable, "L4"),
        ({"isolation": Isolation(Level.L3, runtime="jail")}, RuntimeUnavailable, "L3"),
        ({"resources": Resources(memory=1 << 50)}, InvalidRequest, "memory"),
        ({"resources": Resources(disk=1)}, InvalidRequest, "disk"),
        (
            {"filesystem": Filesystem(mounts=(Mount("/does/not/exist", "/x"),))},
            InvalidRequest,
            "No such file",
        ),
    ],
)
async def test_bad_requests(
    node: Node, change: dict[str, Any], kind: type[RingfenceError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        await node.create(SandboxRequest(policy=Policy().with_wall(**change)))
    assert caught.value.hint
    assert empty(node) == []


async def test_egress_without_a_door_reaches_nothing(node: Node) -> None:
    sandbox = await node.create(SandboxRequest(policy=Policy().with_door(network=Network("egress"))))
    try:
        assert (await sandbox.boundary()).network == "egress"
        script = "echo $https_proxy; for port in 61128 61080 61443; do : < /dev/tcp/127.0.0.1/$port; done"
        _, text = await run(sandbox, "/bin/bash", "-c", script)
        assert text.startswith("http://127.0.0.1:61128\n")
        assert text.count("connect: Connection refused") == 3, text
    finally:
        await sandbox.destroy()


async def test_an_unknown_runtime_lists_the_known(node: Node) -> None:
    with pytest.raises(NotFound) as caught:
        await node.create(ask(runtime="jial"))
    assert "jail" in caught.value.hint
    assert "bubblewrap" in caught.value.hint


async def test_where_the_jail_can_not_start_the_next_one_does_and_says_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    jail = await node.runtime("jail")

    async def fail(_: object) -> None:
        raise StartFailed("injected: no such luck", step="clone", errno="EPERM")

    monkeypatch.setattr(jail, "start", fail)
    assert await node.select(ask(runtime=None).policy) == "jail"
    sandbox = await node.create(ask(runtime=None))
    boundary = await sandbox.boundary()
    assert boundary.runtime == "bubblewrap"
    assert any("not jail" in note and "no such luck" in note for note in boundary.notes)
    await sandbox.destroy()
    with pytest.raises(StartFailed, match="no such luck"):  # named: nothing takes its place
        await node.create(ask(runtime="jail"))


async def test_once_it_has_worked_nothing_takes_its_place(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await node.create(ask(runtime=None))).destroy()
    jail = await node.runtime("jail")

    async def fail(_: object) -> None:
        raise StartFailed("injected", step="mount", errno="EINVAL")

    monkeypatch.setattr(jail, "start", fail)
    with pytest.raises(StartFailed, match="injected"):
        await node.create(ask(runtime=None))


async def test_probes_tell_of_every_runtime(node: Node) -> None:
    probes = {probe.runtime: probe for probe in await node.probe_all()}
    assert set(probes) >= {"jail", "bubblewrap", "fake"}
    assert probes["jail"].health in ("healthy", "degraded")
    with pytest.raises(NotFound):
        await node.probe("jial")


async def test_a_full_state_disk_is_one_clear_message(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(file: int, data: bytes) -> int:
        if data.startswith(b'{"v"'):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(HostLimit, match="the disk is full") as caught:
            await node.create(ask())
    assert caught.value.hint
    assert empty(node) == []


async def test_a_cgroup_that_can_not_be_made_is_one_clear_message(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    if node.cgroups.mode == "none":
        pytest.skip("no cgroup here")

    def refuse(path: str, _text: str) -> None:
        raise OSError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(cgroups, "_write", refuse)
        with pytest.raises(HostLimit, match=r"make cgroup .*permission denied") as caught:
            await node.create(ask())
    assert "doctor" in caught.value.hint
    assert empty(node) == []


@pytest.mark.parametrize("runtime", ["jail", "bubblewrap"])
async def test_without_any_cgroup_limits_are_polled_and_said_to_be(
    no_leaks: Leaks, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setattr(
        cgroups, "detect", lambda: cgroups.Cgroups("none", reason="none here", remedy="get some")
    )
    async with await Node.open() as node:
        sandbox = await node.create(ask(runtime=runtime, memory=64 << 20, cpu_time=30.0))
        boundary = await sandbox.boundary()
        assert boundary.limits["memory"] == boundary.limits["cpu_time"] == "polled"
        assert boundary.limits["pids"] == "rlimit"
        assert any("none here" in note and "get some" in note for note in boundary.notes)
        code = (
            "import time\nx = []\nfor _ in range(60): x.append(b'x' * (4 << 20)); time.sleep(0.02)\n"
            "time.sleep(60)"  # whoever looks at it may be late
        )
        result, _ = await run(sandbox, "python3", "-c", code)
        assert (result.end.cause, result.end.exit_code) == (Cause.OUT_OF_MEMORY, 137)
        await sandbox.destroy()
        sandbox = await node.create(ask(runtime=runtime, cpu_time=0.3))
        result, _ = await run(sandbox, "sh", "-c", "while :; do :; done")
        assert result.end.cause is Cause.CPU_TIME
        await sandbox.destroy()


SWEEPS = """
import asyncio, sys
from pathlib import Path
from ringfence.node import sweeping
from ringfence.node.service import Node

async def main():
    sweeping._old_group = lambda name: True
    sweeping._just_made = lambda node, name: False
    node = await Node.open(Path(sys.argv[1]))
    seen = node.cgroups.names()
    type(node.cgroups).names = lambda _: [name for name in seen if name == sys.argv[2]]  # no test's but ours
    sweeping._sweep_groups(node)
    print(sys.argv[2] in seen)
    await node.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
@pytest.mark.parametrize("keep", [False, True], ids=["ephemeral", "kept"])
async def test_who_sees_no_other_processes_takes_no_others_groups(
    node: Node, keep: bool, tmp_path: Path
) -> None:
    """As in a container that shares the host's cgroups: nothing there looks alive, and still it is."""
    sandbox = await node.create(ask(keep=keep))
    words: tuple[str, ...] = ("unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", SWEEPS)
    words += (str(tmp_path / "other"), sandbox.group.name)
    child = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    told, _ = await child.communicate()
    assert child.returncode == 0 and told == b"True\n", "it saw it"
    assert (await run(sandbox, "echo", "on"))[1] == "on\n"
    await sandbox.destroy()


async def test_a_folder_has_its_journal_before_anything_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without a journal is swept when it is seconds old: a template's first use may take as long."""
    taken: list[asyncio.Handle] = []
    loop = asyncio.get_running_loop()
    take, begin = StateRoot.take_folder, journal.Journal.begin

    def folder(*arguments: Any) -> Path:
        taken.append(loop.call_soon(taken.clear))  # as soon as anything is waited for
        return take(*arguments)

    def noted(*arguments: Any) -> Any:
        assert taken, "the event loop turned between folder and journal"
        return begin(*arguments)

    launcher = node.launcher

    async def slow_launcher() -> Any:
        await asyncio.sleep(0.05)
        return await launcher()

    monkeypatch.setattr(node, "launcher", slow_launcher)
    monkeypatch.setattr(StateRoot, "take_folder", folder)
    monkeypatch.setattr(journal.Journal, "begin", noted)
    sandbox = await node.create(ask())
    await sandbox.destroy()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is sure to have a freezer")
async def test_a_pause_that_is_cancelled_in_the_middle_is_taken_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await node.create(ask())
    reached = freezing._reached
    monkeypatch.setattr(freezing, "_reached", lambda path, frozen: not frozen and reached(path, frozen))
    pausing = asyncio.create_task(sandbox.pause())
    switch = freezing._switch(sandbox.group.place().agent)
    assert switch is not None
    await eventually(lambda: reached(switch[0], True), "nothing is frozen")
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not sandbox.paused
    assert (await run(sandbox, "echo", "alive"))[1] == "alive\n"
    await sandbox.destroy()


async def test_a_run_whose_guest_is_mute_can_be_cancelled(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await node.create(ask())
    running = asyncio.create_task(run(sandbox, "sleep", "600"))
    await eventually(lambda: bool(sandbox._commands), "it does not begin")
    await asyncio.sleep(0.5)

    async def mute(*_: object) -> None:
        await asyncio.sleep(600)

    monkeypatch.setattr(NodeProcess, "signal", mute)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await sandbox.destroy()
