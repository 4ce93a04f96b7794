"""A guest with pure cgroup v2, in which the conformance suites run: what most users have, and hosts may lack.

A virtual machine (QEMU, emulated) boots a small Debian with runc, crun and bubblewrap; its first program
mounts nothing but cgroup2, and runs pytest on this checkout, which it sees on a disk of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ringfence
from ringfence import _native
from ringfence.images import debian
from ringfence.runtimes.vm import initramfs, kernel, machines

PACKAGES = (
    "python3",
    "procps",
    "util-linux",
    "runc",
    "crun",
    "bubblewrap",
    "uidmap",
    "e2fsprogs",
    "iproute2",
)
SUITE = "bookworm"
NEEDED = (
    "_pytest", "_yaml", "iniconfig", "packaging", "pluggy", "py", "pygments", "pytest", "pytest_asyncio",
    "pytest_timeout", "typing_extensions", "yaml",
)  # fmt: skip
MEMORY = 2048  # MiB
_MARK = "RINGFENCE-REPORT "
_INIT = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t tmpfs -o mode=0755 run /run
mount -t tmpfs -o mode=1777 tmp /tmp
mkdir -p /dev/pts /dev/shm /project
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup || echo "no cgroup2"
mount -t erofs -o ro /dev/vdc /project || echo "no project"
echo 10000 > /proc/sys/user/max_user_namespaces
hostname pure-v2
# A file system that can be mounted with other owners: tmpfs and overlays of this kernel can not.
mount -t ext4 /dev/vdb /mnt && mkdir -p /mnt/tmp && chmod 1777 /mnt/tmp
export TMPDIR=/mnt/tmp
cd /tmp
export PYTHONPATH=/project/src:/project/site PYTHONDONTWRITEBYTECODE=1
echo "RINGFENCE-MOUNTS $(grep -c ' - cgroup ' /proc/self/mountinfo) $(cat /sys/fs/cgroup/cgroup.controllers)"
python3 -m pytest @ARGUMENTS@ --ringfence-report=/tmp/report.jsonl
code=$?
sed 's/^/RINGFENCE-REPORT /' /tmp/report.jsonl
echo "RINGFENCE-EXIT $code"
sync
echo b > /proc/sysrq-trigger
"""


@dataclass
class Outcome:
    """What a session in the guest came to. ``tests``: (name, outcome) of every test."""

    exit: int | None = None
    controllers: list[str] = field(default_factory=list)
    old_hierarchies: int = -1
    tests: list[tuple[str, str, str]] = field(default_factory=list)
    console: str = ""

    def count(self, runtime: str, outcome: str) -> int:
        """Tests on one runtime with that outcome."""
        return sum(1 for name, found, _ in self.tests if f"[{runtime}" in name and found == outcome)


def _cache() -> Path:
    folder = kernel.cache_root() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def system_disk() -> Path:
    """The guest's Debian as an erofs image, made once a machine. Needs root, mmdebstrap and mkfs.erofs."""
    path = _cache() / f"guest-{SUITE}-{'-'.join(PACKAGES)}.erofs"
    with _locked(path):
        if path.exists():
            return path
        work = path.with_suffix(".new")
        root = path.with_suffix(".root")
        work.unlink(missing_ok=True)  # of somebody who was killed
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        try:
            tar = subprocess.Popen(["tar", "-x", "-C", str(root)], stdin=subprocess.PIPE)
            assert tar.stdin is not None
            with debian.build(SUITE, packages=PACKAGES) as built:
                while piece := built.read(1 << 20):
                    tar.stdin.write(piece)
                tar.stdin.close()
                assert tar.wait() == 0
                built.check()
            subprocess.run(["mkfs.erofs", "-T0", str(work), str(root)], check=True, capture_output=True)
            work.rename(path)
        finally:
            shutil.rmtree(root, ignore_errors=True)
            work.unlink(missing_ok=True)
    return path


