"""``ringfence node`` as a process: readiness, restarts, kill -9, two services, who may connect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.conformance.suites.placements import Events, run, spec, until
from ringfence.guest.link import GuestLink
from ringfence.model.errors import NodeUnavailable, NotFound
from ringfence.node.journal import read
from ringfence.placement import wire
from ringfence.placement.contract import Placement
from ringfence.placement.local import LocalPlacement
from support.leaks import process
from support.service_nodes import NodeProcess

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user connects")


@pytest.fixture
async def placement(node: NodeProcess) -> AsyncIterator[LocalPlacement]:
    if node.process is None:
        node.start()
    made = LocalPlacement(node.socket, patience=60)
    yield made
    for each in await made.list():
        await made.destroy(each.id)
    await made.close()


def test_it_says_when_it_is_ready(node: NodeProcess) -> None:
    assert node.said == f"ready: service test, 0 sandboxes found, listening on {node.socket}\n"
    info = os.lstat(node.socket)
    assert stat.S_ISSOCK(info.st_mode)
    assert stat.S_IMODE(info.st_mode) == 0o600


def test_one_node_a_service(node: NodeProcess) -> None:
    command = [sys.executable, "-m", "ringfence", "node", "--service", "test", "--json"]
    second = subprocess.run(
        command, env=os.environ | {"RINGFENCE_HOME": str(node.home)}, capture_output=True, timeout=60
    )
    assert second.returncode == 125
    error = json.loads(second.stdout or second.stderr)["error"]
    assert error["code"] == "wrong_state"
    assert "another node serves the service 'test'" in error["message"]
    assert node.process is not None
    assert node.process.poll() is None


@pytest.mark.parametrize("name", ["../x", "", "A", "x/y", "-x", "x" * 64])
def test_impossible_services(node: NodeProcess, name: str) -> None:
    command = [sys.executable, "-m", "ringfence", "node", f"--service={name}"]
    done = subprocess.run(
        command, env=os.environ | {"RINGFENCE_HOME": str(node.home)}, capture_output=True, timeout=60
    )
    assert done.returncode == 125
    assert b"no name of a service" in done.stderr
    assert b"Traceback" not in done.stderr


async def test_sandboxes_live_on_after_sigterm(node: NodeProcess, placement: Placement) -> None:
    wanted = spec(labels={"k": "v"})
    first = await placement.start(wanted)
    link = await GuestLink.open(await placement.connect(wanted.id), timeout=60)
    status, errors = await asyncio.to_thread(node.stop)
    assert (status, errors) == (0, "")
    assert not node.socket.exists()
    await link.ping(60)  # streams don't pass through the node
    await asyncio.to_thread(node.start)
    assert ", 1 sandboxes found," in node.said
    assert await placement.get(wanted.id) == first
    assert (await placement.start(wanted)) == first
    await link.ping(60)
    await link.close()
    assert await run(placement, wanted.id, "echo", "on") == (0, b"on\n")


async def test_calls_go_on_over_kill_9(node: NodeProcess, placement: Placement) -> None:
    wanted = [spec() for _ in range(3)]
    async with Events(placement) as events:
        for each in wanted:
            await placement.start(each)
        await placement.bind(wanted[0].id, deadline=time.time() + 4321)
        await asyncio.to_thread(node.stop, signal.SIGKILL)
        await events.has("lost")
        events.seen.clear()
        waiting = asyncio.create_task(placement.list())
        await asyncio.to_thread(node.start)
        assert {each.id for each in await waiting} == {each.id for each in wanted}
        await events.has("back")
    found = await placement.get(wanted[0].id)
    assert found.deadline == pytest.approx(time.time() + 4321, abs=120)
    assert found.state == "running"


async def test_a_deadline_that_passed_while_no_node_was_there(
    node: NodeProcess, placement: Placement
) -> None:
    wanted = spec(deadline=time.time() + 2.0)
    await placement.start(wanted)
    await asyncio.to_thread(node.stop, signal.SIGKILL)

    async def passed() -> bool:
        return time.time() > (wanted.deadline or 0)

    await until(passed, "the deadline")
    await asyncio.to_thread(node.start)

    async def ended() -> bool:
        return (await placement.get(wanted.id)).state == "ended"

    await until(ended, "the end")
    assert (await placement.destroy(wanted.id))["cause"] == "deadline"


async def test_what_dies_while_no_node_is_there_is_known(node: NodeProcess, placement: Placement) -> None:
    wanted = spec()
    await placement.start(wanted)
    record = read(node.home / "sandboxes" / wanted.id)
    assert record is not None
    await asyncio.to_thread(node.stop, signal.SIGKILL)
    os.kill(record["handle"]["pid"], signal.SIGKILL)

    async def gone() -> bool:
        found = process(record["handle"]["pid"])
        return found is None or found.state in "ZX"

    await until(gone, "the agent's death")
    await asyncio.to_thread(node.start)
    end = (await placement.get(wanted.id)).end
    assert end is not None
    assert end["cause"] == "runtime_crash"
    assert "no node was there" in end["detail"]
    await placement.destroy(wanted.id)
    assert not (node.home / "services/test/ended" / f"{wanted.id}.json").exists()


async def test_ends_stay_known_over_restarts(node: NodeProcess, placement: Placement) -> None:
    wanted = spec(deadline=time.time() + 0.1)
    await placement.start(wanted)

    async def ended() -> bool:
        return (await placement.get(wanted.id)).state == "ended"

    await until(ended, "the end")
    before = await placement.get(wanted.id)
    await asyncio.to_thread(node.stop, signal.SIGKILL)
    await asyncio.to_thread(node.start)
    assert await placement.get(wanted.id) == before
    assert (await placement.start(wanted)) == before


async def test_output_goes_on_being_counted(node: NodeProcess, placement: Placement) -> None:
    wanted = spec()
    await placement.start(wanted)
    limit = await placement.spent(wanted.id, 0)
    left = await placement.spent(wanted.id, limit // 2)
    await asyncio.to_thread(node.stop, signal.SIGKILL)
    await asyncio.to_thread(node.start)
    assert await placement.spent(wanted.id, 0) == left


async def test_no_node(tmp_path: Path) -> None:
    async with LocalPlacement(tmp_path / "node.sock", patience=0.1) as nobody:
        for call in (nobody.list(), nobody.get("sb-00000000000000000000"), nobody.capacity()):
            with pytest.raises(NodeUnavailable) as caught:
                await call
            assert "ringfence node" in caught.value.hint
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "mute.sock"))
    listening.close()  # a socket file that nobody listens on, as a killed node leaves it
    async with LocalPlacement(tmp_path / "mute.sock", patience=0.1) as nobody:
        with pytest.raises(NodeUnavailable):
            await nobody.list()


async def test_services_and_kept_runs_leave_each_other_alone(node: NodeProcess, placement: Placement) -> None:
    env = os.environ | {"RINGFENCE_HOME": str(node.home)}

    def ringfence(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ringfence", *words], env=env, capture_output=True, text=True, timeout=120
        )

    other = NodeProcess(node.home, "other")
    mine, theirs = spec(), spec()
    try:
        await asyncio.to_thread(other.start)
        kept = ringfence("run", "--keep", "--json", "--", "true")
        assert kept.returncode == 0, kept.stderr
        name = json.loads(kept.stdout)["id"]
        await placement.start(mine)
        async with LocalPlacement(other.socket, patience=60) as elsewhere:
            await elsewhere.start(theirs)
            assert [each.id for each in await placement.list()] == [mine.id]
            assert [each.id for each in await elsewhere.list()] == [theirs.id]
            with pytest.raises(NotFound):
                await placement.get(theirs.id)
            assert await placement.destroy(theirs.id) == {}
            with pytest.raises(NotFound):
                await placement.connect(name)
            # One dies, and its sandboxes stay untouched by the others' openings and by `sandbox rm`.
            await asyncio.to_thread(node.stop, signal.SIGKILL)
            refused = ringfence("sandbox", "rm", mine.id)
            assert refused.returncode == 125
            assert "belongs to the service 'test'" in refused.stderr
            everything = ringfence("sandbox", "rm", "--all", "--grace", "0s", "--json")
            assert json.loads(everything.stdout)["stopped"] == [name]
            await asyncio.to_thread(other.stop, signal.SIGKILL)
            await asyncio.to_thread(other.start)
            assert [each.id for each in await elsewhere.list()] == [theirs.id]
            await asyncio.to_thread(node.start)
            assert await run(placement, mine.id, "echo", "on") == (0, b"on\n")
            assert await run(elsewhere, theirs.id, "echo", "on") == (0, b"on\n")
            await elsewhere.destroy(theirs.id)
    finally:
        await asyncio.to_thread(other.destroy_all)


CLIENT = """
import asyncio, encodings.idna, os, sys
import ringfence.guest.channels, ringfence.guest.wire
from ringfence.placement.local import LocalPlacement
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import NodeUnavailable
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
# From here on nothing is imported: the checkout may lie where this user can't read.
class Nothing:
    def find_spec(self, name, *_):
        raise SystemExit(f"imported late: {name}")
