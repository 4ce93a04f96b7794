"""A real docker daemon: what the conformance suite does not ask of every runtime."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, alive, eventually, request_for, run
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import NotFound, RingfenceError, RuntimeUnavailable
from ringfence.model.levels import Boundary, Level
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.runtimes.contract import Health
from ringfence.runtimes.engines import images
from ringfence.runtimes.engines.client import Client
from ringfence.runtimes.engines.endpoints import find
from support.engines import Engine, docker, running

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of these tests is root's")


async def test_the_container_is_made_from_our_policy_and_keeps_no_output(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    link = await kit.link(sandbox)
    assert (await run(link, "echo", "secret words")).text == "secret words"
    (found,) = json.loads(docker("inspect", f"ringfence-{sandbox.id}"))
    host = found["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
    assert sorted(host["CapAdd"]) == ["SETGID", "SETUID"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert host["MemorySwap"] == host["Memory"]
    assert host["LogConfig"]["Type"] == "none"
    assert host["RestartPolicy"]["Name"] in ("no", "")
    assert found["Config"]["Labels"]["dev.ringfence.sandbox"] == sandbox.id
    assert found["LogPath"] == ""


async def test_a_link_that_is_killed_costs_its_links_and_another_takes_its_place(kit: Kit) -> None:
    sandbox = await kept(kit)
    link = await kit.link(sandbox)
    process = await link.start(ProcessSpec(("/bin/sh", "-c", "echo one; sleep 1000"), id="stays"))
    async for piece in process:
        assert piece.data == b"one\n"
        break
    pid = sandbox.handle.data["link"][0]
    os.kill(pid, 9)
    await eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists() or dead(pid), "the link lives")
    again = await kit.link(sandbox)
    assert [known.id for known in await again.processes()] == ["stays"]
    assert (await run(again, "echo", "here")).text == "here"
    assert await kit.runtime.recover(sandbox.handle) is True


def dead(pid: int) -> bool:
    """A zombie, or nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


async def kept(kit: Kit) -> NodeSandbox:
    """A sandbox that outlives its node."""
    made = await kit.node.create(request_for("docker", keep=True))
    kit.sandboxes.append(made)
    kit.ids.add(made.id)
    return made


