"""kill -9 of the service's parts while jobs run: no job is lost, no attempt is doubled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import Serving, eventually, serving

SMALL = {"runtime": "jail", "memory": "128MiB", "disk": "16MiB"}
SLOW = "echo start; until [ -e go ]; do sleep 0.05; done; echo end; echo made > out"
FINAL = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with serving("--no-egress") as made:
        yield made


def submit(service: Serving, **body: Any) -> str:
    answer = service.http.post("/v1/jobs", json=SMALL | {"outputs": ["out"]} | body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def show(service: Serving, job: str) -> dict[str, Any]:
    return dict(service.http.get(f"/v1/jobs/{job}").json())


def started(service: Serving, job: str) -> str:
    """Its sandbox, when its command has begun."""

    def look() -> str | None:
        if "start" not in service.http.get(f"/v1/jobs/{job}/logs").text:
            return None
        return str(show(service, job)["attempts"][-1]["sandbox"])

    return str(eventually(look, "the command has begun"))


def ended(service: Serving, job: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        told = show(service, job)
        return told if told.get("state") in FINAL else None

    return dict(eventually(look, f"job {job} ends"))


def let_go(service: Serving, sandbox: str) -> None:
    def go() -> bool:
        path = f"/v1/sandboxes/{sandbox}/processes"
        answer = service.http.post(path, json={"command": "touch go", "timeout": 20})
        return answer.status_code == 200

    eventually(go, "a command in the job's sandbox")


def check(service: Serving, job: str, attempts: int = 1) -> None:
    told = ended(service, job)
    assert told["state"] == "succeeded", told
    assert len(told["attempts"]) == attempts
    assert service.http.get(f"/v1/jobs/{job}/logs").text == "start\nend\n"
    assert service.http.get(f"/v1/jobs/{job}/artifacts/out").text == "made\n"


@pytest.mark.parametrize("parts", [["node"], ["api", "node"]])
def test_a_part_is_killed_while_jobs_run(service: Serving, parts: list[str]) -> None:
    jobs = [submit(service, command=SLOW) for _ in range(3)]
    sandboxes = [started(service, job) for job in jobs]
    for part in parts:
        for pid in service.children()[part]:
            os.kill(pid, signal.SIGKILL)
    for sandbox in sandboxes:
        let_go(service, sandbox)
    for job in jobs:
        check(service, job)
    eventually(
        lambda: service.http.get("/v1/sandboxes", params={"state": "running"}).json()["items"] == [],
        "no sandbox is left",
    )


def test_the_service_is_killed_again_and_again(service: Serving) -> None:
    """Without waiting for anything: at whatever step the job is."""
    jobs = [
        submit(service, command="echo start; echo end; echo made > out", retries=5, backoff=0.1)
        for _ in range(6)
    ]
    for _ in range(4):
        for pid in service.children()["api"]:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: service.http.get("/healthz").status_code == 200, "it serves again")
    for job in jobs:
        told = ended(service, job)
        assert told["state"] == "succeeded", told
        assert service.http.get(f"/v1/jobs/{job}/logs").text == "start\nend\n"
        assert service.http.get(f"/v1/jobs/{job}/artifacts/out").text == "made\n"
    eventually(
        lambda: service.http.get("/v1/sandboxes", params={"state": "running"}).json()["items"] == [],
        "no sandbox is left",
    )


def test_everything_is_stopped_and_started_again(service: Serving) -> None:
    job = submit(service, command=SLOW)
    sandbox = started(service, job)
    service.stop(signal.SIGTERM)
    service.start()
    let_go(service, sandbox)
    check(service, job)


def test_its_sandbox_is_lost(service: Serving) -> None:
    """An attempt that is lost counts, and another follows."""
    job = submit(service, command="echo start; [ -e again ] || sleep 600", retries=1, backoff=0.1, outputs=[])
    first = started(service, job)
    assert service.http.delete(f"/v1/sandboxes/{first}").status_code in (200, 204)
    second = eventually(
        lambda: len(show(service, job)["attempts"]) == 2 and show(service, job)["attempts"][1]["sandbox"],
        "another attempt",
    )
    assert second != first
    assert show(service, job)["attempts"][0]["cause"] == "killed"
    service.http.post(f"/v1/jobs/{job}/cancel")
    assert ended(service, job)["state"] == "cancelled"
