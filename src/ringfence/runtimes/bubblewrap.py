"""``bubblewrap``: the same agent behind bwrap's namespaces. Shared kernel, level 2.

The proof that a runtime is one small file. bwrap (0.8 and later) has no overlay: the root is a read-only
tmpfs with the template's entries bound into it, and every writable folder is a sized tmpfs of its own, so
the disk limit is the sum of their sizes. bwrap maps one user only, so the agent shares the workload's. When
the node is root, bwrap itself runs as the sandbox's host user and never as root.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator

from ringfence.model.errors import InvalidRequest, RuntimeUnavailable, StartFailed, Unsupported
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.context import STAGE, RuntimeContext
from ringfence.runtimes.contract import Capabilities, Handle, Health, Probe, RootFs, StartSpec
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.launching.driver import EXIT_FILE, LaunchedRuntime
from ringfence.runtimes.launching.foreign import in_place, pipe, version_of
from ringfence.runtimes.launching.freezing import FrozenByCgroup
from ringfence.runtimes.launching.guestargs import agent_arguments, environment_of
from ringfence.runtimes.launching.launcher import Child
from ringfence.runtimes.launching.plan import (
    BIND_READONLY,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    NOBODY,
    Plan,
)
from ringfence.runtimes.launching.processes import kill_tree
from ringfence.runtimes.launching.steps import MASKED, add_cgroups, add_limits, writable_folders
from ringfence.runtimes.measuring import children

START_TIMEOUT = 25.0  # seconds until the agent behind bwrap must answer
_LISTEN, _ARGS, _SECCOMP, _AGENT, _READY, _CGROUPS = range(3, 9)
_MOST_TEXT = 4096  # bytes of bwrap's own messages
_STAGE = f"{STAGE}/stage"
_MERGED, _DEVICES = f"{_STAGE}/root", f"{STAGE}/devices"
# (first version that is not affected, first that is, number)
_VULNERABILITIES = (
    ((0, 0, 0), (0, 1, 3), "CVE-2016-8659"),
    ((0, 0, 0), (0, 3, 3), "CVE-2019-12439"),
    ((0, 4, 0), (0, 4, 1), "CVE-2020-5291"),
)
_HIDDEN = ("sys", ".ringfence")  # what a template has there is not shown
OLDEST = (0, 8, 0)  # --disable-userns, --size


class BubblewrapRuntime(FrozenByCgroup, LaunchedRuntime):
    """See the module."""

    name = "bubblewrap"
    level = Level.L2
    boundary = Boundary.NAMESPACES

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        self.program = shutil.which("bwrap")

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(
            rootless=True,
            mounts=True,
            recover=True,
            disk_limit=True,
            pause=self.context.root,  # by the freezer of a cgroup, which a normal user has seldom
            network=("none", "egress", "open"),
            transparent=True,
        )

    async def probe(self) -> Probe:
        """See the contract: starts a wall and talks to the agent in it."""
        from ringfence.runtimes.launching.probing import probe

        if self.program is None:
            return Probe(
                self.name,
                Health.UNAVAILABLE,
                self.level,
                self.boundary,
                reason="bwrap is not installed",
                remedy="apt-get install bubblewrap",
            )
        version = (await version_of(self.program)).strip().rpartition(" ")[2]
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        known = tuple(name for since, fixed, name in _VULNERABILITIES if since <= numbers < fixed)
        if numbers < OLDEST:
            return Probe(
                self.name,
                Health.UNAVAILABLE,
                self.level,
                self.boundary,
                version,
                reason=f"bubblewrap {version or '?'} is too old",
                remedy="install bubblewrap 0.8.0 or later",
                vulnerabilities=known,
            )
        return await probe(self, version, known)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self._check(spec)
        child: Child | None = None
        judged = _judged(spec)
        opened: list[int] = list(judged.values())
        try:
            listener = sockets.listener(spec.folder)
        except OSError as error:
            raise StartFailed(
                f"no socket in {spec.folder}: {error.strerror}", step="listen", errno=str(error.errno)
            ) from error
        try:
            words, words_end = pipe(opened)
            ready, ready_end = pipe(opened)
            plan = self._plan(spec, listener.fileno(), words_end, ready_end, opened)
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral)
            listener.close()
            for descriptor in opened:
                if descriptor not in (words, ready, *judged.values()):
                    os.close(descriptor)
            opened[:] = [words, ready, *judged.values()]
            async with asyncio.timeout(START_TIMEOUT):
                agent = children(child.pid) if await in_place(ready) else []
                if len(agent) != 1:
                    raise await _failure(child, words)
            handle = self.handle(spec, child, agent[0], _data(spec, child))
            _compare(handle, judged)
            return handle
        except BaseException as error:
            if child is not None:
                await self._undo(child)
            for name in (sockets.NAME, EXIT_FILE):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(spec.folder, name))
            if isinstance(error, TimeoutError):
                raise StartFailed("the agent behind bwrap does not answer", step="agent") from None
            raise
        finally:
            listener.close()
            for descriptor in opened:
                os.close(descriptor)

    # -- starting

    def _check(self, spec: StartSpec) -> None:
        if self.program is None:
            raise RuntimeUnavailable("bwrap is not installed", hint="apt-get install bubblewrap")
        if spec.identity.uid == 0:
            raise Unsupported(
                "bubblewrap maps one user only, so user 0 would be nobody's root",
                hint="use the jail runtime, or user 1000",
                capability="user_zero",
            )
        for lower in spec.root.lowers:
            if not os.path.isdir(lower):
                raise StartFailed(f"no layer {lower}", step="lower", errno=str(errno.ENOENT))
        if spec.root.disk.kind != "tmpfs":
            raise Unsupported(
                "bubblewrap's disk is memory",
                hint="ask for a disk of at most half of the memory, or use the jail runtime",
                capability="disk_limit",
            )

    async def _undo(self, child: Child) -> None:
        # What bwrap started does not die with it where the wall was to be kept, or before bwrap has mapped
        # its users: until then its child waits for that alone.
        if not child.exited.done():
            kill_tree(child.pid, child.pidfd)
        await asyncio.shield(child.exited)
        for key in [key for key, each in self._children.items() if each is child]:
            del self._children[key]
        child.close()

    def _plan(self, spec: StartSpec, listener: int, words: int, ready: int, opened: list[int]) -> Plan:
        assert self.program is not None
        plan = Plan()
        # bwrap gives up being root before it mounts, and nobody else passes through to the node's layers.
        merged = self.context.root
        if merged:
            plan.add("PRELUDE")
            _add_merged(plan, spec.root.lowers)
        if not spec.ephemeral:
            plan.add("KEEP")
        plan.add("EXIT_FILE", os.path.join(spec.folder, EXIT_FILE))
        work = add_cgroups(plan, spec, opened)
        numbers = range(_CGROUPS, _CGROUPS + len(work))
        command = [
            f"/proc/self/fd/{_AGENT}",
            *list(agent_arguments(spec, _LISTEN, numbers, ready_fd=_READY))[1:],
        ]
        arguments = os.memfd_create("bwrap-arguments", os.MFD_CLOEXEC)
        opened.append(arguments)
        os.write(arguments, _packed(_arguments(spec, _MERGED if merged else "")))
        os.lseek(arguments, 0, os.SEEK_SET)
        # A description of its own: bwrap reads the filter from the file's position.
        filter_fd = os.open(
            f"/proc/self/fd/{self.context.filter_fd(spec.seccomp)}", os.O_RDONLY | os.O_CLOEXEC
        )
        opened.append(filter_fd)
        given = {
            2: words,
            _LISTEN: listener,
            _ARGS: arguments,
            _SECCOMP: filter_fd,
            _READY: ready,
            _AGENT: self.context.agent_fd(),
            **dict(zip(numbers, work, strict=True)),
        }
        for number, descriptor in given.items():
            plan.add("FD", plan.fd(descriptor), number)
        add_limits(plan, spec)
        if self.context.root:
            user = spec.identity.host_uid(spec.identity.uid)
            plan.add("BECOME", user, user, 1, 0)
        plan.add("NO_NEW_PRIVS")
        if spec.ephemeral:
            plan.add("DEATH_SIGNAL", 9)
        plan.add("UMASK", 0o022)
        for text in ("bwrap", "--args", str(_ARGS), "--", *command):
            plan.add("ARG", text)
        plan.add("ENV", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
        plan.add("EXEC", self.program)
        return plan


def _packed(words: Iterable[str]) -> bytes:
    """The words as bwrap reads them, a NUL behind each: none may hold one, and so be several.

    Raises:
        InvalidRequest: one does.
    """
    packed = [os.fsencode(word) for word in words]
    for word in packed:
        if b"\0" in word:
            raise InvalidRequest(f"a value for the sandbox has a NUL byte: {word!r}")
    return b"".join(word + b"\0" for word in packed)


def _arguments(spec: StartSpec, merged: str = "") -> Iterator[str]:
    identity, files = spec.identity, spec.root
    yield from ("--unshare-user", "--unshare-pid", "--unshare-uts")
    if not merged:  # else they are there already
        yield from ("--unshare-ipc", "--unshare-net")
    yield from ("--unshare-cgroup-try", "--disable-userns", "--new-session", "--as-pid-1")
    if spec.ephemeral:
        yield "--die-with-parent"
    yield from ("--uid", str(identity.uid), "--gid", str(identity.gid), "--hostname", spec.hostname)
    yield from ("--seccomp", str(_SECCOMP))
    # Not bwrap's own environment: while it starts it sees the host's files, and the loader would follow what
    # is said there (LD_PRELOAD …).
    yield "--clearenv"
    for name, value in environment_of(spec).items():
        yield from ("--setenv", name, value)
    whole = bool(merged) and _whole(files)
    if whole:  # one bind instead of one for each entry: bwrap reads the table of mounts after each
        yield from ("--ro-bind", merged, "/")
    else:
        yield from _entries(files.lowers, "", merged)
    for bind in files.binds:
        yield from ("--ro-bind" if bind.read_only else "--bind", bind.source, bind.target)
    yield from ("--proc", "/proc")
    for path in _covered(identity.host_uid(identity.uid)):
        if os.path.isdir(path):
            yield from ("--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path)
        else:
            yield from ("--ro-bind", "/dev/null", path)
    # One bind instead of bwrap's own eight; what it is made from is read-only.
    yield from ("--dev-bind", _DEVICES, "/dev") if merged else ("--dev", "/dev")
    yield from ("--perms", "1777", "--size", str(max(16 << 20, spec.memory // 2)))
    yield from ("--tmpfs", "/dev/shm")  # noqa: S108
    if not merged:
        yield from ("--remount-ro", "/dev")
    yield from ("--perms", "0755", "--size", str(1 << 20), "--tmpfs", "/run/secrets")
    for path, size, mode in writable_folders(files):
        yield from ("--perms", mode, "--size", str(size), "--tmpfs", path)
    for path in files.read_only:
        yield from ("--remount-ro", path)
    if not whole:
        yield from ("--remount-ro", "/")
    yield from ("--chdir", "/")


def _covered(user: int) -> list[str]:
    """What of ``MASKED`` that user of the host could open: not what is another's alone. (Root without root's
    rights, as in a container, runs walls as a normal user does, and owns it all.)"""
    found = []
    for path in MASKED:
        with contextlib.suppress(OSError):
            info = os.lstat(path)
            if info.st_uid == user or info.st_mode & 0o077:
                found.append(path)
    return found


def _whole(files: RootFs) -> bool:
    """Whether the merged layers can be the root as they are: all that is mounted in it finds its place, and
    nothing shows that has to be hidden.
    """
    targets = [bind.target for bind in files.binds] + [path for path, _, _ in writable_folders(files)]
    needed = {"proc", "dev", "sys", "run", *(target.split("/")[1] for target in targets)}
    if len(files.lowers) == 1:
        return _fits(files.lowers[0], needed)
    found = _merge(files.lowers, "")
    if not needed <= found.keys() or not all(stat.S_ISDIR(found[name][0].st_mode) for name in needed):
        return False
    hidden = [f"{layer}/{name}" for name in _HIDDEN if name in found for layer in found[name][1]]
    return not any(os.listdir(folder) for folder in hidden)


def _fits(lower: str, needed: set[str]) -> bool:
    """The same for one layer, which a start need not read whole."""
    try:
        folders = all(stat.S_ISDIR(os.lstat(f"{lower}/{name}").st_mode) for name in needed)
    except FileNotFoundError:
        return False
    hidden = [f"{lower}/{name}" for name in _HIDDEN]
    return folders and not any(os.path.lexists(path) and os.listdir(path) for path in hidden)


def _entries(lowers: tuple[str, ...], path: str, merged: str = "") -> Iterator[str]:
    """The merged lower layers as binds and symlinks; folders that are in several layers are taken apart.

    ``merged``: a folder where all of them are mounted already, so that nothing has to be taken apart.
    """
    for name, (info, layers) in sorted(_merge(lowers, path).items()):
        source, target = f"{merged or layers[0]}{path}/{name}", f"{path}/{name}"
        if stat.S_ISLNK(info.st_mode):
            yield from ("--symlink", os.readlink(f"{layers[0]}{path}/{name}"), target)
        elif target in ("/proc", "/dev", "/sys", "/.ringfence"):
            yield from ("--perms", "0755", "--dir", target)
        elif len(layers) > 1 and not merged:
            yield from ("--perms", f"{info.st_mode & 0o7777:04o}", "--dir", target)
            yield from _entries(tuple(layers), target)
        else:
            yield from ("--ro-bind", source, target)


def _merge(lowers: tuple[str, ...], path: str) -> dict[str, tuple[os.stat_result, list[str]]]:
    """What overlay would show in a folder: each name with what is on top, and the layers it comes from."""
    found: dict[str, tuple[os.stat_result, list[str]]] = {}
    hidden: set[str] = set()
    for lower in lowers:
        with contextlib.suppress(FileNotFoundError), os.scandir(lower + path) as entries:
            for entry in entries:
                if entry.name in hidden:
                    continue
                info = entry.stat(follow_symlinks=False)
                folder = stat.S_ISDIR(info.st_mode)
                if not folder or _is_opaque(entry.path):
                    hidden.add(entry.name)
                if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                    continue  # a whiteout
                if entry.name not in found:
                    found[entry.name] = (info, [lower])
                elif folder:
                    found[entry.name][1].append(lower)
    return found


def _is_opaque(folder: str) -> bool:
    for name in ("trusted.overlay.opaque", "user.overlay.opaque"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name, follow_symlinks=False) == b"y":
                return True
    return False


def _add_merged(plan: Plan, lowers: tuple[str, ...]) -> None:
    """Mount the layers at ``_MERGED``, in the mount namespace that was made ahead and only bwrap sees."""
    # bwrap mounts one of its own; each mount that it finds takes time.
    plan.add("UMOUNT", f"{STAGE}/proc")
    quiet = MS_NOSUID | MS_NODEV
    plan.add("MOUNT", "ringfence", _STAGE, "tmpfs", quiet | MS_NOEXEC, "mode=0711,size=1m")
    if len(lowers) == 1:  # of which no overlay can be made
        plan.add("MKDIR", _MERGED, 0o711, NOBODY, NOBODY)
        plan.add("BIND", os.path.realpath(lowers[0]), _MERGED, BIND_READONLY)
        return
    for index, lower in enumerate(lowers):
        plan.add("MKDIR", f"{_STAGE}/l{index}", 0o700, NOBODY, NOBODY)
        plan.add("BIND", os.path.realpath(lower), f"{_STAGE}/l{index}", BIND_READONLY)
    plan.add("MKDIR", _MERGED, 0o711, NOBODY, NOBODY)
    layers = ":".join(f"{_STAGE}/l{index}" for index in range(len(lowers)))
    plan.add("MOUNT", "root", _MERGED, "overlay", quiet | MS_RDONLY, f"lowerdir={layers},metacopy=off")


def _judged(spec: StartSpec) -> dict[str, int]:
    """The source of every bind that nothing covers later, by target: open, and reached through no symlink.

    bwrap takes a path and follows links: a folder that somebody turns into one meanwhile is found out by
    comparing what is shown with what was open before.
    """
    opened: dict[str, int] = {}
    try:
        for bind in spec.root.binds:
            opened = {target: fd for target, fd in opened.items() if not _covers(bind.target, target, fd)}
            opened[bind.target] = _open_real(bind.source)
    except OSError as error:
        for descriptor in opened.values():
            os.close(descriptor)
        raise StartFailed(
            f"can't bind {bind.source}: {error.strerror}", step="bind", errno=str(error.errno)
        ) from error
    return opened


def _covers(path: str, target: str, descriptor: int) -> bool:
    covered = target == path or target.startswith(path + "/")
    if covered:
        os.close(descriptor)
    return covered


def _open_real(path: str) -> int:
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in path.strip("/").split("/"):
        try:
            below = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        finally:
            os.close(here)
        here = below
        if stat.S_ISLNK(os.fstat(here).st_mode):
            os.close(here)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return here


def _compare(handle: Handle, judged: dict[str, int]) -> None:
    for target, descriptor in judged.items():
        try:
            same = os.path.samestat(os.stat(f"/proc/{handle.pid}/root{target}"), os.fstat(descriptor))
        except OSError:
            same = False
        if not same:
            raise StartFailed(f"{target} does not show what was to be bound there", step="bind")


def _data(spec: StartSpec, child: Child) -> dict[str, object]:
    return {
        "uid": spec.identity.host_uid(spec.identity.uid),
        "network": spec.network,
        "cgroups": list(spec.cgroup.agent),
        "monitor": child.pid,
    }


async def _failure(child: Child, words: int) -> StartFailed:
    text = await _said(child, words)
    return StartFailed(f"bwrap: {text or 'ended without a word'}", hint=_hint(text), step="bwrap")


async def _said(child: Child, words: int) -> str:
    """What bwrap wrote to its stderr, once it has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await asyncio.shield(child.exited)
    with contextlib.suppress(OSError):
        return os.read(words, _MOST_TEXT).decode(errors="replace").strip().removeprefix("bwrap: ")
    return ""


def _hint(text: str) -> str:
    from ringfence.runtimes.launching.hints import user_namespace_hint

    return user_namespace_hint() if "namespace" in text or "uid map" in text or "Permission" in text else ""
