"""Compiled modules by digest, under the state root.

A compiled module is machine code that Wasmtime executes as it is, so an entry is used only if the folder and
the file belong to us and nobody else can write them, and if the file has the digest that was noted down when
it was made. The name of an entry has the module's digest, Wasmtime's version and the processor's kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import stat
import sys

import ringfence
from ringfence.model.errors import HostLimit, InvalidRequest, RuntimeUnavailable
from ringfence.runtimes.wasm import packages

VARIABLE = "RINGFENCE_MODULES"  # another place for compiled modules
FOLDER = "modules"
MOST_CODE = 512 << 20
_FORMAT = "1"
# Bytes of address space and seconds of processor time of a compilation. CPython takes 2 GiB and 30 s.
_TRUSTED, _HOSTILE = (8 << 30, 600), (4 << 30, 60)
_PYTHON = os.path.realpath(sys.executable)
_PLACE = os.path.dirname(os.path.dirname(os.path.abspath(ringfence.__file__)))
_START = (
    f"import sys; sys.path.insert(0, {_PLACE!r}); from ringfence.runtimes.wasm.compiling import main; main()"
)


def root_for(folder: str) -> str:
    """The cache's folder, for a sandbox in ``folder``: that of its state root."""
    if os.environ.get(VARIABLE):
        return os.environ[VARIABLE]
    above, name = os.path.split(os.path.dirname(os.path.abspath(folder)))
    if name == "sandboxes":
        return os.path.join(above, FOLDER)
    if os.environ.get("RINGFENCE_HOME"):
        return os.path.join(os.environ["RINGFENCE_HOME"], FOLDER)
    if os.geteuid() == 0:
        return f"/var/lib/ringfence/{FOLDER}"
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "ringfence", FOLDER)


