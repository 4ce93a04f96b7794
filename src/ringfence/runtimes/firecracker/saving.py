"""Saving a machine, and what must fit when it is restored.

A folder of a saved machine is root's alone and has ``disk``, and with its memory ``state`` and ``memory``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringfence.guest.link import GuestLink
from ringfence.model.errors import HostLimit, InvalidRequest, RingfenceError
from ringfence.runtimes.contract import Handle, StartSpec
from ringfence.runtimes.firecracker import files, links, machine
from ringfence.runtimes.firecracker.api import Refused
from ringfence.runtimes.vm import disks, kernel

if TYPE_CHECKING:
    from ringfence.runtimes.firecracker.driver import FirecrackerRuntime
    from ringfence.runtimes.launching.launcher import Child

FORMAT = 1
TIMEOUT = 120.0  # seconds for the guest's memory to be written or mapped
_FILES = ("state", "memory", "disk")


async def save(driver: FirecrackerRuntime, handle: Handle, folder: str, *, memory: bool) -> dict[str, Any]:
    """See the contract's ``snapshot``."""
    jail = driver.jail(handle)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.chmod(folder, 0o700)  # what is in a memory is nobody else's to read
        if memory:
            async with await GuestLink.open(await driver.connect(handle)) as link:
                await link.quiesce()
        else:
            await links.call(jail, "freeze")
        await driver.pause(handle)
        try:
            if memory:
                await driver.send(jail, [machine.save()], within=TIMEOUT)
            await asyncio.to_thread(_keep, jail, folder, memory)
        finally:
            await driver.resume(handle)
    except BaseException as error:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if isinstance(error, Refused):
            raise HostLimit(error.message, hint="is there room on the disk of the state root?") from error
        if isinstance(error, OSError):
            raise HostLimit(
                f"the snapshot can't be written: {error.strerror}", hint="see the disk"
            ) from error
        raise
    finally:
        with contextlib.suppress(RingfenceError):  # the machine may have ended: its own error tells more
            await links.call(jail, "wake" if memory else "thaw")
        await asyncio.to_thread(files.unlink, jail, (machine.STATE, machine.MEMORY))
    return {
        "format": FORMAT,
        "memory": memory,
        "firecracker": handle.data["firecracker"],
        "kernel": handle.data["digest"],
        "template": handle.data["template"],
        "size": handle.data["size"],
    }


async def check(spec: StartSpec, folder: str, data: Mapping[str, Any], version: str) -> None:
    """Refuse what was saved elsewhere, or not by us.

    Raises:
        InvalidRequest: it does not fit; the message says what.
    """
    if data.get("format") != FORMAT:
        raise InvalidRequest("the snapshot is of another driver or version", hint="take it anew")
    for name in _FILES if data.get("memory") else ("disk",):
        path = os.path.join(folder, name)
        if not stat.S_ISREG(files.mode(path)):
            raise InvalidRequest(f"the snapshot is damaged: there is no file {name}", hint="take it anew")
    here = {
        "firecracker": version,
        "kernel": (await asyncio.to_thread(kernel.find)).digest,
        "template": spec.root.template,
        "size": [machine.memory(spec), machine.processors(spec)],
    }
    wanted = here if data["memory"] else {"template": here["template"]}
    for name, found in wanted.items():
        if data.get(name) != found:
            raise InvalidRequest(
                f"the snapshot was taken with {name} {data.get(name)}, and here it is {found}",
                hint="restore it where it was taken, at the same size",
            )


async def identify(jail: str, hostname: str, child: Child, within: float) -> None:
    """Wake a restored guest with a name, a machine id, randomness and a clock of its own."""
    import secrets
    import time

    (await links.appear(jail, links.CONTROL, child.exited.done, within)).close()
    now = time.time_ns()
    for line in (
        f"hostname {hostname}",
        f"machine-id {secrets.token_hex(16)}",
        f"seed {secrets.token_hex(64)}",
        f"clock {now // 10**9} {now % 10**9}",
        "wake",
    ):
        await links.call(jail, line)


def _keep(jail: str, folder: str, memory: bool) -> None:
    """Move what the monitor wrote out of its jail, and copy its disk. Nothing that it made is followed."""
    if memory:
        for name, inside in (("state", machine.STATE), ("memory", machine.MEMORY)):
            source = os.path.join(jail, inside)
            target = os.path.join(folder, name)
            os.rename(source, target)
            # Looked at where the monitor can't put another thing in its place any more.
            if not stat.S_ISREG(files.mode(target)):
                raise OSError(5, "Firecracker wrote no snapshot", source)
            os.chown(target, 0, 0, follow_symlinks=False)
            os.chmod(target, 0o444)
    disks.copy(os.path.join(jail, machine.DISK), os.path.join(folder, "disk"))
