"""A bench for starting walls without a node: a small root file system, an identity, a launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.runtimes.bubblewrap import BubblewrapRuntime
from ringfence.runtimes.context import RuntimeContext, privileged
from ringfence.runtimes.contract import (
    AGENT_UID,
    MAP_SIZE,
    Bind,
    CgroupPlace,
    Disk,
    Handle,
    Identity,
    IdMap,
    RootFs,
    StartSpec,
)
from ringfence.runtimes.jail import JailRuntime

# Ranges near the end of the node's, so that sandboxes of other tests have other users.
FIRST = 0x7FF0_0000
FOLDERS = (
    "dev",
    "etc",
    "home/agent",
    "proc",
    "run/secrets",
    "sys",
    "tmp",
    "usr",
    "var/tmp",
    "workspace",
    "data",
)
RUNTIMES = {"jail": JailRuntime, "bubblewrap": BubblewrapRuntime}


def make_skeleton(folder: Path, user: int) -> Path:
    """A lower layer whose writable folders belong to ``user`` inside (as root they are idmapped)."""
    skeleton = folder / "skeleton"
    for name in (*FOLDERS, ".ringfence"):
        (skeleton / name).mkdir(parents=True, mode=0o755)
    for name in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), skeleton / name)
    (skeleton / "etc/passwd").write_text("agent:x:1000:1000::/home/agent:/bin/sh\n")
    for name in ("tmp", "var/tmp"):
        (skeleton / name).chmod(0o1777)
    if os.geteuid() == 0:
        for name in ("workspace", "home/agent", "data"):
            os.chown(skeleton / name, user, user)
    return skeleton


def identity(number: int, user: int = 1000) -> Identity:
    capabilities = 0b11101011 if user == 0 else 0
    if privileged():
        first = FIRST + number * MAP_SIZE
        return Identity(user, user, (IdMap(0, first, MAP_SIZE),), AGENT_UID, capabilities=capabilities)
    return Identity(
        user,
        user,
        (IdMap(user, os.geteuid(), 1),),
        user,
        capabilities=capabilities,
        gid_maps=(IdMap(user, os.getegid(), 1),),
    )


class Bench:
    """One launcher, one runtime, and walls in a folder of the test."""

    def __init__(self, runtime: str, folder: Path, context: RuntimeContext) -> None:
        self.folder = folder
        self.context = context
        self.runtime = RUNTIMES[runtime](context)
        self.made: list[Handle] = []
        self._skeletons: dict[int, Path] = {}

    def spec(self, user: int = 1000, binds: tuple[Bind, ...] = (), **changes: Any) -> StartSpec:
        number = len(self.made)
        if user not in self._skeletons:
            where = self.folder / f"user-{user}"
            where.mkdir()
            self._skeletons[user] = make_skeleton(where, user)
        folder = self.folder / f"sb-{number}"
        folder.mkdir(mode=0o711, exist_ok=True)
        files = {
            key: changes.pop(key) for key in ("disk", "readonly", "read_write", "read_only") if key in changes
        }
        root = RootFs(
            lowers=(str(self._skeletons[user]),),
            binds=(Bind("/usr", "/usr"), *binds),
            disk=files.pop("disk", Disk("tmpfs", 16 << 20, 2048)),
            **files,
        )
        values = {
            "id": f"sb-{number}",
            "folder": str(folder),
            "hostname": "box",
            "root": root,
            "identity": identity(number % 8, user),
            "cgroup": CgroupPlace(),
            "max_processes": 64,
            "max_open_files": 256,
        }
        return StartSpec(**(values | changes))

    async def start(self, spec: StartSpec | None = None, **changes: Any) -> Handle:
        handle = await self.runtime.start(spec or self.spec(**changes))
        self.made.append(handle)
        return handle

    async def run(self, handle: Handle, script: str, **changes: Any) -> tuple[int | None, str]:
        """Exit code (None if killed) and everything that a shell script printed."""
        spec = replace(ProcessSpec(argv=("/bin/sh", "-c", script), merge_stderr=True), **changes)
        async with await GuestLink.open(await self.runtime.connect(handle)) as link:
            process = await link.start(spec)
            text = b"".join([each.data async for each in process])
            return (await process.wait()).code, text.decode(errors="replace")

    async def close(self) -> None:
        for handle in self.made:
            await self.runtime.destroy(handle)
        await self.context.close()


@asynccontextmanager
async def bench(runtime: str) -> AsyncIterator[Bench]:
    # Walls run as other users, and pytest makes its own folders for one user only.
    folder = Path(tempfile.mkdtemp(prefix="ringfence-walls-"))
    folder.chmod(0o755)
    made = Bench(runtime, folder, await RuntimeContext.open())
    try:
        yield made
    finally:
        await made.close()
        shutil.rmtree(folder)
