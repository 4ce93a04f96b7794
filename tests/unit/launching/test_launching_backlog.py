"""Dialling a unix socket whose owner is behind with accepting."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from ringfence.runtimes.engines.endpoints import Endpoint
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.vm import control, qmp


def _full(path: Path) -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose backlog holds not one more, and those who wait there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(0)
    waiting: list[socket.socket] = []
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            sock.close()
            return listener, waiting
        waiting.append(sock)


async def _accepting(listener: socket.socket, waiting: list[socket.socket]) -> socket.socket:
    """Accept all, after a moment; the one who came last."""
    await asyncio.sleep(0.05)
    for each in waiting:
        listener.accept()[0].close()
        each.close()
    listener.setblocking(False)
    return (await asyncio.get_running_loop().sock_accept(listener))[0]


async def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    listener, waiting = _full(tmp_path / "engine.sock")
    with listener:
        accepted = asyncio.ensure_future(_accepting(listener, waiting))
        endpoint = Endpoint("docker", "unix://", path=str(tmp_path / "engine.sock"))
        async with asyncio.timeout(60):
            with await endpoint.connect() as sock, await accepted as theirs:
                theirs.send(b"x")
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b"x"


@pytest.mark.parametrize("name", [qmp.NAME, control.NAME])
async def test_a_machine_that_serves_others_first_is_waited_for(tmp_path: Path, name: str) -> None:
    listener, waiting = _full(tmp_path / name)
    folder = str(tmp_path)
    with listener:
        accepted = asyncio.ensure_future(_accepting(listener, waiting))
        work = qmp.Qmp.open(folder) if name == qmp.NAME else control.call(folder, "kills")
        asked = asyncio.ensure_future(work)
        await asyncio.wait({accepted, asked}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert not asked.done(), asked
        with await accepted as theirs:
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()
            if name == qmp.NAME:
                await loop.sock_sendall(theirs, b'{"QMP": {}}\n')
                assert b"qmp_capabilities" in await loop.sock_recv(theirs, 4096)
                await loop.sock_sendall(theirs, b'{"return": {}}\n')
            else:
                mark = (await loop.sock_recv(theirs, 4096)).split()[1]
                await loop.sock_sendall(theirs, b"ok " + mark + b"\nok 3\n")
            answer = await asked
    if isinstance(answer, qmp.Qmp):
        answer.close()
    else:
        assert answer == "3"


async def test_a_backlog_that_stays_full_is_an_error(tmp_path: Path) -> None:
    listener, waiting = _full(tmp_path / "s")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with listener, sock:
        with pytest.raises(BlockingIOError):
            await sockets.connect(sock, str(tmp_path / "s"), within=0.01)
        for each in waiting:
            each.close()
