"""The fake runtime: a real agent behind no wall, and every scripted fault through the guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.conformance.harness import eventually
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import (
    DeadlineExceeded,
    HostLimit,
    InvalidRequest,
    LinkLost,
    ProtocolViolation,
    StartFailed,
    Unsupported,
)
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes import guarding
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.contract import (
    AGENT_UID,
    CgroupPlace,
    Disk,
    Handle,
    Health,
    Identity,
    IdMap,
    RootFs,
    StartSpec,
)
from ringfence.runtimes.fake import FakeFaults, FakeRuntime
from ringfence.runtimes.guarding import Guarded, guard

ROOT = os.geteuid() == 0


@pytest.fixture
async def context() -> AsyncIterator[RuntimeContext]:
    made = await RuntimeContext.open()
    yield made
    await made.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-fake-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


def spec(folder: Path, number: str = "sb-fake", **changes: Any) -> StartSpec:
    if ROOT:
        identity = Identity(changes.pop("uid", 1000), 1000, (IdMap(0, 0x7F00_0000, 65536),), AGENT_UID)
    else:
        identity = Identity(
            changes.pop("uid", 1000),
            1000,
            (IdMap(1000, os.geteuid(), 1),),
            1000,
            gid_maps=(IdMap(1000, os.getegid(), 1),),
        )
    return StartSpec(
        id=number,
        folder=str(folder),
        hostname="fake",
        root=RootFs((), (), Disk("tmpfs", 16 << 20, 4096)),
        identity=identity,
        cgroup=CgroupPlace(),
        max_processes=64,
        max_open_files=256,
        **changes,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def walls_of(context: RuntimeContext) -> list[int]:
    """Living walls of a node: the agents among the children of its launcher."""
    launcher = context.launcher.pid
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if alive(int(pid)) and is_agent(pid)]


def is_agent(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ringfence-agent\0")
    except OSError:
        return False


async def link_to(runtime: Guarded, handle: Handle) -> GuestLink:
    return await GuestLink.open(await runtime.connect(handle))


async def output(link: GuestLink, *argv: str) -> str:
    process = await link.start(ProcessSpec(argv))
    return b"".join([piece.data async for piece in process]).decode().strip()


# -- without faults


async def test_it_runs_commands_and_says_that_it_is_no_wall(context: RuntimeContext, folder: Path) -> None:
    runtime = guard(FakeRuntime(context))
    handle = await runtime.start(spec(folder))
    try:
        async with await link_to(runtime, handle) as link:
            assert (
                await output(link, "sh", "-c", "cd; pwd; cd /workspace; echo x > f; cat f")
                == "/home/agent\nx"
            )
            assert await output(link, "id", "-u") != "0"
            assert await output(link, "cat", "/etc/passwd") == Path("/etc/passwd").read_text().strip()
            process = await link.start(ProcessSpec(("sleep", "600")))
            boundary = await runtime.measure(handle)
            await process.signal(signal.SIGKILL)
        assert (boundary.level, boundary.boundary, boundary.network) == (Level.L1, Boundary.NONE, "open")
        assert boundary.host_uid not in (0, None)
        assert boundary.capabilities == ()
        assert (await runtime.stats(handle)).processes >= 1
    finally:
        await runtime.destroy(handle)
    await eventually(lambda: not alive(handle.pid), "the wall outlived its end")
    assert os.listdir(folder) in ([], ["exit"])


async def test_the_hosts_own_folders_stay_as_they_are(context: RuntimeContext, folder: Path) -> None:
    before = {name: sorted(os.listdir(name)) for name in ("/", "/home", "/run")}
    runtime = guard(FakeRuntime(context))
    handle = await runtime.start(spec(folder))
    async with await link_to(runtime, handle) as link:
        await link.bind(secrets={"token": b"secret"})
        assert await output(link, "cat", "/run/secrets/token") == "secret"
        await output(link, "sh", "-c", "echo x > /workspace/x; echo x > ~/x; tty; true")
    await runtime.destroy(handle)
    assert {name: sorted(os.listdir(name)) for name in before} == before


async def test_a_kept_wall_outlives_its_node_and_is_adopted(folder: Path) -> None:
    first = await RuntimeContext.open()
    handle = await guard(FakeRuntime(first)).start(spec(folder, ephemeral=False))
    await first.close()
    second = await RuntimeContext.open()
    try:
        runtime = guard(FakeRuntime(second))
        assert await runtime.recover(handle)
        async with await link_to(runtime, handle) as link:
            assert await output(link, "echo", "still here") == "still here"
        await runtime.stop(handle, 2.0)
        exit_ = await runtime.wait(handle)
        assert (exit_.code, exit_.signal) != (None, None)
        assert not await runtime.recover(handle)
        await runtime.destroy(handle)
    finally:
        await second.close()
    await eventually(lambda: not alive(handle.pid), "the wall outlived its end")


async def test_an_ephemeral_wall_dies_with_its_node(folder: Path) -> None:
    context = await RuntimeContext.open()
    handle = await guard(FakeRuntime(context)).start(spec(folder))
    assert alive(handle.pid)
    await context.close()
    end = time.monotonic() + 60
    while alive(handle.pid):
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_user_zero_is_refused(context: RuntimeContext, folder: Path) -> None:
    with pytest.raises(Unsupported):
        await guard(FakeRuntime(context)).start(spec(folder, uid=0))


async def test_the_probe_runs_a_wall(context: RuntimeContext) -> None:
    assert (await guard(FakeRuntime(context)).probe()).health == Health.HEALTHY


# -- faults


@pytest.mark.parametrize("step", ["listen", "spawn", "handle"])
async def test_a_start_that_fails_at_any_step_leaves_nothing(
    context: RuntimeContext, folder: Path, step: str
) -> None:
    runtime = guard(FakeRuntime(context, FakeFaults(start_error=step, start_errno=28)))
    with pytest.raises(StartFailed, match="No space left") as caught:
        await runtime.start(spec(folder))
    assert (caught.value.details["step"], caught.value.details["errno"]) == (step, "ENOSPC")
    await eventually(lambda: walls_of(context) == [], "a wall is left")
    assert os.listdir(folder) in ([], ["exit"])


async def test_the_leak_search_finds_what_is_there(context: RuntimeContext, folder: Path) -> None:
    """The control of the tests around it: a wall that lives is found by the same search."""
    runtime = guard(FakeRuntime(context))
    handle = await runtime.start(spec(folder))
    assert walls_of(context) == [handle.pid]
    await runtime.destroy(handle)
    await eventually(lambda: walls_of(context) == [], "the wall outlived its end")


async def test_a_start_that_hangs_leaves_nothing(
    context: RuntimeContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarding, "START_DEADLINE", 0.5)
    runtime = guard(FakeRuntime(context, FakeFaults(start_hang=True)))
    with pytest.raises(DeadlineExceeded):
        await runtime.start(spec(folder))
    await eventually(lambda: walls_of(context) == [], "a wall is left")
    assert os.listdir(folder) in ([], ["exit"])


async def test_starts_may_fail_after_some_worked(context: RuntimeContext, folder: Path) -> None:
    runtime = guard(FakeRuntime(context, FakeFaults(start_error="spawn", start_works=1)))
    handle = await runtime.start(spec(folder, "sb-a"))
    second = folder / "b"
    second.mkdir()
    with pytest.raises(StartFailed):
        await runtime.start(spec(second, "sb-b"))
    await runtime.destroy(handle)


async def test_a_cancelled_slow_start_leaves_nothing(context: RuntimeContext, folder: Path) -> None:
    runtime = guard(FakeRuntime(context, FakeFaults(start_hang=True)))
    task = asyncio.ensure_future(runtime.start(spec(folder)))
    end = time.monotonic() + 60
    while not (folder / "guest.sock").exists():
        assert time.monotonic() < end
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: walls_of(context) == [], "a wall is left")


async def test_a_wall_that_dies_by_itself_is_noticed(
    context: RuntimeContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked, die = asyncio.Event(), FakeRuntime._die

    async def not_before(self: FakeRuntime, handle: Handle, seconds: float) -> None:
        await linked.wait()
        await die(self, handle, seconds)

    monkeypatch.setattr(FakeRuntime, "_die", not_before)
    runtime = guard(FakeRuntime(context, FakeFaults(die_after=0.1)))
    handle = await runtime.start(spec(folder))
    link = await link_to(runtime, handle)
    linked.set()
    assert (await runtime.wait(handle)).signal == signal.SIGKILL
    while link.failure is None:
        with contextlib.suppress(LinkLost):
            await link.ping()
    assert isinstance(link.failure, LinkLost)
    with pytest.raises(LinkLost):
        await runtime.connect(handle)
    await link.close()
    await runtime.destroy(handle)


async def test_refused_connections(context: RuntimeContext, folder: Path) -> None:
    runtime = guard(FakeRuntime(context, FakeFaults(refuse_connect=2)))
    handle = await runtime.start(spec(folder))
    for _ in range(2):
        with pytest.raises(LinkLost, match="scripted"):
            await runtime.connect(handle)
    async with await link_to(runtime, handle) as link:
        await link.ping()
    await runtime.destroy(handle)


async def test_a_link_that_is_cut_can_be_resumed(context: RuntimeContext, folder: Path) -> None:
    driver = FakeRuntime(context, FakeFaults(cut_after=3000))
    runtime = guard(driver)
    handle = await runtime.start(spec(folder))
    wanted = "".join(f"{n}\n" for n in range(2000)).encode()
    got = bytearray()
    cuts = 0
    link = await link_to(runtime, handle)
    process = await link.start(ProcessSpec(("seq", "0", "1999"), id="seq", window=1000))
    while True:
        try:
            async for _, offset, data in process:
                assert offset == len(got)
                got += data
            break
        except LinkLost:
            cuts += 1
            await link.close()
            link = await link_to(runtime, handle)
            process = await link.attach("seq", stdout=len(got), window=1000)
    await link.close()
    await runtime.destroy(handle)
    assert cuts >= 2
    assert bytes(got) == wanted


async def test_somebody_else_on_the_socket(context: RuntimeContext, folder: Path) -> None:
    runtime = guard(FakeRuntime(context, FakeFaults(garbage=True)))
    handle = await runtime.start(spec(folder))
    with pytest.raises(ProtocolViolation):
        await link_to(runtime, handle)
    await runtime.destroy(handle)


async def test_hanging_calls_hit_their_deadlines(
    context: RuntimeContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONNECT_DEADLINE", "STOP_MARGIN", "DESTROY_DEADLINE", "PROBE_DEADLINE"):
        monkeypatch.setattr(guarding, name, 0.3)
    driver = FakeRuntime(
        context, FakeFaults(connect_hang=True, stop_hang=True, destroy_hang=True, probe_hang=True)
    )
    runtime = guard(driver)
    handle = await runtime.start(spec(folder))
    with pytest.raises(DeadlineExceeded):
        await runtime.connect(handle)
    assert (await runtime.probe()).health == Health.UNAVAILABLE
    with pytest.raises(HostLimit):
        await runtime.stop(handle, 0.1)  # overruled, but the destroy hangs, too
    assert alive(handle.pid)
    driver.faults = FakeFaults()
    monkeypatch.setattr(guarding, "DESTROY_DEADLINE", 60.0)
    await runtime.destroy(handle)
    await eventually(lambda: not alive(handle.pid), "the wall outlived its end")


async def test_a_destroy_that_fails_is_tried_again(context: RuntimeContext, folder: Path) -> None:
    runtime = guard(FakeRuntime(context, FakeFaults(destroy_error=1)))
    handle = await runtime.start(spec(folder))
    with pytest.raises(HostLimit, match="scripted"):
        await runtime.destroy(handle)
    assert alive(handle.pid)
    await runtime.destroy(handle)
    await eventually(lambda: not alive(handle.pid), "the wall outlived its end")


async def test_leaks_are_leaks(context: RuntimeContext, folder: Path) -> None:
    """The control of every leak check: what the fault leaves is really there."""
    driver = FakeRuntime(context, FakeFaults(leak="process"))
    handle = await guard(driver).start(spec(folder))
    await guard(driver).destroy(handle)
    assert alive(handle.pid)
    driver.faults = FakeFaults(leak="file")
    await guard(driver).destroy(handle)
    await eventually(lambda: not alive(handle.pid), "the wall outlived its end")
    assert (folder / "guest.sock").exists()


async def test_probe_faults(context: RuntimeContext) -> None:
    found = await guard(FakeRuntime(context, FakeFaults(probe_error="no such thing"))).probe()
    assert (found.health, found.reason) == (Health.UNAVAILABLE, "no such thing")


def test_faults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "RINGFENCE_FAKE_FAULTS", '{"start_error": "spawn", "die_after": 2, "refuse_connect": -1}'
    )
    context: Any = None
    assert FakeRuntime(context).faults == FakeFaults(start_error="spawn", die_after=2, refuse_connect=-1)


@pytest.mark.parametrize(
    "text", ["[]", "nonsense", '{"no_such": 1}', '{"start_hang": 1}', '{"start_error": "x"}', '{"leak": "x"}']
)
def test_wrong_faults_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        FakeFaults.parse(text)
