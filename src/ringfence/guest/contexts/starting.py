"""How a context begins: as a copy of the sandbox's zygote, or as a cold interpreter.

The zygote is an interpreter that runs nobody's code (``kernels/python_zygote.py``): it is started with the
first context and stays; every context is a copy of it. It belongs to the workload as all that runs there:
wherever it does not do its duty, the context starts cold.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import time
from dataclasses import replace
from typing import Final

from ringfence.guest.contexts.languages import Language
from ringfence.guest.fields import clean
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import STDERR, GuestProcess, ProcessSpec
from ringfence.model.errors import GuestRefused, Unsupported

ZYGOTES: Final = "zygote."  # with the language: the id of the process
_BOOT: Final = 30.0  # seconds for it to be ready: an emulated machine takes its time
_PATIENCE: Final = 5.0  # seconds to wait for one that somebody else begins
_RING: Final = 16384  # bytes; it prints one line
_NO_PROGRAM: Final = 127  # what a shell says


async def copied(link: GuestLink, kind: Language, spec: ProcessSpec) -> GuestProcess | None:
    """The context as a copy of the sandbox's zygote, which is started if there is none.

    ``None``: there can be none, and the context must start cold.

    Raises:
        GuestRefused: EEXIST, the id is in use.
    """
    if kind.zygote is None:
        return None
    number = ZYGOTES + kind.name
    for attempt in (1, 2):
        try:
            return await link.start(replace(spec, copy_of=number))
        except GuestRefused as error:
            if error.errno == errno.EEXIST:
                raise
            if error.errno == errno.ETIMEDOUT:  # the next one is not to wait for it too
                with contextlib.suppress(GuestRefused):
                    await link.signal(number, signal.SIGKILL)
            if error.errno != errno.ESRCH or attempt == 2:
                return None
        if not await _boot(link, kind, number):
            return None
    return None


async def _boot(link: GuestLink, kind: Language, number: str) -> bool:
    """Start the zygote; returns when it can be asked. False: it can't be had."""
    process, begun = await _started(link, kind, number)
    if process is None:
        return False
    ready = False
    try:
        async with asyncio.timeout(_PATIENCE if begun else _BOOT):
            if not begun:
                await process.write(kind.zygote_source())
            await until_ready(kind, process)
        ready = True
    except (GuestRefused, Unsupported, TimeoutError):
        pass
    finally:
        # Also where nobody waits for it any more: with half of its text it would be in everybody's way.
        if not ready and (not begun or await _old(link, number)):
            with contextlib.suppress(Exception):
                await process.signal(signal.SIGKILL)
        await process.close()
    return ready


async def _old(link: GuestLink, number: str) -> bool:
    """Whether it had the time to be ready."""
    with contextlib.suppress(GuestRefused):
        for row in await link.processes():
            if row.id == number:
                return time.time() - row.started_ns / 1e9 > _BOOT
    return False


async def _started(link: GuestLink, kind: Language, number: str) -> tuple[GuestProcess | None, bool]:
    """The zygote's process, and whether somebody else began it."""
    size = len(kind.zygote_source())
    for program in kind.programs:
        spec = ProcessSpec(
            kind.command(program, size), id=number, stdin=True, zygote=True, drop=True, ring=_RING
        )
        for _ in (1, 2):
            try:
                return await link.start(spec), False
            except GuestRefused as error:
                if error.errno == errno.ENOENT:
                    break
                if error.errno != errno.EEXIST:
                    return None, False
            try:
                await link.remove(number)  # one that has ended
            except GuestRefused as error:
                if error.errno == errno.EBUSY:  # somebody else is starting it
                    return await _attached(link, number), True
    return None, False


async def _attached(link: GuestLink, number: str) -> GuestProcess | None:
    try:
        return await link.attach(number)
    except GuestRefused:
        return None


async def until_ready(kind: Language, process: GuestProcess) -> None:
    """Return when the kernel has said that it is ready.

    Raises:
        Unsupported: it ended before.
    """
    reader = kind.reader("-", False)
    said = bytearray()
    async for stream, offset, data in process:
        if stream == STDERR:
            said += data[: 4096 - len(said)]
        reader.feed(stream, offset, data)
        if reader.ready:
            return
    exit = await process.wait()
    if exit.code == _NO_PROGRAM:
        raise missing_program(kind)
    raise Unsupported(
        f"the {kind.name} context ended with status {exit.status} before it was ready"
        + (f": {clean(bytes(said), 1000)}" if said else ""),
        hint=f"use a template with {kind.needs}",
        capability=f"contexts.{kind.name}",
    )


def missing_program(kind: Language) -> Unsupported:
    """The template has none of the language's programs."""
    return Unsupported(
        f"the sandbox has no {' or '.join(kind.programs)} to run {kind.name}",
        hint=f"use a template with {kind.needs}",
        capability=f"contexts.{kind.name}",
    )
