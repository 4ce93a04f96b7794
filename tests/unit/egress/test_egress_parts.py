"""ClientHello, DNS messages, the meter's arithmetic, learning, the inference guard, the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import struct
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress import hello, meter, throttle
from ringfence.egress.inference import Guard, Refusal
from ringfence.egress.learning import propose
from ringfence.egress.log import ConnectionLog
from ringfence.egress.recording import har
from ringfence.egress.resolver import parse_answer, query, read_question, reply, same_question
from ringfence.model.policies import from_dict
from ringfence.model.policy import Inference

# -- ClientHello


def client_hello(name: str | None, alpn: list[str] | None = None) -> bytes:
    """What a real client sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(alpn)
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def test_a_real_hello_whole_and_in_pieces() -> None:
    data = client_hello("API.example.test", ["h2", "http/1.1"])
    found = hello.parse(data)
    assert found == hello.Hello("api.example.test", ("h2", "http/1.1"), False)
    assert all(hello.parse(data[:size]) is None for size in range(len(data)))
    assert hello.parse(data + b"more") == found
    without = hello.parse(client_hello(None))
    assert without is not None and without.name is None


def test_a_hello_in_two_records() -> None:
    data = client_hello("a.example.test")
    body = data[5:]
    for cut in (1, 3, 4, 100):
        split = b"".join(
            b"\x16\x03\x01" + struct.pack(">H", len(part)) + part for part in (body[:cut], body[cut:])
        )
        found = hello.parse(split)
        assert found is not None and found.name == "a.example.test"


def with_extension(data: bytes, kind: int, content: bytes) -> bytes:
    """The hello with one more extension at its end."""
    body = data[9:]
    at = 34
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2])
    at += 1 + body[at]
    extensions = body[at + 2 :] + struct.pack(">HH", kind, len(content)) + content
    body = body[:at] + struct.pack(">H", len(extensions)) + extensions
    message = b"\x01" + len(body).to_bytes(3) + body
    return b"\x16\x03\x01" + struct.pack(">H", len(message)) + message


def test_ech_is_seen_and_two_names_are_refused() -> None:
    data = client_hello("a.example.test")
    found = hello.parse(with_extension(data, 0xFE0D, b"\0" * 20))
    assert found is not None and found.ech
    second = b"\0\x0f\0\0\x0cb.other.test"
    with pytest.raises(hello.NotTls):
        hello.parse(with_extension(data, 0, second))
    plain = hello.parse(with_extension(client_hello(None), 0, second))
    assert plain is not None and plain.name == "b.other.test"
    for bad in (
        b"\0\x0f\0\0\x0cb.other\0test",
        b"\0\x0f\1\0\x0cb.other.test",
        b"\0\x03\0\0\0",
        b"",
        b"\0\x20\0\0\x0cb.oth",
    ):
        with pytest.raises(hello.NotTls):
            hello.parse(with_extension(client_hello(None), 0, bad))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x02\0\0\0",
        b"\x16\x03\x01\0\0",
        b"\x16\x03\x01\0\x01\x02",
        b"\x16\x03\x01\xff\xff",
    ],
)
def test_what_is_no_hello(data: bytes) -> None:
    with pytest.raises(hello.NotTls):
        hello.parse(data)


@given(st.binary(max_size=300), st.integers(0, 250))
def test_hello_never_fails_otherwise(noise: bytes, at: int) -> None:
    data = bytearray(client_hello("a.example.test"))
    data[at : at + len(noise)] = noise
    for sample in (noise, bytes(data), b"\x16\x03\x01" + noise):
        with contextlib.suppress(hello.NotTls):
            hello.parse(sample)


# -- DNS


def test_questions_and_answers() -> None:
    question = query("a.example.test", 1, 77)
    assert read_question(question) == ("a.example.test", 1, 1)
    answered = reply(question, [ip_address("198.18.0.2"), ip_address("::1")])
    assert same_question(answered, question)
    assert parse_answer(answered, 1) == [ip_address("198.18.0.2")]
    assert parse_answer(reply(query("a.example.test", 28, 77), [ip_address("2001:db8::1")]), 28) == [
        ip_address("2001:db8::1")
    ]
    assert parse_answer(reply(question, [], 3), 1) == []
    with pytest.raises(OSError, match="refused"):
        parse_answer(reply(question, [], 5), 1)
    assert not same_question(reply(query("b.example.test", 1, 77), []), question)


@given(st.binary(max_size=120))
def test_dns_from_inside_never_fails_otherwise(data: bytes) -> None:
    for sample in (data, b"\0\1\1\0\0\1\0\0\0\0\0\0" + data):
        try:
            read_question(sample)
            reply(sample, [])
        except (ValueError, struct.error, IndexError):
            pass
        with contextlib.suppress(OSError):
            parse_answer(sample, 1)


