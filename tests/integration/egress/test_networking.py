"""What a wall's network namespace is made to do, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.conformance.harness import request_for
from ringfence.guest import doors
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused, HostLimit, RuntimeUnavailable, StartFailed
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.runtimes import networking
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.launching.plan import CLONE_NEWNET, Plan
from ringfence.runtimes.launching.processes import ProcessRef
from support.egress import connected, doors_into, with_network
from support.internet import Internet
from support.nodes import run

EGRESS = {"mode": "egress", "allow": [{"host": "api.example.test"}]}
OPEN = {"mode": "open"}
TRY = "python3 -c 'import socket; socket.create_connection((\"93.184.216.10\", 443), 20)' 2>&1 | tail -1"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this here")
slirp = pytest.mark.skipif(shutil.which("slirp4netns") is None, reason="slirp4netns is not installed")


def nat(sandbox: NodeSandbox) -> ProcessRef:
    """The process that is the sandbox's network."""
    return ProcessRef(*sandbox.handle.data["nat"])


async def gone(process: ProcessRef) -> bool:
    """It has ended, within a good while."""
    deadline = time.monotonic() + 60
    while process.alive() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return not process.alive()


async def test_without_rules_in_the_kernel_it_fails_closed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise StartFailed("no such protocol", step="guard", errno="EPROTONOSUPPORT")

    monkeypatch.setattr(networking, "_guard", refuse)
    sandbox = await node.create(with_network(request_for("jail"), EGRESS))
    try:
        assert not networking.transparent(sandbox.handle)
        _, text = await run(sandbox, "/bin/sh", "-c", TRY)
        assert "Network is unreachable" in text
        link = await sandbox.new_link("egress")
        await doors.open_ports(link)  # the door itself is as everywhere
        await link.close()
    finally:
        await sandbox.destroy()


async def test_what_is_caught_meets_a_shut_door_as_refused(node: Node) -> None:
    sandbox = await node.create(with_network(request_for("jail"), EGRESS))
    try:
        assert networking.transparent(sandbox.handle)
        _, text = await run(sandbox, "/bin/sh", "-c", TRY)
        assert "Connection refused" in text
    finally:
        await sandbox.destroy()


async def test_a_namespace_of_the_host_is_left_alone(node: Node) -> None:
    sandbox = await node.create(with_network(request_for("jail"), EGRESS))
    try:
        ours = replace(sandbox.handle, pid=os.getpid())
        with pytest.raises(HostLimit, match="no network namespace of its own"):
            await networking.catch(sandbox.runtime.driver, ours)  # type: ignore[attr-defined]
        gone_one = replace(sandbox.handle, pid=2**22 - 1)
        assert await networking.catch(sandbox.runtime.driver, gone_one) is gone_one  # type: ignore[attr-defined]
    finally:
        await sandbox.destroy()


async def test_a_port_that_a_program_took_first_costs_its_own_door_only(node: Node) -> None:
    sandbox = await node.create(with_network(request_for("jail"), EGRESS))
    try:
        script = f"import socket, time; s = socket.create_server(('127.0.0.1', {doors.HTTP_PORT})); "
        script += "print('up', flush=True); time.sleep(600)"
        process = await sandbox.start(ProcessSpec(("/usr/bin/python3", "-c", script)))
        async for output in process:
            assert output.data == b"up\n"
            break
        link = await sandbox.new_link("egress")
        with pytest.raises(GuestRefused, match="port 61128"):
            await doors.open_ports(link)
        await link.close()
    finally:
        await sandbox.destroy()


async def test_a_paused_sandbox_keeps_its_door(node: Node, internet: Internet, state: Path) -> None:
    async with (
        doors_into(internet, state / "egress-paused") as opened,
        connected(node, opened, internet, request_for("jail"), EGRESS) as sandbox,
    ):
        await sandbox.pause()
        await sandbox.resume()
        result, text = await run(sandbox, "curl", "-sS", "https://api.example.test/after-pause")
        assert result.end.exit_code == 0, text


