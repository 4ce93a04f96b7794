"""Images of a wall of gVisor: its memory (runsc's checkpoint), its upper layer, and what must fit.

A folder of an image has ``memory/`` (runsc's files), ``upper/`` (the files that were written, owned by the
ids inside, so that it is a lower layer of whatever is restored from it) and nothing that names the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from typing import Any

from ringfence.model.errors import HostLimit, InvalidRequest, StartFailed
from ringfence.runtimes.contract import Handle, StartSpec
from ringfence.runtimes.gvisor_parts import sandboxes
from ringfence.runtimes.launching import readied

FORMAT = 1
MEMORY, UPPER = "memory", "upper"
TIMEOUT = 60.0  # seconds of one call of runsc
_NSENTER = (
    "nsenter",
    "--user",
    "--mount",
    "--pid",
    "--net",
    "--ipc",
    "--uts",
    "--setuid",
    "0",
    "--setgid",
    "0",
)


async def call(program: str, monitor: int, *arguments: str) -> None:
    """Call runsc beside the one that watches the wall: in its namespaces, with its state, as its user.

    Raises:
        HostLimit: it failed; the message is its own.
    """
    argv = (
        *_NSENTER,
        "--target",
        str(monitor),
        program,
        "--root",
        readied.STATE,
        *sandboxes.OPTIONS,
        *arguments,
    )
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"},
        cwd="/",
    )
    try:
        async with asyncio.timeout(TIMEOUT):
            output, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        words = output.decode(errors="replace").strip().splitlines()
        raise HostLimit(
            f"runsc {arguments[0]}: {words[-1] if words else process.returncode}",
            hint="is anything open that leads to the host? see `ringfence doctor`",
        )


async def save(program: str, handle: Handle, folder: str, first: int, *, memory: bool) -> None:
    """Write an image of a wall, which stands still meanwhile. To save ``memory`` its agent must sleep.

    ``first``: the host's number of id 0 inside.

    Raises:
        HostLimit: runsc or the disk refused; nothing of the image is left.
    """
    monitor = int(handle.data["monitor"])
    place, upper = os.path.join(folder, MEMORY), os.path.join(folder, UPPER)
    try:
        os.makedirs(folder, mode=0o711, exist_ok=True)
        if memory:
            os.mkdir(place, 0o700)
            os.chown(place, first, first)
    except OSError as error:
        raise HostLimit(f"the snapshot can't be written: {error.strerror}", hint="see the folder") from error
    await call(program, monitor, "pause", handle.id)
    try:
        await _copy(sandboxes.upper(monitor), upper)
        if memory:
            options = ("--image-path", place, "--compression", "none", "--leave-running")
            await call(program, monitor, "checkpoint", *options, handle.id)
    finally:
        with contextlib.suppress(HostLimit):  # the checkpoint may have let it go on
            await call(program, monitor, "resume", handle.id)
    await asyncio.to_thread(_own, place if memory else "", upper, first)


async def _copy(source: str, target: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "cp", "-a", "--", source, target, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, error = await process.communicate()
    if process.returncode:
        raise HostLimit(f"the files can't be copied: {error.decode(errors='replace').strip()[-300:]}")


def _own(memory: str, upper: str, first: int) -> None:
    """Give the files the ids that they have inside; nobody else works on this copy."""
    if memory:
        for name in os.listdir(memory):
            os.chown(os.path.join(memory, name), 0, 0)
            os.chmod(os.path.join(memory, name), 0o400)
        os.chown(memory, 0, 0)
        os.chmod(memory, 0o500)
    _shift(upper, first)
    for place, folders, files in os.walk(upper):
        for name in (*folders, *files):
            _shift(os.path.join(place, name), first)


def _shift(path: str, first: int) -> None:
    found = os.lstat(path)
    if found.st_uid < first:
        return  # of the host's, as whiteouts are
    os.chown(path, found.st_uid - first, max(found.st_gid - first, 0), follow_symlinks=False)
    if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
        os.chmod(
            path, stat.S_IMODE(found.st_mode) & 0o1777
        )  # without set-user-ID: nothing gains from it inside


def describe(folder: str, version: str, spec: Mapping[str, Any], *, memory: bool) -> dict[str, Any]:
    """What restoring has to know and to check; JSON-able."""
    place = os.path.join(folder, MEMORY)
    names = sorted(os.listdir(place)) if memory else []
    return {
        "runtime": "gvisor",
        "format": FORMAT,
        "runsc": version,
        "machine": os.uname().machine,
        "memory": memory,
        "checked": [MEMORY],  # by us, before each restore
        "files": {name: _digest(os.path.join(place, name)) for name in names},
        **spec,
    }


def check(folder: str, data: Mapping[str, Any], version: str, spec: StartSpec) -> None:
    """Refuse what can't be restored into this wall.

    Raises:
        InvalidRequest: the image is foreign, damaged or of another kind of wall; the message says which.
    """
    if data.get("runtime") != "gvisor" or data.get("format") != FORMAT:
        raise InvalidRequest(
            "the snapshot is not one of gVisor's", hint="restore it with the runtime that made it"
        )
    for key, ours in (("runsc", version), ("machine", os.uname().machine)):
        if data.get(key) != ours:
            raise InvalidRequest(
                f"the snapshot was made with {key} {data.get(key)}, here is {ours}",
                hint="gVisor reads the images of its own version only: make the snapshot again",
            )
    for key, mine in fitting(spec).items():
        if data.get(key) != mine:
            raise InvalidRequest(
                f"the snapshot does not fit: its {key} is {data.get(key)}, the request's is {mine}",
                hint="restore it with the policy and template that it was made with",
            )
    memory, files = os.path.join(folder, MEMORY), data.get("files")
    try:
        present = sorted(os.listdir(memory)) if data.get("memory") else []
        if not isinstance(files, dict) or present != sorted(files) or bool(files) != bool(data.get("memory")):
            raise InvalidRequest("the snapshot is damaged: files are missing or too many", hint=_AGAIN)
        for name, digest in files.items():
            if _digest(os.path.join(memory, name)) != digest:
                raise InvalidRequest(f"the snapshot is damaged: {name} is not what was saved", hint=_AGAIN)
        if not os.path.isdir(os.path.join(folder, UPPER)):
            raise InvalidRequest("the snapshot is damaged: its files are missing", hint=_AGAIN)
    except OSError as error:
        raise InvalidRequest(f"the snapshot can't be read: {error.strerror}", hint=_AGAIN) from error


_AGAIN = "make the snapshot again"


def fitting(spec: StartSpec) -> dict[str, Any]:
    """What of a request must be the same in the wall that was saved and the one it becomes."""
    return {
        "user": spec.identity.uid,
        # Mount points of the policy's mounts are in a layer of the sandbox's own folder.
        "lowers": [
            lower.replace(f"{spec.folder}/", "./", 1)
            for lower in spec.root.lowers
            if lower not in own_layers(spec)
        ],
        "binds": [[bind.source, bind.target, bind.read_only] for bind in spec.root.binds],
        "readonly": spec.root.readonly,
    }


def own_layers(spec: StartSpec) -> tuple[str, ...]:
    """Layers that lie over what was saved: what no two copies share."""
    return tuple(lower for lower in spec.root.lowers if lower == os.path.join(spec.folder, "identity"))


def _digest(path: str) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


async def wake(program: str, monitor: int, name: str, ended: asyncio.Future[int | None]) -> None:
    """Tell the agent that it is somewhere else now: as soon as runsc can.

    Raises:
        StartFailed: the wall ended, or never came to life.
    """
    pause = 0.03
    while True:
        try:
            await call(program, monitor, "kill", name, "USR1")
            return
        except HostLimit as error:
            last = error.message
        await asyncio.wait([ended], timeout=pause)
        if ended.done():
            raise StartFailed(f"runsc: {last}", step="restore")
        pause = min(pause * 1.5, 0.2)
