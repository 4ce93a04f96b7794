"""Level 4 with systemd: it is the machine's first process, brings the system up, starts units and ends them.

All of it boots for minutes where the processor is emulated: ``--ringfence-runtime=qemu`` runs it.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.conformance import templates
from ringfence.conformance.harness import Kit, opened, run
from ringfence.conformance.plugin import LISTED
from ringfence.guest.link import GuestLink
from ringfence.images.importing import ImportOptions, add
from ringfence.images.store import TemplateStore
from ringfence.model.levels import Level

PACKAGES = ("systemd-sysv", "dbus")
UNITS = {
    # Started by whoever connects.
    "greeter.socket": "[Socket]\nListenStream=/run/greeter\nSocketMode=0666\nAccept=yes\n",
    "greeter@.service": "[Service]\nStandardInput=socket\n"
    "ExecStart=/bin/sh -c 'echo started by $$PPID, $(cat /proc/1/comm), as $(id -u)'\n",
    # Runs from the start to the end, and leaves a trace of both.
    "witness.service": "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
    "ExecStart=/bin/sh -c 'echo begun > /var/lib/witness'\n"
    "ExecStop=/bin/sh -c 'echo ended >> /var/lib/witness'\n",
}
WANTED = {"sockets.target.wants": "greeter.socket", "multi-user.target.wants": "witness.service"}
# What can't work in a machine without a network card and with its modules locked, and nobody misses.
MAY_FAIL = {"systemd-modules-load.service", "systemd-networkd-wait-online.service"}
BUS = "org.freedesktop.DBus"
WHO = (BUS, "/org/freedesktop/DBus", BUS, "GetConnectionUnixProcessID", "s", "org.freedesktop.systemd1")
CONNECT = (
    "use IO::Socket::UNIX; my $s = IO::Socket::UNIX->new(Peer => '/run/greeter') or die $!; print while <$s>;"
)


def with_units(source: Path, target: Path) -> None:
    """The system's tar, and the units of the test in it."""
    shutil.copyfile(source, target)
    with tarfile.open(target, "a") as file:
        for name, text in UNITS.items():
            entry = tarfile.TarInfo(f"./etc/systemd/system/{name}")
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text.encode()))
        for folder, name in WANTED.items():
            entry = tarfile.TarInfo(f"./etc/systemd/system/{folder}/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, f"../{name}"
            file.addfile(entry)


@pytest.fixture(scope="module")
def systemd_state(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A state root whose template has systemd."""
    if "qemu" not in request.config.getoption("--ringfence-runtime"):
        pytest.skip(f"{LISTED}a whole system boots for minutes: --ringfence-runtime=qemu runs it")
    request.getfixturevalue("vm_state")  # which skips where there can be no machine
    with tempfile.TemporaryDirectory(prefix="rf-vm-", ignore_cleanup_errors=True) as state:
        Path(state).chmod(0o711)
        archive = Path(state, "system.tar")
        with_units(templates.archive(PACKAGES), archive)
        with TemplateStore.open(Path(state, "images")) as store:
            add(store, f"rootfs:{archive}", ImportOptions(name=templates.NAME))
        archive.unlink()
        yield Path(state)


@pytest.fixture
async def systems(systemd_state: Path) -> AsyncIterator[Kit]:
    """Sandboxes on qemu; afterwards nothing of them is left."""
    async with opened(systemd_state, "qemu") as made:
        yield made


async def said(link: GuestLink, *argv: str) -> str:
    """What a command inside says, on both its streams."""
    done = await run(link, *argv)
    return (done.stdout + done.stderr).decode(errors="replace").strip()


async def until(link: GuestLink, wanted: set[str], *argv: str) -> str:
    """What a command says when that is one of those words, or after minutes."""
    deadline = time.monotonic() + 300
    while (found := await said(link, *argv)) not in wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return found


def on_disk(image: Path, path: str) -> str:
    """A file on a machine's disk that nobody has mounted."""
    done = subprocess.run(
        ["debugfs", "-R", f"cat {path}", str(image)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"},
    )
    return done.stdout


@pytest.mark.timeout(1800)
async def test_systemd_is_the_first_process_and_brings_the_system_up(systems: Kit) -> None:
    sandbox = await systems.sandbox(memory=512 << 20, disk=256 << 20)
    link = await systems.link(sandbox)
    boundary = await sandbox.boundary()
    assert (boundary.level, boundary.runtime) == (Level.L4, "qemu")
    # As the machine counts; the agent counts anew. It comes to the bus a moment after the bus is there.
    assert await until(link, {"u 1"}, "busctl", "call", *WHO) == "u 1"

    settled = {"running", "degraded"}
    state = await until(link, settled, "systemctl", "is-system-running", "--wait")
    listed = await said(link, "systemctl", "list-units", "--failed", "--plain", "--no-legend", "--full")
    failed = {line.split()[0] for line in listed.splitlines()}
    assert state == ("degraded" if failed else "running"), (state, listed)
    assert failed <= MAY_FAIL, listed
    assert (
        await said(link, "systemctl", "is-active", "multi-user.target", "witness.service") == "active\nactive"
    )

    # Units start when they are needed, as the system's own users; the workload is none that may order it.
    assert await said(link, "perl", "-e", CONNECT) == "started by 1, systemd, as 0"
    for order in (("stop", "witness.service"), ("start", "rescue.target"), ("poweroff",)):
        done = await run(link, "systemctl", "--no-ask-password", *order)
        assert done.exit.code != 0, order
    assert await said(link, "systemctl", "is-active", "witness.service") == "active"

    # Whatever the system does, the agent is there.
    assert await said(link, "id", "-u") == "1000"
    assert (await systems.runtime.stats(sandbox.handle)).processes > 0

    # Asked to stop, the machine ends by itself, its services in order.
    handle = sandbox.handle
    await sandbox.stop(600)
    end = await systems.runtime.wait(handle)
    assert (end.code, end.signal) == (0, None), end
    assert on_disk(Path(handle.data["disk"]), "/upper/var/lib/witness").split() == ["begun", "ended"]
