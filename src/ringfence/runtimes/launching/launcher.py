"""The client of the native launcher: one small process that starts every wall of this node process."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable

from ringfence import _native
from ringfence.model.errors import HostLimit, StartFailed
from ringfence.runtimes.launching.hints import failure
from ringfence.runtimes.launching.plan import MAX_BYTES, Plan
from ringfence.runtimes.launching.processes import kill_tree, readable

LATE = 5.0  # seconds that a start under way is waited for at the end
_MAGIC = 0x314C4652
_REQUEST = struct.Struct("<IIII")
_REPLY = struct.Struct("<IIiiiIIIQ32s")
_INIT, _SPAWN, _PRELUDE = 1, 2, 3
_STARTED, _FAILED, _EXITED = 1, 2, 3


class Child:
    """A program that the launcher started. ``exited`` resolves to its wait status, or ``None`` if the
    launcher ended first and nobody can know."""

    __slots__ = ("birth", "exited", "keep", "landlock", "pid", "pidfd")

    def __init__(
        self,
        pid: int,
        birth: int,
        pidfd: int,
        landlock: int,
        keep: bool,
        exited: asyncio.Future[int | None],
    ) -> None:
        self.pid = pid
        self.birth = birth  # start time as /proc/PID/stat has it, 0 if unknown
        self.pidfd = pidfd
        self.landlock = landlock
        self.keep = keep
        self.exited = exited

    def close(self) -> None:
        """Close the pidfd. The program lives on."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Launcher:
    """Started once a node process; every local driver starts its programs through it.

    When this object is closed, or its process dies, ephemeral children are killed and kept ones live on
    (the launcher stays to record their exits, then ends).
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self._starting: dict[int, tuple[Plan, bool, asyncio.Future[Child]]] = {}
        self._running: dict[int, Child] = {}
        self._sending = asyncio.Lock()  # a loop has one writer a descriptor: one at a time waits for room
        self._room: asyncio.Future[None] | None = None
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def start(cls, init: Plan | None = None, prelude: Plan | None = None) -> Launcher:
        """Start the program and let it execute ``init`` in itself.

        ``prelude`` is what plans with a step PRELUDE begin with; children that have done it are made ahead.

        Raises:
            HostLimit: it is not built.
            StartFailed: a step of ``init`` failed.
        """
        program = _native.launcher()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
            if theirs.fileno() == 3:  # dup2 to itself would leave it close-on-exec
                theirs = socket.socket(fileno=_moved(theirs))
                actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
            environment = {
                key: os.environ[key] for key in ("ASAN_OPTIONS", "UBSAN_OPTIONS") if key in os.environ
            }
            pid = os.posix_spawn(program, ["ringfence-launcher"], environment, file_actions=actions)  # noqa: ASYNC221
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        launcher = cls(pid, ours)
        try:
            for kind, plan in ((_INIT, init), (_PRELUDE, prelude)):
                if plan is not None:
                    await launcher._request(kind, plan, keep=False)
        except BaseException:
            await launcher.close()
            raise
        return launcher

    async def spawn(
        self, plan: Plan, *, keep: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> Child:
        """Execute a plan in a new process; return once its program runs.

        ``keep`` must say what the plan says (step KEEP): it only tells :meth:`close` whom to wait for.
        ``meanwhile`` is called while the child is at work; if it raises, the child is killed.

        Raises:
            StartFailed: ``details`` has ``step`` and ``errno``; nothing of it is left.
            HostLimit: the host ran out of processes, memory, descriptors or namespaces.
        """
        return await self._request(_SPAWN, plan, keep=keep, meanwhile=meanwhile)

    async def close(self) -> None:
        """Let go: ephemeral children are killed, kept ones live on. Idempotent."""
        if self._sock.fileno() < 0:
            return
        # Walls to keep that are being made for somebody who is gone: killed as soon as they are heard of, and
        # without our socket nobody would hear of them.
        late = [answer for _, keep, answer in self._starting.values() if keep]
        if late:
            await asyncio.wait(late, timeout=LATE)
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock.fileno())
        if self._room is not None:
            self._loop.remove_writer(self._sock.fileno())
            _settle(self._room)
        self._sock.close()
        kept = any(child.keep for child in self._running.values())
        self._lost()
        if not kept:
            await readable(self._pidfd)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)  # noqa: ASYNC222
        os.close(self._pidfd)

    async def _request(
        self, kind: int, plan: Plan, *, keep: bool, meanwhile: Callable[[], None] | None = None
    ) -> Child:
        body = plan.encode()
        if len(body) > MAX_BYTES:
            raise StartFailed("the plan of the wall is too long", step="plan", errno="E2BIG")
        self._serial = serial = self._serial % 0xFFFFFFFF + 1
        answer: asyncio.Future[Child] = self._loop.create_future()
        self._starting[serial] = (plan, keep, answer)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", plan.fds))] if plan.fds else []
        try:
            async with self._sending:
                while True:
                    try:
                        self._sock.sendmsg([_REQUEST.pack(_MAGIC, kind, serial, 0), body], control)
                        break
                    except BlockingIOError:
                        await self._writable()
        except asyncio.CancelledError:
            self._starting.pop(serial, None)  # it was never sent
            raise
        except OSError as error:
            self._starting.pop(serial, None)
            raise HostLimit(
                "the launcher has ended", hint="start the node again", errno=str(error)
            ) from error
        try:
            if meanwhile is not None:
                meanwhile()
            return await answer
        except (asyncio.CancelledError, OSError):
            # Whoever asked is gone: what was started for him must go too.
            answer.add_done_callback(_abandon)
            if serial in self._starting:
                self._starting[serial] = (plan, keep, _orphan(self._loop))
            raise

    async def _writable(self) -> None:
        self._room = self._loop.create_future()
        self._loop.add_writer(self._sock.fileno(), _settle, self._room)
        try:
            await self._room
        finally:
            self._room = None
            if self._sock.fileno() >= 0:
                self._loop.remove_writer(self._sock.fileno())

    def _receive(self) -> None:
        for _ in range(64):
            try:
                data, control, flags, _address = self._sock.recvmsg(
                    _REPLY.size, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, control = b"", []
            if len(data) != _REPLY.size:
                self._loop.remove_reader(self._sock.fileno())
                self._lost()
                return
            pidfd = -1
            for level, kind, payload in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    pidfd = array.array("i", payload)[0]
            self._handle(data, pidfd, bool(flags & socket.MSG_CTRUNC))

    def _handle(self, data: bytes, pidfd: int, cut: bool) -> None:
        kind, serial, pid, number, status, index, landlock, _reserved, birth, step = _REPLY.unpack(data)
        if kind == _EXITED:
            child = self._running.pop(serial, None)
            if child is not None and not child.exited.done():
                child.exited.set_result(status)
            return
        plan, keep, answer = self._starting.pop(serial)
        if kind == _STARTED and cut:
            # There was no descriptor for it. Nobody would hear of its end, or could signal it safely later.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            if not answer.done():
                hint = "raise its limit of open files: ulimit -n"
                answer.set_exception(HostLimit("this process has no file descriptor left", hint=hint))
        elif kind == _STARTED:
            child = Child(pid, birth, pidfd, landlock, keep, self._loop.create_future())
            if pidfd >= 0:
                self._running[serial] = child
            if answer.done():
                _abandon_child(child)
            else:
                answer.set_result(child)
        elif not answer.done():
            name = step.rstrip(b"\0").decode()
            answer.set_exception(failure(plan, name, index, number))

    def _lost(self) -> None:
        """The launcher is gone: nobody will hear from it again."""
        for plan, _keep, answer in self._starting.values():
            if not answer.done():
                answer.set_exception(failure(plan, "LAUNCHER", 0, errno.EPIPE))
        self._starting.clear()
        for child in self._running.values():
            if not child.exited.done():
                child.exited.set_result(None)
        self._running.clear()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _moved(sock: socket.socket) -> int:
    import fcntl

    moved = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 4)
    sock.close()
    return moved


def _abandon_child(child: Child) -> None:
    # A foreign program may have forked already, and what it forked would wait for it for ever.
    kill_tree(child.pid, child.pidfd)
    child.close()


def _abandon(answer: asyncio.Future[Child]) -> None:
    if not answer.cancelled() and answer.exception() is None:
        _abandon_child(answer.result())


def _orphan(loop: asyncio.AbstractEventLoop) -> asyncio.Future[Child]:
    answer: asyncio.Future[Child] = loop.create_future()
    answer.add_done_callback(_abandon)
    return answer
