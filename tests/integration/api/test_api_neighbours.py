"""A sandbox whose agent answers nothing any more is its owner's trouble, and nobody else's."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.serving import Serving, eventually

RUNNING = {"id": "", "state": "running"}  # who is not answered yet has not heard of an end
MANY = 12  # commands; one after the other they would cost 30 seconds each


def agent_of(argument: str) -> int:
    """Pid of the agent that runs a command with this argument."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if argument.encode() in (folder / "cmdline").read_bytes().split(b"\0")[1:]:
                status = dict(
                    line.split(":\t", 1)
                    for line in (folder / "status").read_text().splitlines()
                    if ":\t" in line
                )
                parent = int(status["PPid"])
                if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"ringfence-agent"):
                    return parent
        except (OSError, KeyError, IndexError):
            continue
    return 0


@pytest.fixture
def mute(service: Serving) -> Iterator[str]:
    """A sandbox with commands whose time is nearly over, and an agent that has stopped."""
    _, key = service.tenant(f"mute{uuid.uuid4().hex[:8]}")
    owner: httpx.Client = service.client(key)
    id = str(service.sandbox(owner)["id"])
    mark = f"{10**8 + uuid.uuid4().int % 10**8}.25"

    def begin(name: str, seconds: float) -> None:
        body = {"argv": ["sleep", mark], "id": name, "wait": False, "detached": True, "timeout": seconds}
        assert owner.post(f"/v1/sandboxes/{id}/processes", json=body).status_code == 201

    begin("known", 600)  # it is found by this one: the others may be over before somebody has looked
    agent = int(eventually(lambda: agent_of(mark), "the agent"))
    for number in range(MANY):
        begin(f"c{number}", 6)
    os.kill(agent, signal.SIGSTOP)
    try:
        yield id
    finally:
        os.kill(agent, signal.SIGCONT)
        eventually(
            lambda: all(
                each["state"] != "running"
                for each in owner.get(f"/v1/sandboxes/{id}/processes").json().get("items", [RUNNING])
                if each["id"] != "known"
            ),
            "its own commands end too, once it answers",
        )
        owner.delete(f"/v1/sandboxes/{id}")


def test_a_mute_agent_holds_up_nobody_elses_deadline(service: Serving, mute: str) -> None:
    box = service.sandbox()["id"]
    # Due later than those of the mute one: only then is it in line behind them.
    body = {"argv": ["sleep", "600"], "id": "mine", "wait": False, "timeout": 9}
    assert service.http.post(f"/v1/sandboxes/{box}/processes", json=body).status_code == 201
    path = f"/v1/sandboxes/{box}/processes/mine"
    eventually(lambda: service.http.get(path).json()["state"] != "running", "its own deadline")
    service.http.delete(f"/v1/sandboxes/{box}")
