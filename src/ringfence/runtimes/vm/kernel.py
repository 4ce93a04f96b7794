"""The guest's kernel: Debian's own for clouds, taken out of its package and never installed.

A *kernel folder* holds ``vmlinuz``, ``modules/NAME.ko`` and ``kernel.json`` with the digests of both. It is
looked for in ``RINGFENCE_KERNEL`` first, then where :func:`fetch` puts it: below ``/var/cache/ringfence``
(as root) or the user's cache folder. ``python -m ringfence.runtimes.vm.kernel`` fetches it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringfence.model.errors import HostLimit, RuntimeUnavailable
from ringfence.model.values import dataclass

REMEDY = "ringfence setup qemu, or python3 -m ringfence.runtimes.vm.kernel as root"
VARIABLE = "RINGFENCE_KERNEL"
CACHE = "RINGFENCE_CACHE"
# In the order in which they are loaded: each needs only what stands before it. What a kernel has built in is
# left out, so a name may be missing in a folder.
MODULES = (
    "virtio_ring", "virtio", "virtio_mmio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci",
    "virtio_blk", "virtio_console", "rng-core", "virtio-rng", "vsock", "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport", "libcrc32c", "erofs", "squashfs", "overlay",
)  # fmt: skip
_PACKAGE = "linux-image-cloud-amd64"
_RELEASE = re.compile(r"linux-image-\d[\w.+~-]*-cloud-amd64\b")
_MANIFEST = "kernel.json"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to boot guests with. ``modules``: paths, in the order of loading. ``digest`` of all of it."""

    image: str
    release: str
    modules: tuple[str, ...]
    digest: str

    def needed(self, *wanted: str) -> list[str]:
        """Paths inside the guest of the modules for ``wanted``: each takes a moment of every start."""
        names = {"virtio_ring", "virtio", "virtio_blk", "virtio-rng", "rng-core", "overlay", *wanted}
        if "virtio_pci" in names:
            names |= {"virtio_pci_modern_dev", "virtio_pci_legacy_dev"}
        if "erofs" in names:
            names.add("libcrc32c")
        if "vsock" in names:
            names |= {"vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"}
        return [f"/modules/{name}.ko" for name in MODULES if name in names and self._has(name)]

    def _has(self, name: str) -> bool:
        return any(path.endswith(f"/{name}.ko") for path in self.modules)


def find() -> Kernel:
    """The kernel for guests of this machine.

    Raises:
        RuntimeUnavailable: there is none, or it is not what was put there; the hint says how to get one.
    """
    if platform.machine() != "x86_64":
        raise RuntimeUnavailable(
            f"there is no guest kernel for {platform.machine()}", hint="use another runtime on this machine"
        )
    chosen = os.environ.get(VARIABLE)
    for folder in [Path(chosen)] if chosen else _folders():
        if (folder / _MANIFEST).is_file():
            return _read(folder)
    if chosen:
        raise RuntimeUnavailable(
            f"{VARIABLE} is {chosen}, which is no kernel folder (no {_MANIFEST} in it)", hint=REMEDY
        )
    raise RuntimeUnavailable("there is no guest kernel on this host", hint=REMEDY)


def cache_root() -> Path:
    """Where this machine keeps what takes long to fetch or make; ``RINGFENCE_CACHE`` names another folder."""
    if chosen := os.environ.get(CACHE):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/cache/ringfence")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringfence"


def cache() -> Path:
    """Where :func:`fetch` puts kernels."""
    return cache_root() / "kernels"


def _folders() -> Iterator[Path]:
    others = () if os.environ.get(CACHE) else (Path("/var/cache/ringfence/kernels"),)
    for base in dict.fromkeys((cache(), *others)):
        try:
            found = [each for each in base.iterdir() if not each.name.startswith(".")]
        except OSError:
            continue
        yield from sorted(found, key=lambda each: _numbers(each.name), reverse=True)


def _numbers(name: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", name)]


_known: dict[str, tuple[float, Kernel]] = {}


def _read(folder: Path) -> Kernel:
    """The kernel in a folder, every file of it compared with its digest (once a process)."""
    manifest = folder / _MANIFEST
    try:
        changed = manifest.stat().st_mtime
        known = _known.get(str(folder))
        if known is not None and known[0] == changed:
            return known[1]
        record: dict[str, Any] = json.loads(manifest.read_text())
        files: dict[str, str] = record["files"]
        for name, digest in files.items():
            if _digest(folder / name) != digest:
                raise RuntimeUnavailable(
                    f"the guest kernel in {folder} is damaged: {name} is not what was put there",
                    hint=f"remove the folder; then {REMEDY}",
                )
        modules = [f"modules/{name}.ko" for name in MODULES]
        kernel = Kernel(
            str(folder / "vmlinuz"),
            str(record["release"]),
            tuple(str(folder / name) for name in modules if name in files),
            hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        )
        if "vmlinuz" not in files:
            raise KeyError("vmlinuz")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeUnavailable(
            f"the guest kernel in {folder} can't be read: {error}", hint=f"remove it; then {REMEDY}"
        ) from error
    _known[str(folder)] = changed, kernel
    return kernel


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def fetch(base: Path | None = None) -> Path:
    """Download Debian's kernel package (apt checks its signature) and take a kernel folder out of it.

    Raises:
        HostLimit: not a Debian system, nothing can be downloaded, or the disk is full.
    """
    base = base or cache()
    for program in ("apt-cache", "apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise HostLimit(
                f"{program} is not on this host", hint=f"make a kernel folder and name it in {VARIABLE}"
            )
    depends = _call(["apt-cache", "show", "--no-all-versions", _PACKAGE])
    found = _RELEASE.search(depends)
    if found is None:
        raise HostLimit(f"apt knows no {_PACKAGE}", hint="run apt-get update and try again")
    release = found.group().removeprefix("linux-image-")
    target = base / release
    if (target / _MANIFEST).exists():
        return target
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=base) as work:
        options = ["-q", "-o", "APT::Sandbox::User=root"]
        _call(["apt-get", *options, "download", found.group()], cwd=work)
        packages = list(Path(work).glob("*.deb"))
        if len(packages) != 1:
            raise HostLimit(f"apt-get downloaded no {found.group()}", hint="run apt-get update and try again")
        _call(["dpkg-deb", "--extract", str(packages[0]), f"{work}/package"])
        made = Path(work) / "kernel"
        _take_out(Path(work) / "package", release, made)
        try:
            made.rename(target)
        except OSError:
            if not (target / _MANIFEST).exists():  # else somebody else was faster
                raise
    return target


def _take_out(package: Path, release: str, made: Path) -> None:
    (made / "modules").mkdir(parents=True)
    shutil.copyfile(package / "boot" / f"vmlinuz-{release}", made / "vmlinuz")
    files = {"vmlinuz": _digest(made / "vmlinuz")}
    present = {path.stem: path for path in (package / "lib" / "modules" / release).rglob("*.ko")}
    for name in MODULES:
        if name in present:
            shutil.copyfile(present[name], made / "modules" / f"{name}.ko")
            files[f"modules/{name}.ko"] = _digest(made / "modules" / f"{name}.ko")
    (made / _MANIFEST).write_text(json.dumps({"release": release, "files": files}, indent=1))


def _call(command: list[str], cwd: str | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostLimit(f"{command[0]} failed: {error}", hint="try again") from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise HostLimit(
            f"{command[0]} failed: {words[-1] if words else done.returncode}",
            hint="is a Debian mirror reachable, and is there room on the disk?",
        )
    return done.stdout


if __name__ == "__main__":
    print(fetch())
