"""The ``wasm`` driver: a worker process behind the same kernel walls as a jail's, and modules in Wasmtime.

What keeps a module in is the instruction set: it has no system calls, only what Wasmtime gives it. The
worker is fenced in besides, so that a hole in Wasmtime leads into a jail: namespaces, its own root file
system, no capability, no_new_privs, Landlock, the system call filter. The level stays 1 all the same: this
runtime is for functions, and is chosen by name only.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import sys
from dataclasses import replace

import ringfence
from ringfence.model.errors import (
    DeadlineExceeded,
    HostLimit,
    RingfenceError,
    RuntimeUnavailable,
    StartFailed,
    Unsupported,
)
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.context import DEVICE_LINKS, DEVICES, STAGE, RuntimeContext
from ringfence.runtimes.contract import Bind, Capabilities, Handle, Health, Identity, Probe, StartSpec
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.launching.driver import EXIT_FILE, LaunchedRuntime
from ringfence.runtimes.launching.freezing import FrozenByCgroup
from ringfence.runtimes.launching.guestargs import environment_of
from ringfence.runtimes.launching.landlock import add_landlock
from ringfence.runtimes.launching.plan import (
    ATTR_RDONLY,
    BIND_DEVICES,
    BIND_FLAT,
    BIND_IDMAP,
    BIND_INSIDE,
    BIND_MAKE,
    BIND_NOEXEC,
    BIND_READONLY,
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MAPS_DENY_SETGROUPS,
    MAPS_HELPER,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    NOBODY,
    Plan,
    id_maps,
)
from ringfence.runtimes.launching.steps import (
    MASKED,
    MOST_SECRETS,
    READ_ONLY,
    SECRETS_SIZE,
    add_cgroups,
    add_overlay,
    per_process_limits,
)
from ringfence.runtimes.wasm import cache, packages
from ringfence.runtimes.wasm.commands import FUEL

_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWTIME
_QUIET = MS_NOSUID | MS_NODEV | MS_NOEXEC
_LISTEN = 3
_NOFILE = 7
_WORKER_FILES = 4096  # links, and three pipes a command
_PROBE_TIMEOUT = 12.0
_EMPTY = b"\0asm\1\0\0\0"  # the smallest module
PROBE = "probe"  # the id of a probe's wall, which waits for no compilation
MEMORY_MARGIN = 32 << 20  # bytes of a module's memory beyond the sandbox's limit
# Seconds that a start waits for the interpreters to be compiled, the first time; CPython takes 30 s of one
# idle core. What is given up here begins anew with the next process, so it is not given up lightly.
COMPILE_TIMEOUT = 240.0
# The worker's own things lie where every root has an empty folder that no module can open.
_SITE, _MODULES, _LIBRARY = "/sys/site", "/sys/modules", "/sys/library.so"
_OPEN = ("/workspace", "/tmp", "/home/agent", "/var/tmp")  # noqa: S108
_START = (
    f"import sys; sys.path.insert(0, {_SITE!r}); sys.dont_write_bytecode = True; "
    "from ringfence.runtimes.wasm.worker import main; main()"
)


class WasmRuntime(FrozenByCgroup, LaunchedRuntime):
    """See the module."""

    name = "wasm"
    level = Level.L1
    boundary = Boundary.INSTRUCTION
    start_deadline = COMPILE_TIMEOUT + 20.0

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(context)
        self._caches: dict[str, cache.ModuleCache] = {}
        self._compiled = False  # of the last start: all interpreters were

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(
            rootless=True,
            overlay=True,
            mounts=True,
            pty=False,
            ports=False,
            watch=False,
            recover=True,
            disk_limit=True,
            pause=self.context.root,  # by the freezer of a cgroup, which a normal user has seldom
            disk_snapshot=True,
            programs=False,
        )

    async def probe(self) -> Probe:
        """See the contract: starts a worker, and lets it run an interpreter."""
        from ringfence.runtimes.launching.probing import probe, unavailable

        if packages.library() is None:
            return unavailable(self, "the package wasmtime is not installed", packages.REMEDY)
        version = packages.version()
        if not packages.interpreters():
            return unavailable(self, "no interpreter is installed", packages.REMEDY, version)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                await cache.compiled(cache.require_library(), _EMPTY, fuel=False)
        except (TimeoutError, RingfenceError) as error:
            return unavailable(self, f"Wasmtime compiles nothing here: {error}", packages.REMEDY, version)
        answer = await probe(self, version)
        if answer.health != Health.UNAVAILABLE and not self._compiled:
            reason = "the interpreters are not compiled yet: the first start here takes half a minute"
            return replace(answer, health=Health.DEGRADED, reason=reason, remedy="start one: ringfence run "
                           "--runtime wasm -- python3 -c 0")  # fmt: skip
        return answer

    async def prepare(self, folder: str) -> None:
        """Compile the interpreters, for sandboxes in the state root of ``folder`` (a sandbox's own), however
        long it takes.

        Raises:
            RuntimeUnavailable, HostLimit: see :meth:`start`.
        """
        store = self._store(folder, cache.require_library())
        for source in packages.interpreters().values():
            await store.get(source, interruptible=False)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract. The first start on a machine compiles the interpreters, which takes seconds.

        Raises:
            RuntimeUnavailable: Wasmtime is not installed, or the compilation goes on for longer.
        """
        library = cache.require_library()
        if spec.network != "none":
            raise Unsupported(
                "WebAssembly has no network", hint="use network mode none", capability="network"
            )
        if spec.root.disk.kind == "image" and not self.context.root:
            raise HostLimit(
                "only root can mount a disk image",
                hint="ask for a disk of at most half of the memory, or run the node as root",
            )
        modules = await self._modules(spec, library)
        opened: list[int] = []
        words = -1
        try:
            listener = sockets.listener(spec.folder)
        except OSError as error:
            raise StartFailed(
                f"no socket in {spec.folder}: {error.strerror}", step="listen", errno=str(error.errno)
            ) from error
        try:
            words, words_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            opened += (words, words_end, null)
            plan = self._plan(spec, listener.fileno(), null, modules, library, opened)
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral)
        except BaseException:
            _forget(spec.folder)
            raise
        finally:
            listener.close()
            for descriptor in opened:
                os.close(descriptor)
        data = {
            "landlock": child.landlock,
            "uid": spec.identity.host_uid(spec.identity.uid),
            "capabilities": 0,
            "network": spec.network,
            "cgroups": list(spec.cgroup.agent),
        }
        return self.handle(spec, child, child.pid, data)

    def open_upper(self, handle: Handle) -> int:
        """See the contract."""
        return os.open(
            f"/proc/{handle.pid}/root/.ringfence/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )

    # -- modules

    def _store(self, folder: str, library: str) -> cache.ModuleCache:
        root = cache.root_for(folder)
        store = self._caches.get(root)
        if store is None:
            store = self._caches[root] = cache.ModuleCache(root, library)
        return store

    async def _modules(self, spec: StartSpec, library: str) -> dict[str, str]:
        """Name or digest → compiled form: the interpreters, and modules that the policy mounts as such.

        Where a module is mounted, an interpreter that is not compiled yet is not waited for.
        """
        store = self._store(spec.folder, library)
        fuel = FUEL in spec.env
        mark = "+fuel" if fuel else ""
        found: dict[str, str] = {}
        mounted = _mounted(spec)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT):
                for source in mounted:
                    digest = await asyncio.to_thread(store.digest, source)
                    found[digest + mark] = await store.get(source, fuel=fuel)
                for name, source in packages.interpreters().items():
                    ready = await asyncio.to_thread(self._ready, store, source, fuel)
                    if ready is None and not mounted and spec.id != PROBE:
                        ready = await store.get(source, fuel=fuel, interruptible=False)
                    if ready is not None:
                        found[name + mark] = ready
                self._compiled = len(found) - len(set(mounted)) == len(packages.interpreters())
        except TimeoutError:
            raise RuntimeUnavailable(
                "the WebAssembly interpreters are still being compiled, once a machine",
                hint="`ringfence setup wasm` compiles them, however long it takes",
            ) from DeadlineExceeded(f"{COMPILE_TIMEOUT:g} s have passed")
        return found

    @staticmethod
    def _ready(store: cache.ModuleCache, source: str, fuel: bool) -> str | None:
        return store.find(store.digest(source), fuel=fuel, interruptible=False)

    # -- the plan

    def _plan(
        self,
        spec: StartSpec,
        listener: int,
        null: int,
        modules: dict[str, str],
        library: str,
        opened: list[int],
    ) -> Plan:
        root, identity = self.context.root, spec.identity
        plan = Plan()
        if root:
            plan.add("CLONE", _NAMESPACES)
            plan.add("USERNS", _maps(identity))
        else:
            plan.add("CLONE", _NAMESPACES | CLONE_NEWUSER)
            plan.add("MAPS", MAPS_HELPER if identity.helper else MAPS_DENY_SETGROUPS, _maps(identity))
        if not spec.ephemeral:
            plan.add("KEEP")
        plan.add("EXIT_FILE", os.path.join(spec.folder, EXIT_FILE))
        work = add_cgroups(plan, spec, opened)
        cgroups = list(range(_LISTEN + 1, _LISTEN + 1 + len(work)))
        settings = os.memfd_create("worker-settings", os.MFD_CLOEXEC)
        opened.append(settings)
        number_of = _LISTEN + 1 + len(work)
        given = dict.fromkeys((0, 1, 2), null) | {_LISTEN: listener, number_of: settings}
        given |= dict(zip(cgroups, work, strict=True))
        for number, descriptor in given.items():
            plan.add("FD", plan.fd(descriptor), number)
        plan.add("UNSHARE", CLONE_NEWCGROUP)
        plan.add("HOSTNAME", spec.hostname)
        plan.add("LOOPBACK")
        inside = self._add_root(plan, spec, modules, library)
        for number, value in per_process_limits(spec):
            value = max(value, _WORKER_FILES) if number == _NOFILE else value
            plan.add("RLIMIT", number, value, value)
        if root:
            plan.add("USERNS_ENTER")
        plan.add("NO_NEW_PRIVS")
        add_landlock(plan, spec)
        plan.add("BECOME", identity.uid, identity.gid, int(root or identity.helper), 0)
        if spec.ephemeral:
            plan.add("DEATH_SIGNAL", 9)
        plan.add("UMASK", 0o022)
        config = {
            "listen": _LISTEN,
            "cgroups": cgroups,
            "library": _LIBRARY,
            "modules": inside,
            "sources": {name: f"{_MODULES}/{name}.wasm" for name in packages.interpreters()},
            "folders": _folders(spec),
            "host_functions": list(spec.host_functions),
            # Above what the sandbox may have: whoever takes more is killed for it, and the host knows why.
            "memory": min(spec.memory + MEMORY_MARGIN, 4 << 30) if spec.memory else 0,
            "max_open_files": spec.max_open_files,
            "workdir": spec.workdir,
            "env": environment_of(spec),
            "version": ringfence.__version__,
        }
        program = os.path.realpath(sys.executable)
        with open(settings, "wb", closefd=False) as file:
            marshal.dump(config, file)
        os.lseek(settings, 0, os.SEEK_SET)
        for text in (program, "-I", "-S", "-c", _START, str(number_of)):
            plan.add("ARG", text)
        plan.add("ENV", "LANG=C.UTF-8")
        plan.add("SECCOMP", plan.fd(self.context.filter_fd(spec.seccomp)))
        plan.add("EXEC", program)
        return plan

    def _add_root(self, plan: Plan, spec: StartSpec, modules: dict[str, str], library: str) -> dict[str, str]:
        """The root file system; returns where the compiled modules are in it."""
        root, files, identity = self.context.root, spec.root, spec.identity
        stage = f"{STAGE}/stage" if root else STAGE
        add_overlay(plan, spec.root, spec.identity, stage, f"{stage}/root", root=root)
        plan.add("PIVOT", f"{stage}/root")
        if root:
            plan.add("OWNER", identity.host_uid(0), identity.host_uid(0))
        for bind in files.binds:
            plan.add("BIND", bind.source, bind.target, _bind_flags(bind))
        _add_interpreter(plan, spec)
        plan.add("MOUNT", "proc", "/proc", "proc", _QUIET, "")
        _add_devices(plan, root)
        owner = (
            f",uid={identity.host_uid(identity.uid)},gid={identity.host_uid(identity.gid)}" if root else ""
        )
        owner = owner or f",uid={identity.uid}"
        plan.add("MOUNT", "shm", "/dev/shm", "tmpfs", _QUIET, "size=1m,mode=1777")  # noqa: S108
        plan.add(
            "MOUNT",
            "secrets",
            "/run/secrets",
            "tmpfs",
            _QUIET,
            f"size={SECRETS_SIZE},nr_inodes={MOST_SECRETS},mode=0755{owner}",
        )
        if not root and os.path.exists("/proc/sys/user/max_user_namespaces"):
            plan.add("WRITE", "/proc/sys/user/max_user_namespaces", "0")  # as root USERNS does it
        for path in MASKED:
            if os.path.lexists(path):
                plan.add("MASK", path)
        for path in READ_ONLY:
            plan.add("READONLY", path)
        inside = _add_site(plan, modules, library)
        plan.add("BIND", stage, "/.ringfence", BIND_READONLY | BIND_FLAT | BIND_NOEXEC | BIND_MAKE)
        if files.readonly:
            for path in files.read_write:
                plan.add("BIND", path, path, BIND_INSIDE)
            plan.add("REMOUNT", "/", ATTR_RDONLY)
        for path in files.read_only:
            plan.add("READONLY", path)
        plan.add("DETACH")
        return inside


