"""Jobs of a service as a user starts it."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from typing import Any

import pytest

from support.serving import Serving, eventually

SMALL = {"runtime": "jail", "memory": "128MiB", "disk": "16MiB"}
FINAL = ("succeeded", "failed", "cancelled")


def submit(service: Serving, **body: Any) -> str:
    answer = service.http.post("/v1/jobs", json=SMALL | body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["state"] == "queued"
    return str(answer.json()["id"])


def ended(service: Serving, job: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        told: dict[str, Any] = service.http.get(f"/v1/jobs/{job}").json()
        return told if told["state"] in FINAL else None

    found: dict[str, Any] = eventually(look, f"job {job} ends")
    return found


def logs(service: Serving, job: str, **query: Any) -> str:
    answer = service.http.get(f"/v1/jobs/{job}/logs", params=query)
    assert answer.status_code == 200, answer.text
    return answer.text


def gone(service: Serving, told: dict[str, Any]) -> None:
    """Nothing of its attempts' sandboxes is left."""
    for attempt in told["attempts"]:
        eventually(
            lambda id=attempt["sandbox"]: (
                service.http.get(f"/v1/sandboxes/{id}").json()["state"] in ("stopped", "failed")
            ),
            "its sandbox is removed",
        )


def test_a_job_with_inputs_and_outputs(service: Serving) -> None:
    job = submit(
        service,
        command="cat in.txt sub/b.bin | tee out.txt; mkdir -p d && cp in.txt d/x; echo oops >&2; echo $WHO",
        files={"in.txt": "hello\n", "sub/b.bin": {"content": "AAEC", "encoding": "base64"}},
        outputs=["out.txt", "d", "nothing"],
        env={"WHO": "me"},
        labels={"a": "b"},
    )
    told = ended(service, job)
    assert (told["state"], told["exit_code"], told["cause"]) == ("succeeded", 0, "exited"), told
    assert told["missing"] == ["nothing"] and told["labels"] == {"a": "b"}
    assert logs(service, job, stream="stdout") == "hello\n\0\1\2me\n"
    assert logs(service, job, stream="stderr") == "oops\n"
    assert sorted(logs(service, job)) == sorted("hello\n\0\1\2me\noops\n")
    one, two = told["artifacts"]
    assert one["name"] == "out.txt" and one["sha256"] == hashlib.sha256(b"hello\n\0\1\2").hexdigest()
    for name in ("out.txt", one["sha256"]):
        got = service.http.get(f"/v1/jobs/{job}/artifacts/{name}")
        assert got.content == b"hello\n\0\1\2" and got.headers["etag"] == f'"{one["sha256"]}"'
    tar = service.http.get(f"/v1/jobs/{job}/artifacts/{two['name']}")
    with tarfile.open(fileobj=io.BytesIO(tar.content)) as archive:
        assert any(name.endswith("x") for name in archive.getnames())
    assert service.http.get(f"/v1/jobs/{job}/artifacts/../secret").status_code == 404
    gone(service, told)
    assert service.http.delete(f"/v1/jobs/{job}").status_code == 204
    assert service.http.get(f"/v1/jobs/{job}").status_code == 404
    assert not list(service.home.rglob(job))


def test_retries_with_back_off_each_in_a_fresh_sandbox(service: Serving) -> None:
    job = submit(
        service, command="echo try; ls /tmp/mark 2>/dev/null; touch /tmp/mark; exit 3", retries=2, backoff=0.1
    )
    told = ended(service, job)
    assert (told["state"], told["exit_code"], told["cause"]) == ("failed", 3, "exited")
    assert [attempt["exit_code"] for attempt in told["attempts"]] == [3, 3, 3]
    assert len({attempt["sandbox"] for attempt in told["attempts"]}) == 3
    assert [logs(service, job, attempt=n) for n in (1, 2, 3)] == ["try\n"] * 3
    assert service.http.get(f"/v1/jobs/{job}/logs", params={"attempt": 4}).status_code == 404
    gone(service, told)
    again = service.http.post(f"/v1/jobs/{job}/retry")
    assert again.status_code == 200 and again.json()["state"] == "queued"
    assert len(ended(service, job)["attempts"]) == 4


def test_cancel(service: Serving) -> None:
    job = submit(service, command="echo began; sleep 600")
    eventually(lambda: "began" in logs(service, job), "it runs")
    assert service.http.post(f"/v1/jobs/{job}/retry").status_code == 409
    assert service.http.delete(f"/v1/jobs/{job}").status_code == 409
    assert service.http.post(f"/v1/jobs/{job}/cancel").status_code == 200
    told = ended(service, job)
    assert (told["state"], told["cause"]) == ("cancelled", "cancelled")
    assert service.http.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"
    gone(service, told)


