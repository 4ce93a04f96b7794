"""Snapshots of a machine: its disk, and the memory that QEMU writes for a migration.

A folder of a snapshot holds ``disk`` (a sparse copy of the guest's disk) and, with memory, ``memory``. Both
were written by the guest: nothing on the host looks into them but QEMU, in its wall.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from typing import Any

from ringfence.model.errors import HostLimit, InvalidRequest, LinkLost, RingfenceError
from ringfence.runtimes.contract import Handle, StartSpec
from ringfence.runtimes.vm import control, disks, machines
from ringfence.runtimes.vm.qmp import Qmp

FORMAT = 1
DISK, MEMORY = "disk", "memory"
TIMEOUT = 100.0  # seconds for the memory to be written
_AGAIN = "make the snapshot again"


async def save(handle: Handle, folder: str, *, memory: bool) -> None:
    """Write disk and memory of a machine, which stands still meanwhile and then goes on.

    Raises:
        HostLimit: the machine or the host's disk refuses; nothing is left in ``folder``.
        LinkLost: the machine has ended.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        await (_save_all(handle, folder) if memory else _save_disk(handle, folder))
    except OSError as error:
        raise HostLimit(
            f"the snapshot can't be written: {error.strerror}", hint="is the disk of the state root full?"
        ) from error


async def _save_all(handle: Handle, folder: str) -> None:
    async with await Qmp.open(handle.folder) as machine:
        await machine.call("stop")  # what the guest wrote is in the image then
        try:
            await asyncio.to_thread(disks.copy, handle.data["disk"], os.path.join(folder, DISK))
            file = os.open(
                os.path.join(folder, MEMORY), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400
            )
            try:
                await machine.call("getfd", fds=[file], fdname="memory")
                await machine.call("migrate-set-parameters", max_bandwidth=1 << 40)
                await machine.call("migrate", uri="fd:memory")
                await _written(machine)
                os.fsync(file)
            finally:
                os.close(file)
        finally:
            with contextlib.suppress(RingfenceError):
                await machine.call("cont")


async def _written(machine: Qmp) -> None:
    async with asyncio.timeout(TIMEOUT):
        while True:
            status = await machine.call("query-migrate")
            if status.get("status") == "completed":
                return
            if status.get("status") in ("failed", "cancelled"):
                raise HostLimit(
                    f"QEMU could not write its memory: {status.get('error-desc', 'no reason given')}"
                )
            await asyncio.sleep(0.02)


async def _save_disk(handle: Handle, folder: str) -> None:
    await control.call(handle.folder, "freeze", 60)
    try:
        await asyncio.to_thread(disks.copy, handle.data["disk"], os.path.join(folder, DISK))
    finally:
        await control.call(handle.folder, "thaw", 60)


def describe(folder: str, fitting: Mapping[str, Any], *, memory: bool) -> dict[str, Any]:
    """What restoring has to know and to check; JSON-able."""
    names = [DISK, MEMORY] if memory else [DISK]
    return {
        "format": FORMAT,
        "memory": memory,
        "files": {name: _digest(os.path.join(folder, name)) for name in names},
        "checked": names,
        "fitting": dict(fitting),
    }


def fitting(
    runtime: str, spec: StartSpec, kernel: str, version: str, kind: str, firmware: str
) -> dict[str, Any]:
    """What of a machine must be the same in the one that was saved and the one it becomes."""
    return {
        "runtime": runtime,
        "machine": os.uname().machine,
        "kind": kind,
        "kernel": kernel,
        "qemu": version,
        "firmware": firmware or "QEMU's own",
        "template": spec.root.template,
        "memory": machines.guest_memory(spec.memory),
        "processors": machines.processors(spec),
        "user": spec.identity.uid,
        "readonly": spec.root.readonly,
    }


def check(folder: str, data: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse what can't become this machine.

    Raises:
        InvalidRequest: the snapshot is foreign, damaged or of another kind; the message says which.
    """
    known, files = data.get("fitting"), data.get("files")
    if data.get("format") != FORMAT or not isinstance(known, Mapping) or not isinstance(files, Mapping):
        raise InvalidRequest(
            "the snapshot is not one of a virtual machine", hint="restore it with the runtime that made it"
        )
    # Without memory only what is on the disk must fit.
    keys = mine if data.get("memory") else ("runtime", "machine", "template")
    for key in keys:
        if known.get(key) != mine[key]:
            raise InvalidRequest(
                f"the snapshot does not fit: its {key} is {known.get(key)}, here it is {mine[key]}",
                hint="restore it with the policy, template and programs that it was made with",
            )
    if sorted(files) != ([DISK, MEMORY] if data.get("memory") else [DISK]):
        raise InvalidRequest("the snapshot is damaged: files are missing or too many", hint=_AGAIN)
    for name, digest in files.items():
        try:
            found = _digest(os.path.join(folder, name))
        except OSError as error:
            raise InvalidRequest(f"the snapshot is damaged: {name}: {error.strerror}", hint=_AGAIN) from error
        if found != digest:
            raise InvalidRequest(f"the snapshot is damaged: {name} is not what was saved", hint=_AGAIN)


def _digest(path: str) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def remove(folder: str) -> None:
    """Remove what :func:`save` wrote."""
    shutil.rmtree(folder, ignore_errors=True)


async def resume(folder: str, hostname: str, within: float) -> None:
    """Let a machine go on that was started from a memory image, as somebody else.

    Raises:
        LinkLost: it ended, or can't be reached.
        HostLimit: QEMU can't read the image, or its guest does not take its new identity.
    """
    async with await Qmp.open(folder, within) as machine:
        async with asyncio.timeout(within):
            while True:
                try:
                    status = (await machine.call("query-status")).get("status")
                except LinkLost:
                    raise HostLimit("QEMU can't read the memory of the snapshot") from None
                if status != "inmigrate":
                    break
                await asyncio.sleep(0.01)
        await machine.call("cont")
    await control.wake(folder, hostname)
