"""Volumes on this node: who has which, and their files in and out.

A volume is written by one sandbox, or read by any number. That is decided before a start, from what runs and
what is starting; which volumes a sandbox has is part of its wall, so its journal says it to the next node.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from ringfence.guest.archives import ArchiveLimits, extract_tar
from ringfence.model.errors import (
    GuestRefused,
    HostLimit,
    InvalidRequest,
    RingfenceError,
    Unsupported,
    WrongState,
)
from ringfence.model.mounts import target_problem
from ringfence.model.policy import Filesystem, Mount, Policy
from ringfence.model.values import dataclass
from ringfence.node.volumes import RUNTIMES, USER, Volumes

if TYPE_CHECKING:
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.placement.contract import VolumeMount

_AHEAD = 4  # pieces of an import that may wait
_TURN = 30.0  # seconds that an import waits for the one before it
LIMITS = ArchiveLimits(bytes=1 << 44, entries=4_000_000)  # the volume's own size is what counts
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Use:
    """One sandbox has one volume."""

    volume: str
    read_only: bool


class Attachments:
    """The volumes of one node, and their users."""

    def __init__(self, volumes: Volumes, renew: Callable[[], None]) -> None:
        self.volumes = volumes
        self._renew = renew  # called when the launcher that runs can't see volumes
        self._uses: dict[str, tuple[_Use, ...]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._working: dict[str, int] = {}  # calls that look into a volume
        self._filling: dict[str, asyncio.Lock] = {}  # by volume, held by the import that has its turn

    # -- who has which

    def known(self, sandboxes: Iterable[NodeSandbox]) -> None:
        """Learn who has which from those that were adopted."""
        for sandbox in sandboxes:
            uses = tuple(
                _Use(name, mount.read_only)
                for mount in sandbox.request.policy.wall.filesystem.mounts
                if (name := self._name(mount.source))
            )
            if uses:
                self._uses[sandbox.id] = uses

    def _name(self, source: str) -> str:
        """The volume that a mount of a policy shows; empty if it shows something else."""
        prefix = f"{self.volumes.folder}/"
        return source.removeprefix(prefix).split("/")[0] if source.startswith(prefix) else ""

    def users(self, name: str) -> list[str]:
        """Sandboxes that have a volume."""
        return [id for id, uses in self._uses.items() if any(use.volume == name for use in uses)]

    async def attach(self, id: str, policy: Policy, mounts: tuple[VolumeMount, ...]) -> Policy:
        """The policy with the volumes in it, mounted and taken for this sandbox until :meth:`let_go`.

        Raises:
            NotFound: no such volume. WrongState: it is in use in a way that excludes this one.
            InvalidRequest: an impossible path. Unsupported: a runtime without binds.
        """
        if not mounts:
            return policy
        for mount in mounts:
            if problem := target_problem(mount.path):
                raise InvalidRequest(f"volume {mount.volume} at {mount.path!r}: it {problem}")
            self.volumes.get(mount.volume)
        paths = [mount.path for mount in mounts] + [each.target for each in policy.wall.filesystem.mounts]
        if len(set(paths)) < len(paths):
            raise InvalidRequest("two things are to be mounted at one path", hint="choose other paths")
        named = policy.wall.isolation.runtime
        if named is not None and named not in RUNTIMES:
            raise no_volumes(named)
        for mount in mounts:
            self._check_free(id, mount)
        self._uses[id] = tuple(_Use(mount.volume, mount.read_only) for mount in mounts)
        try:
            added = [
                Mount(
                    str(await self._blocking(mount.volume, self.volumes.mounted)), mount.path, mount.read_only
                )
                for mount in mounts
            ]
        except BaseException:
            await self.let_go(id)
            raise
        files = policy.wall.filesystem
        return policy.with_wall(filesystem=with_mounts(files, (*files.mounts, *added)))

    def _check_free(self, id: str, mount: VolumeMount) -> None:
        for user, uses in self._uses.items():
            for use in uses:
                if use.volume == mount.volume and user != id and not (use.read_only and mount.read_only):
                    raise WrongState(
                        f"volume {mount.volume} is "
                        + ("read by" if use.read_only else "written by")
                        + f" sandbox {user}",
                        hint="attach it read-only to all, or end the others first",
                        sandboxes=[user],
                    )

    def without(self, policy: Policy) -> Policy:
        """The policy as it was asked for, before volumes were put into it."""
        files = policy.wall.filesystem
        own = tuple(mount for mount in files.mounts if not self._name(mount.source))
        if len(own) == len(files.mounts):
            return policy
        return policy.with_wall(filesystem=with_mounts(files, own))

    async def let_go(self, id: str) -> None:
        """A sandbox is gone: unmount what nobody has any more."""
        for use in self._uses.pop(id, ()):
            await self._unmount(use.volume)

    async def _unmount(self, name: str) -> None:
        async with self._lock(name):
            if not self.users(name) and not self._working.get(name):
                with contextlib.suppress(RingfenceError):
                    await _to_its_end(lambda: self.volumes.release(name))

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _blocking(self, name: str, work: Callable[[str], _Result]) -> _Result:
        async with self._lock(name):
            return await _to_its_end(lambda: work(name))

    # -- the calls of the contract

    async def make(self, name: str, quota: int) -> None:
        """See the contract."""
        if await asyncio.to_thread(self.volumes.share):
            self._renew()
        await self._blocking(name, lambda name: self.volumes.make(name, quota))

    async def remove(self, name: str) -> None:
        """See the contract."""
        users = self.users(name)
        if users or self._working.get(name):
            raise WrongState(
                f"volume {name} is in use by {', '.join(users) or 'an export or import'}",
                hint="end the sandboxes that have it first",
                sandboxes=users,
            )
        await self._blocking(name, self.volumes.remove)
        self._locks.pop(name, None)
        self._filling.pop(name, None)

    async def size(self, name: str) -> int:
        """See the contract."""
        async with self._looking(name):
            return await self._blocking(name, self.volumes.size)

    @contextlib.asynccontextmanager
    async def _looking(self, name: str) -> AsyncIterator[None]:
        """While we have a look inside it stays mounted."""
        self.volumes.get(name)
        self._working[name] = self._working.get(name, 0) + 1
        try:
            yield
        finally:
            self._working[name] -= 1
            if not self._working[name]:
                del self._working[name]
            await self._unmount(name)

    async def export(self, name: str) -> AsyncGenerator[bytes, None]:
        """See the contract."""
        async with self._looking(name):
            await self._blocking(name, self.volumes.mounted)
            pieces = self.volumes.export(name)
            try:
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    if piece:
                        yield piece
            finally:
                await asyncio.to_thread(pieces.close)  # type: ignore[attr-defined]

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """While files come in: two imports at once would replace each other's files half way."""
        lock = self._filling.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(_TURN):
                await lock.acquire()
        except TimeoutError:
            raise WrongState(
                f"another import into volume {name} is under way", hint="try again when it is over"
            ) from None
        try:
            yield
        finally:
            lock.release()

    async def fill(self, name: str, tar: AsyncIterator[bytes]) -> None:
        """See the contract: in a thread that has no more rights on files than the sandboxes' user."""
        async with self._looking(name), self._alone(name):
            top = os.open(
                await self._blocking(name, self.volumes.mounted), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )
            work = _Import(top)
            try:
                async for piece in tar:
                    if not await asyncio.to_thread(work.put, piece):
                        break
                await asyncio.to_thread(work.put, None)
                await asyncio.to_thread(work.join)
            except BaseException:
                work.give_up()
                await asyncio.shield(asyncio.to_thread(work.join, quiet=True))
                raise
            finally:
                os.close(top)


