"""Proving that a driver can start a wall here: one is started, spoken to and destroyed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import replace
from typing import Any

from ringfence.model.errors import RingfenceError
from ringfence.runtimes.contract import (
    AGENT_UID,
    MAP_SIZE,
    CgroupPlace,
    Disk,
    Handle,
    Health,
    Identity,
    IdMap,
    Probe,
    RootFs,
    Runtime,
    StartSpec,
)

TIMEOUT = 15.0  # seconds for the whole probe
_FIRST_UID = 0x7FFF_0000  # a host uid range that the node gives to nobody else: the last one it has
_FOLDERS = (
    ".ringfence", "dev", "etc", "home/agent", "proc", "run/secrets", "sys", "tmp", "usr", "var/tmp",
    "workspace",
)  # fmt: skip


def _skeleton(folder: str) -> str:
    skeleton = os.path.join(folder, "skeleton")
    for name in _FOLDERS:
        os.makedirs(os.path.join(skeleton, name), mode=0o755)
    return skeleton


def _identity(root: bool, user: int) -> Identity:
    if root:
        return Identity(1000, 1000, (IdMap(0, _FIRST_UID, MAP_SIZE),), AGENT_UID)
    return Identity(
        user,
        user,
        (IdMap(user, os.geteuid(), 1),),
        user,
        gid_maps=(IdMap(user, os.getegid(), 1),),
    )


def specimen(folder: str, root: bool, user: int = 1000) -> StartSpec:
    """The smallest wall: an empty root, one megabyte of disk, no cgroup.

    ``user``: of the workload, where a normal user makes the wall: the only one that can be mapped.
    """
    return StartSpec(
        id="probe",
        folder=folder,
        hostname="probe",
        root=RootFs((_skeleton(folder),), (), Disk("tmpfs", 1 << 20, 256)),
        identity=_identity(root, user),
        cgroup=CgroupPlace(),
        max_processes=64,
        max_open_files=256,
    )


async def _try_out(runtime: Runtime, folder: str, root: bool) -> tuple[float, list[str]]:
    """Milliseconds from start to the agent's first answer, and what is missing of the wall."""
    from ringfence.guest.link import GuestLink

    begun = time.perf_counter()
    handle: Handle | None = None
    try:
        # Some programs insist that user 0 is mapped inside.
        user = int(getattr(runtime, "probe_user", 1000))
        spec = specimen(folder, root, user)
        if not runtime.capabilities().host_template:
            spec = replace(spec, root=replace(spec.root, template="probe"))
        handle = await runtime.start(spec)
        async with await GuestLink.open(await runtime.connect(handle), timeout=TIMEOUT):
            taken = (time.perf_counter() - begun) * 1000
            boundary = await runtime.measure(handle)
    finally:
        if handle is not None:
            await runtime.destroy(handle)
    missing = [note for note in boundary.notes if note.startswith("no wall")]
    if boundary.landlock == "absent":
        missing.append("Landlock is not in this kernel")
    return taken, missing


async def probe(
    runtime: Any, version: str = "", vulnerabilities: tuple[str, ...] = (), *, within: float = TIMEOUT
) -> Probe:
    """Start, measure and destroy a wall of ``runtime`` within so many seconds; never raises."""
    root = runtime.context.root
    answer: dict[str, Any] = {
        "runtime": runtime.name,
        "level": runtime.level,
        "boundary": runtime.boundary,
        "version": version or _version(),
        "vulnerabilities": vulnerabilities,
    }
    if not root and not runtime.capabilities().rootless:
        return Probe(
            health=Health.UNAVAILABLE,
            reason="it needs root",
            remedy="run Ringfence as root, or choose a runtime that does without",
            **answer,
        )
    folder = ""
    try:
        folder = tempfile.mkdtemp(prefix="ringfence-probe-")
        os.chmod(folder, 0o711)  # noqa: S103 - the wall's host user passes through, and lists nothing
        async with asyncio.timeout(within):
            taken, missing = await _try_out(runtime, folder, root)
    except TimeoutError:
        return Probe(health=Health.UNAVAILABLE, reason=f"no answer within {within:.0f} s", **answer)
    except RingfenceError as error:
        return Probe(health=Health.UNAVAILABLE, reason=error.message, remedy=error.hint, **answer)
    except OSError as error:
        return Probe(
            health=Health.UNAVAILABLE, reason=f"{error.filename or 'probe'}: {error.strerror}", **answer
        )
    finally:
        if folder:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    walled = not any(note.startswith("no wall") for note in missing)
    return Probe(
        health=Health.UNAVAILABLE if not walled else Health.DEGRADED if missing else Health.HEALTHY,
        reason="; ".join(missing),
        cold_start_ms=round(taken, 2),
        **answer,
    )


def unavailable(
    runtime: Any, reason: str, remedy: str, version: str = "", known: tuple[str, ...] = ()
) -> Probe:
    """The answer of a driver that has nothing to start."""
    return Probe(
        runtime.name,
        Health.UNAVAILABLE,
        runtime.level,
        runtime.boundary,
        version,
        reason=reason,
        remedy=remedy,
        vulnerabilities=known,
    )


def _version() -> str:
    from ringfence import __version__

    return __version__