def _mounted(spec: StartSpec) -> list[str]:
    """Files that the policy shows inside as modules."""
    binds = (bind for bind in spec.root.binds if bind.target.endswith(".wasm"))
    return [bind.source for bind in binds if os.path.isfile(bind.source)]


def _add_site(plan: Plan, modules: dict[str, str], library: str) -> dict[str, str]:
    """Our package, Wasmtime and compiled modules, on a small file system of their own."""
    plan.add("MOUNT", "site", "/sys", "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=0755")
    for path in (_SITE, _MODULES):
        plan.add("MKDIR", path, 0o755, NOBODY, NOBODY)
    package = os.path.dirname(os.path.abspath(ringfence.__file__))
    plan.add("BIND", package, f"{_SITE}/ringfence", BIND_READONLY | BIND_MAKE | BIND_NOEXEC)
    plan.add("BIND", library, _LIBRARY, BIND_READONLY | BIND_MAKE)
    inside = {}
    for name, source in modules.items():
        inside[name] = f"{_MODULES}/{name}"
        plan.add("BIND", source, inside[name], BIND_READONLY | BIND_MAKE)
    for name, source in packages.interpreters().items():
        plan.add("BIND", source, f"{_MODULES}/{name}.wasm", BIND_READONLY | BIND_MAKE | BIND_NOEXEC)
    plan.add("REMOUNT", "/sys", ATTR_RDONLY)
    return inside


