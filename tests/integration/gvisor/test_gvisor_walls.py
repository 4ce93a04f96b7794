"""Walls of gVisor: what is particular to them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, python, run
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import LinkLost
from ringfence.runtimes.gvisor_parts import links
from ringfence.runtimes.measuring import children


async def test_threads_can_be_made(kit: Kit) -> None:
    """The C library makes them with clone3, and takes no error but ENOSYS for an answer."""
    code = (
        "import threading as t\nfor n in range(3): x = t.Thread(target=print, args=(n,)); x.start(); x.join()"
    )
    assert (await python(await kit.started(), code)).text.split() == ["0", "1", "2"]


async def test_the_workload_sees_another_kernel(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    link = await kit.link(sandbox)
    assert (await run(link, "uname", "-r")).text != os.uname().release
    assert (await sandbox.boundary()).kernel.endswith("(gVisor)")


async def test_no_part_of_the_wall_has_a_right_over_the_host(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    monitor = int(sandbox.handle.data["monitor"])
    processes = [monitor, sandbox.handle.pid, *children(monitor)]
    for pid in processes:
        status = Path(f"/proc/{pid}/status").read_text()
        assert int(status.partition("\nUid:")[2].split()[0]) >= sandbox.handle.data["first"] > 0
        assert "\nNoNewPrivs:\t1" in status
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    assert "\nSeccomp:\t2" in Path(f"/proc/{sandbox.handle.pid}/status").read_text()


async def test_a_link_in_place_of_the_socket_leads_nowhere(kit: Kit, tmp_path: Path) -> None:
    """Who owns the wall owns the folder of the socket: the host must not be led to another socket by it."""
    sandbox = await kit.sandbox()
    victim = socket.socket(socket.AF_UNIX)
    victim.bind(str(tmp_path / "victim"))
    victim.listen()
    victim.setblocking(False)
    place = Path(sandbox.handle.folder) / links.FOLDER / "guest.sock"
    place.rename(place.with_name("kept"))
    place.symlink_to(tmp_path / "victim")
    with pytest.raises(LinkLost):
        await kit.runtime.connect(sandbox.handle)
    with pytest.raises(BlockingIOError):
        victim.accept()
    # The control: the same path, followed, leads there.
    with socket.socket(socket.AF_UNIX) as caller:
        descriptor = os.open(place.parent, os.O_PATH)
        caller.connect(f"/proc/self/fd/{descriptor}/guest.sock")
        os.close(descriptor)
    victim.accept()[0].close()
    victim.close()


async def test_the_workload_can_connect_to_no_socket_of_the_host(kit: Kit, tmp_path: Path) -> None:
    """Not even to one in a folder that the policy shows (``--host-uds=create``)."""
    tmp_path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service"))
        os.chmod(tmp_path / "service", 0o777)
        listener.listen()
        link = await kit.started(mounts=[(str(tmp_path), "/mnt/shown", True)])
        code = "import socket; socket.socket(socket.AF_UNIX).connect('/mnt/shown/service')"
        done = await python(link, code)
        assert done.exit.code == 1
        assert b"Error" in done.stderr, done
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(tmp_path / "service"))


async def test_memory_of_a_dead_wall_says_out_of_memory(kit: Kit) -> None:
    sandbox = await kit.sandbox(memory=64 << 20, disk=16 << 20)
    result = await sandbox.run(
        ProcessSpec(("/usr/bin/python3", "-c", "x=[bytearray(1<<20) for _ in range(400)]"))
    )
    assert result.end.cause.value == "out_of_memory"