class ModuleCache:
    """One folder of compiled modules. Verified entries are remembered as long as they stay untouched."""

    def __init__(self, root: str, library: str) -> None:
        self.root = root
        self.library = library
        self._kind = f"{_FORMAT}-{packages.version()}-{platform.machine()}"
        self._verified: dict[str, tuple[int, ...]] = {}
        self._sources: dict[str, tuple[tuple[int, ...], str]] = {}
        self._compiling: dict[str, asyncio.Task[str]] = {}

    def digest(self, path: str) -> str:
        """SHA-256 of a module's bytes, looked up again only if the file has changed.

        Raises:
            InvalidRequest: it can't be read, or is too large.
        """
        try:
            with open(path, "rb") as file:
                mark = _mark(os.fstat(file.fileno()))
                known = self._sources.get(path)
                if known is not None and known[0] == mark:
                    return known[1]
                if mark[3] > MOST_CODE:
                    raise InvalidRequest(f"the module {path} is larger than {MOST_CODE} bytes")
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidRequest(f"the module {path} can't be read: {error.strerror}") from error
        self._sources[path] = (mark, found)
        return found

    def path(self, digest: str, *, fuel: bool = False, interruptible: bool = True) -> str:
        """Where the compiled form of a module is, or would be."""
        form = ("-fuel" if fuel else "") + ("" if interruptible else "-plain")
        return os.path.join(self.root, f"{digest}-{self._kind}{form}.cwasm")

    def find(self, digest: str, *, fuel: bool = False, interruptible: bool = True) -> str | None:
        """The verified compiled form; ``None`` if there is none, or none to be trusted (which is removed)."""
        path = self.path(digest, fuel=fuel, interruptible=interruptible)
        try:
            if not _private(os.lstat(self.root), folder=True):
                return None
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            mark = _mark(info)
            if _private(info) and self._verified.get(path) == mark:
                return path
            if _private(info) and hashlib.file_digest(file, "sha256").hexdigest() == _noted(path):
                self._verified[path] = mark
                return path
        self._verified.pop(path, None)
        for each in (path, path + ".sha256"):
            with contextlib.suppress(OSError):
                os.unlink(each)
        return None

    async def get(self, source: str, *, fuel: bool = False, interruptible: bool = True) -> str:
        """The compiled form of a module's file, made if missing. Callers at once share one compilation,
        which goes on if they give up.

        Raises:
            InvalidRequest: it is no module.
            HostLimit: the cache can't be written, or the compiler ran out of something.
        """
        digest = await asyncio.to_thread(self.digest, source)
        found = await asyncio.to_thread(lambda: self.find(digest, fuel=fuel, interruptible=interruptible))
        if found is not None:
            return found
        path = self.path(digest, fuel=fuel, interruptible=interruptible)
        task = self._compiling.get(path)
        if task is None:
            work = self._compile(source, digest, path, fuel, interruptible)
            task = self._compiling[path] = asyncio.ensure_future(work)
            task.add_done_callback(lambda _: self._compiling.pop(path, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _compile(self, source: str, digest: str, path: str, fuel: bool, interruptible: bool) -> str:
        code = await asyncio.to_thread(_read, source)
        if hashlib.sha256(code).hexdigest() != digest:
            raise InvalidRequest(f"the module {source} changed while it was read", hint="try again")
        trusted = source in packages.interpreters().values()
        made = await compiled(self.library, code, fuel=fuel, interruptible=interruptible, trusted=trusted)
        try:
            await asyncio.to_thread(self._store, path, made)
        except OSError as error:
            raise HostLimit(
                f"the compiled module can't be kept in {self.root}: {error.strerror}",
                hint=f"free some space, or point {VARIABLE} at another folder",
            ) from error
        return path

    def _store(self, path: str, made: bytes) -> None:
        os.makedirs(self.root, mode=0o711, exist_ok=True)
        if not _private(os.lstat(self.root), folder=True):
            raise PermissionError(1, "others can write this folder")
        digest = hashlib.sha256(made).hexdigest()
        # The note first: a module without one is no entry.
        for name, data in ((path + ".sha256", digest.encode()), (path, made)):
            part = f"{name}.{os.urandom(6).hex()}"
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with open(descriptor, "wb") as file:
                # Readable by the sandboxes' users: they map it. What it is made from is no secret of theirs.
                os.fchmod(descriptor, 0o644)
                file.write(data)
            os.rename(part, name)
        self._verified[path] = _mark(os.lstat(path))


async def compiled(
    library: str, code: bytes, *, fuel: bool, interruptible: bool = True, trusted: bool = False
) -> bytes:
    """Compile in a process of its own; a trusted module may take more of memory and time.

    Raises:
        InvalidRequest: it is no module.
        HostLimit: the compiler ended for another reason.
    """
    memory, seconds = _TRUSTED if trusted else _HOSTILE
    config = {"library": library, "fuel": fuel, "interruptible": interruptible}
    process = await asyncio.create_subprocess_exec(
        _PYTHON, "-I", "-S", "-c", _START,
        json.dumps({**config, "memory": memory, "seconds": seconds}),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    try:
        made, words = await process.communicate(code)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode == 0 and made:
        return made
    text = words.decode(errors="replace").strip()
    if process.returncode == 1 and text:
        last = text.splitlines()[-1][:500]
        raise InvalidRequest(f"this is no WebAssembly module: {last}", hint="compile it for wasm32-wasip1")
    raise HostLimit(f"the compiler ended with {process.returncode}", hint="the module may be too large")


def require_library() -> str:
    """Wasmtime's shared library.

    Raises:
        RuntimeUnavailable: it is not installed.
    """
    found = packages.library()
    if found is None:
        raise RuntimeUnavailable("the package wasmtime is not installed", hint=packages.REMEDY)
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MOST_CODE + 1)


def _mark(info: os.stat_result) -> tuple[int, ...]:
    return (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size, info.st_ctime_ns)


def _private(info: os.stat_result, *, folder: bool = False) -> bool:
    right = stat.S_ISDIR(info.st_mode) if folder else stat.S_ISREG(info.st_mode)
    return right and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _noted(path: str) -> str:
    with contextlib.suppress(OSError), open(path + ".sha256") as file:
        return file.read(128).strip()
    return ""