def _add_interpreter(plan: Plan, spec: StartSpec) -> None:
    """The host's Python and C library, where the sandbox's root has not got them: no module sees them."""
    shown = {bind.target for bind in spec.root.binds}
    prefix = os.path.realpath(sys.base_prefix)
    folders = ["/usr", *sorted("/" + name for name in os.listdir("/") if name.startswith("lib"))]
    if not any(prefix == folder or prefix.startswith(folder + "/") for folder in (*folders, *shown)):
        folders.append(prefix)
    for folder in folders:
        if folder in shown or not os.path.isdir(folder):
            continue
        there = any(os.path.lexists(lower + folder) for lower in spec.root.lowers)
        if not os.path.islink(folder):
            plan.add("BIND", folder, folder, BIND_READONLY | BIND_MAKE)
        elif not there:
            plan.add("SYMLINK", os.readlink(folder), folder)


def _add_devices(plan: Plan, root: bool) -> None:
    if root:
        plan.add("BIND", f"{STAGE}/dev", "/dev", BIND_READONLY | BIND_DEVICES | BIND_NOEXEC)
        return
    plan.add("MOUNT", "dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=0755")
    for name in DEVICES:
        plan.add("BIND", f"/dev/{name}", f"/dev/{name}", BIND_DEVICES | BIND_NOEXEC | BIND_MAKE)
    for name, target in DEVICE_LINKS.items():
        plan.add("SYMLINK", target, f"/dev/{name}")
    for name in ("pts", "shm"):
        plan.add("MKDIR", f"/dev/{name}", 0o755, NOBODY, NOBODY)
    plan.add("REMOUNT", "/dev", ATTR_RDONLY)


