"""The host's end of a wall that has one byte stream only: a ``ringfence-link`` process for each.

The process owns the stream, offers the usual ``guest.sock``, has no rights, outlives the node and ends when
the stream does (docs/PROTOCOL.md, "Many links over one stream"). Whoever dials the socket notices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess

from ringfence import _native
from ringfence.model.errors import HostLimit, StartFailed
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.launching.processes import ProcessRef, readable

START_TIMEOUT = 20.0  # seconds until the agent must have answered
END_TIMEOUT = 10.0
_life: list[int] = []  # a pipe: its writing end closes when this process ends, however that comes
_ours: dict[int, subprocess.Popen[bytes]] = {}  # to be reaped


async def start(
    folder: str,
    *,
    stream: int | tuple[int, int] | None = None,
    connect: str | None = None,
    fresh: bool = False,
    docker: bool = False,
    owned: bool = False,
    within: float = START_TIMEOUT,
) -> ProcessRef:
    """Start the process for one stream; returns when the agent at the far end has answered.

    Args:
        folder: of the sandbox; ``guest.sock`` is bound in it, one that is there is replaced.
        stream: descriptors to read and write (one number for a socket); the caller's stay open and may be
            closed at once. They become non-blocking.
        connect: in place of ``stream``, a unix socket to dial (by the process, as this user).
        fresh: nobody has written to this stream yet: a little faster.
        owned: it ends with this process (a sandbox that must not outlive the node).
        docker: what comes in is in Docker's multiplexed attach format.

    Raises:
        StartFailed: the stream ended, or nobody answered ``within`` that many seconds; nothing is left.
        HostLimit: the program is not built, or can't be started.
    """
    if stream is not None:
        inward, outward = stream if isinstance(stream, tuple) else (stream, stream)
        where, passed = [f"stream={inward},{outward}"], [inward, outward]
    else:
        where, passed = [f"connect={connect}"], list[int]()
    program = _native.path("link")
    _reap()
    listener = sockets.listener(folder)
    ready, ready_end = os.pipe2(os.O_CLOEXEC)
    words, words_end = os.pipe2(os.O_CLOEXEC)
    ref: ProcessRef | None = None
    try:
        options = [f"listen={listener.fileno()}", *where, f"ready={ready_end}"]
        options += ["fresh=1"] if fresh else []
        options += ["format=docker"] if docker else []
        if owned:
            options.append(f"owner={_owner()}")
            passed.append(_owner())
        process = _spawn([program, *options], (listener.fileno(), ready_end, *passed), words_end)
        _ours[process.pid] = process
        ref = ProcessRef.of(process.pid)
        os.close(ready_end)
        os.close(words_end)
        ready_end = words_end = -1
        async with asyncio.timeout(within):
            await readable(ready)
        if not os.read(ready, 1):
            said = os.read(words, 4096).decode(errors="replace").strip()
            raise StartFailed(said or "the stream to the guest agent has ended", step="link")
    except BaseException as error:
        if ref is not None:
            await end(ref)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, sockets.NAME))
        if isinstance(error, TimeoutError):
            raise StartFailed(
                f"the guest agent did not answer on its stream within {within:g} s", step="agent"
            ) from None
        raise
    finally:
        listener.close()
        for descriptor in (ready, words, ready_end, words_end):
            if descriptor >= 0:
                os.close(descriptor)
    return ref


def _owner() -> int:
    if not _life:
        _life.extend(os.pipe2(os.O_CLOEXEC))
    return _life[0]


def _spawn(command: list[str], passed: tuple[int, ...], words: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            env={},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise HostLimit(
            f"{command[0]} can't be started: {error.strerror}", hint="look at the limits of this user"
        ) from error


async def end(ref: ProcessRef) -> None:
    """Kill the process, if it lives, and return when it is gone. The wall is not touched.

    Raises:
        HostLimit: it does not die.
    """
    descriptor = ref.pidfd()
    if descriptor is not None:
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            async with asyncio.timeout(END_TIMEOUT):
                await readable(descriptor)
        except TimeoutError:
            raise HostLimit(f"process {ref.pid} does not die", hint="see its /proc/PID/stack") from None
        finally:
            os.close(descriptor)
    _reap()


def _reap() -> None:
    for pid, process in list(_ours.items()):
        if process.poll() is not None:
            del _ours[pid]
