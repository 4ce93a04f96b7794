"""The guard over a driver that does whatever a test tells it, in every state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.model.errors import (
    DeadlineExceeded,
    HostLimit,
    LinkLost,
    RingfenceError,
    StartFailed,
    Unsupported,
    WrongState,
)
from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes import guarding
from ringfence.runtimes.contract import (
    Capabilities,
    CgroupPlace,
    Disk,
    Exit,
    Handle,
    Health,
    Identity,
    IdMap,
    Layered,
    Pausable,
    Probe,
    RootFs,
    Runtime,
    StartSpec,
    WallStats,
)
from ringfence.runtimes.guarding import guard

BOUNDARY = EffectiveBoundary(
    "toy",
    Level.L2,
    Boundary.NAMESPACES,
    "6.1",
    (),
    True,
    1,
    "filter",
    True,
    (),
    "absent",
    "absent",
    "none",
    {},
)


def spec(number: str = "sb-1", **changes: Any) -> StartSpec:
    return StartSpec(
        id=number,
        folder="/nowhere",
        hostname=number,
        root=RootFs((), (), Disk("tmpfs", 1, 1)),
        identity=Identity(changes.pop("uid", 1000), 1000, (IdMap(0, 100_000, 65536),), 64999),
        cgroup=CgroupPlace(),
        max_processes=1,
        max_open_files=1,
        **changes,
    )


class Toy:
    """A driver that counts, and fails or hangs where it is told to."""

    name = "toy"
    level = Level.L2
    boundary = Boundary.NAMESPACES

    def __init__(self) -> None:
        self.able = Capabilities(rootless=True)
        self.calls: list[str] = []
        self.behaviour: dict[str, Callable[[], Awaitable[None]]] = {}
        self.ended = asyncio.Event()
        self.exists: set[str] = set()  # what the driver has on the host
        self.sockets: list[socket.socket] = []

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        if call in self.behaviour:
            await self.behaviour[call]()

    async def probe(self) -> Probe:
        await self._do("probe")
        return Probe("toy", Health.HEALTHY, self.level, self.boundary)

    def capabilities(self) -> Capabilities:
        return self.able

    async def start(self, spec: StartSpec) -> Handle:
        self.exists.add(spec.id)
        await self._do("start")
        return Handle("toy", 1, spec.id, spec.folder, 4711, 1, "boot")

    async def recover(self, handle: Handle) -> bool:
        await self._do("recover")
        return not self.ended.is_set()

    async def connect(self, handle: Handle) -> socket.socket:
        await self._do("connect")
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        return ours

    async def wait(self, handle: Handle) -> Exit:
        await self._do("wait")
        await self.ended.wait()
        return Exit(code=7)

    async def stop(self, handle: Handle, grace: float) -> None:
        await self._do("stop")
        self.ended.set()

    async def destroy(self, handle: Handle) -> None:
        await self._do("destroy")
        self.ended.set()
        self.exists.discard(handle.id)

    async def stats(self, handle: Handle) -> WallStats:
        await self._do("stats")
        return WallStats(1, 2)

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        await self._do("measure")
        return BOUNDARY

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


class Able(Toy):
    """A driver with both optional powers."""

    async def pause(self, handle: Handle) -> None:
        await self._do("pause")

    async def resume(self, handle: Handle) -> None:
        await self._do("resume")

    def open_upper(self, handle: Handle) -> int:
        return os.open("/", os.O_RDONLY)


async def hang() -> None:
    await asyncio.Event().wait()


def fail(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def failing() -> None:
        raise error

    return failing


@pytest.fixture
async def toy() -> Any:
    driver = Toy()
    yield driver
    driver.close()


CALLS: dict[str, Callable[[Runtime, Handle], Awaitable[Any]]] = {
    "start": lambda r, h: r.start(spec(h.id)),
    "connect": lambda r, h: r.connect(h),
    "wait": lambda r, h: r.wait(h),
    "stop": lambda r, h: r.stop(h, 0.1),
    "destroy": lambda r, h: r.destroy(h),
    "stats": lambda r, h: r.stats(h),
    "recover": lambda r, h: r.recover(h),
    "measure": lambda r, h: r.measure(h),
}
# The table of the contract, but for the state "absent", in which no handle exists.
LEGAL = {
    "running": {"connect", "wait", "stop", "destroy", "stats", "recover", "measure"},
    "ended": {"wait", "stop", "destroy", "recover"},
    "destroyed": {"stop", "destroy"},
}


def test_the_table_is_the_one_in_the_contract() -> None:
    from ringfence.runtimes import contract

    lines = [line.split() for line in (contract.__doc__ or "").splitlines()]
    header = next(line for line in lines if line[:1] == ["state"])[1:]
    for state, legal in LEGAL.items():
        row = next(line for line in lines if line[:1] == [state])[1:]
        assert {call for call, word in zip(header, row, strict=True) if word == "yes"} == legal


@pytest.mark.parametrize("state", LEGAL)
@pytest.mark.parametrize("call", CALLS)
async def test_every_call_in_every_state(toy: Toy, state: str, call: str) -> None:
    runtime = guard(toy)
    handle = await runtime.start(spec())
    if state == "ended":
        toy.ended.set()
        await runtime.wait(handle)
    elif state == "destroyed":
        await runtime.destroy(handle)
    if state == "running" and call == "wait":
        task = asyncio.ensure_future(runtime.wait(handle))
        await asyncio.sleep(0)
        toy.ended.set()
        assert await task == Exit(code=7)
    elif call in LEGAL[state]:
        await CALLS[call](runtime, handle)
    else:
        # A link to what has ended is lost, as the contract says of connect; all else is a wrong call.
        expected: type[RingfenceError] = LinkLost if (state, call) == ("ended", "connect") else WrongState
        before = list(toy.calls)
        with pytest.raises(expected) as caught:
            await CALLS[call](runtime, handle)
        assert "sb-1" in str(caught.value)
        assert toy.calls == before  # the driver never heard of it


@pytest.mark.parametrize("call", sorted(set(CALLS) - {"start"}))
async def test_a_handle_from_elsewhere_is_the_drivers_to_judge(toy: Toy, call: str) -> None:
    toy.ended.set()
    await CALLS[call](guard(toy), Handle("toy", 1, "sb-9", "/nowhere", 5, 6, "boot"))
    assert toy.calls == [call]


async def test_recovering_says_what_is_true_from_then_on(toy: Toy) -> None:
    runtime = guard(toy)
    handle = Handle("toy", 1, "sb-9", "/nowhere", 5, 6, "boot")
    assert await runtime.recover(handle)
    await runtime.connect(handle)
    toy.ended.set()
    assert not await runtime.recover(handle)
    with pytest.raises(LinkLost):
        await runtime.connect(handle)


async def test_a_handle_of_another_runtime_is_refused(toy: Toy) -> None:
    handle = Handle("other", 1, "sb-9", "/nowhere", 5, 6, "boot")
    for name, call in CALLS.items():
        if name != "start":
            with pytest.raises(WrongState, match="handle of other"):
                await call(guard(toy), handle)
    assert toy.calls == []


# -- starts that fail


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (StartFailed("no", step="mount"), StartFailed),
        (HostLimit("disk full"), HostLimit),
        (OSError(13, "denied"), StartFailed),
        (KeyError("bug"), StartFailed),
    ],
)
async def test_a_start_that_fails_leaves_nothing(
    toy: Toy, error: Exception, raised: type[RingfenceError]
) -> None:
    runtime = guard(toy)
    toy.behaviour["start"] = fail(error)
    with pytest.raises(raised):
        await runtime.start(spec())
    assert toy.exists == set()
    assert toy.calls == ["start", "destroy"]
    del toy.behaviour["start"]
    assert (await runtime.start(spec())).id == "sb-1"  # the id may be tried again


async def test_a_start_that_hangs_is_undone(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "START_DEADLINE", 0.02)
    toy.behaviour["start"] = hang
    with pytest.raises(DeadlineExceeded, match=r"within 0\.02 s") as caught:
        await guard(toy).start(spec())
    assert caught.value.hint
    assert toy.exists == set()


async def test_a_cancelled_start_is_undone_however_often_it_is_cancelled(toy: Toy) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        begun.set()
        await go_on.wait()

    toy.behaviour.update(start=hang, destroy=slowly)
    task = asyncio.ensure_future(guard(toy).start(spec()))
    while "start" not in toy.calls:
        await asyncio.sleep(0)
    task.cancel()
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert toy.exists == set()


async def test_what_an_undo_could_not_remove_is_said(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.behaviour.update(start=fail(StartFailed("no", step="x")), destroy=fail(HostLimit("a mount is busy")))
    with pytest.raises(StartFailed) as caught:
        await guard(toy).start(spec())
    assert "a mount is busy" in caught.value.details["left"]
    monkeypatch.setattr(guarding, "DESTROY_DEADLINE", 0.02)
    toy.behaviour.update(start=fail(ValueError("x")), destroy=hang)
    with pytest.raises(StartFailed, match="look into /nowhere"):
        await guard(toy).start(spec())


async def test_wishes_that_the_driver_can_not_meet_never_reach_it(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = guard(toy)
    for wish, capability in ((spec(uid=0), "user_zero"), (spec(network="open"), "network")):
        with pytest.raises(Unsupported) as caught:
            await runtime.start(wish)
        assert caught.value.details["capability"] == capability
        assert caught.value.hint
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    toy.able = Capabilities()
    with pytest.raises(Unsupported, match="root only"):
        await runtime.start(spec())
    assert toy.calls == []
    toy.able = Capabilities(rootless=True, user_zero=True, network=("none", "open"))
    await runtime.start(spec(uid=0, network="open"))


async def test_an_id_is_started_once(toy: Toy) -> None:
    runtime = guard(toy)
    toy.behaviour["start"] = hang
    first = asyncio.ensure_future(runtime.start(spec()))
    await asyncio.sleep(0)
    with pytest.raises(WrongState, match="starting"):
        await runtime.start(spec())
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first


# -- ends


async def test_waiters_share_one_wait_and_one_may_leave(toy: Toy) -> None:
    runtime = guard(toy)
    handle = await runtime.start(spec())
    waiters = [asyncio.ensure_future(runtime.wait(handle)) for _ in range(5)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.sleep(0)
    toy.ended.set()
    assert await asyncio.gather(*waiters[1:]) == [Exit(code=7)] * 4
    assert toy.calls.count("wait") == 1
    assert waiters[0].cancelled()


async def test_a_driver_that_does_not_stop_is_overruled(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "STOP_MARGIN", 0.02)
    runtime = guard(toy)
    handle = await runtime.start(spec())
    toy.behaviour["stop"] = hang
    await runtime.stop(handle, 0.01)
    assert toy.calls[-2:] == ["stop", "destroy"]
    await runtime.stop(handle, 0.01)
    await runtime.destroy(handle)
    assert toy.calls.count("destroy") == 1


async def test_stop_and_destroy_are_idempotent(toy: Toy) -> None:
    runtime = guard(toy)
    handle = await runtime.start(spec())
    for _ in range(3):
        await runtime.stop(handle, 0)
    for _ in range(3):
        await runtime.destroy(handle)
    assert (toy.calls.count("stop"), toy.calls.count("destroy")) == (1, 1)


async def test_destroys_at_once_share_one_run(toy: Toy) -> None:
    runtime = guard(toy)
    handle = await runtime.start(spec())
    go_on = asyncio.Event()

    async def slowly() -> None:
        await go_on.wait()

    toy.behaviour["destroy"] = slowly
    tasks = [asyncio.ensure_future(runtime.destroy(handle)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*tasks[1:])
    assert toy.calls.count("destroy") == 1
    assert toy.exists == set()


async def test_a_destroy_that_failed_can_be_tried_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = guard(toy)
    handle = await runtime.start(spec())
    toy.behaviour["destroy"] = fail(HostLimit("a mount is busy"))
    with pytest.raises(HostLimit, match="busy"):
        await runtime.destroy(handle)
    monkeypatch.setattr(guarding, "DESTROY_DEADLINE", 0.02)
    toy.behaviour["destroy"] = hang
    with pytest.raises(HostLimit, match="within"):
        await runtime.destroy(handle)
    del toy.behaviour["destroy"]
    await runtime.destroy(handle)
    assert toy.exists == set()


async def test_slow_drivers_hit_deadlines(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "CONNECT_DEADLINE", 0.02)
    monkeypatch.setattr(guarding, "MEASURE_DEADLINE", 0.02)
    runtime = guard(toy)
    handle = await runtime.start(spec())
    for call in ("connect", "recover", "stats", "measure"):
        toy.behaviour[call] = hang
        with pytest.raises(DeadlineExceeded, match=call):
            await CALLS[call](runtime, handle)
        task = asyncio.ensure_future(CALLS[call](runtime, handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):  # a caller's own cancellation stays what it is
            await task


async def test_a_probe_never_raises_and_never_hangs(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = guard(toy)
    assert (await runtime.probe()).health == Health.HEALTHY
    toy.behaviour["probe"] = fail(HostLimit("no cgroup", hint="mount one"))
    found = await runtime.probe()
    assert (found.health, found.reason, found.remedy) == (Health.UNAVAILABLE, "no cgroup", "mount one")
    toy.behaviour["probe"] = fail(ZeroDivisionError("bug"))
    assert "ZeroDivisionError" in (await runtime.probe()).reason
    monkeypatch.setattr(guarding, "PROBE_DEADLINE", 0.02)
    toy.behaviour["probe"] = hang
    assert "did not end" in (await runtime.probe()).reason


async def test_memory_of_destroyed_sandboxes_is_bounded(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "_MOST_GONE", 10)
    runtime = guard(toy)
    for number in range(50):
        await runtime.destroy(await runtime.start(spec(f"sb-{number}")))
    assert len(runtime._gone) == 10
    assert len(runtime._walls) == 0


# -- optional powers


async def test_powers_are_those_of_the_driver(toy: Toy) -> None:
    assert isinstance(guard(toy), Runtime)
    assert not isinstance(guard(toy), Pausable)
    assert not isinstance(guard(toy), Layered)
    able = Able()
    runtime = guard(able)
    assert isinstance(runtime, Pausable)
    assert isinstance(runtime, Layered)
    handle = await runtime.start(spec())
    await runtime.pause(handle)
    await runtime.resume(handle)
    os.close(runtime.open_upper(handle))
    able.ended.set()
    await runtime.wait(handle)
    os.close(runtime.open_upper(handle))  # changes can be read after the end
    for power in (runtime.pause, runtime.resume):
        with pytest.raises(WrongState):
            await power(handle)
    await runtime.destroy(handle)
    with pytest.raises(WrongState):
        runtime.open_upper(handle)


def test_handles_survive_a_journal() -> None:
    handle = Handle("toy", 1, "sb-1", "/x" * 100, 1, 2, "b", {"a": [1]})
    assert replace(handle) == handle
    assert handle.socket_path == Path("/x" * 100) / "guest.sock"