sys.meta_path.insert(0, Nothing())
async def main():
    async with LocalPlacement(sys.argv[1], patience=0.2) as placement:
        try:
            (found,) = await placement.list()
        except NodeUnavailable as error:
            print("refused")
            return
        async with await GuestLink.open(await placement.connect(found.id), timeout=60) as link:
            process = await link.start(ProcessSpec(("echo", "hello")))
            print(os.geteuid(), b"".join([piece.data async for piece in process]))
asyncio.run(main())
"""


def connect_as(path: Path, user: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(path), str(user)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@as_root
async def test_only_the_apis_user_may_connect(node: NodeProcess, placement: Placement) -> None:
    await placement.start(spec())
    await asyncio.to_thread(node.stop)
    node.options = ("--api-uid", "64123")
    try:
        await asyncio.to_thread(node.start)
        assert os.lstat(node.socket).st_uid == 64123
        # The right to talk to a sandbox is handed out as a descriptor: no other privilege is needed.
        assert await asyncio.to_thread(connect_as, node.socket, 64123) == "64123 b'hello\\n'"
        os.chmod(node.socket, 0o666)  # whatever the file's mode: the kernel says who connects
        assert await asyncio.to_thread(connect_as, node.socket, 64124) == "refused"
        _, errors = await asyncio.to_thread(node.stop)
        assert "user 64124 was refused" in errors
    finally:
        node.options = ()
        if node.process is not None:
            await asyncio.to_thread(node.stop)
        await asyncio.to_thread(node.start)


def frame(kind: int, number: int, payload: bytes = b"") -> bytes:
    return wire.HEADER.pack(len(payload), kind, number) + payload


HOSTILE = {
    "nothing": b"",
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge": wire.HEADER.pack(1 << 31, wire.CALL, 1),
    "unknown kind": frame(99, 1),
    "no JSON": frame(wire.CALL, 1, b"{"),
    "deep JSON": frame(wire.CALL, 1, b"[" * 100_000),
    "no call": frame(wire.CALL, 1, b'{"a": 1}'),
    "a number twice": frame(wire.CALL, 1, b'["runtimes", {}]') * 2,
    "result": frame(wire.RESULT, 1, b"{}"),
    "descriptor announced": frame(wire.CALL | wire.WITH_DESCRIPTOR, 1, b'["list", {}]'),
    "data beyond credit": frame(wire.CALL, 1, b'["import_volume", {"id": "vo-none"}]')
    + frame(wire.DATA, 1, b"x") * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_clients_end_their_own_connection_only(
    node: NodeProcess, placement: Placement, name: str
) -> None:
    hostile = socket.socket(socket.AF_UNIX)
    hostile.settimeout(60)
    hostile.connect(str(node.socket))
    with hostile, contextlib.suppress(ConnectionError):  # it may hang up before it has read all
        hostile.sendall(HOSTILE[name])
        hostile.shutdown(socket.SHUT_WR)
        while await asyncio.to_thread(hostile.recv, 65536):
            pass  # until it hangs up
    assert await placement.list() == []
    assert node.process is not None
    assert node.process.poll() is None


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("no_such_call", {}),
        ("get", {}),
        ("get", {"id": 5}),
        ("get", {"id": "sb-../../etc"}),
        ("start", {"spec": []}),
        ("start", {"spec": {"id": 5, "policy": {}}}),
        ("start", {"spec": {"id": "sb-00000000000000000000", "policy": {}, "env": {"A": 1}}}),
        ("start", {"spec": {"id": "sb-00000000000000000000", "policy": {}, "env": {"A": "\ud800"}}}),
        ("start", {"spec": {"id": "sb-00000000000000000000", "policy": {}, "owner": {"user": 7}}}),
        ("start", {"spec": {"id": "sb-00000000000000000000", "policy": {"a": "\ud800"}}}),
        ("start", {"spec": {"id": "sb-00000000000000000000", "policy": {}, "volumes": [5]}}),
        ("start", {"spec": {"id": "sb-00000000000000000000", "policy": {}, "what": 1}}),
        ("destroy", {"id": "sb-00000000000000000000", "grace": -1}),
        ("destroy", {"id": "sb-00000000000000000000", "grace": "x"}),
        ("spent", {"id": "sb-00000000000000000000", "output": "x"}),
        ("bind", {"id": "sb-00000000000000000000", "secrets": {"a": "\u00e4"}}),
        ("make_volume", {"id": "../x", "quota": 1 << 25}),
        ("make_volume", {"id": "vo-x", "quota": -1}),
        ("make_volume", {"id": "vo-x", "quota": True}),
        ("volume_size", {"id": ".."}),
        ("remove_volume", {"id": ".part"}),
        ("add_template", {"source": "rootfs:/etc/shadow", "name": "x", "options": {}}),
        ("add_template", {"source": "rootfs:relative", "name": "x", "options": {"unknown": 1}}),
        ("import_volume", {"id": "../../x"}),
        ("export_volume", {"id": "../../x"}),
    ],
)
async def test_impossible_arguments_are_refused_by_name(
    placement: LocalPlacement, call: str, arguments: dict[str, object]
) -> None:
    from ringfence.model.errors import InvalidRequest, Unsupported

    with pytest.raises((InvalidRequest, NotFound, Unsupported)) as caught:
        await placement._call(call, **arguments)
    assert caught.value.code != "internal"
    assert await placement.list() == []
