"""``ringfence bench --runtimes``: each runtime beside the program that it is built on, and what else is
promised of them: a restore beside a cold start, and starts from a small and a large image.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tarfile
import tempfile
import time
from collections.abc import AsyncIterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.cli.references import LIMITS
from ringfence.cli.timing import Samples
from ringfence.guest.processes import Output, ProcessSpec
from ringfence.model.errors import RingfenceError
from ringfence.model.levels import Level
from ringfence.model.policy import MIB, Isolation, Mount, Policy, Resources
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.service import Node

if TYPE_CHECKING:
    from ringfence.cli.bench import Bench

NAMES = ("jail", "bubblewrap", "nsjail", "runc", "gvisor", "docker", "qemu-microvm", "wasm")
# Cold start with Python and pandas → the same, warm, from a snapshot of its memory.
RESTORE, SIZES = 0.6, 1.2
SMALL, LARGE = 10, 2048  # MiB of an image
_RESTORES, _SIZED = 10, 40
_WARM = (
    "import sys\nimport pandas\nprint('ready', flush=True)\n"
    "for line in sys.stdin: print(pandas.DataFrame({'n': [int(line)]}).n.sum(), flush=True)\n"
)


def run(bench: Bench, names: list[str] | None, folder: str) -> None:
    """Measure into ``bench``; what can't be had here is named in ``bench.absent``."""
    bench.own = True
    bench.only = ["cold"]
    chosen = names or list(NAMES)
    bench.prepare(list(dict.fromkeys(other for name, other in LIMITS if name in chosen)), folder)
    try:
        asyncio.run(_measure(bench, chosen))
    finally:
        for reference in bench.references:
            reference.remove()


async def _measure(bench: Bench, names: list[str]) -> None:
    async with await Node.open(adopt=False) as node:
        for name in names:
            # A call of a function is what WebAssembly is for.
            bench.only = ["cold", "exec"] if name == "wasm" else ["cold"]
            await _try(bench, name, bench.runtime(node, name))
        if "gvisor" in names:
            await _try(bench, "gvisor: restore", _restores(bench, node, "gvisor"))
        if "jail" in names:
            await _try(bench, "jail: images of different sizes", _sizes(bench))


async def _try(bench: Bench, what: str, work: Any) -> None:
    try:
        await work
    except RingfenceError as error:
        bench.absent[what] = error.message


# -- restores


async def _restores(bench: Bench, node: Node, name: str) -> None:
    from ringfence.cli.bench import Promise

    found = importlib.util.find_spec("pandas")
    if found is None or not found.submodule_search_locations:
        bench.absent[f"{name}: restore with a warm pandas"] = "pandas is not installed for this Python"
        return
    bench.say(f"{name}: restores")
    count = _RESTORES if bench.full.starts > _RESTORES * 4 else 4
    policy = Policy().with_wall(
        isolation=Isolation(runtime=name, minimum=Level.L1, allow_emulated=True),
        resources=Resources(cpus=1, memory=1024 * MIB, disk=256 * MIB),
    )
    packages = os.path.dirname(found.submodule_search_locations[0])
    files = replace(policy.wall.filesystem, mounts=(Mount(packages, "/mnt"),))
    request = SandboxRequest(policy=policy.with_wall(filesystem=files))
    spec = ProcessSpec(
        ("/usr/bin/python3", "-S", "-c", _WARM), id="warm", stdin=True, env={"PYTHONPATH": "/mnt"}
    )
    cold, warm = Samples(f"{name}: cold start, import pandas"), Samples(f"{name}: restore, pandas answers")
    for turn in range(-1, count):
        started = time.perf_counter()
        sandbox = await node.create(request)
        try:
            process = await sandbox.start(spec)
            await _says(process, "ready")
            await process.write(b"7\n")
            await _says(process, "7")
            if turn >= 0:
                cold.add(started)
            if turn == count - 1:
                await process.close()
                saved = await sandbox.snapshot(f"bench-{os.getpid()}", kind="memory")
        finally:
            await sandbox.destroy()
    try:
        for turn in range(-1, count):
            started = time.perf_counter()
            sandbox = await node.restore(saved.id)
            try:
                going_on = await (await sandbox.link()).attach("warm", stdout=0)
                await going_on.write(b"8\n")
                await _says(going_on, "8")
                if turn >= 0:
                    warm.add(started)
                await going_on.close()
            finally:
                await sandbox.destroy()
    finally:
        await asyncio.to_thread(node.snapshots.remove, saved.name)
    bench.figures += [cold.as_dict(), warm.as_dict()]
    text = f"{warm.percentile(50):.0f} ms beside {cold.percentile(50):.0f} ms"
    ratio = warm.percentile(50) / cold.percentile(50)
    what = f"{name}: restore with a warm pandas beside a cold start that imports it, p50"
    bench.promises.append(Promise(what, RESTORE, ratio, "x", reference=text))


