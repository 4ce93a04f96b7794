"""Credentials, budgets, records, questions, learning and the inference guard, against real servers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ringfence.egress.engine import Settings
from ringfence.egress.learning import propose
from ringfence.egress.meter import _TELL_AGAIN
from support.doors import LOCAL, LocalDoor, Names, Origin, TestAuthority, local_door

SECRET = "sk-the-real-value/9"
BEARER = {"header": "Authorization", "value": "Bearer {{secret:key}}"}


@pytest.fixture(autouse=True)
def _resolves(names: Names) -> None:
    names.add("api.example.test", "127.0.0.1")
    names.add("alt.example.test", "127.0.0.1")


def rule(origin: Origin, **more: Any) -> dict[str, Any]:
    return {"host": "api.example.test", "ports": [origin.port], "addresses": LOCAL} | more


async def secret_door_curl(door: LocalDoor, url: str, *arguments: str) -> tuple[int, str, str]:
    return await door.curl("--cacert", await door.ca(), *arguments, url)


async def test_credential_is_added_and_shows_nowhere(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    network = {"allow": [rule(secure, inject=BEARER)], "record": "bodies"}
    async with local_door(folder, network, names, authority.file, project="p") as door:
        await door.engine.secrets.put("p", "key", SECRET)
        url = f"https://api.example.test:{secure.port}/v1"
        code, out, err = await secret_door_curl(door, url, "-H", "Authorization: Bearer mine", "-d", "x")
        assert code == 0, err
        assert f"Authorization: Bearer {SECRET}".encode() in secure.requests[0]
        assert secure.requests[0].count(b"Authorization") == 1
        # The server echoes what it got; the sandbox does not see it all the same.
        assert SECRET not in out and "Bearer " + "*" * len(SECRET) in out
        await door.engine.secrets.put("p", "key", "rotated-value")
        await secret_door_curl(door, url)
        assert b"Bearer rotated-value" in secure.requests[1]  # without restart
        await door.idle()
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert SECRET.encode() not in everything and b"rotated-value" not in everything
    assert base64.b64encode(SECRET.encode()) not in everything


async def test_no_secret_no_request(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    settings = Settings(ca_file=str(authority.file), key_command=("/bin/sh", "-c", f"cat {folder}/key"))
    async with local_door(folder, {"allow": [rule(secure, inject=BEARER)]}, names, settings=settings) as door:
        url = f"https://api.example.test:{secure.port}/v1"
        (folder / "key").write_bytes(base64.b64encode(os.urandom(32)))
        ca = await door.ca()
        _, out, _ = await door.curl("--cacert", ca, url)  # there is a key, but no such secret
        assert " 503 " in out and "secrets_unavailable" in out and "ringfence egress secret set key" in out
        await door.engine.secrets.put("", "key", SECRET)
        _, out, _ = await door.curl("--cacert", ca, url)
        assert " 200 " in out
        (folder / "key").unlink()  # the store can't be reached any more
        door.engine.key._known = None
        _, out, _ = await door.curl("--cacert", ca, url)
        assert " 503 " in out
        assert len(secure.requests) == 1  # nothing was sent bare


async def test_placeholders_work_for_their_host_and_ring_elsewhere(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    network = {
        "allow": [
            rule(secure, inject={"placeholder": "{{secret:key}}"}),
            rule(secure, tls="inspect") | {"host": "alt.example.test"},
        ]
    }
    async with local_door(folder, network, names, authority.file, sandbox="sb-2", lineage=("sb-1",)) as door:
        await door.engine.secrets.put("", "key", SECRET)
        placeholder = door.engine.secrets.placeholder
        mine, inherited, foreign = [await placeholder(name, "key") for name in ("sb-2", "sb-1", "sb-9")]
        url = f"https://api.example.test:{secure.port}/v1"
        for mark in (mine, inherited):
            for arguments in (
                ("-H", f"X-Key: {mark}"),
                ("-u", f"me:{mark}"),
                ("-H", "Content-Type: application/json", "-d", json.dumps({"key": mark})),
            ):
                _, out, _ = await secret_door_curl(door, url, *arguments)
                assert " 200 " in out
                sent = secure.requests[-1].decode() + secure.bodies[-1].decode()
                basic = base64.b64encode(f"me:{SECRET}".encode()).decode()
                assert SECRET in sent or basic in sent
                assert mark not in sent and SECRET not in out
        before = len(secure.requests)
        other = f"https://alt.example.test:{secure.port}/"
        attempts = [
            (url, "-H", f"X-Key: {foreign}"),
            (other, "-H", f"X-Key: {mine}"),
            (other + mine,),
            (other + f"?q={mine.upper()}",),
            (other, "-u", f"me:{mine}"),
            (other, "-d", f"q={mine}"),
            (other, "-H", "Transfer-Encoding: chunked", "-d", "x" * 100_000 + mine),
            (f"http://{mine}.example.test/",),
        ]
        for target, *arguments in attempts:
            door.events.clear()
            _, out, _ = await secret_door_curl(door, target, *arguments)
            assert '"code": "placeholder"' in out, (target, arguments, out)
            assert [event["alarm"] for event in door.events if event["event"] == "egress.alarm"] == [
                "placeholder"
            ]
        assert len(secure.requests) <= before + 1  # the streamed one had begun; its end never came
        assert not any(mine.encode() in body for body in secure.bodies[before:])
        door.door.revoked.add("sb-1")
        _, out, _ = await secret_door_curl(door, url, "-H", f"X-Key: {inherited}")
        assert '"code": "placeholder"' in out
        _, out, _ = await secret_door_curl(door, url, "-H", f"X-Key: {mine}")
        assert " 200 " in out


async def test_no_credential_for_who_proves_nothing(folder: Path, names: Names, plain: Origin) -> None:
    url = f"http://api.example.test:{plain.port}/"
    for more, status in (({}, " 403 "), ({"protocol": "http"}, " 200 ")):
        async with local_door(folder, {"allow": [rule(plain, inject=BEARER, **more)]}, names) as door:
            await door.engine.secrets.put("", "key", SECRET)
            _, out, _ = await door.curl(url)
            assert status in out
    assert len(plain.requests) == 1


async def test_impostor_gets_no_credential(folder: Path, names: Names, authority: TestAuthority) -> None:
    impostor = await Origin().start(authority.server("evil.example.test"))
    async with local_door(folder, {"allow": [rule(impostor, inject=BEARER)]}, names, authority.file) as door:
        await door.engine.secrets.put("", "key", SECRET)
        _, out, _ = await secret_door_curl(door, f"https://api.example.test:{impostor.port}/")
        assert " 502 " in out and "does not prove" in out and not impostor.requests
    await impostor.stop()


# -- budgets


BUDGETS = {
    "requests": {"maxRequests": 2},
    "bytes": {"maxBytes": 900},
    "spend": {"maxSpend": 0.5, "price": 0.25},
    "rate": {"rate": "2/h"},
}


@pytest.mark.parametrize("what", BUDGETS)
@pytest.mark.parametrize("scope", ["rule", "sandbox", "project"])
async def test_budgets_end_with_429(folder: Path, names: Names, plain: Origin, what: str, scope: str) -> None:
    budget = BUDGETS[what] | {"pause": True}
    network: dict[str, Any] = {"allow": [rule(plain, **({"budget": budget} if scope == "rule" else {}))]}
    if scope == "sandbox":
        network["budget"] = budget
    more = {"project_budget": budget} if scope == "project" else {}
    began = time.monotonic()
    async with local_door(folder, network, names, project="p", **more) as door:
        url = f"http://api.example.test:{plain.port}/"
        outs = [(await door.curl(url))[1] for _ in range(8)]
        passed = [" 200 " in out for out in outs]
        assert passed[0] and not passed[-1] and passed == sorted(passed, reverse=True)
        assert passed.count(True) == {"rate": 1}.get(what, passed.count(True))
        if what != "bytes":
            assert passed.count(True) <= 2
        assert " 429 " in outs[-1] and f"budget_{what}" in outs[-1] and scope in outs[-1]
        assert ("Retry-After" in outs[-1]) is (what == "rate")
        assert len(plain.requests) <= passed.count(True) + 1  # what goes over while it is sent may have begun
        events = [event for event in door.events if event["event"] == "egress.over_budget"]
        told = [(event["scope"], event["limit"], event["pause"]) for event in events]
        assert set(told) == {(scope, what, what != "rate")}
        assert len(told) == 1 or time.monotonic() - began > _TELL_AGAIN  # it is told again after a while


async def test_a_download_over_budget_breaks_off(folder: Path, names: Names, plain: Origin) -> None:
    plain.response = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000
    network = {"allow": [rule(plain)], "budget": {"maxBytes": 200_000}}
    async with local_door(folder, network, names) as door:
        code, out, _ = await door.curl(f"http://api.example.test:{plain.port}/")
        assert code == 18 and len(out) < 300_000
        await door.idle()
        assert door.log()[0]["code"] == "budget_bytes"


async def test_reported_tokens_are_paid_for(folder: Path, names: Names, plain: Origin) -> None:
    body = json.dumps({"usage": {"total_tokens": 600}}).encode()
    plain.response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    network = {"allow": [rule(plain, budget={"maxSpend": 1, "tokenPrice": 0.001})]}
    async with local_door(folder, network, names) as door:
        url = f"http://api.example.test:{plain.port}/"
        outs = [(await door.curl("-H", "Accept-Encoding: gzip", url))[1] for _ in range(3)]
        assert [" 200 " in out for out in outs] == [True, True, False]  # 0.6, 1.2, and that was it
        await door.idle()
        assert door.log()[0]["tokens"] == 600 and door.log()[0]["cost"] == 0.6
        assert b"Accept-Encoding: identity" in plain.requests[0]
        assert door.engine.meter.used("sandbox/sb-test")[3] == pytest.approx(1.2)


async def test_counts_outlive_the_process(folder: Path, names: Names, plain: Origin) -> None:
    url = f"http://api.example.test:{plain.port}/"
    network = {"allow": [rule(plain)], "budget": {"maxRequests": 2}}
    for count, status in ((1, " 200 "), (2, " 200 "), (3, " 429 ")):
        async with local_door(folder, network, names) as door:
            assert status in (await door.curl(url))[1], count


async def test_bandwidth_is_held_both_ways(folder: Path, names: Names, plain: Origin) -> None:
    """1 MB at 4 Mbit/s takes 2 seconds: never much faster (slower says nothing on a busy machine)."""
    size = 500_000
    plain.response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (size, b"x" * size)
    async with local_door(folder, {"allow": [rule(plain)]}, names, bandwidth=4_000_000) as door:
        url = f"http://api.example.test:{plain.port}/"
        for arguments in ((), ("-d", "x" * size)):
            (folder / "body").write_bytes(b"x" * size)
            plain.response = (
                plain.response if not arguments else b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
            )
            upload = ("--data-binary", f"@{folder}/body", "-H", "Expect:") if arguments else ()
            began = time.monotonic()
            code, _, err = await door.curl(*upload, url)
            assert code == 0, err
            assert time.monotonic() - began >= 0.85 * size * 8 / 4_000_000


# -- records


async def test_records_by_level(folder: Path, names: Names, plain: Origin) -> None:
    plain.response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    url = f"http://api.example.test:{plain.port}/x?token=abc&q=CUST-77"
    for level in ("none", "metadata", "headers", "bodies"):
        place = folder / level
        place.mkdir()
        network = {"allow": [rule(plain)], "record": level, "redact": ["CUST-\\d+"]}
        async with local_door(place, network, names, task="t") as door:
            await door.curl("-d", "about CUST-12", "-H", "Cookie: session=1", "-H", "X-A: CUST-5", url)
            await door.curl("http://denied.example.test/")
            await door.idle()
            log, records = door.log(), list(door.engine.records.log("sb-test").read())
        assert [line["decision"] for line in log] == (
            ["denied"] if level == "none" else ["allowed", "denied"]
        )
        text = json.dumps(records)
        assert len(records) == (1 if level in ("headers", "bodies") else 0)
        assert "CUST" not in text.replace("CUST-\\", "") and "session=1" not in text and "abc" not in text
        if records:
            assert records[0]["task"] == "t" and records[0]["response"]["status"] == 200
            assert ["X-A", "[redacted]"] in records[0]["request"]["headers"]
            assert records[0]["url"].endswith("/x?token=[redacted]&q=[redacted]")
            assert records[0]["request"].get("body") == ("about [redacted]" if level == "bodies" else None)


# -- questions


async def asked(door: LocalDoor) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while not (found := door.engine.questions.pending()):
            await asyncio.sleep(0.01)
    [one] = found
    return one


async def test_questions_are_held_answered_and_remembered(folder: Path, names: Names, plain: Origin) -> None:
    network = {"allow": [], "onUnknown": "ask", "askTimeout": "60s"}
    # Nobody named the address, and an answer is about a host: what lies in a private range stays out.
    async with local_door(folder, network, names) as door:
        url = f"http://api.example.test:{plain.port}/a"
        request = asyncio.ensure_future(door.curl(url))
        question = await asked(door)
        assert (question["host"], question["port"], question["method"], question["path"]) == (
            "api.example.test", plain.port, "GET", "/a",
        )  # fmt: skip
        door.engine.questions.answer(question["id"], True)
        _, out, _ = await request
        assert " 403 " in out and '"code": "address"' in out


async def test_answers(folder: Path, names: Names, plain: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ringfence.egress.policy.address_class", lambda address: None
    )  # loopback is the internet
    network = {"onUnknown": "ask", "askTimeout": "60s"}
    async with local_door(folder, network, names) as door:
        url = f"http://api.example.test:{plain.port}/a"
        for allow, remember, status, asks in (
            (True, False, " 200 ", True),
            (True, True, " 200 ", True),
            (None, None, " 200 ", False),
        ):
            request = asyncio.ensure_future(door.curl(url))
            if asks:
                question = await asked(door)
                result = door.engine.questions.answer(question["id"], bool(allow), bool(remember))
                if remember:
                    assert result["rule"] == {
                        "host": "api.example.test", "ports": [plain.port], "methods": ["GET"], "paths": ["/a"],  # noqa: E501
                    }  # fmt: skip
            assert status in (await request)[1]
        request = asyncio.ensure_future(
            door.curl(url.replace("/a", "/b"))
        )  # the rule is no wider than the answer
        question = await asked(door)
        door.engine.questions.answer(question["id"], False)
        assert " 403 " in (await request)[1]
        assert " 403 " in (await door.curl(url.replace("/a", "/b")))[1]  # and is not asked again at once
        names_of = [event["event"] for event in door.events]
        assert names_of.count("egress.asked") == names_of.count("egress.answered") == 3


@pytest.mark.parametrize("how", ["once", "remembered", "learned"])
async def test_what_was_let_through_outlives_an_update_that_would_let_it_through(
    folder: Path, names: Names, plain: Origin, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("ringfence.egress.policy.address_class", lambda address: None)
    plain.response = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun"  # and never ends
    network: dict[str, Any] = {"mode": "egress", "onUnknown": "ask", "askTimeout": "60s"}
    if how == "learned":
        network = {"mode": "egress", "learn": True}
    more = {"allow": [{"host": "other.example.test", "ports": [443]}]}
    async with local_door(folder, network, names, trust="trusted") as door:
        request = asyncio.ensure_future(door.curl(f"http://api.example.test:{plain.port}/a"))
        if how != "learned":
            question = await asked(door)
            door.engine.questions.answer(question["id"], True, how == "remembered")
        async with asyncio.timeout(60):
            while not any(flow.received for flow in door.door.flows):
                await asyncio.sleep(0.01)
        assert door.door.update(network | more) == 0
        [flow] = door.door.flows
        assert flow.cut is None and not request.done()
        # What would not be let through any more ends; an answer that was remembered is a rule.
        left = {"mode": "egress", **more}
        assert door.door.update(left) == (0 if how == "remembered" else 1)
        # A rule about it goes before an answer.
        rule_ = {"host": "api.example.test", "ports": [plain.port], "addresses": ["10.0.0.0/8"]}
        door.door.update(left | {"allow": [rule_]})
        code, _, _ = await request
        assert code == 18  # it was cut
        await door.idle()


async def test_nobody_answers(folder: Path, names: Names, plain: Origin) -> None:
    async with local_door(folder, {"onUnknown": "ask", "askTimeout": "1s"}, names) as door:
        _, out, _ = await door.curl(f"http://api.example.test:{plain.port}/a")
        assert " 403 " in out and "nobody answered" in out
        assert not door.engine.questions.pending() and not plain.requests
        assert [event["event"] for event in door.events][:2] == ["egress.asked", "egress.unanswered"]


async def test_questions_are_bounded(folder: Path, names: Names) -> None:
    async with local_door(folder, {"onUnknown": "ask", "askTimeout": "60s"}, names) as door:
        requests = [
            asyncio.ensure_future(
                door.raw(
                    f"GET http://h{n}.example.test/ HTTP/1.1\r\nHost: h{n}.example.test\r\n\r\n".encode()
                )
            )
            for n in range(40)
        ]
        async with asyncio.timeout(60):
            while len(door.log()) < 8:
                await asyncio.sleep(0.01)
        assert len(door.engine.questions.pending()) == 32
        await door.door.close()
        await asyncio.gather(*requests)
        assert not door.engine.questions.pending()


# -- learning


async def test_what_is_learned_is_enough_and_no_more(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ringfence.egress.policy.address_class", lambda address: None)
        async with local_door(folder, {"learn": True}, names, authority.file, trust="trusted") as door:
            base = f"https://api.example.test:{secure.port}"
            assert " 200 " in (await secret_door_curl(door, f"{base}/v1/models"))[1]
            assert " 200 " in (await secret_door_curl(door, f"{base}/v1/chat", "-d", "x"))[1]
            await door.idle()
            assert all(line["rule"].startswith("learn ") for line in door.log())
            network = propose(door.log())
    methods = {(tuple(one["methods"]), tuple(one["paths"])) for one in network["allow"]}
    assert methods == {(("GET",), ("/v1/models",)), (("POST",), ("/v1/chat",))}
    other = folder / "strict"
    other.mkdir()
    async with local_door(other, network, names, authority.file) as door:
        assert " 200 " in (await secret_door_curl(door, f"{base}/v1/models"))[1]
        assert " 200 " in (await secret_door_curl(door, f"{base}/v1/chat", "-d", "x"))[1]
        assert " 403 " in (await secret_door_curl(door, f"{base}/v1/chat"))[1]
        assert " 403 " in (await secret_door_curl(door, f"{base}/v1/other"))[1]


# -- the inference guard


async def test_inference_guard(folder: Path, names: Names, secure: Origin, authority: TestAuthority) -> None:
    network = {
        "inference": {
            "upstream": f"https://api.example.test:{secure.port}/v1", "inject": BEARER, "models": ["small"],
            "paths": ["/v1/chat/*"], "mask": ["email", "card"], "addresses": LOCAL, "budget": {"maxRequests": 3},  # noqa: E501
        }
    }  # fmt: skip
    async with local_door(folder, network, names, authority.file) as door:
        await door.engine.secrets.put("", "key", SECRET)

        async def ask(path: str, document: Any) -> str:
            return (await door.curl("--json", json.dumps(document), f"http://inference{path}"))[1]

        out = await ask(
            "/chat/completions", {"model": "small", "prompt": "mail jane@mail.example 4111111111111111"}
        )
        assert " 200 " in out and SECRET not in out
        assert secure.requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1")
        assert f"Bearer {SECRET}".encode() in secure.requests[0]
        assert json.loads(secure.bodies[0]) == {"model": "small", "prompt": "mail [email] [card]"}
        assert '"code": "model"' in await ask("/chat/completions", {"model": "large"})
        assert '"code": "path"' in await ask("/files", {"model": "small"})
        assert " 403 " in (await door.curl(f"https://api.example.test:{secure.port}/v1/chat/x"))[1]  # only so
        outs = [await ask("/chat/x", {"model": "small"}) for _ in range(3)]
        assert "budget_requests" in outs[-1]
        await door.idle()
        assert door.log()[0]["masked"] == {"email": 1, "card": 1}
    async with local_door(folder, {}, names) as door:
        assert " 403 " in (await door.curl("http://inference/chat"))[1]  # the control: no guard, no host