def project_disk(folder: Path) -> Path:
    """This checkout's package, and the packages that its suites need, as an erofs image in ``folder``."""
    tree = folder / "project"
    shutil.copytree(
        Path(ringfence.__file__).parent,
        tree / "src" / "ringfence",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    native = tree / "src" / "ringfence" / "_native"
    for name in ("launcher", "agent", "link"):  # where another build of them is tested
        shutil.copy2(_native.path(name), native / f"ringfence-{name}")
    packages = Path(sysconfig.get_paths()["purelib"])
    for entry in packages.iterdir():
        name = entry.name.partition(".")[0]
        if name in NEEDED or (
            entry.name.endswith(".dist-info") and entry.name.lower().startswith(("pytest", "plug"))
        ):
            if entry.is_dir():
                shutil.copytree(
                    entry, tree / "site" / entry.name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                (tree / "site").mkdir(exist_ok=True)
                shutil.copy2(entry, tree / "site" / entry.name)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(tree)], check=False, capture_output=True
    )  # an emulated machine compiles slowly
    (tree / "init").write_text("")
    disk = folder / "project.erofs"
    subprocess.run(["mkfs.erofs", "-T0", str(disk), str(tree)], check=True, capture_output=True)
    shutil.rmtree(tree)
    return disk


def run(folder: Path, arguments: list[str], timeout: float) -> Outcome:
    """Boot the guest, run pytest in it with these arguments, and return what it reported."""
    found = kernel.find()
    system, project = system_disk(), project_disk(folder)
    disk = folder / "disk.img"
    with open(disk, "wb") as file:
        file.truncate(4 << 30)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,nodiscard", str(disk)], check=True)
    script = _INIT.replace("@ARGUMENTS@", " ".join(f"'{word}'" for word in arguments))
    lines = [("module", path) for path in found.needed("virtio_pci", "virtio_console", "erofs")]
    lines += [("root", "/dev/vda:erofs"), ("disk", "/dev/vdb:ext4"), ("link", "serial:agent")]
    lines += [
        ("control", "serial:control"),
        ("init", "/bin/sh"),
        ("init_script", script),
        ("up", "/run/never"),
    ]
    lines += [("arg", "ringfence-agent")]
    first = initramfs.base(found, _native.path("vminit"), _native.agent(), str(folder))
    initrd = folder / "initrd"
    initramfs.compose(first, initramfs.Config(tuple(lines)), str(initrd), os.geteuid())
    words = [
        "console=ttyS0",
        "quiet",
        "reboot=t",
        "panic=-1",
        "mitigations=off",
        "cgroup_no_v1=all",
        "no_timer_check",
    ]
    if frequency := machines.counter():
        words += [f"tsc_early_khz={frequency}", "tsc=reliable", "clocksource=tsc"]
    command = [
        "qemu-system-x86_64", "-M", "q35,usb=off", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max",
        "-smp", "2", "-m", f"{MEMORY}M", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-serial", "stdio", "-kernel", found.image, "-initrd", str(initrd), "-append", " ".join(words),
        "-device", "virtio-serial-pci", "-device", "virtio-rng-pci",
        "-chardev", "null,id=a", "-device", "virtserialport,chardev=a,name=agent",
        "-chardev", "null,id=c", "-device", "virtserialport,chardev=c,name=control",
    ]  # fmt: skip
    for name, image, extra in (
        ("s", system, ",readonly=on"),
        ("w", disk, ""),
        ("p", project, ",readonly=on"),
    ):
        command += ["-drive", f"if=none,id={name},format=raw,file={image}{extra}"]
        command += ["-device", f"virtio-blk-pci,drive={name}"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    finally:
        process.kill()  # where this session is interrupted
        process.wait()
        disk.unlink(missing_ok=True)
        project.unlink(missing_ok=True)
    return _parse(output.decode(errors="replace"))


def _parse(console: str) -> Outcome:
    outcome = Outcome(console=console)
    for line in console.replace("\r", "").splitlines():
        if line.startswith(_MARK):
            entry = json.loads(line.removeprefix(_MARK))
            outcome.tests.append((entry["test"], entry["outcome"], entry["text"]))
        elif line.startswith("RINGFENCE-MOUNTS "):
            _, number, *outcome.controllers = line.split()
            outcome.old_hierarchies = int(number)
        elif line.startswith("RINGFENCE-EXIT "):
            outcome.exit = int(line.split()[1])
    return outcome
