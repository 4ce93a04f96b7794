"""Nodes that kill themselves at a chosen step, one after the other: forks of a process that has all loaded.

Run as a program: reads a case a line (JSON), answers ``[pid, wait status]`` a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ringfence.guest.link import GuestLink
from ringfence.model.policy import Policy, Process, Resources, Wall
from ringfence.node import disks, groups, identities, journal, saving, service, snapshots, state, templates
from ringfence.node import sandboxes as node_sandboxes
from ringfence.node.volumes import Volumes
from ringfence.placement import attaching, graves, hosting
from ringfence.placement.contract import PlacedSpec, VolumeMount
from ringfence.runtimes import guarding

MIB = 1 << 20
VOLUME, SNAPSHOT = "vo-crash", "sn-crash"
POLICY = Policy(
    wall=Wall(
        process=Process(max_processes=64), resources=Resources(cpus=0.5, memory=64 * MIB, disk=16 * MIB)
    )
)
# What is called on the way: (where, name), by operation. Each is a crash point, before and after.
STEPS: dict[str, dict[str, tuple[Any, str]]] = {
    "start": {
        "folder": (state.StateRoot, "take_folder"),
        "range": (identities.Ranges, "take"),
        "intent": (journal.Journal, "begin"),
        "group": (groups.GroupPool, "take"),
        "disk": (disks, "prepare"),
        "root": (templates.HostTemplate, "root"),
        "wall": (guarding.Guarded, "start"),
        "handle": (service, "handle_as_json"),
        "deadline": (node_sandboxes.NodeSandbox, "set_deadline"),
        "hold": (hosting.Hosting, "_hold"),
    },
    "bind": {
        "journal": (node_sandboxes.NodeSandbox, "rebind"),
        "deadline": (node_sandboxes.NodeSandbox, "set_deadline"),
        "agent": (GuestLink, "bind"),
    },
    "pause": {"freeze": (guarding._GuardedPausable, "pause"), "note": (node_sandboxes.NodeSandbox, "mark")},
    "resume": {"thaw": (guarding._GuardedPausable, "resume"), "note": (node_sandboxes.NodeSandbox, "mark")},
    "snapshot": {
        "work": (snapshots.SnapshotStore, "work"),
        "freeze": (guarding._GuardedPausable, "pause"),
        "layer": (saving, "_layer"),
        "commit": (snapshots.SnapshotStore, "commit"),
    },
    "reset": {"wall": (guarding.Guarded, "start"), "enter": (node_sandboxes.NodeSandbox, "enter_wall")},
    "destroy": {
        "wall": (guarding.Guarded, "_destroy"),
        "group": (groups.GroupPool, "give_back"),
        "range": (identities.Ranges, "give_back"),
        "folder": (state.StateRoot, "give_folder"),
        "forget": (graves.Graves, "fill"),
    },
    "ended": {
        "grave": (graves.Graves, "dig"),
        "wall": (guarding.Guarded, "_destroy"),
        "folder": (state.StateRoot, "give_folder"),
    },
    "make_volume": {"format": (Volumes, "_mounted"), "reserve": (disks, "_reserve")},
    "attach": {"mount": (Volumes, "mounted"), "intent": (journal.Journal, "begin")},
    "import": {"mount": (Volumes, "mounted"), "unpack": (attaching, "extract_tar")},
    "detach": {"wall": (guarding.Guarded, "_destroy"), "unmount": (Volumes, "release")},
    "remove_volume": {"unmount": (Volumes, "release")},
}
ROOT_ONLY = {
    "range",
    "freeze",
    "make_volume",
    "attach",
    "import",
    "detach",
    "remove_volume",
    "pause",
    "resume",
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arm(owner: Any, name: str, moment: str) -> None:
    """From now on this call is the last one."""
    real = owner.__dict__[name]
    plain: Callable[..., Any] = getattr(real, "__func__", real)
    if asyncio.iscoroutinefunction(plain):

        async def call(*a: Any, **k: Any) -> Any:
            if moment == "before":
                die()
            await plain(*a, **k)
            die()

    else:

        def call(*a: Any, **k: Any) -> Any:  # type: ignore[misc]
            if moment == "before":
                die()
            plain(*a, **k)
            die()

    setattr(owner, name, classmethod(call) if isinstance(real, classmethod) else call)


def spec(id: str, **parts: Any) -> PlacedSpec:
    return PlacedSpec(id=id, policy=POLICY.to_dict(), **parts)


def writer(id: str) -> PlacedSpec:
    return spec(id, volumes=(VolumeMount(VOLUME, "/data", read_only=False),))


async def some_tar() -> Any:
    import io
    import tarfile

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("file")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    yield data.getvalue()


async def operate(node: hosting.Hosting, operation: str, id: str) -> None:
    """The operation itself; the same again after the crash must succeed."""
    if operation == "start":
        await node.start(spec(id, deadline=time.time() + 600))
    elif operation == "bind":
        await node.bind(
            id, env={"BOUND": "yes"}, secrets={"s": b"x"}, owner=None, labels={"a": "b"}, policy=None,
            deadline=time.time() + 700,
        )  # fmt: skip
    elif operation == "pause":
        await node.pause(id)
    elif operation == "resume":
        await node.resume(id)
    elif operation == "snapshot":
        await node.snapshot(id, SNAPSHOT, "disk")
    elif operation == "reset":
        await node.reset(id)
    elif operation in ("destroy", "detach"):
        await node.destroy(id, 0.0)
    elif operation == "ended":
        node._set_deadline(node.node.get(id), time.time())
        await asyncio.sleep(60)
    elif operation == "make_volume":
        await node.volumes.make(VOLUME, 32 * MIB)
    elif operation == "attach":
        await node.start(writer(id))
    elif operation == "import":
        await node.volumes.fill(VOLUME, some_tar())
    elif operation == "remove_volume":
        await node.volumes.remove(VOLUME)


async def case(home: str, operation: str, step: str, moment: str, id: str) -> None:
    node = await hosting.Hosting.open(home, "crash", lambda *_: None)
    if operation not in ("start", "make_volume", "attach", "import", "remove_volume", "detach"):
        await node.start(spec(id))
    if operation in ("attach", "import", "remove_volume", "detach"):
        await node.volumes.make(VOLUME, 32 * MIB)
    if operation == "detach":
        await node.start(writer(id))
    if operation == "resume":
        await node.pause(id)
    owner, name = STEPS[operation][step]
    arm(owner, name, moment)
    await operate(node, operation, id)


def main() -> None:
    for line in sys.stdin:
        arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                asyncio.run(case(*arguments))
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(json.dumps([pid, status]), flush=True)


if __name__ == "__main__":
    main()