def test_its_deadline_ends_it(service: Serving) -> None:
    job = submit(service, command="sleep 600", deadline=2, retries=3)
    told = ended(service, job)
    assert (told["state"], told["cause"]) == ("failed", "deadline")
    assert len(told["attempts"]) <= 1  # none on a machine that took longer to come to it
    gone(service, told)


def test_causes_are_measured(service: Serving) -> None:
    job = submit(service, argv=["python3", "-c", "x = b'x' * 10**9"], memory="64MiB")
    told = ended(service, job)
    assert (told["state"], told["cause"]) == ("failed", "out_of_memory"), told
    job = submit(service, argv=["/no/such/program"])
    told = ended(service, job)
    assert told["state"] == "failed" and told["cause"] == "refused" and "can't start" in told["detail"]
    job = submit(service, command="true", template="no-such-template")
    told = ended(service, job)
    assert told["state"] == "failed" and told["error"]["code"] == "not_found" and len(told["attempts"]) == 1


def test_follow_the_log(service: Serving) -> None:
    job = submit(service, command="for n in 1 2 3 4 5; do echo $n; sleep 0.1; done")
    assert logs(service, job, follow="true") == "1\n2\n3\n4\n5\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="volumes need a node that runs as root")
def test_a_volume_goes_from_job_to_job(service: Serving) -> None:
    assert service.http.post("/v1/volumes", json={"name": "work", "quota": "16MiB"}).status_code == 201
    mount = [{"volume": "work", "path": "/data", "read_only": False}]
    jobs = [submit(service, command=f"echo {n} >> /data/all", volumes=mount) for n in range(3)]
    for job in jobs:  # they wait for one another
        assert ended(service, job)["state"] == "succeeded"
    job = submit(service, command="sort /data/all", volumes=[mount[0] | {"read_only": True}])
    ended(service, job)
    assert logs(service, job) == "0\n1\n2\n"
    eventually(lambda: service.http.delete("/v1/volumes/work").status_code == 204, "it can be removed")


def test_wrong_requests(service: Serving) -> None:
    http = service.http
    for body in (
        {},
        {"command": "a", "argv": ["b"]},
        {"command": "a", "what": 1},
        {"command": "a", "retries": 21},
        {"command": "a", "deadline": 0},
        {"command": "a", "deadline": "soon"},
        {"command": "a", "files": {"x": {"content": "!", "encoding": "base64"}}},
        {"command": "a", "inputs": [{"url": "file:///etc/passwd", "path": "x"}]},
        {"command": "a", "inputs": [{"url": "http://example.test/", "path": "x"}]},  # no egress in its policy
        {"argv": ["a\0b"]},
    ):
        answer = http.post("/v1/jobs", json=body)
        assert answer.status_code in (400, 422), (body, answer.text)
        assert answer.json()["error"]["code"] in ("invalid_request", "invalid_policy")
    network = {"mode": "egress", "allow": [{"host": "example.test"}]}
    answer = http.post(
        "/v1/jobs",
        json={"command": "a", "network": network, "inputs": [{"url": "https://example.test/", "path": "x"}]},
    )
    assert answer.status_code == 501 and answer.json()["error"]["code"] == "unsupported"
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("POST", "/retry"),
        ("GET", "/logs"),
    ):
        assert http.request(method, f"/v1/jobs/job-00000000000000000000{path}").status_code == 404


def test_list_and_idempotency(service: Serving) -> None:
    http = service.http
    body = SMALL | {"command": "true", "labels": {"list": "one"}}
    made = [http.post("/v1/jobs", json=body, headers={"idempotency-key": "k"}).json()["id"] for _ in range(2)]
    assert made[0] == made[1]
    found = http.get("/v1/jobs", params={"label": "list=one"}).json()["items"]
    assert [each["id"] for each in found] == made[:1]
    ended(service, made[0])
    found = http.get("/v1/jobs", params={"label": "list=one", "state": "succeeded"}).json()["items"]
    assert [each["id"] for each in found] == made[:1]


def test_nobody_reaches_anothers(service: Serving) -> None:
    job = submit(service, command="echo secret > f; cat f", outputs=["f"])
    ended(service, job)
    project = service.http.post("/v1/projects", json={"name": "job-others"}).json()["id"]
    key = service.http.post("/v1/keys", json={"name": "k", "project": project, "scopes": ["run"]}).json()
    with service.client(key["secret"]) as other:
        for method, path in (
            ("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("POST", "/retry"), ("GET", "/logs"),
            ("GET", "/artifacts/f"),
        ):  # fmt: skip
            assert other.request(method, f"/v1/jobs/{job}{path}").status_code == 404
        assert other.get("/v1/jobs").json()["items"] == []
    assert service.http.get(f"/v1/jobs/{job}/artifacts/f").text == "secret\n"
