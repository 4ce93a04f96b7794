"""QEMU's own wall: a root with nothing but what QEMU opens, and the plan that starts it there.

The programs and libraries that QEMU needs are copied once, into ``vmm-<digest>`` of the VM store; kernel,
disks and sockets of a machine are bound into that root or inherited. QEMU runs in namespaces of its own, as a
user of the sandbox's range that nobody else is, without a capability, in the sandbox's control groups, and
with its own system call filter.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence

from ringfence.model.errors import HostLimit
from ringfence.runtimes.context import STAGE
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.launching.plan import (
    ATTR_RDONLY,
    BIND_DEVICES,
    BIND_FLAT,
    BIND_MAKE,
    BIND_NOEXEC,
    BIND_READONLY,
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUTS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    Plan,
    id_maps,
)
from ringfence.runtimes.launching.processes import boot_id
from ringfence.runtimes.launching.steps import add_cgroups
from ringfence.runtimes.vm import cleaning

PROGRAM = "/qemu"
_VERDICT = "/run/ringfence-kvm"
FILES = "/vm"  # where a machine's own files are bound
_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWTIME | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
_QUIET = MS_NOSUID | MS_NODEV | MS_NOEXEC
_FIRMWARE = ("bios-256k.bin", "bios-microvm.bin", "kvmvapic.bin", "linuxboot_dma.bin", "qboot.rom")
_LEAN = "/firmware/qboot.rom"
_FIRMWARE_FOLDERS = ("/usr/share/qemu", "/usr/share/seabios", "/usr/local/share/qemu")
_MODULES = ("accel-tcg-x86_64.so",)
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
_FSIZE, _NOFILE, _CORE, _MEMLOCK = 1, 7, 4, 8
_FILE_SLACK = 256 << 20  # bytes that a saved memory may be larger than the memory
_FOLDERS = ("dev", "proc", "sys", "vm", "tmp")
_made: dict[tuple[str, str], str] = {}


async def root(program: str, folder: str) -> str:
    """The root folder for ``program`` (QEMU's real path) in a VM store; made if it is not there.

    Raises:
        HostLimit: a library or the firmware is missing, or the disk is full.
    """
    known = _made.get((program, folder))
    if known is None or not os.path.isdir(known):  # noqa: ASYNC240 - a stat
        libraries = await _libraries(program)
        known = _made[program, folder] = await asyncio.to_thread(_root, program, libraries, folder)
    cleaning.used(known)
    return known


async def _libraries(program: str) -> list[str]:
    found: list[str] = []
    modules = _modules(program)
    for each in (program, *modules):
        process = await asyncio.create_subprocess_exec(
            "ldd", each, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        output, _ = await process.communicate()
        found += _LIBRARY.findall(output.decode(errors="replace"))
    if not found:
        raise HostLimit(f"the libraries of {program} can't be listed", hint="is ldd installed (libc-bin)?")
    return [*dict.fromkeys(found), *modules]


def _modules(program: str) -> list[str]:
    for base in ("/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib/qemu", "/usr/lib64/qemu"):
        found = [f"{base}/{name}" for name in _MODULES if os.path.exists(f"{base}/{name}")]
        if found:
            return found
    return []  # built in


def _firmware() -> dict[str, str]:
    found = {}
    for name in _FIRMWARE:
        for base in _FIRMWARE_FOLDERS:
            if os.path.exists(f"{base}/{name}"):
                found[name] = os.path.realpath(f"{base}/{name}")
                break
    if "bios-256k.bin" not in found:
        raise HostLimit("QEMU's firmware is missing", hint="apt-get install qemu-system-data seabios")
    return found


def firmware(base: str, kvm: bool) -> str:
    """What a machine begins with: a whole BIOS looks for devices to boot from, which takes a tenth of
    an emulated start. Empty: QEMU's own choice."""
    return _LEAN if not kvm and os.path.exists(base + _LEAN) else ""


def _root(program: str, libraries: Sequence[str], folder: str) -> str:
    copies = {PROGRAM: program} | {path: path for path in libraries}
    copies |= {f"/firmware/{name}": path for name, path in _firmware().items()}
    try:
        digest = hashlib.sha256(" ".join(_FOLDERS).encode())
        for target, source in sorted(copies.items()):
            status = os.stat(source)
            digest.update(f"{target}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        made = os.path.join(folder, f"vmm-{digest.hexdigest()[:32]}")
        if os.path.isdir(made):
            return made
        work = tempfile.mkdtemp(prefix=".vmm-", dir=folder)
        try:
            for name in _FOLDERS:
                os.mkdir(f"{work}/{name}", 0o755)
            for target, source in copies.items():
                os.makedirs(os.path.dirname(work + target), mode=0o755, exist_ok=True)
                shutil.copyfile(os.path.realpath(source), work + target)
                os.chmod(work + target, 0o555)  # noqa: S103 - read only
            os.chmod(work, 0o755)  # noqa: S103 - QEMU's user passes through
            os.rename(work, made)
        except BaseException as error:
            shutil.rmtree(work, ignore_errors=True)
            if not (isinstance(error, OSError) and os.path.isdir(made)):  # else somebody was faster
                raise
    except OSError as error:
        raise HostLimit(
            f"QEMU's root can't be made: {error.filename}: {error.strerror}", hint="is the disk full?"
        ) from error
    return made


def plan(
    spec: StartSpec,
    base: str,
    files: dict[str, tuple[str, bool]],
    arguments: Sequence[str],
    descriptors: dict[int, int],
    opened: list[int],
    *,
    exit_file: str,
    kvm: bool,
    guest_memory: int = 0,
    devices: Sequence[tuple[str, int, int]] = (),
    locked: int = 0,
) -> Plan:
    """The steps from nothing to a running QEMU.

    ``files``: name below ``FILES`` → (host path, writable). ``descriptors``: number in QEMU → ours.
    ``guest_memory``: bytes.
    ``devices``: nodes for VFIO (path, major, minor), for which QEMU is shown ``/sys`` and may lock ``locked``
    bytes of memory.
    """
    identity = spec.identity
    made = Plan()
    made.add("CLONE", _NAMESPACES)
    lines = [(line.inside, line.outside, line.count) for line in identity.maps]
    made.add("USERNS", id_maps(lines, lines))
    if not spec.ephemeral:
        made.add("KEEP")
    made.add("EXIT_FILE", exit_file)
    add_cgroups(made, spec, opened)
    for number, descriptor in descriptors.items():
        made.add("FD", made.fd(descriptor), number)
    made.add("UNSHARE", CLONE_NEWCGROUP)
    stage = f"{STAGE}/stage"
    made.add("BIND", os.path.realpath(base), stage, BIND_READONLY)
    made.add("PIVOT", stage)
    made.add("MOUNT", "vm", FILES, "tmpfs", _QUIET, "size=64k,mode=0755")
    for name, (source, writable) in files.items():
        flags = BIND_MAKE | BIND_FLAT | BIND_NOEXEC | (0 if writable else BIND_READONLY)
        made.add("BIND", os.path.realpath(source), f"{FILES}/{name}", flags)
    made.add("REMOUNT", FILES, ATTR_RDONLY)
    made.add("MOUNT", "dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=0755")
    for name in ("null", "urandom", *(("kvm",) if kvm else ())):
        source = f"/dev/{name}" if name == "kvm" else f"{STAGE}/dev/{name}"
        made.add("BIND", source, f"/dev/{name}", BIND_DEVICES | BIND_NOEXEC | BIND_MAKE)
    if devices:
        made.add("MKDIR", "/dev/vfio", 0o755, 0, 0)
        for path, major, minor in devices:
            made.add("MKNOD", path, 0o20666, major, minor)
        made.add("MOUNT", "sys", "/sys", "sysfs", _QUIET | 1, "")
        made.add("RLIMIT", _MEMLOCK, locked, locked)
    made.add("REMOUNT", "/dev", ATTR_RDONLY)
    made.add("MOUNT", "tmp", "/tmp", "tmpfs", _QUIET | 1, "size=0,nr_inodes=2,mode=0555")  # noqa: S108
    made.add("MOUNT", "proc", "/proc", "proc", _QUIET, "hidepid=2")
    made.add("DETACH")
    made.add("RLIMIT", _CORE, 0, 0)
    # A monitor that its guest has taken over can't fill the host's disk through the two files it may write.
    sizes = [os.stat(source).st_size for source, writable in files.values() if writable]
    largest = max([guest_memory, *sizes])
    made.add("RLIMIT", _FSIZE, largest + _FILE_SLACK, largest + _FILE_SLACK)
    made.add("RLIMIT", _NOFILE, 1024, 1024)
    made.add("USERNS_ENTER")
    made.add("NO_NEW_PRIVS")
    made.add("BECOME", identity.agent_uid, identity.agent_uid, 1, 0)
    if spec.ephemeral:
        made.add("DEATH_SIGNAL", 9)
    made.add("UMASK", 0o077)
    for text in (PROGRAM, *arguments):
        made.add("ARG", text)
    for text in ("PATH=/", "HOME=/", "QEMU_MODULE_DIR=" + _module_folder(base)):
        made.add("ENV", text)
    made.add("EXEC", PROGRAM)
    return made


def _module_folder(base: str) -> str:
    for folder in ("/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib/qemu", "/usr/lib64/qemu"):
        if os.path.isdir(base + folder):
            return folder
    return "/"


def kvm_verdict() -> bool | None:
    """Whether a guest has booted with KVM on this host since it was started; None if nobody has tried."""
    with contextlib.suppress(OSError), open(_VERDICT) as file:
        boot, _, answer = file.read().strip().partition(" ")
        if boot == boot_id():
            return answer == "boots"
    return None


def remember_kvm(boots: bool) -> None:
    """Keep the verdict until the next start of this host."""
    with contextlib.suppress(OSError):
        work = f"{_VERDICT}.{os.getpid()}"
        with open(work, "x") as file:
            file.write(f"{boot_id()} {'boots' if boots else 'hangs'}\n")
        os.rename(work, _VERDICT)


def kvm_opens() -> bool:
    """Whether /dev/kvm can be opened at all: a guest that boots proves more."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
        return True
    return False


def why_no_kvm() -> str:
    """Why machines are emulated here."""
    if not os.path.exists("/dev/kvm"):
        return "there is no /dev/kvm"
    return "no guest boots with /dev/kvm here"