async def _to_its_end(work: Callable[[], _Result]) -> _Result:
    """In a thread, which no cancelling ends: so neither does the wait for it, and with it what lock is held.
    A mount that nobody waits for would meet the next one, or the unmount.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # whoever was cancelled does not want to know


def _too_large(error: HostLimit) -> RingfenceError:
    """It is the volume that is full, or the tar that has too much, and not the host."""
    cause = error.__cause__
    if not isinstance(cause, OSError):
        return InvalidRequest(error.message, hint="send less at once")
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return GuestRefused(cause.errno, "the tar does not fit into the volume")
    return error


class _Import:
    """A thread that unpacks a hostile tar as the user that sandboxes have inside."""

    def __init__(self, top: int) -> None:
        self._pieces: queue.Queue[bytes | RingfenceError | None] = queue.Queue(_AHEAD)
        self._failure: BaseException | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(top,), daemon=True)
        self._thread.start()

    def put(self, piece: bytes | RingfenceError | None) -> bool:
        """False: it has ended already."""
        while not self._done.is_set():
            try:
                self._pieces.put(piece, timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def give_up(self) -> None:
        """The stream ends in the middle."""
        with contextlib.suppress(queue.Full):
            self._pieces.put_nowait(InvalidRequest("the import was given up"))
        self._done.set()

    def join(self, *, quiet: bool = False) -> None:
        """Wait for its end."""
        self._thread.join()
        if self._failure is not None and not quiet:
            raise self._failure

    def _run(self, top: int) -> None:
        try:
            become_user(USER)
            asyncio.run(
                extract_tar(self._stream(), f"/proc/self/fd/{top}", LIMITS, replace=True, any_links=True)
            )
        except HostLimit as error:
            self._failure = _too_large(error)
        except BaseException as error:
            self._failure = error
        finally:
            self._done.set()

    async def _stream(self) -> AsyncIterator[bytes]:
        while True:
            try:
                piece = self._pieces.get(timeout=0.5)
            except queue.Empty:
                if self._done.is_set():
                    raise InvalidRequest("the import was given up") from None
                continue
            if isinstance(piece, RingfenceError):
                raise piece
            if piece is None:
                return
            yield piece


def become_user(user: int) -> None:
    """This thread's rights on files become those of a user (``setfsuid``): it is not root there any more."""
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0:
        libc.setfsgid(user)
        libc.setfsuid(user)
        if libc.setfsuid(-1) != user:
            raise Unsupported("setfsuid does not work here", capability="volumes")


def with_mounts(files: Filesystem, mounts: tuple[Mount, ...]) -> Filesystem:
    """The same with other mounts."""
    from dataclasses import replace

    return replace(files, mounts=mounts)


def no_wall(runtime: str) -> Unsupported:
    """A runtime whose commands would run beside the service, not behind a wall."""
    return Unsupported(
        f"runtime {runtime} is no wall, and a service starts nothing without one",
        hint="name another runtime, or none: `ringfence doctor` lists them",
        capability="boundary",
    )


def no_volumes(runtime: str) -> Unsupported:
    """A runtime that can't show volumes."""
    return Unsupported(
        f"runtime {runtime} can't show volumes: owners of files would not be those inside",
        hint=f"runtimes that can: {', '.join(sorted(RUNTIMES))}",
        capability="volumes",
    )
