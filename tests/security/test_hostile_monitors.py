"""Monitors of machines that a hostile guest has taken over, at the host that saves and asks them."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from ringfence.model.errors import LinkLost, RuntimeUnavailable
from ringfence.runtimes.engines.client import Client
from ringfence.runtimes.engines.endpoints import Endpoint
from ringfence.runtimes.firecracker import machine as firecracker
from ringfence.runtimes.firecracker import saving
from ringfence.runtimes.vm import disks, qmp

_DEEP = b"[" * 200_000  # JSON that no parser with a stack goes into


def test_a_disk_that_its_monitor_swapped_is_not_followed(tmp_path: Path) -> None:
    secret, disk, copy = tmp_path / "secret", tmp_path / "disk", tmp_path / "copy"
    secret.write_text("of the host")
    disk.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        disks.copy(str(disk), str(copy))
    assert not copy.exists()
    disk.unlink()
    os.mkfifo(disk)  # which nobody ever writes to
    with pytest.raises(OSError, match="it is no file"):
        disks.copy(str(disk), str(tmp_path / "other"))
    disk.unlink()
    disk.write_text("of the guest")
    disks.copy(str(disk), str(copy))  # the control
    assert copy.read_text() == "of the guest"
    assert copy.stat().st_mode & 0o777 == 0o600


async def test_an_answer_without_end_of_nesting_is_no_answer(tmp_path: Path) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / qmp.NAME))
    sock.listen()
    sock.setblocking(False)

    async def monitor() -> None:
        loop = asyncio.get_running_loop()
        peer, _ = await loop.sock_accept(sock)
        with peer:
            await loop.sock_sendall(peer, b'{"QMP": {}}\n')
            await loop.sock_recv(peer, 4096)
            await loop.sock_sendall(peer, b'{"return": {}}\n')
            await loop.sock_recv(peer, 4096)
            await loop.sock_sendall(peer, _DEEP + b"\n")
            await loop.sock_recv(peer, 4096)

    hostile = asyncio.ensure_future(monitor())
    async with await qmp.Qmp.open(str(tmp_path)) as machine:
        with pytest.raises(LinkLost):
            await machine.call("stop")
    await hostile
    sock.close()


async def test_an_engine_whose_answer_nests_without_end_is_none(tmp_path: Path) -> None:
    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n" % (status, len(_DEEP) + 2)
        writer.write(head + b'{"' + _DEEP if status >= 400 else head + _DEEP + b"]]")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(engine, tmp_path / "engine")
    client = Client(Endpoint("docker", "unix://engine", path=str(tmp_path / "engine")))
    async with server:
        status = 200
        with pytest.raises(RuntimeUnavailable):
            await client.call("GET", "/version")


def test_a_saved_machine_swapped_for_a_link_gives_nothing_of_the_host_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, jail, folder = tmp_path / "secret", tmp_path / "jail", tmp_path / "saved"
    secret.write_text("of the host")
    secret.chmod(0o600)
    for place in (jail, folder):
        place.mkdir()
    for name in (firecracker.STATE, firecracker.MEMORY, firecracker.DISK):
        (jail / name).write_text("of the guest")
    moved = os.rename

    def race(source: str, target: str) -> None:
        os.unlink(source)  # the monitor, a moment before
        os.symlink(secret, source)
        moved(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", race)
        with pytest.raises(OSError, match="wrote no snapshot"):
            saving._keep(str(jail), str(folder), True)
    assert secret.stat().st_mode & 0o777 == 0o600
    (jail / firecracker.DISK).unlink()
    (jail / firecracker.DISK).symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        saving._keep(str(jail), str(folder), False)
    assert not (folder / "disk").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away: needs root")
def test_a_saved_machine_is_kept(tmp_path: Path) -> None:
    jail, folder = tmp_path / "jail", tmp_path / "saved"
    for place in (jail, folder):
        place.mkdir()
    for name in (firecracker.STATE, firecracker.MEMORY, firecracker.DISK):
        (jail / name).write_text("of the guest")
    saving._keep(str(jail), str(folder), True)
    assert sorted(os.listdir(folder)) == ["disk", "memory", "state"]
