"""Two API processes with folders of their own on one PostgreSQL: what a job left is read through each."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from support.apis import another
from support.postgres import PostgresServer, postgres
from support.serving import Serving, eventually, needs_root_or_users, serving

__all__ = ["postgres"]
SMALL = {"runtime": "jail", "memory": "128MiB", "disk": "16MiB"}
MIB = 1024 * 1024


class Pair:
    """Two of them, and the store's address."""

    def __init__(self, first: Serving, second: Serving, store: str) -> None:
        self.first, self.second, self.store = first, second, store

    def parts(self, job: str) -> int:
        """How many pieces of a job's files the store has."""
        with psycopg.connect(self.store) as connection:
            found = connection.execute(
                "SELECT count(*) FROM rf_rows WHERE kind = 'job-part' AND id LIKE %s", (f"{job}%",)
            ).fetchone()
        assert found is not None
        return int(found[0])


@pytest.fixture(scope="module")
def pair(postgres: PostgresServer) -> Iterator[Pair]:
    needs_root_or_users()
    store = postgres.fresh()
    with serving("--no-egress", store=store) as first, another(first, "--no-egress") as second:
        yield Pair(first, second, store)


def submit(service: Serving, **body: Any) -> str:
    answer = service.http.post("/v1/jobs", json=SMALL | body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def ended(service: Serving, job: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        told = dict(service.http.get(f"/v1/jobs/{job}").json())
        return told if told.get("state") in ("succeeded", "failed", "cancelled") else None

    return dict(eventually(look, f"job {job} ends"))


def test_what_a_job_left_is_read_through_the_other_when_its_own_was_killed(pair: Pair) -> None:
    ran, other = pair.first, pair.second
    command = "head -c 3000000 /dev/urandom > big; : > none; echo out; echo err >&2; sha256sum < big > sum"
    job = submit(ran, command=command, outputs=["big", "none", "sum"])
    told = ended(other, job)
    assert told["state"] == "succeeded", told
    for pid in ran.children()["api"]:
        os.kill(pid, signal.SIGKILL)
    answer = other.http.get(f"/v1/jobs/{job}/artifacts/big")
    assert (answer.status_code, len(answer.content)) == (200, 3_000_000), answer.text[:300]
    digest = hashlib.sha256(answer.content).hexdigest()
    assert answer.headers["etag"] == f'"{digest}"'
    assert other.http.get(f"/v1/jobs/{job}/artifacts/sum").text.split()[0] == digest
    assert other.http.get(f"/v1/jobs/{job}/artifacts/none").content == b""
    assert other.http.get(f"/v1/jobs/{job}/logs", params={"stream": "stdout"}).text == "out\n"
    assert other.http.get(f"/v1/jobs/{job}/logs", params={"stream": "stderr"}).text == "err\n"
    assert other.http.get(f"/v1/jobs/{job}/artifacts/else").status_code == 404
    eventually(lambda: ran.http.get("/healthz").status_code == 200, "it serves again")
    assert ran.http.get(f"/v1/jobs/{job}/artifacts/big").content == answer.content
    assert pair.parts(job) == 16 + 0 + 1 + 1
    (folder,) = ran.node_socket.parent.glob(f"**/jobs/{job}")

    os.utime(folder, (0, 0))  # as if it had been there for long
    assert other.http.delete(f"/v1/jobs/{job}").status_code == 204  # all of it goes, whoever is asked
    assert pair.parts(job) == 0
    eventually(lambda: not folder.exists(), "its own machine has heard of it")
    assert ran.http.get(f"/v1/jobs/{job}/artifacts/big").status_code == 404


def test_a_log_is_followed_through_the_other(pair: Pair) -> None:
    """Attempt by attempt, each when it is over."""
    command = "echo one; [ -e /never ]"
    job = submit(pair.first, command=command, retries=1, backoff=0.1)
    answer = pair.second.http.get(f"/v1/jobs/{job}/logs", params={"follow": "true"}, timeout=120)
    assert (answer.status_code, answer.text) == (200, "one\none\n")
    answer = pair.second.http.get(f"/v1/jobs/{job}/logs", params={"attempt": 1})
    assert answer.text == "one\n"
    assert ended(pair.second, job)["state"] == "failed"


def test_an_attempt_whose_api_is_killed_while_it_keeps_the_outputs_leaves_nothing_twice(pair: Pair) -> None:
    ran, other = pair.first, pair.second
    job = submit(ran, command=f"head -c {8 * MIB} /dev/urandom > big", outputs=["big"])
    eventually(lambda: pair.parts(job) > 2, "some of it is there")
    for pid in ran.children()["api"]:
        os.kill(pid, signal.SIGKILL)
    told = ended(other, job)
    assert (told["state"], len(told["attempts"])) == ("succeeded", 1), told
    content = other.http.get(f"/v1/jobs/{job}/artifacts/big").content
    assert hashlib.sha256(content).hexdigest() == told["artifacts"][0]["sha256"]
    assert other.http.delete(f"/v1/jobs/{job}").status_code == 204
    assert pair.parts(job) == 0


def test_what_finds_no_room_is_not_left_in_the_store(pair: Pair) -> None:
    http = pair.first.http
    path = f"/v1/projects/{http.get('/v1/me').json()['project']}/quota"

    def idle() -> dict[str, Any] | None:
        quota = dict(http.get("/v1/quota").json())
        return None if quota["usage"]["alive"] else quota

    before = dict(eventually(idle, "no sandbox is left"))
    room = before["usage"]["storage"] + 16 * MIB + 4 * MIB  # its sandbox's disk, and less than it leaves
    assert http.patch(path, json={"storage": room}).status_code == 200
    try:
        job = submit(pair.first, command=f"head -c {6 * MIB} /dev/zero > big", outputs=["big"])
        told = ended(pair.second, job)
        assert (told["state"], told["cause"], told["artifacts"]) == ("failed", "outputs", []), told
        eventually(lambda: pair.parts(job) <= 1, "only its log is kept")
    finally:
        assert http.patch(path, json={"storage": before["limits"]["storage"]}).status_code == 200
