"""The proxy process ends at a bad moment: with messages that it never took, or when no other can start."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ringfence.egress.client import Doors
from ringfence.egress.messages import Messages


async def test_whoever_gets_the_number_of_a_full_socket_that_ended_is_heard() -> None:
    """The event loop must have forgotten the writer that waited for room: else the next reader of that number
    is refused, though it has nothing to do with it."""
    loop = asyncio.get_running_loop()
    troubles: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: troubles.append(context))
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    messages = Messages(ours, lambda *_: None, lambda: None)
    for _ in range(20):  # so large that not all of them find room
        given = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        messages.send({"text": "x" * (64 << 10)}, given)
    await asyncio.sleep(0.05)
    assert messages.waiting
    theirs.close()
    while not messages.closed:
        await asyncio.sleep(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        moved = other.fileno()
        if moved != number:
            os.dup2(moved, number, inheritable=False)
        heard = loop.create_future()
        try:
            loop.add_writer(number, heard.cancel)
            await asyncio.sleep(0.05)
            assert heard.done()  # nobody has taken it out again
            loop.remove_writer(number)
        finally:
            if moved != number:
                os.close(number)
    assert troubles == []


async def test_a_host_that_can_start_none_at_the_moment_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = Doors(tmp_path, {})
    tries: list[None] = []

    async def launch() -> None:
        tries.append(None)
        if len(tries) == 1:
            raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(doors, "_launch", launch)
    await doors._restart()
    assert len(tries) == 2


async def test_nobody_is_told_of_a_child_that_is_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process dies at the moment at which it is cleared away."""
    doors = Doors(tmp_path, {})
    for _ in range(150):
        dying = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", "kill -9 $$", stdout=asyncio.subprocess.PIPE
        )
        assert dying.stdout is not None
        await dying.stdout.read()
        doors._process = dying
        await doors._reap()
        assert dying.returncode == -9
    assert [record.getMessage() for record in caplog.records] == []
