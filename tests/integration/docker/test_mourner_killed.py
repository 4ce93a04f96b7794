"""The process that watches over containers is killed at the moment at which another one is to be watched."""

from __future__ import annotations

import os
import signal

import pytest

from ringfence.runtimes.engines import mourning
from ringfence.runtimes.engines.endpoints import Endpoint


async def test_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint("docker", "unix:///nowhere", path="/nowhere")
    watching = mourning.Mourning()
    watching.begin("one", endpoint)
    first = watching._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(first, "poll", lambda: None)  # its pipe is closed, and it is not to be waited for yet
        watching.begin("two", endpoint)
    try:
        assert watching.pid not in (0, first.pid)
    finally:
        first.wait()
        await watching.end("one")
        await watching.end("two")
    assert watching.pid == 0
