"""What the suites stand on: a node of the test's own, sandboxes on the runtime under test, and what was left.

The node prepares root file systems, identities and cgroups, so a driver is tested with what it gets in real
life. Everything is measured on the host or spoken over links; nothing here knows one runtime from another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ringfence.conformance import templates
from ringfence.conformance.plugin import who
from ringfence.conformance.tables.capabilities import expected
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import GuestProcess, Output, ProcessExit, ProcessSpec
from ringfence.model.levels import Level
from ringfence.model.policy import (
    Door,
    Filesystem,
    Isolation,
    Limits,
    Mount,
    Policy,
    Process,
    Resources,
    Wall,
)
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.runtimes.contract import Capabilities, CgroupPlace, Handle, Runtime, StartSpec

_RESOURCES = ("cpus", "memory", "disk")
_PROCESS = ("user", "max_processes", "max_open_files", "cpu_time")
_LIMITS = ("timeout", "output")


def request_for(
    runtime: str, *, keep: bool = False, env: dict[str, str] | None = None, **wishes: Any
) -> SandboxRequest:
    """A request for one runtime. ``wishes``: fields of Resources, Process, Limits or Filesystem by name.

    Runtimes that can't show the host's programs get the template of ``conformance.templates``.
    """
    row = expected(runtime, who())
    usual = "host" if row is None or row["host_template"] else templates.NAME
    template = wishes.pop("template", usual)
    mounts = tuple(Mount(source, target, read_only) for source, target, read_only in wishes.pop("mounts", ()))
    filesystem = replace(Filesystem(mounts=mounts), **_take(wishes, ("root", "read_write", "read_only")))
    wall = Wall(
        isolation=Isolation(minimum=Level.L1, runtime=runtime, allow_emulated=True),
        filesystem=filesystem,
        process=replace(Process(), **_take(wishes, _PROCESS)),
        resources=replace(Resources(), **_take(wishes, _RESOURCES)),
    )
    door = Door(limits=replace(Limits(), **_take(wishes, _LIMITS)))
    assert not wishes, f"unknown wishes {wishes}"
    policy = Policy(wall=wall, door=door)
    return SandboxRequest(policy=policy, keep=keep, env=env or {}, template=template)


def _take(wishes: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: wishes.pop(name) for name in names if name in wishes}


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended."""

    exit: ProcessExit
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Standard output, stripped."""
        return self.stdout.decode(errors="replace").strip()


class Kit:
    """One node, one runtime, and every sandbox that a test starts with them."""

    def __init__(self, state: Path, node: Node, runtime: Runtime) -> None:
        self.name = runtime.name
        self.state = state
        self.node = node
        self.runtime = runtime  # behind the guarding wrapper
        self.sandboxes: list[NodeSandbox] = []
        self.links: list[GuestLink] = []
        self.handles: list[Handle] = []
        self.ids: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        """What the driver says it can do."""
        return self.runtime.capabilities()

    async def sandbox(self, **wishes: Any) -> NodeSandbox:
        """A started sandbox; see :func:`request_for`."""
        made = await self.node.create(request_for(self.name, **wishes))
        self.sandboxes.append(made)
        self.ids.add(made.id)
        return made

    async def link(self, sandbox: NodeSandbox) -> GuestLink:
        """A new link of the test's own."""
        made = await GuestLink.open(await self.runtime.connect(sandbox.handle))
        self.links.append(made)
        return made

    async def started(self, **wishes: Any) -> GuestLink:
        """A link to a new sandbox, where the test needs no more than that."""
        return await self.link(await self.sandbox(**wishes))

    async def spec(self, **wishes: Any) -> StartSpec:
        """What the node would hand to the driver, for a start without the node: in a folder of its own, and
        without cgroups."""
        recorder = _Recorder(self.runtime)
        self.node.use(recorder)
        try:
            await self.node.create(request_for(self.name, **wishes))
        except _Recorded as found:
            spec = found.spec
        finally:
            self.node.use(self.runtime)
        folder = Path(spec.folder)
        folder.mkdir(mode=0o711)
        folder.chmod(0o711)
        self.ids.add(spec.id)
        return replace(spec, cgroup=CgroupPlace())

    async def start(self, spec: StartSpec) -> Handle:
        """Start a wall without the node."""
        handle = await self.runtime.start(spec)
        self.handles.append(handle)
        return handle

    async def close(self) -> None:
        """Destroy what the test has left."""
        for link in self.links:
            await link.close()
        for sandbox in self.sandboxes:
            await sandbox.destroy()
        for handle in self.handles:
            await self.runtime.destroy(handle)
        for name in self.ids:
            shutil.rmtree(self.state / "sandboxes" / name, ignore_errors=True)


class _Recorded(Exception):
    def __init__(self, spec: StartSpec) -> None:
        super().__init__(spec.id)
        self.spec = spec