# -- the meter


@pytest.mark.parametrize(
    ("tail", "count"),
    [
        (b'{"usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}', 15),
        (b'{"usage":{"input_tokens":10,"output_tokens":5,"cache_read_input_tokens":3}}', 18),
        (
            b'data: {"usage":{"output_tokens":1,"input_tokens":7}}\n\ndata: {"usage":{"output_tokens":20}}\n\n',  # noqa: E501
            27,
        ),
        (b'{"no": "tokens"}', 0),
        (b'"total_tokens": -5', 0),
    ],
)
def test_reported_tokens(tail: bytes, count: int) -> None:
    assert meter.tokens(tail) == count


async def test_counts_of_ended_processes_are_kept_and_of_living_ones_seen(tmp_path: Path) -> None:
    first, second = meter.Meter(tmp_path), meter.Meter(tmp_path)
    first.start()
    second.start()
    first._get("project/p")[meter.REQUESTS] += 3
    second._get("project/p")[meter.REQUESTS] += 4
    first.flush()
    second.flush()
    first.flush()
    assert first.used("project/p")[0] == second.used("project/p")[0] == 7
    first.close()
    third = meter.Meter(tmp_path)
    third.start()
    assert third.used("project/p")[0] == 7
    assert json.loads((tmp_path / "total").read_text()) == {"project/p": [3, 0, 0, 0]}
    second.close()
    third.close()
    fourth = meter.Meter(tmp_path)
    fourth.start()
    assert fourth.used("project/p")[0] == 7
    fourth.close()


async def test_what_a_sandbox_used_is_forgotten_with_it_and_not_before(tmp_path: Path) -> None:
    first = meter.Meter(tmp_path)
    first.start()
    for key in ("sandbox/a", "rule/a/1", "sandbox/b", "project/p"):
        first._get(key)[meter.REQUESTS] += 1
    first.close()
    second = meter.Meter(tmp_path)
    second.start()
    assert second.used("sandbox/a")[0] == 1
    second.forget("a")
    assert [second.used(key)[0] for key in ("sandbox/a", "rule/a/1", "sandbox/b", "project/p")] == [
        0,
        0,
        1,
        1,
    ]
    second.close()
    assert json.loads((tmp_path / "total").read_text()).keys() == {"sandbox/b", "project/p"}