@slirp
async def test_an_open_network_ends_with_its_wall(node: Node) -> None:
    sandbox = await node.create(with_network(request_for("jail"), OPEN))
    process = nat(sandbox)
    assert process.alive()
    assert (await sandbox.boundary()).network == "open"
    os.kill(sandbox.handle.pid, signal.SIGKILL)  # the wall by itself
    await asyncio.wait_for(asyncio.shield(sandbox.ended), 60)
    assert await gone(process)
    await sandbox.destroy()
    sandbox = await node.create(with_network(request_for("jail"), OPEN))
    process = nat(sandbox)
    await sandbox.destroy()
    assert await gone(process)


@slirp
async def test_a_kept_open_network_outlives_its_node_and_ends_with_the_next(state: Path) -> None:
    async with await Node.open(state) as node:
        sandbox = await node.create(with_network(request_for("jail", keep=True), OPEN))
        name, process = sandbox.id, nat(sandbox)
    assert process.alive()
    async with await Node.open(state) as node:
        await node.get(name).destroy()
        assert await gone(process)


@slirp
async def test_an_open_network_dies_with_an_ephemeral_node(state: Path) -> None:
    node = await Node.open(state)
    sandbox = await node.create(with_network(request_for("jail"), OPEN))
    process = nat(sandbox)
    await node.close()
    assert await gone(process)


async def test_without_the_program_there_is_no_open_network(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    with pytest.raises(RuntimeUnavailable, match="slirp4netns") as caught:
        await node.create(with_network(request_for("jail"), OPEN))
    assert "apt-get install" in caught.value.hint


async def test_a_network_that_can_not_be_made_leaves_no_wall(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: "/bin/false")
    with pytest.raises(StartFailed, match="could not make a network"):
        await node.create(with_network(request_for("jail"), OPEN))
    assert os.listdir(node.state.path / "sandboxes") == []


@pytest.mark.parametrize(
    ("port", "dns", "rules"),
    [(70000, 53, b""), (1, 70000, b""), (1, 0, b""), (0, 0, b"x" * 11), (0, 0, bytes(12) * 129)],
)
async def test_rules_that_are_none_are_refused(port: int, dns: int, rules: bytes) -> None:
    context = await RuntimeContext.open()
    try:
        plan = Plan()
        plan.add("CLONE", CLONE_NEWNET)
        plan.add("GUARD", port, dns, rules)
        plan.add("DONE")
        with pytest.raises(StartFailed) as caught:
            await context.launcher.spawn(plan)
        assert caught.value.details["errno"] == "EPROTO"
    finally:
        await context.close()


async def test_a_plan_that_only_sets_something_up_ends_well() -> None:
    context = await RuntimeContext.open()
    try:
        plan = Plan()
        plan.add("CLONE", CLONE_NEWNET)
        plan.add("LOOPBACK")
        plan.add("GUARD", doors.CAUGHT_PORT, doors.DNS_PORT, b"")
        plan.add("DONE")
        child = await context.launcher.spawn(plan)
        assert await child.exited == 0
        child.close()
    finally:
        await context.close()


async def test_what_a_normal_user_s_network_may_open(tmp_path: Path) -> None:
    """It handles what the sandbox sends, so it must not be able to read, or write, that user's files."""
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    context = await RuntimeContext.open()
    try:

        async def status(*words: str) -> int | None:
            plan = Plan()
            plan.add("NO_NEW_PRIVS")
            networking._confine(plan)
            for word in words:
                plan.add("ARG", word)
            plan.add("ENV", "PATH=/usr/bin:/bin")
            plan.add("EXEC", shutil.which(words[0]) or words[0])
            child = await context.launcher.spawn(plan)
            try:
                if not child.landlock:
                    pytest.skip("this kernel has no Landlock")
                return await asyncio.wait_for(child.exited, 60)
            finally:
                child.close()

        assert await status("cat", "/etc/resolv.conf") == 0  # the control
        for refused in (
            ("cat", str(secret)),
            ("cat", "/etc/passwd"),
            ("ls", str(tmp_path)),
            ("touch", str(tmp_path / "new")),
            ("rm", str(secret)),
        ):
            assert await status(*refused) not in (0, None), refused
        assert secret.read_text() == "of the user"
        assert not (tmp_path / "new").exists()
    finally:
        await context.close()