async def _says(process: AsyncIterable[Output], word: str) -> None:
    """Wait for a line of its output.

    Raises:
        RuntimeError: it ended without it.
    """
    seen = b""
    async for piece in process:
        seen += piece.data
        if word.encode() in seen.split(b"\n")[:-1]:
            return
    raise RuntimeError(f"the command ended without {word!r}: {seen[-500:]!r}")


# -- images


async def _sizes(bench: Bench) -> None:
    """Two images that differ in size only: the static command, and a file that nobody reads."""
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)  # noqa: S103 - a workload's host user passes through to its root
        async with await Node.open(folder, adopt=False) as node:
            await _sized(bench, node)


async def _sized(bench: Bench, node: Node) -> None:
    from ringfence.cli.bench import Promise
    from ringfence.images.contract import ImportLimits

    samples, requests = {}, {}
    policy = Policy().with_wall(isolation=Isolation(runtime="jail", minimum=Level.L1))
    for size in (SMALL, LARGE):
        name = f"bench:{size}"
        bench.say(f"an image of {size} MiB is made")
        source, limits = _Tar(bench.program, size << 20), ImportLimits()
        layer = await asyncio.to_thread(node.images.store.add_layer_from, source, limits=limits)
        node.images.store.put(name, [layer])
        requests[size] = SandboxRequest(policy=policy, template=name)
        samples[size] = Samples(f"jail: image of {size} MiB, create to first output")
    bench.say("starts from both")
    for turn in range(-2, max(4, min(_SIZED, bench.full.starts))):
        for size, request in requests.items():
            started = time.perf_counter()
            sandbox = await node.create(request)
            try:
                process = await sandbox.start(ProcessSpec(("/hello",)))
                async for _ in process:
                    break
                if turn >= 0:
                    samples[size].add(started)
                await process.close()
            finally:
                await sandbox.destroy()
    bench.figures += [each.as_dict() for each in samples.values()]
    small, large = samples[SMALL].percentile(50), samples[LARGE].percentile(50)
    text = f"{large:.2f} ms beside {small:.2f} ms"
    what = f"jail: start from an image of {LARGE} MiB beside one of {SMALL} MiB, p50"
    bench.promises.append(Promise(what, SIZES, large / small, "x", reference=text))


class _Tar:
    """A layer as a stream: the command as ``/hello``, and a file of so many bytes that don't compress."""

    def __init__(self, program: str, size: int) -> None:
        self._pieces = self._made(program, size)
        self._rest = b""

    def _made(self, program: str, size: int) -> Iterator[bytes]:
        with open(program, "rb") as file:
            code = file.read()
        for name, data in (("bin/", None), ("etc/", None), ("hello", code)):
            yield _header(name, len(data or b""), folder=data is None) + _padded(data or b"")
        yield _header("large", size)
        block = os.urandom(1 << 20)
        for _ in range(size >> 20):
            yield block
        yield bytes(1024)

    def read(self, size: int) -> bytes:
        """As a file."""
        while len(self._rest) < size:
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._rest += piece
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def _header(name: str, size: int, *, folder: bool = False) -> bytes:
    info = tarfile.TarInfo(name.rstrip("/"))
    info.size, info.mode = size, 0o755
    info.type = tarfile.DIRTYPE if folder else tarfile.REGTYPE
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)
