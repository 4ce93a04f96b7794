"""Code contexts through a service as a user starts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.serving import Serving, serving


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with serving("--no-egress") as made:
        yield made


@pytest.fixture(scope="module")
def base(service: Serving) -> str:
    return f"/v1/sandboxes/{service.sandbox(memory='512MiB')['id']}/contexts"


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    told: dict[str, Any] = {}
    for line in answer.iter_lines():
        if line.startswith("id: "):
            told["id"] = line[4:]
        elif line.startswith("event: "):
            told["event"] = line[7:]
        elif line.startswith("data: "):
            yield told | {"data": json.loads(line[6:])}
            told = {}


def test_life(service: Serving, base: str) -> None:
    http = service.http
    made = http.post(base, json={"id": "life", "cwd": "/tmp"})
    assert made.status_code == 201 and made.json() == {
        "id": "life", "language": "python", "cwd": "/tmp", "running": True,
    }  # fmt: skip
    assert http.post(base, json={"id": "life"}).status_code == 409
    ran = http.post(f"{base}/life/run", json={"code": "x = 20\nprint('p')\nx * 2 + 2"})
    assert ran.status_code == 200
    assert ran.json()["stdout"] == "p\n" and ran.json()["results"] == [
        {"type": "result", "text": "42", "main": True}
    ]
    assert [each["id"] for each in http.get(base).json()["items"]] == ["life"]
    assert http.post(f"{base}/life/restart", json={}).status_code == 200
    failed = http.post(f"{base}/life/run", json={"code": "x"}).json()
    assert failed["status"] == "error" and failed["error"]["name"] == "NameError"
    assert http.post(f"{base}/life/interrupt").status_code == 204
    assert http.delete(f"{base}/life").status_code == 204
    for path, method in (
        (f"{base}/life", "GET"),
        (f"{base}/life/interrupt", "POST"),
        (f"{base}/life", "DELETE"),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_bad_requests(service: Serving, base: str) -> None:
    for body in (
        {"language": "cobol"},
        {"id": "../x"},
        {"cwd": "/nowhere"},
        {"what": 1},
        {"env": {"a=b": "1"}},
    ):
        answer = service.http.post(base, json=body)
        assert answer.status_code in (400, 422), (body, answer.text)
        assert answer.json()["error"]["code"] == "invalid_request"
    assert service.http.post(f"{base}/none/run", json={"code": "1"}).status_code == 404
    other = service.http.get("/v1/sandboxes/sb-00000000000000000000/contexts")
    assert other.status_code == 404


def test_a_lost_stream_goes_on(service: Serving, base: str) -> None:
    http = service.http
    assert http.post(base, json={"id": "lost"}).status_code == 201
    code = (
        "import time, os\nfor n in range(200):\n    print(n, flush=True)\n"
        "    while n == 50 and not os.path.exists('/tmp/go'): time.sleep(0.01)\n'done'"
    )
    seen, last, name = "", "", ""
    with http.stream("POST", f"{base}/lost/stream", json={"code": code}) as answer:
        assert answer.status_code == 200
        for told in _events(answer):
            if told["event"] == "started":
                name = told["data"]["call"]
            else:
                seen, last = seen + told["data"]["text"], told["id"]
            if "20\n" in seen:
                break
    assert service.run(base.split("/")[3], "touch /tmp/go")["exit_code"] == 0
    with http.stream("GET", f"{base}/lost/calls/{name}/stream", headers={"last-event-id": last}) as answer:
        rest = list(_events(answer))
    seen += "".join(told["data"]["text"] for told in rest if told["event"] == "stdout")
    assert seen == "".join(f"{n}\n" for n in range(200))
    assert rest[-2]["data"]["text"] == "'done'" and rest[-1]["data"] == {
        "type": "end",
        "status": "ok",
        "count": 1,
    }
    wrong = http.get(f"{base}/lost/calls/{name}/stream", params={"place": "x"})
    assert wrong.status_code in (400, 422)


def test_output_counts(service: Serving) -> None:
    """What a context prints is output of the sandbox, and has its limit."""
    policy = {
        "apiVersion": "ringfence/v1", "kind": "Policy", "metadata": {"name": "little"},
        "limits": {"output": "100KiB"},
    }  # fmt: skip
    base = f"/v1/sandboxes/{service.sandbox(policy=policy, memory='256MiB')['id']}/contexts"
    assert service.http.post(base, json={"id": "c"}).status_code == 201
    assert service.http.post(f"{base}/c/run", json={"code": "1"}).json()["status"] == "ok"
    ran = service.http.post(f"{base}/c/run", json={"code": "print('x' * 300_000)"}).json()
    assert ran["status"] == "ended" and len(ran["stdout"]) <= 100 * 1024, ran["error"]


def test_code_that_leaves_nothing_behind(service: Serving, base: str) -> None:
    path = base.removesuffix("/contexts") + "/code"
    for _ in range(2):
        ran = service.http.post(path, json={"code": "x = globals().get('x', 0) + 1\nx"})
        assert ran.status_code == 200 and ran.json()["results"][0]["text"] == "1"
    assert service.http.post(path, json={"code": "echo hi", "language": "bash"}).json()["stdout"] == "hi\n"
