"""What clients get wrong or try: a precise 4xx each, and nothing changed."""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.serving import Serving, eventually

Box = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_changed(service: Serving, box: Box) -> Iterator[None]:
    """No request of a test here makes or changes a sandbox."""

    def state() -> list[tuple[str, str, dict[str, str]]]:
        found = service.http.get("/v1/sandboxes", params={"limit": 1000}).json()["items"]
        # A start that was tried and failed leaves its record, and nothing else.
        return [(e["id"], e["state"], e["labels"]) for e in found if e["state"] != "failed"]

    before = state()
    yield
    assert state() == before


def raw(service: Serving, data: bytes, *, shut: bool = False) -> bytes:
    """Bytes in, bytes out, until the server hangs up."""
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            if shut:
                sock.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65536):
                received += piece
        return received


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "EOF"),
        (b"", ""),
        (b"nul", ""),
        (b"[]", "object"),
        (b"\xff\xfe", ""),
        (b'"' + b"[" * 100_000, ""),
        (b"[" * 100_000, "recursion"),
        (b'{"labels": ' + b'{"a":' * 5000, "recursion"),
        (b'{"labels": {"a": 1}}', "labels.a"),
        (b'{"labels": {"": "x"}}', "labels"),
        (b'{"env": {"A=B": "x"}}', "env"),
        (b'{"env": {"A": "x\\u0000"}}', "env"),
        (b'{"wait": "yes"}', "wait"),
        (b'{"cpus": "1"}', "cpus"),
        (b'{"cpus": -1}', "cpus"),
        (b'{"cpus": NaN}', ""),
        (b'{"memory": 1e999}', ""),
        (b'{"memory": "lots"}', "size"),
        (b'{"memory": 1}', "memory"),
        (b'{"timeout": "soon"}', "timeout"),
        (b'{"timeout": 0}', "timeout"),
        (b'{"colour": "red"}', "colour: unknown field"),
        (b'{"policy": {"wall": 1}}', "wall"),
        (b'{"policy": "nonsense"}', "nonsense"),
        (b'{"policy": {"filesystem": {"mounts": [{"source": "/etc", "target": "/x"}]}}}', "mounts"),
        (b'{"policy": {"isolation": {"minimum": "L9"}}}', "minimum"),
        (b'{"runtime": "no-such"}', "no-such"),
        (b'{"level": "L0"}', "level"),
        (b'{"template": "no-such-template"}', "no-such-template"),
        (b'{"snapshot": "no-such-snapshot"}', "no-such-snapshot"),
        (b'{"pool": "no-such-pool"}', "no-such-pool"),
        (b'{"secrets": {"../x": "y"}}', "secrets"),
        (b'{"files": {"/x": {"content": "!", "encoding": "base64"}}}', "base64"),
        (b'{"files": {"": "x"}}', "files"),
        (b'{"volumes": [{"volume": "v", "path": "/data", "x": 1}]}', "unknown field"),
        (b'{"network": "internet"}', "network"),
        (b'{"start_timeout": 0}', "start_timeout"),
    ],
)  # fmt: skip
def test_bodies(service: Serving, body: bytes, told: str) -> None:
    if body == b"":
        body = b" "
    answer = service.http.post("/v1/sandboxes", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, (body[:60], answer.text)
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "hint", "details"} and error["code"] != "internal"
    assert told.lower() in answer.text.lower(), answer.text


def test_media_types_and_methods(service: Serving) -> None:
    form = service.http.post("/v1/sandboxes", data={"a": "b"})
    assert form.status_code == 415 and form.json()["error"]["code"] == "unsupported_media_type"
    wrong = service.http.request("TRACE", "/v1/sandboxes")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "GET, POST"
    assert service.http.options("/v1/sandboxes", headers={"origin": "http://evil.example"}).status_code == 405
    assert service.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    query = service.http.get("/v1/me?x=1")
    assert query.status_code == 400 and "'x'" in query.json()["error"]["message"]
    twice = service.http.get("/v1/sandboxes?limit=1&limit=2")
    assert twice.status_code == 400 and "more than once" in twice.json()["error"]["message"]
    many = service.http.get("/v1/sandboxes?" + "&".join(f"a{n}=1" for n in range(100)))
    assert many.status_code == 400


def test_cors_is_closed(service: Serving) -> None:
    for method in ("GET", "OPTIONS"):
        answer = service.http.request(
            method, "/v1/me", headers={"origin": "http://x.example", "access-control-request-method": "GET"}
        )
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_huge_bodies(service: Serving, box: Box) -> None:
    huge = b'{"labels": {"a": "' + b"x" * (9 * 2**20) + b'"}}'
    answer = raw(
        service,
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Authorization: Bearer {service.key}\r\nContent-Length: {len(huge)}\r\n\r\n".encode()
        + huge[:100_000],
    )
    assert status(answer) == 413 and b"payload_too_large" in answer
    chunks = b"".join(b"10000\r\n" + b"x" * 0x10000 + b"\r\n" for _ in range(150))
    answer = raw(
        service,
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Authorization: Bearer {service.key}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        + chunks,
    )
    assert status(answer) in (413, 0)  # 0: it hung up while we were sending