class _Recorder:
    """A driver that starts nothing: it shows what it was asked to start."""

    def __init__(self, real: Runtime) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def start(self, spec: StartSpec) -> Handle:
        raise _Recorded(spec)


async def run(link: GuestLink, *argv: str | bytes, stdin: bytes | None = None, **spec: Any) -> Done:
    """Run a command to its end."""
    process = await link.start(ProcessSpec(argv, stdin=stdin is not None, **spec))
    if stdin is not None:
        await process.write(stdin)
        await process.close_stdin()
    return await finish(process)


async def finish(process: GuestProcess) -> Done:
    """The rest of a command's output, and its exit."""
    parts: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
    async for piece in process:
        parts[piece.stream] += piece.data
    return Done(await process.wait(), bytes(parts[1]), bytes(parts[2]))


async def python(link: GuestLink, code: str, *args: str, **spec: Any) -> Done:
    """Run a Python program inside (Debian's interpreter, which the host template shows)."""
    return await run(link, "/usr/bin/python3", "-I", "-S", "-c", code, *args, **spec)


async def read_until(process: GuestProcess, wanted: bytes) -> bytes:
    """Output of both streams up to and including ``wanted``; the command runs on."""
    seen = bytearray()
    async for piece in process:
        seen += piece.data
        if wanted in seen:
            return bytes(seen)
    raise AssertionError(f"the output ended without {wanted!r}: {bytes(seen)!r}")


async def next_piece(process: GuestProcess) -> Output:
    """The next piece of output."""
    async for piece in process:
        return piece
    raise AssertionError("the output ended")


async def eventually(check: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for something of the host that gives no event (the kernel takes walls down in its own time)."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


def alive(handle: Handle) -> bool:
    """Is the wall's first process still there, and the same one?"""
    try:
        text = Path(f"/proc/{handle.pid}/stat").read_text()
    except OSError:
        return False
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) == handle.birth and fields[0] not in "ZX"


async def gone(handle: Handle) -> None:
    """Wait until the wall is dead: the kernel takes it down in its own time."""
    await eventually(lambda: not alive(handle), "the wall outlived its end")


def residue(state: Path, ids: Iterable[str]) -> list[str]:
    """What sandboxes of a state root left on the host: processes, mounts, cgroups, folders."""
    marks = [*ids]
    found = [f"folder {path}" for path in (state / "sandboxes").glob("*") if path.name in marks]
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    found += [f"mount {line}" for line in mounts if any(mark in line for mark in marks)]
    for base in {line.split()[4] for line in mounts if " - cgroup" in line}:
        for folder, names, _ in os.walk(base):
            found += [f"cgroup {folder}/{name}" for name in names if name.startswith(tuple(marks))]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "cmdline").read_bytes() + (entry / "cgroup").read_bytes()
                if not any(mark.encode() in text for mark in marks):
                    continue
                # A zombie is its parent's to bury, and that is whoever adopts orphans on this machine.
                if (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    found.append(f"process {entry.name} {text[:80]!r}")
    return found


async def nothing_left(state: Path, ids: Iterable[str], seconds: float = 60.0) -> None:
    """Fail with what is left, if it does not go away."""
    end = time.monotonic() + seconds
    while found := residue(state, ids):
        assert time.monotonic() < end, "left behind: " + "; ".join(found)
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def opened(state: Path, runtime: str, seconds: float = 60.0) -> AsyncIterator[Kit]:
    """A node of this state root with that runtime; afterwards nothing of its sandboxes may be left.

    ``seconds``: for what is left to go away.
    """
    node = await Node.open(state)
    try:
        made = Kit(state, node, await node.runtime(runtime))
        # What a driver makes once a machine (compiled interpreters) is not what the tests are about.
        prepare = getattr(getattr(made.runtime, "driver", None), "prepare", None)
        if prepare is not None:
            await prepare(str(state / "sandboxes" / "none"))
        try:
            yield made
        finally:
            await made.close()
    finally:
        await node.close()
    # Cgroups are named after the sandbox, or after the node that uses them again and again.
    await nothing_left(state, {*made.ids, node.state.owner}, seconds)


class RuntimeSuite:
    """Base of the suites. Subclass a suite, or choose a runtime with ``--ringfence-runtime``."""

    @pytest_asyncio.fixture
    async def kit(self, ringfence_runtime: str, ringfence_state: Path) -> AsyncIterator[Kit]:
        """A node on the runtime under test; afterwards nothing of its sandboxes may be left."""
        async with opened(ringfence_state, ringfence_runtime) as made:
            if not made.capabilities.host_template:
                await asyncio.to_thread(templates.ensure, ringfence_state)
            yield made

    @pytest.fixture
    def caller(self) -> str:
        """``root`` or ``user``."""
        return who()
