"""Processes that `ringfence serve` watches over."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence.model.errors import HostLimit
from ringfence.serving.supervising import Child, listen_unix


async def test_one_that_ends_instead_of_starting_is_let_end(caplog: pytest.LogCaptureFixture) -> None:
    """Its pipe closes a moment before it is gone. A signal then would take its exit code from asyncio, which
    warns of a child that it does not know, on the terminal of who started the service.
    """

    async def start() -> tuple[asyncio.subprocess.Process, Any]:
        process = await asyncio.create_subprocess_exec("sh", "-c", "exec >&-; sleep 0.5; exit 3", stdout=-1)

        async def ready() -> None:
            assert process.stdout is not None
            await process.stdout.read()
            raise EOFError

        return process, ready()

    child = Child("it", start, lambda _: None)
    with caplog.at_level(logging.WARNING), pytest.raises(HostLimit, match="it did not start"):
        await child.begin()
    assert child.process is not None
    assert child.process.returncode == 3  # not -9: nobody shot it
    assert caplog.records == []


async def test_one_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.serving.supervising._LAST", 0.2)

    async def start() -> tuple[asyncio.subprocess.Process, Any]:
        async def ready() -> None:
            raise EOFError

        return await asyncio.create_subprocess_exec("sleep", "1000"), ready()

    child = Child("it", start, lambda _: None)
    with pytest.raises(HostLimit):
        await child.begin()
    assert child.process is not None
    assert child.process.returncode == -9


def test_one_at_a_time_looks_whether_somebody_listens(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(listen_unix, path) for _ in range(2)]
        time.sleep(0.3)
        assert not path.exists()
        os.close(folder)
        found = [each.exception() or each.result() for each in both]
    (listening,) = [each for each in found if isinstance(each, socket.socket)]
    (refused,) = [each for each in found if isinstance(each, HostLimit)]
    assert "somebody listens" in str(refused)
    with socket.socket(socket.AF_UNIX) as dialled:
        dialled.connect(str(path))
    listening.close()
    listen_unix(path).close()  # what is left over is replaced