def test_heads_have_limits(service: Serving) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    assert status(raw(service, start + b"Connection: close\r\n\r\n")) == 200
    assert status(raw(service, start + b"A: " + b"x" * 100_000 + b"\r\n\r\n")) in (400, 431)
    assert status(raw(service, start + b"A: " + b"x" * 1_000_000)) in (400, 431, 0)
    assert status(raw(service, start + b"".join(b"A%d: b\r\n" % n for n in range(500)) + b"\r\n")) == 400
    assert status(raw(service, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")) in (400, 431)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nA: b\rc\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nA: b\0c\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nA b: c\r\n\r\n",
        b"GET /healthz\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/me HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request(service: Serving, data: bytes) -> None:
    answer = raw(service, data + b"" if data.endswith(b"\r\n\r\n") else data, shut=True)
    assert status(answer) == 400, answer[:200]
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_request"


def test_slow_senders_are_hung_up_on(service: Serving) -> None:
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 60) as quiet:
        with socket.create_connection((place.hostname, place.port), 60) as slow:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")  # and no more
            slow.settimeout(60)
            received = b""
            while piece := slow.recv(65536):
                received += piece
            assert status(received) == 408
        quiet.settimeout(60)
        assert quiet.recv(1) == b""  # never said anything


def test_who_is_answered_before_the_end_is_told_of_the_hanging_up(service: Serving, box: Box) -> None:
    """Else the next request would go the same way, into a closed connection."""
    place = urlsplit(service.url)
    head = (
        f"PUT /v1/sandboxes/{box['id']}/files/content?path=/workspace/early HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {service.key}\r\nContent-Length: 4\r\n"
    )
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        sock.sendall(f"{head}X-Content-SHA256: none\r\n\r\n".encode())
        told = b"".join(iter(lambda: sock.recv(65536), b""))
    assert told.startswith(b"HTTP/1.1 400 ") and b"\r\nconnection: close\r\n" in told.lower()
    # Control: whoever has sent all of it keeps the connection.
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        for _ in range(2):
            sock.sendall(f"{head}X-Content-SHA256: none\r\n\r\nabcd".encode())
            told = b""
            while not told.endswith(b"}}"):
                told += (more := sock.recv(65536))
                assert more
            assert told.startswith(b"HTTP/1.1 400 ") and b"connection: close" not in told.lower()


def test_half_closed_connections(service: Serving) -> None:
    head = f"GET /v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}\r\n"
    whole = raw(service, f"{head}\r\n".encode(), shut=True)
    assert status(whole) == 200 and b'"project"' in whole  # it wants its answer
    within = raw(service, head.encode(), shut=True)
    assert status(within) == 400
    body = raw(
        service,
        f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode(),
        shut=True,
    )
    assert status(body) in (0, 400)


def test_header_injection(service: Serving, box: Box) -> None:
    asked = service.http.get("/v1/me", headers={"x-request-id": "my-id.1"})
    assert asked.headers["x-request-id"] == "my-id.1"
    for wrong in ("a b", "x" * 65, "ä".encode().decode("latin-1"), "a,b"):
        answer = service.http.get("/v1/me", headers=[(b"x-request-id", wrong.encode("latin-1"))])  # type: ignore[list-item]
        assert answer.headers["x-request-id"].startswith("req-")
    for path in ("/v1/%0d%0aSet-Cookie:%20a=b", "/v1/sandboxes/a%0d%0ab", "/v1/sandboxes/..%2f..%2fme"):
        answer = service.http.get(path)
        assert answer.status_code == 404 and "set-cookie" not in answer.headers
    named = service.http.get(f"/v1/sandboxes/{box['id']}/files/content", params={"path": "/x\r\nA: b"})
    assert named.status_code == 404 and "a" not in {name.lower() for name in named.headers if name == "a"}


def test_keys(service: Serving) -> None:
    bare = service.client()
    none = bare.get("/v1/me")
    assert none.status_code == 401 and none.headers["www-authenticate"] == "Bearer"
    for given in (
        "x",
        "rf_",
        "rf_x_y",
        service.key[:-1],
        service.key + "0",
        "rf_" + "0" * 20 + "_" + "0" * 64,
        "\xff",
    ):
        for headers in (
            [(b"authorization", b"Bearer " + given.encode("latin-1"))],
            [(b"x-api-key", given.encode("latin-1"))],
        ):
            answer = bare.get("/v1/me", headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "not_authenticated"
    assert bare.get("/v1/me", headers={"authorization": f"Basic {service.key}"}).status_code == 401
    assert bare.get(f"/v1/me?api_key={service.key}").status_code == 401
    short = service.make_key(scopes=["read"], seconds=0.3)
    eventually(lambda: service.client(short).get("/v1/me").status_code == 401, "it expires")
    made = service.http.post("/v1/keys", json={"scopes": ["run"]}).json()
    user = service.client(made["secret"])
    assert user.get("/v1/me").status_code == 200
    assert user.post("/v1/keys", json={}).status_code == 403
    rotated = service.http.post(f"/v1/keys/{made['id']}/rotate", json={}).json()
    assert user.get("/v1/me").status_code == 401  # at once
    assert service.client(rotated["secret"]).get("/v1/me").json()["scopes"] == ["run"]
    assert service.http.delete(f"/v1/keys/{rotated['id']}").json()["state"] == "revoked"
    assert service.client(rotated["secret"]).get("/v1/me").status_code == 401
    assert service.http.get(f"/v1/keys/{rotated['id']}").json()["state"] == "revoked"


def test_ids_states_and_idempotency(service: Serving, box: Box) -> None:
    for id in ("sb-00000000000000000000", "x", "..", "%00", "sb-" + "x" * 5000):
        answer = service.http.get(f"/v1/sandboxes/{id}")
        assert answer.status_code in (404, 405) or (id == ".." and answer.status_code == 200), (
            id,
            answer.text,
        )
    resume = service.http.post("/v1/sandboxes/sb-00000000000000000000/resume")
    assert resume.status_code == 404
    for key in ("", "x" * 201, "a\tb"):
        answer = service.http.post("/v1/sandboxes", json={}, headers={"idempotency-key": key})
        assert answer.status_code == 400, key
    taken = uuid.uuid4().hex
    body = {"name": taken[:20], "min": 0, "max": 0}
    assert service.http.post("/v1/pools", json=body, headers={"idempotency-key": taken}).status_code == 201
    other = service.http.post("/v1/pools", json={**body, "max": 2}, headers={"idempotency-key": taken})
    assert other.status_code == 409
    service.http.delete(f"/v1/pools/{taken[:20]}")


def test_rates_and_quotas(service: Serving) -> None:
    project, key = service.tenant(f"q{uuid.uuid4().hex[:8]}")
    user = service.client(key)
    assert user.patch(f"/v1/projects/{project}/quota", json={"alive": 5}).status_code == 403
    limits = {"alive": 0, "requests": 0.001, "burst": 4}
    set_ = service.http.patch(f"/v1/projects/{project}/quota", json=limits)
    assert set_.status_code == 200 and set_.json()["limits"]["alive"] == 0
    refused = user.post("/v1/sandboxes", json={"memory": "128MiB", "disk": "16MiB"})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "quota_exceeded"
    assert "retry-after" in refused.headers

    def limited() -> bool:
        answer = user.get("/v1/me")
        return answer.status_code == 429 and answer.json()["error"]["code"] == "rate_limited" and int(
            answer.headers["retry-after"]
        ) >= 1  # fmt: skip

    eventually(limited, "too many requests")
    assert service.http.get("/v1/me").status_code == 200  # others are not in the way
    unknown = service.http.patch(f"/v1/projects/{project}/quota", json={"cores": 1})
    assert unknown.status_code == 400 and "cores" in unknown.json()["error"]["message"]


def test_faults_are_told_by_request_id_and_logged_once(service: Serving) -> None:
    # A client can't make one, so the log has none of all that was tried here.
    assert "Traceback" not in service.log, service.log[-3000:]


@pytest.mark.parametrize(
    "body",
    [
        {"runtime": "fake"},
        {"policy": {"isolation": {"runtime": "fake", "minimum": "L1"}}},
        {"policy": {"isolation": {"prefer": ["fake"], "minimum": "L1"}}},
        {"runtime": "inline"},
    ],
    ids=["named", "in a policy", "preferred", "inline"],
)
def test_nothing_runs_without_a_wall(service: Serving, body: dict[str, Any]) -> None:
    """Its commands would see the host's files and network, and, where no root serves, the service's own."""
    answer = service.http.post("/v1/sandboxes", json=body)
    assert answer.status_code == 501, answer.text
    assert answer.json()["error"]["code"] == "unsupported"


@pytest.mark.parametrize("where", ["policy", "network", "change"])
def test_a_policy_has_a_size(service: Serving, box: Box, where: str) -> None:
    """To judge one takes the time of all: of 50,000 rules a quarter of a minute."""
    for network in (
        {"mode": "egress", "allow": [{"host": f"h{n}.example"} for n in range(50_000)]},
        {"mode": "egress", "allow": [{"host": "a.example", "paths": ["/" + "x" * 300_000]}]},
    ):
        if where == "change":
            answer = service.http.patch(f"/v1/sandboxes/{box['id']}", json={"network": network})
        else:
            body = {"network": network} if where == "network" else {"policy": {"network": network}}
            answer = service.http.post("/v1/sandboxes", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "invalid_request" and "a policy" in answer.text


def test_metrics_are_the_operators(service: Serving) -> None:
    _, key = service.tenant(f"m{uuid.uuid4().hex[:8]}")
    answer = service.client(key).get("/metrics")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
    assert service.http.get("/metrics").status_code == 200