def test_bytes_wait_for_the_slowest_of_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "time", SimpleNamespace(monotonic=lambda: 100.0))
    own, other, shared = throttle.Bucket(100_000), throttle.Bucket(100_000), throttle.Bucket(10_000)
    both = throttle.Buckets([own, shared])
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(throttle, "asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))
    asyncio.run(both.take(11_500))  # 1,500 of the shared one at once, 5,000 of the own
    assert slept == [pytest.approx(0.065), pytest.approx(1.0)]  # at the same time
    assert other.debt(5_000) == 0  # another one that shares nothing
    asyncio.run(throttle.Buckets([other, shared]).take(10_000))
    assert slept[2:] == [pytest.approx(0.1), pytest.approx(2.0)]  # behind what the first has taken


# -- learning


def line(host: str, port: int, **more: Any) -> dict[str, Any]:
    return {"decision": "allowed", "host": host, "port": port, "protocol": "tls"} | more


def test_the_narrowest_policy() -> None:
    lines = [
        line("api.example.com", 443, method="GET", path="/v1/models", address="203.0.113.1"),
        line("api.example.com", 443, method="POST", path="/v1/chat", address="203.0.113.1"),
        line("api.example.com", 443, method="POST", path="/v1/chat"),
        *(line("files.example.com", 443, method="GET", path=f"/d/{number}") for number in range(20)),
        line("internal.example.com", 8080, protocol="http", method="GET", path="/x y", address="10.1.2.3"),
        line("pass.example.com", 443),
        line("db.example.com", 5432, protocol="tcp"),
        {"decision": "denied", "host": "evil.example", "port": 443, "method": "GET", "path": "/"},
        line("down.example.com", 443, error="connect"),
        {"decision": "allowed"}, line("a b", 443), line("inference", 80, method="POST", path="/v1"),
    ]  # fmt: skip
    found = propose(lines)
    assert found["allow"] == [
        {"host": "api.example.com", "ports": [443], "methods": ["POST"], "paths": ["/v1/chat"]},
        {"host": "api.example.com", "ports": [443], "methods": ["GET"], "paths": ["/v1/models"]},
        {"host": "db.example.com", "ports": [5432], "protocol": "tcp"},
        {"host": "files.example.com", "ports": [443], "methods": ["GET"], "paths": ["/d/*"]},
        {
            "host": "internal.example.com",
            "ports": [8080],
            "addresses": ["10.1.2.3"],
            "methods": ["GET"],
            "paths": ["/*"],
        },
        {"host": "pass.example.com", "ports": [443]},
    ]
    from_dict({"apiVersion": "ringfence/v1", "kind": "Policy", "network": found})  # it is a policy
    assert propose([]) == {"mode": "none"}


# -- the inference guard


def guard(**more: Any) -> Guard:
    return Guard(Inference("https://api.example.com:8443/v1", **more))


def test_paths_and_models() -> None:
    found = guard(paths=("/v1/chat/*",), models=("small",))
    assert (found.scheme, str(found.host), found.port) == ("https", "api.example.com", 8443)
    assert found.target("/chat/completions?x=1") == ("/v1/chat/completions", "?x=1")
    assert found.target("/v1/chat/completions") == ("/v1/chat/completions", "")
    with pytest.raises(Refusal, match="not among"):
        found.target("/v1/files")
    assert json.loads(found.body("application/json", b'{"model": "small"}')[0]) == {"model": "small"}
    for body in (b'{"model": "large"}', b"{}", b"[]", b'{"model": ["small"]}'):
        with pytest.raises(Refusal, match="model"):
            found.body("application/json", body)
    for kind in ("text/plain", "multipart/form-data"):
        with pytest.raises(Refusal):
            found.body(kind, b'{"model": "small"}')


MASKED = {
    "email": ("mail jane.doe+x@mail.example.co.uk now", "mail [email] now"),
    "phone": ("call +49 (170) 123-4567 today", "call [phone] today"),
    "card": ("pay 4111 1111 1111 1111 or 4111-1111-1111-1112", "pay [card] or 4111-1111-1111-1112"),
    "iban": ("to DE89 3704 0044 0532 0130 00.", "to [iban]."),
    "ip": ("host 192.0.2.17, not 1.2.3.4.5", "host [ip], not 1.2.3.4.5"),
    "ssn": ("ssn 078-05-1120.", "ssn [ssn]."),
    "CUST-\\d+": ("about CUST-1234", "about [masked]"),
}


@pytest.mark.parametrize("mask", MASKED)
def test_masks(mask: str) -> None:
    text, masked = MASKED[mask]
    found = guard(mask=(mask,))
    body = {"messages": [{"role": "user", "content": text}, {"content": [{"text": text}]}], text: 5}
    data, counts = found.body("application/json", json.dumps(body).encode())
    assert json.loads(data) == {
        "messages": [{"role": "user", "content": masked}, {"content": [{"text": masked}]}],
        masked: 5,
    }
    assert list(counts.values()) == [3]
    assert json.loads(guard(mask=("ssn",)).body("", b'{"a": "nothing here"}')[0]) == {"a": "nothing here"}


def test_escapes_do_not_hide_what_is_masked() -> None:
    data, _ = guard(mask=("email",)).body("application/json", b'{"a": "jane\\u0040mail.example"}')
    assert json.loads(data) == {"a": "[email]"}
    for body in (b"\xff\xfe", b"{", b"[" * 100_000):
        with pytest.raises(Refusal):
            guard(mask=("email",)).body("application/json", body)


# -- the log


def test_log_rotates_and_whole_lines_only_are_read(tmp_path: Path) -> None:
    log = ConnectionLog(tmp_path / "connections.jsonl", rotate=1000)
    other = ConnectionLog(tmp_path / "connections.jsonl", rotate=1000)
    for number in range(40):
        (log if number % 2 else other).write({"number": number, "x": "y" * 50})
    numbers = [line["number"] for line in log.read()]
    assert sorted(numbers) == list(range(40))
    assert (tmp_path / "connections.jsonl").stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.glob("connections.jsonl.*"))) >= 2
    with open(tmp_path / "connections.jsonl", "ab") as file:
        file.write(b'{"cut": \n[1]\n')
    assert sorted(line["number"] for line in log.read()) == list(range(40))
    log.write({"long": "z" * 100_000, "kept": 1})
    assert list(log.read())[-1] == {"kept": 1, "cut": True}
    log.close()
    other.close()


def test_har() -> None:
    entry = {
        "at": 1.5, "seconds": 0.25, "sandbox": "sb-1", "method": "POST", "url": "https://a.example/x?q=1",
        "request": {"headers": [["Content-Type", "application/json"]], "size": 2, "body": "{}"},
        "response": {"status": 200, "reason": "OK", "headers": [], "size": 3, "body": "abc"},
    }  # fmt: skip
    [found] = har([entry, {"no": "url"}])["log"]["entries"]
    assert found["startedDateTime"] == "1970-01-01T00:00:01.500000+00:00" and found["time"] == 250
    assert found["request"]["postData"] == {"mimeType": "application/json", "text": "{}"}
    assert found["request"]["queryString"] == [{"name": "q", "value": "1"}]
    assert found["response"]["content"] == {"size": 3, "mimeType": "", "text": "abc"}