async def test_the_end_of_an_ephemeral_one_s_link_is_its_own(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    os.kill(sandbox.handle.data["link"][0], 9)
    await eventually(lambda: not alive(sandbox.handle), "the container lives on without its stream")
    await eventually(lambda: docker("ps", "--all", "--quiet") == "", "the engine keeps the container")


async def test_an_image_of_the_engine(kit: Kit, image: str) -> None:
    sandbox = await kit.node.create(replace(request_for("docker"), template=f"docker:{image}"))
    kit.sandboxes.append(sandbox)
    kit.ids.add(sandbox.id)
    link = await kit.link(sandbox)
    done = await run(
        link, "/bin/sh", "-c", "id -u; echo $FROM_IMAGE; touch /data/x || echo no volume; touch /etc/x"
    )
    assert done.stdout.decode().splitlines() == ["1000", "yes", "no volume"], done
    assert b"Read-only" in done.stderr


async def test_an_image_that_the_engine_has_not(kit: Kit) -> None:
    with pytest.raises((NotFound, RingfenceError)) as caught:
        await kit.node.create(replace(request_for("docker"), template="docker:nobody/has:this"))
    assert "no image nobody/has:this" in str(caught.value)


async def test_images_of_ours_go_when_nobody_uses_them(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    client = Client(find("docker"))
    name = docker("ps", "--format", "{{.Image}}")
    assert "ringfence" in name
    assert name not in await images.remove_all(client), "it is in use"  # those of earlier tests are not
    await sandbox.destroy()
    left = docker("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines()
    assert [line for line in left if "ringfence" in line] == [name]
    assert await images.remove_all(client, frozenset({name})) == []
    assert await images.remove_all(client) == [name]
    again = await kit.sandbox()  # and it is sent once more
    assert (await run(await kit.link(again), "true")).exit.code == 0


def installed(program: str) -> None:
    """Skip where the engine has no such OCI runtime."""
    if program not in json.loads(docker("info", "--format", "{{json .Runtimes}}")):
        pytest.skip(f"{program} is not installed")


async def test_gvisor_under_the_engine(kit: Kit) -> None:
    installed("runsc")
    runtime = await kit.node.runtime("docker:runsc")
    assert runtime.level is Level.L3
    sandbox = await kit.node.create(request_for("docker:runsc"))
    kit.sandboxes.append(sandbox)
    kit.ids.add(sandbox.id)
    link = await sandbox.new_link()
    kernel = (await run(link, "uname", "-r")).text
    assert kernel != os.uname().release
    await link.close()
    measured = await runtime.measure(sandbox.handle)
    assert measured.network == "none"
    assert measured.boundary is Boundary.USERSPACE_KERNEL
    assert any("the engine's own word" in note for note in measured.notes)
    status = Path(f"/proc/{sandbox.handle.pid}/status").read_text()
    assert (measured.seccomp == "filter") == ("\nSeccomp:\t2" in status), "of gVisor's own process"
    assert measured.kernel.startswith(kernel)


async def test_crun_says_that_it_refuses_both_versions_of_control_groups(kit: Kit) -> None:
    installed("crun")
    if not hybrid():
        pytest.skip("this machine has one version of control groups: crun takes it")
    probe = await kit.node.probe("docker:crun")
    assert probe.health == Health.UNAVAILABLE
    assert "hybrid" in probe.reason
    assert "crun itself" in probe.remedy


async def test_crun_under_the_engine(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("crun")
    if not hybrid():
        await use_crun(kit.state / "crun")
        return
    with running("docker", hidden="cgroup2") as engine:  # it sees version 1 only
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        await use_crun(kit.state / "crun")
        assert docker("ps", "--all", "--quiet") == ""


async def use_crun(state: Path) -> None:
    """A sandbox on ``docker:crun``, whose wall is what the jail's is."""
    node = await Node.open(state)
    try:
        sandbox = await node.create(request_for("docker:crun"))
        link = await sandbox.new_link()
        assert (await run(link, "uname", "-r")).text == os.uname().release
        (found,) = json.loads(docker("inspect", f"ringfence-{sandbox.id}"))
        assert found["HostConfig"]["Runtime"] == "crun"
        measured = await sandbox.boundary()
        assert (measured.level, measured.boundary) == (Level.L2, Boundary.NAMESPACES)
        assert measured.seccomp == "filter"
        assert measured.network == "none"
        await link.close()
        await sandbox.destroy()
    finally:
        await node.close()


def hybrid() -> bool:
    """Both versions of control groups are mounted."""
    mounts = Path("/proc/self/mountinfo").read_text()
    return " - cgroup2 " in mounts and " - cgroup " in mounts


@asynccontextmanager
async def far(engine: Engine) -> AsyncIterator[int]:
    """The engine behind a tcp port, as another machine's would be."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
            target.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(f"{engine.folder}/engine.sock")
        try:
            await asyncio.gather(copy(reader, outer), copy(inner, writer))
        finally:
            for each in (writer, outer):
                each.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def test_a_remote_engine(
    kit: Kit, docker_engine: Engine, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with far(docker_engine) as port:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
        await use_from_afar(kit.state / "far", image)


async def use_from_afar(state: Path, image: str) -> None:
    """What works with a remote engine, and what is refused."""
    node = await Node.open(state)
    try:
        with pytest.raises(RingfenceError, match="on another machine"):
            await node.create(request_for("docker"))
        sandbox = await node.create(replace(request_for("docker"), template=f"docker:{image}"))
        link = await sandbox.new_link()
        done = await run(link, "/bin/echo", "from afar")
        assert done.text == "from afar"
        assert sandbox.handle.pid == sandbox.handle.data["link"][0]
        measured = await sandbox.runtime.measure(sandbox.handle)
        assert any("the engine's own word" in note for note in measured.notes)
        assert measured.seccomp == "unknown", "nobody here can read it"
        await link.close()
        await sandbox.destroy()
    finally:
        await node.close()


async def test_an_engine_that_is_not_there(kit: Kit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    node = await Node.open(kit.state / "none")
    try:
        probe = await node.probe("docker")
        assert probe.health == Health.UNAVAILABLE
        assert "can't be reached" in probe.reason
        assert "systemctl start docker" in probe.remedy
        with pytest.raises(RuntimeUnavailable, match="can't be reached"):
            await node.create(request_for("docker"))
    finally:
        await node.close()


async def test_an_oci_runtime_that_the_engine_has_not(kit: Kit) -> None:
    probe = await kit.node.probe("docker:nobody")
    assert probe.health == Health.UNAVAILABLE
    assert "no OCI runtime nobody" in probe.reason


async def test_a_start_that_is_cancelled_at_any_time_leaves_no_container(kit: Kit) -> None:
    for delay in (0, 0.02, 0.1, 0.2, 0.3):
        starting = asyncio.create_task(kit.node.create(request_for("docker")))
        await asyncio.sleep(delay)
        starting.cancel()
        try:
            kit.sandboxes.append(await starting)
        except asyncio.CancelledError:
            continue
    for sandbox in kit.sandboxes:
        await sandbox.destroy()
    await eventually(lambda: docker("ps", "--all", "--quiet") == "", "a container is left")