def _folders(spec: StartSpec) -> list[tuple[str, str, bool]]:
    """What a module can open: the writable folders, secrets, and what the policy mounts; nothing else."""
    files = spec.root
    system = {"/usr", "/opt", "/bin", "/sbin"}
    found = dict.fromkeys(_OPEN, True)
    if files.readonly:
        found = dict.fromkeys(files.read_write, True)
    else:
        found |= dict.fromkeys(files.read_write, True)
    found["/run/secrets"] = False
    for bind in files.binds:
        if bind.target not in system and not bind.target.startswith("/lib") and os.path.isdir(bind.source):
            found[bind.target] = not bind.read_only
    for path in files.read_only:
        found[path] = False
    return [(path, path, writable) for path, writable in found.items()]


def _bind_flags(bind: Bind) -> int:
    return (BIND_READONLY if bind.read_only else 0) | (BIND_IDMAP if bind.idmapped else 0) | BIND_MAKE


def _maps(identity: Identity) -> bytes:
    users = [(line.inside, line.outside, line.count) for line in identity.maps]
    groups = [(line.inside, line.outside, line.count) for line in identity.gid_maps or identity.maps]
    return id_maps(users, groups)


def _forget(folder: str) -> None:
    for name in (sockets.NAME, EXIT_FILE):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
