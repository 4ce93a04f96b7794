"""``ringfence egress`` of a user who has logged in to a service, and the SDK's half of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox, Service
from ringfence.model.errors import InvalidRequest
from ringfence.sdk import settings
from ringfence.sdk.background import BACKGROUND
from support.beyond import Web, web_beyond
from support.commands import Ringfence
from support.serving import Serving, eventually, needs_root_or_users, serving

pytest.importorskip("h2")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

KEY = "k3y-of-mine"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with web_beyond() as server:
        yield server


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    needs_root_or_users()
    with serving() as made:
        yield made


@pytest.fixture
def ringfence(served: Serving, tmp_path: Path) -> Ringfence:
    """The command line of a user who has logged in, and has a home of his own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    home = {"RINGFENCE_LOGIN": str(tmp_path / "login.json"), "RINGFENCE_HOME": str(tmp_path / "home")}
    found = Ringfence(env | home)
    assert found("login", served.url, input=served.key.encode()).returncode == 0
    return found


@pytest.fixture
def sdk(served: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(settings.URL, served.url)
    monkeypatch.setenv(settings.KEY, served.key)
    yield
    BACKGROUND.end()


def fetch(port: int, key: str = "none", path: str = "") -> str:
    return f'curl -sS -m 200 --noproxy "" -x $http_proxy -H "X-Key: {key}" http://127.0.0.1:{port}/{path}'


def network(web: Web) -> dict[str, Any]:
    rule = {"host": "127.0.0.1", "ports": [web.port], "protocol": "http"}
    rule |= {"addresses": ["127.0.0.1/32"], "inject": {"placeholder": "{{secret:key}}", "env": "TOKEN"}}
    return {"mode": "egress", "allow": [rule]}


def test_questions_and_the_log_of_a_service(served: Serving, ringfence: Ringfence, web: Web) -> None:
    port = web.port
    assert ringfence.json("egress", "pending", "--json") == {"pending": []}
    box = served.sandbox(network={"mode": "egress", "onUnknown": "ask", "askTimeout": 200})["id"]
    quiet = ringfence("egress", "log", "--sandbox", box)  # the service was asked, and has nothing to say
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"nothing is in the log\n", b"")
    for verb, code in (("deny", 403), ("allow", 200)):
        argv = ["sh", "-c", fetch(port, path=verb) + " -o /dev/null -w '%{http_code}'"]
        body = {"argv": argv, "id": verb, "wait": False, "detached": True}
        served.http.post(f"/v1/sandboxes/{box}/processes", json=body)
        found = eventually(lambda: ringfence.json("egress", "pending", "--json")["pending"], "it is asked")
        assert [(each["sandbox"], each["port"]) for each in found] == [(box, port)]
        assert box.encode() in ringfence("egress", "pending").stdout
        done = ringfence("egress", verb, found[0]["id"])
        assert done.returncode == 0, done.stderr
        place = f"/v1/sandboxes/{box}/processes/{verb}/output"
        told = eventually(lambda at=place: served.http.get(at).json()["stdout"]["data"], "it goes on")
        assert told == str(code)
    done = ringfence("egress", "allow", "ask-06h2k1tywwgvxb4ybktb")
    assert done.returncode == 125 and b"egress pending" in done.stderr

    def log(*options: str) -> Any:
        return ringfence.json("egress", "log", "--json", *options)["connections"]

    lines = eventually(lambda: log("--sandbox", box)[1:], "both are in the log")
    assert {line["sandbox"] for line in lines} == {box}
    assert [line["decision"] for line in log("--sandbox", box)] == ["denied", "allowed"]
    assert [line["decision"] for line in log("--sandbox", box, "--denied")] == ["denied"]
    learnt = ringfence.json("egress", "learn", "--json", "--sandbox", box)
    assert [rule["host"] for rule in learnt["network"]["allow"]] == ["127.0.0.1"]
    assert b"the service has one of each sandbox" in ringfence("egress", "log").stderr
    assert ringfence("egress", "log", "--sandbox", "sb-06h2k1tywwgvxb4ybktb").returncode == 125
    served.http.delete(f"/v1/sandboxes/{box}")


def test_secrets_are_the_services_unless_local(ringfence: Ringfence, served: Serving) -> None:
    done = ringfence("egress", "secret", "set", "mine", input=b"s3cret-one\n")
    assert (done.returncode, done.stdout) == (0, b"mine, version 1\n"), done.stderr
    for options in (("here", "--local"), ("--local", "here")):
        done = ringfence("egress", "secret", "set", *options, input=b"s3cret-two")
        assert done.returncode == 0, done.stderr

    def names(*options: str) -> list[str]:
        listed = ringfence("egress", "secret", "ls", "--json", *options)
        assert b"s3cret" not in listed.stdout + listed.stderr
        return [
            each["name"] for each in ringfence.json("egress", "secret", "ls", "--json", *options)["secrets"]
        ]

    assert (names(), names("--local")) == (["mine"], ["here"])
    assert [each["name"] for each in served.http.get("/v1/secrets").json()["items"]] == ["mine"]
    assert b"mine" in ringfence("egress", "secret", "ls").stdout
    assert ringfence("egress", "secret", "rm", "mine").returncode == 0
    assert ringfence("egress", "secret", "rm", "mine").returncode == 125
    assert names() == []


