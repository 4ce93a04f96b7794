"""Two sandboxes side by side: neither may read, signal or reach the other."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path

import pytest

from ringfence.conformance.harness import python, read_until, request_for, run
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import RingfenceError
from ringfence.model.policies import check_mounts
from ringfence.model.policy import Mount
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from security.attacks import Attack, NoControl, row
from security.stage import Stage
from security.walls import run_attack

LISTEN = """
import os, socket, sys
a = socket.socket(socket.AF_UNIX); a.bind("\\0rf-neighbour"); a.listen()
t = socket.socket(); t.bind(("127.0.0.1", 47123)); t.listen()
s = socket.socket(socket.AF_UNIX); s.bind("/tmp/rf-neighbour"); s.listen()
open("/workspace/secret", "w").write(sys.argv[1]); open("/dev/shm/secret", "w").write(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


async def neighbour(node: Node, wall: str, stage: Stage) -> tuple[NodeSandbox, int]:
    """A sandbox with listeners, secrets and a process; and that process's pid on the host."""
    sandbox = await node.create(request_for(wall))
    link = await sandbox.link()
    argv = ("/usr/bin/python3", "-I", "-S", "-c", LISTEN, stage.marker)
    process = await link.start(ProcessSpec(argv, stdin=True, id="neighbour"))
    await read_until(process, b"ready")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if stage.marker.encode() in (entry / "cmdline").read_bytes():
                    return sandbox, int(entry.name)
            except OSError:
                continue
    raise AssertionError("the neighbour's process is not to be seen on the host")


def attack(payload: str, *args: str) -> Attack:
    return Attack("neighbour", payload, args, row(""), NoControl("see the table's host-* and *-socket rows"))


async def test_a_neighbour_is_out_of_reach(wall: str, node: Node, stage: Stage) -> None:
    if wall == "gvisor":
        pytest.skip("processes of gVisor's kernel are none of the host's: there is no pid to aim at")
    sandbox, pid = await neighbour(node, wall, stage)
    root = f"/proc/{pid}/root"
    hidden = {"invisible", "denied:EACCES+invisible"}
    attempts = {
        "signal": (attack("trace.c", "kill", str(pid)), {"denied:ESRCH"}),
        "pidfd": (attack("trace.c", "pidfd_signal", str(pid)), {"denied:ESRCH"}),
        "trace": (attack("trace.c", "attach", str(pid)), {"denied:EPERM"}),
        "memory": (attack("trace.c", "mem", str(pid)), {"invisible"}),
        "abstract": (attack("connect.py", "abstract", "rf-neighbour"), {"denied:ECONNREFUSED"}),
        "loopback": (attack("connect.py", "tcp", "127.0.0.1", "47123"), {"denied:ECONNREFUSED"}),
        "socket": (attack("connect.py", "unix", "/tmp/rf-neighbour"), {"invisible"}),
        "file": (attack("other_roots.py", "/workspace/secret", stage.marker), hidden),
        "shared-memory": (attack("other_roots.py", "/dev/shm/secret", stage.marker), hidden),
        "root": (attack("read_file.py", f"{root}/workspace/secret", stage.marker), {"invisible"}),
        "socket-of-the-agent": (attack("connect.py", "unix", str(sandbox.handle.socket_path)), {"invisible"}),
        "everything": (attack("kill_all.c", os.readlink("/proc/self/ns/pid")), {"sent"}),
    }  # fmt: skip
    for name, (tried, expected) in attempts.items():
        assert await run_attack(node, wall, tried, stage) in expected, name
    link = await sandbox.link()
    assert [(found.id, found.state) for found in await link.processes()] == [("neighbour", "running")]
    assert os.path.exists(f"/proc/{pid}")
    # The control: the neighbour itself can be reached by who may.
    assert Path(root, "workspace/secret").read_text() == stage.marker
    os.kill(pid, 9)
    assert (await (await link.attach("neighbour")).wait()).signal == 9
    await sandbox.destroy()


async def test_ranges_of_host_ids_do_not_overlap(node: Node) -> None:
    if os.geteuid() != 0:
        return  # a normal user's sandboxes share its one id: namespaces keep them apart
    spans = []
    sandboxes = [await node.create(request_for("jail")) for _ in range(4)]
    for sandbox in sandboxes:
        done = await run(await sandbox.link(), "cat", "/proc/self/uid_map")
        for line in done.text.splitlines():
            _, outside, count = map(int, line.split())
            spans.append(range(outside, outside + count))
    for index, one in enumerate(spans):
        assert one.start > 65536, "ids of the host's own users"
        for two in spans[index + 1 :]:
            assert one.stop <= two.start or two.stop <= one.start
    for sandbox in sandboxes:
        await sandbox.destroy()


async def test_ids_of_a_neighbour_can_not_be_used(node: Node) -> None:
    """Root of one sandbox gives a file to every id it can name: none is another sandbox's on the host."""
    if os.geteuid() != 0:
        return
    one = await node.create(request_for("jail", user=0))
    two = await node.create(request_for("jail"))
    code = (
        "import os\nopen('/workspace/f','w').close()\ntaken=[]\n"
        "for uid in (0, 1000, 65535, 65536, 0x70000000, 0x70010000, 2**32-2):\n"
        " try: os.chown('/workspace/f', uid, uid); taken.append(uid)\n except OSError: pass\nprint(taken)"
    )
    done = await python(await one.link(), code, as_root=True)
    assert done.text == "[0, 1000, 65535]", done
    owner = os.stat(f"/proc/{one.handle.pid}/root/workspace/f").st_uid
    first = (await two.boundary()).host_uid
    assert abs(owner - first) >= 65536 // 2 or owner // 65536 != first // 65536
    await one.destroy()
    await two.destroy()


def swap_folder(stage: Stage) -> tuple[Path, Path]:
    """A harmless folder, and a folder of secrets to which it may turn."""
    base = Path(tempfile.mkdtemp(prefix="swap-", dir=stage.folder))
    base.chmod(0o755)
    good, secret = base / "data", base / "secrets"
    for folder in (good, secret):
        folder.mkdir()
    (good / "file").write_text("harmless")
    (secret / "file").write_text(stage.marker)
    return good, secret


async def shown(node: Node, wall: str, mounts: tuple[Mount, ...]) -> str:
    """What a sandbox with these mounts sees; empty if it is refused."""
    wanted = [(mount.source, mount.target, mount.read_only) for mount in mounts]
    try:
        sandbox = await node.create(request_for(wall, mounts=wanted))
    except RingfenceError:
        return ""
    text = (await run(await sandbox.link(), "cat", "/mnt/data/file")).text
    await sandbox.destroy()
    return text


async def test_a_mount_that_turns_into_a_link_after_it_was_judged(
    wall: str, node: Node, stage: Stage
) -> None:
    """A sandbox that may write to a folder makes a part of it a link, before another is shown that part."""
    good, secret = swap_folder(stage)
    judged = check_mounts([Mount(str(good), "/mnt/data")])
    assert await shown(node, wall, judged) == "harmless"
    good.rename(good.with_name("aside"))
    good.symlink_to(secret)
    assert await shown(node, wall, judged) != stage.marker


async def test_a_mount_that_is_swapped_while_it_is_made(wall: str, node: Node, stage: Stage) -> None:
    good, secret = swap_folder(stage)
    judged = check_mounts([Mount(str(good), "/mnt/data")])
    aside, link = good.with_name("aside"), good.with_name("link")
    link.symlink_to(secret)
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            good.rename(aside)
            link.rename(good)
            good.rename(link)
            aside.rename(good)

    flipping = threading.Thread(target=flip)
    flipping.start()
    try:
        seen = [await shown(node, wall, judged) for _ in range(60)]
    finally:
        stop.set()
        await asyncio.to_thread(flipping.join)
    assert stage.marker not in seen


async def test_the_control_of_the_swap(node: Node, stage: Stage) -> None:
    """A folder that was asked for is shown: the swaps would show the secrets if they were followed."""
    _, secret = swap_folder(stage)
    assert await shown(node, "jail", (Mount(str(secret), "/mnt/data"),)) == stage.marker
