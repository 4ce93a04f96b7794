"""What one sandbox, or one project, can do to the others of a proxy process: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.egress import log as logging_
from ringfence.egress.bounded import MARK, Patterns, TooLong, bounded
from ringfence.egress.client import Doors
from ringfence.egress.inference import Guard, Refusal
from ringfence.egress.injection import CannotInject, Outgoing, apply
from ringfence.egress.keys import MasterKey
from ringfence.egress.learning import propose
from ringfence.egress.log import ConnectionLog, Share
from ringfence.egress.messages import MOST, Messages
from ringfence.egress.meter import Meter
from ringfence.egress.recording import Records, Taking
from ringfence.egress.redaction import Redactor, Redactors
from ringfence.egress.secrets import MOST_SECRETS, SecretStore
from ringfence.egress.throttle import Bucket
from ringfence.model.errors import InvalidRequest, QuotaExceeded
from ringfence.model.policy import Inference

FOR_EVER = "(a|aa)+$"  # on letters a and another at the end
LETTERS = "a" * 100 + "!"

# -- patterns


def test_a_pattern_that_takes_for_ever_is_ended() -> None:
    patterns = Patterns([FOR_EVER])
    assert patterns.mark("ends in aaaa") == f"ends in {MARK}"
    for _ in range(5):  # the last ones are not tried any more
        assert patterns.mark(f"x {LETTERS}") == MARK  # nothing of what could not be looked through
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert not Patterns() and Patterns().mark(LETTERS) == LETTERS


def test_bounded_work_gives_what_it_gives() -> None:
    assert bounded(10, lambda: 7) == 7
    with pytest.raises(ValueError, match="none"):
        bounded(10, lambda: int("none"))

    def loop() -> None:
        while True:
            pass

    with pytest.raises(TooLong):
        bounded(0.01, loop)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(bounded(0.01, lambda: 7)))
    thread.start()
    thread.join()
    assert found == [7]


def test_a_body_that_can_t_be_looked_through_in_time_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(Inference("https://api.example.test/v1", mask=(FOR_EVER, "email")))
    body = json.dumps({"text": "to a@b.example.test"}).encode()
    assert guard.body("application/json", body)[0] == b'{"text": "to [email]"}'
    monkeypatch.setattr("ringfence.egress.inference._PATIENCE", 0.05)
    with pytest.raises(Refusal, match="too long"):
        guard.body("application/json", json.dumps({"text": LETTERS}).encode())


def test_deep_json_is_refused_and_not_an_accident() -> None:
    deep = b"[" * 900 + b"]" * 900
    guard = Guard(Inference("https://api.example.test/v1", mask=("email",)))
    assert guard.body("application/json", b"[[]]")[0] == b"[[]]"
    with pytest.raises(Refusal):
        guard.body("application/json", deep)
    for body in (b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", b'{"a": ' + b"[" * 90_000):
        request = Outgoing("POST", "h", "/", [("Content-Type", "application/json")], body)
        with pytest.raises(CannotInject):
            apply({"field": "key", "value": "{{secret:k}}"}, {"k": "v"}, request)


@pytest.mark.parametrize("text", ["?key" * 8000, "?" + "key&" * 8000, "?" + "=key" * 8000, "key?" * 8000])
def test_no_target_takes_for_ever(text: str) -> None:
    assert len(Redactor().target(f"/x{text}")) >= len(text)


@pytest.mark.parametrize(
    ("target", "clean"),
    [
        ("/x?q=1&api_key=abc&r=2", f"/x?q=1&api_key={MARK}&r=2"),
        ("/x?token=a=b", f"/x?token={MARK}"),
        ("/x?q=1?auth=abc", f"/x?q=1?auth={MARK}"),
        ("/x?key?=abc", f"/x?key?={MARK}"),
        ("/x?Password=a#b", f"/x?Password={MARK}#b"),
        ("/key=abc?q=1", "/key=abc?q=1"),
        ("/x?keys", "/x?keys"),
    ],
)
def test_what_looks_like_a_credential_in_a_query(target: str, clean: str) -> None:
    assert Redactor().target(target) == clean


# -- redaction


def test_secrets_of_one_project_hide_nothing_of_another() -> None:
    line = {"decision": "denied", "sandbox": "sb-1", "host": "evil.attacker.test", "reason": "denied: sb-1"}
    both = Redactors()
    both.of("theirs").learn(["denied", "sb-1", "evil.attacker.test"])
    assert both.of("ours").values(line) == line and not both.of("ours").finds("evil.attacker.test")
    # Nor does a project hide from itself who did something and what became of it.
    assert both.of("theirs").values(line) == line | {"host": MARK, "reason": f"{MARK}: {MARK}"}


def test_what_is_known_is_bounded_and_the_newest_are() -> None:
    redactor = Redactor()
    redactor.learn(f"secret-{number:05}" for number in range(3000))
    assert redactor.text("secret-02999") == MARK and redactor.text("secret-00000") == "secret-00000"
    redactor.learn(f"{number}" + "x" * 30_000 for number in range(100))
    assert redactor.text("99" + "x" * 30_000) == MARK and redactor.text("secret-02999") == "secret-02999"
    many = Redactors()
    for number in range(2000):
        many.of(f"p{number}").learn(["a secret"])
    assert many.of("p1999").finds("a secret") and not many.of("p0").finds("a secret")


def test_a_mark_is_not_looked_through() -> None:
    redactor = Redactor()
    redactor.learn(["redacted", "sk-value"])
    assert redactor.text("sk-value redacted") == f"{MARK} {MARK}"


@pytest.mark.parametrize("shown", [4, 7, 11])
def test_a_secret_at_the_end_of_what_is_kept_shows_no_half(tmp_path: Path, shown: int) -> None:
    from ringfence.egress.recording import MOST_BODY

    secret = "sk-topsecret"
    redactors = Redactors()
    redactors.of("p").learn([secret])
    records = Records(tmp_path, redactors)
    taking = Taking("bodies", "POST", "https://api.example.test/", [])
    taking.sent(b"x" * (MOST_BODY - shown) + secret.encode())
    records.write("sb-1", {"project": "p"}, taking)
    taking = Taking("bodies", "POST", "https://api.example.test/", [])
    taking.sent(b"x" * (MOST_BODY - shown - 1) + b"y" + b"z" * 100)
    records.write("sb-1", {"project": "p"}, taking)
    cut, whole = (entry["request"]["body"] for entry in records.log("sb-1").read())
    assert cut == "x" * (MOST_BODY - shown)
    assert len(whole) == MOST_BODY  # nothing is taken away that begins no secret
    records.close()


async def test_a_project_has_so_many_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.egress.secrets.MOST_SECRETS", 3)
    store = SecretStore(tmp_path, MasterKey(tmp_path))
    for number in range(3):
        await store.put("p", f"s{number}", "value")
    with pytest.raises(QuotaExceeded):
        await store.put("p", "s3", "value")
    assert (await store.put("p", "s0", "rotated")).version == 2  # those that there are can be rotated
    await store.put("other", "s3", "value")
    store.remove("p", "s1")
    await store.put("p", "s3", "value")
    monkeypatch.setattr("ringfence.egress.secrets.MOST_SECRETS", MOST_SECRETS)
    stored = 0
    with contextlib.suppress(QuotaExceeded):
        while stored < 100:
            await store.put("big", f"s{stored}", "x" * 32_000)
            stored += 1
    assert 20 < stored < 30


# -- messages


async def test_an_answer_that_is_too_long_is_an_error_and_no_end() -> None:
    ours, theirs = socket.socketpair()
    got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    ended: list[bool] = []
    sender = Messages(ours, lambda message, descriptors: None, lambda: ended.append(True))
    receiver = Messages(theirs, lambda message, _: got.put_nowait(message), lambda: ended.append(True))
    try:
        sender.send({"number": 1, "result": "x" * MOST})
        sender.send({"number": 2, "result": "short"})
        async with asyncio.timeout(30):
            first, second = await got.get(), await got.get()
        assert first["error"]["code"] == "invalid_request" and second["result"] == "short"
        with pytest.raises(InvalidRequest):
            sender.send({"event": "x" * MOST})
        assert not ended and not sender.closed
    finally:
        sender.close()
        receiver.close()


async def test_a_slow_webhook_takes_no_thread_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def slow(url: str, event: dict[str, Any]) -> None:
        begun.release()
        go.wait(60)

    monkeypatch.setattr("ringfence.egress.webhook.post", slow)
    doors = Doors(tmp_path, {}, webhook="http://127.0.0.1:9/ask")
    posts = [asyncio.ensure_future(doors._ask_webhook({"id": f"ask-{number}"})) for number in range(100)]
    try:
        while not begun.acquire(blocking=False):  # they are under way
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: 7) == 7
    finally:
        go.set()
        await asyncio.gather(*posts)
        await doors.stop()


# -- the log


def test_a_sandbox_has_a_share_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_, "_REFUSALS", (2.0, 0.0))
    monkeypatch.setattr(logging_, "_BYTES", (1000.0, 0.0))
    share = Share()
    assert [share.refusal() for _ in range(4)] == [False, False, True, True]
    line = {"sent": 3, "received": 5, "path": "x" * 370}
    assert [share.passed(("a", 443), line) for _ in range(4)] == [False, False, True, True]
    assert not share.passed(("b", 443), line)  # a destination's first line is written all the same
    assert share.passed(("b", 443), line)
    assert share.left_out() == {"left_out": 5, "left_out_bytes": [9, 15]} and share.left_out() == {}


def test_the_newest_lines_of_a_sandbox(tmp_path: Path) -> None:
    log = ConnectionLog(tmp_path / "c.jsonl", rotate=20_000)
    for number in range(1000):
        log.write({"sandbox": f"sb-{number % 3}", "n": number, "host": "sb-1"})
    log.close()
    with open(tmp_path / "c.jsonl", "ab") as file:
        file.write(b'{"sandbox": "sb-1", "n": broken\n{"sandbox": "sb-1"')
    assert (tmp_path / "c.jsonl.1").exists()
    own = [line for line in log.read() if line["sandbox"] == "sb-1"]
    assert len(own) > 100 and own[-1]["n"] == 999 - 999 % 3 + 1 - (0 if 999 % 3 >= 1 else 3)
    for limit in (1, 7, 100, 100_000):
        assert log.newest("sb-1", limit) == own[-limit:]
    assert log.newest("sb", 10) == []


def test_long_lines_are_read_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_, "_PIECE", 7)
    log = ConnectionLog(tmp_path / "c.jsonl")
    for number in range(20):
        log.write({"sandbox": "sb-1", "n": number, "path": "x" * number * 5})
    log.close()
    assert log.newest("sb-1", 100) == list(log.read())


def test_a_path_that_was_cut_proposes_no_rule_for_it() -> None:
    line = {"decision": "allowed", "host": "a.example.test", "port": 443, "method": "GET", "path": "/abc"}
    assert propose([line])["allow"][0]["paths"] == ["/abc"]
    assert "paths" not in propose([line | {"path_cut": 9000}])["allow"][0]


# -- counts


async def test_counts_of_another_process_are_seen_without_traffic_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.egress.meter._FLUSH", 0.0)
    mine, theirs = Meter(tmp_path), Meter(tmp_path)
    mine.start()
    theirs.start()
    door = SimpleNamespace(
        spec=SimpleNamespace(sandbox="sb-1", project=""), network=SimpleNamespace(budget=None)
    )
    theirs.add(door, None, 10, 20)  # type: ignore[arg-type]
    theirs.flush()
    assert mine.seen("sandbox/sb-1") == [0, 10, 20, 0]
    for number in range(50):
        mine.seen(f"sandbox/unknown-{number}")
    assert not mine._own  # questions leave nothing behind
    mine.close()
    theirs.close()


def test_another_rate_keeps_what_was_taken() -> None:
    bucket = Bucket(1e6)
    owed = bucket.debt(3_000_000)
    bucket.change(2e6)
    assert 0 < bucket.debt(0) <= owed / 2