@pytest.mark.usefixtures("sdk")
def test_placeholders_are_taken_back(ringfence: Ringfence, web: Web) -> None:
    with Service() as service:
        assert service.put_secret("key", KEY)["version"] == 1
        assert "key" in [each["name"] for each in service.secrets()]
        assert service.questions() == []
    port = web.port
    box = Sandbox.create(runtime="jail", network=network(web))
    box.run("echo $TOKEN > /workspace/kept").check()
    (copy,) = box.fork()
    (other,) = box.fork()
    try:

        def inherited(one: Sandbox) -> str:
            return one.run(fetch(port, "$(cat /workspace/kept)")).check().stdout

        for one in (box, copy, other):
            web.keys.clear()
            assert (inherited(one), web.keys) == ("beyond", [KEY])
        done = ringfence("egress", "revoke", copy.id)
        assert done.returncode == 0, done.stderr
        other.revoke_placeholders(box.id)
        for one in (copy, other):
            web.keys.clear()
            assert '"code": "placeholder"' in inherited(one) and web.keys == []
            assert one.run(fetch(port, "$TOKEN")).check().stdout == "beyond" and web.keys == [KEY]
        assert inherited(box) == "beyond"

        def denied() -> list[dict[str, Any]]:
            return [line for line in copy.connections()["items"] if line["decision"] == "denied"]

        assert eventually(denied, "it is in the log")[-1]["sandbox"] == copy.id
        with pytest.raises(InvalidRequest):
            box.revoke_placeholders(copy.id)
        assert ringfence("egress", "revoke", box.id, copy.id).returncode == 125
        assert ringfence("egress", "revoke", box.id, box.id).returncode == 0
        assert '"code": "placeholder"' in inherited(box)
    finally:
        for one in (box, copy, other):
            one.kill()
        with Service() as service:
            service.remove_secret("key")


@pytest.mark.usefixtures("sdk")
def test_what_was_recorded_is_read_from_the_service(ringfence: Ringfence, served: Serving, web: Web) -> None:
    with Service() as service:
        service.put_secret("key", KEY)
    box = Sandbox.create(runtime="jail", network=network(web) | {"record": "bodies", "redact": ["CUST-\\d+"]})
    try:
        done = ringfence("egress", "log", "--har", "--sandbox", box.id)
        assert done.returncode == 125 and b"nothing was recorded" in done.stderr
        for number in range(3):
            answer = box.run(fetch(web.port, "$TOKEN", f"{number}?of=CUST-7") + " -d CUST-12").check()
            assert answer.stdout == "beyond"
        assert web.keys[-1] == KEY  # the control: it was sent

        def urls(document: Any) -> list[str]:
            text = json.dumps(document)
            assert KEY not in text and "CUST" not in text
            assert (document["log"]["version"], document["log"]["creator"]["name"]) == ("1.2", "ringfence")
            found = document["log"]["entries"]
            assert all(each["response"]["content"]["text"] == "beyond" for each in found)
            return [each["request"]["url"].partition(f":{web.port}/")[2][0] for each in found]

        har = eventually(
            lambda: (found := box.records())["log"]["entries"][2:] and found, "all are written down"
        )
        assert urls(har) == ["0", "1", "2"]
        assert urls(box.records(limit=2)) == ["1", "2"]
        assert urls(ringfence.json("egress", "log", "--har", "--sandbox", box.id)) == ["0", "1", "2"]
        other = ringfence.json("egress", "log", "--har", "--sandbox", box.id, "--host", "other.example")
        assert urls(other) == []
        place = f"/v1/sandboxes/{box.id}/records"
        assert served.http.get(place, params={"limit": 0}).status_code == 400
        _, stranger = served.tenant("reader")
        assert served.client(stranger).get(place).status_code == 404
        assert served.client().get(place).status_code == 401
    finally:
        box.kill()
        with Service() as service:
            service.remove_secret("key")


def test_revoking_needs_a_service(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    alone = Ringfence(env | {"RINGFENCE_LOGIN": str(tmp_path / "none.json"), "RINGFENCE_HOME": str(tmp_path)})
    done = alone("egress", "revoke", "sb-06h2k1tywwgvxb4ybktb")
    assert done.returncode == 125 and b"ringfence login" in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"", b"no secret"),
        (b"first\nsecond\n", b"several lines"),
        (b"\xff\xfe", b"UTF-8"),
        (b"x" * 70_000, b"more than a secret may"),
        (None, b"closed"),
    ],
    ids=["nothing", "lines", "bytes", "long", "closed"],
)
def test_what_is_stored_is_what_was_given_or_nothing(
    tmp_path: Path, given: bytes | None, words: bytes
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    alone = Ringfence(env | {"RINGFENCE_LOGIN": str(tmp_path / "none.json"), "RINGFENCE_HOME": str(tmp_path)})
    if given is None:
        argv = [sys.executable, "-m", "ringfence", "egress", "secret", "set", "key"]
        shell = ["sh", "-c", 'exec "$@" <&-', "sh", *argv]
        done = subprocess.run(shell, env=alone.env, capture_output=True, timeout=60, check=False)
    else:
        done = alone("egress", "secret", "set", "key", input=given)
    assert done.returncode == 125 and words in done.stderr, done.stderr
    assert b"fault in Ringfence" not in done.stderr and b"second" not in done.stderr
    assert alone.json("egress", "secret", "ls", "--json") == {"secrets": []}
    assert alone("egress", "secret", "set", "key", input=b"one line\r\n").returncode == 0  # the control
    assert alone("egress", "log", "-n", "-3").returncode == 125
