"""Doors of a service: placeholders, copies and what they inherit, budgets of a project, restarts, resets."""

from __future__ import annotations

import base64
import http.server
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import images
from support.beyond import Web, web_beyond
from support.commands import Ringfence
from support.serving import Serving, eventually, serving

pytest.importorskip("h2")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

KEY = "k3y-of-the-project"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with web_beyond() as server:
        yield server


class Hook(http.server.ThreadingHTTPServer):
    """A program of the operator's that says no. ``asked``: what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _No)


class _No(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Hook)
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"answer": "deny"}')

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def service(hook: Hook) -> Iterator[Serving]:
    # The key of the secrets comes from a command: it is in no file of the service's.
    command = f"echo {base64.b64encode(bytes(range(32))).decode()}"
    options = ("--egress-webhook", f"http://127.0.0.1:{hook.server_address[1]}/ask")
    with serving(*options, "--egress-key-command", command) as made:
        assert made.http.put("/v1/secrets/key", json={"value": KEY}).status_code == 200
        yield made
        stored = [path.parent for path in made.home.glob("**/secrets.json")]
        own = [folder for folder in stored if folder != made.home / "egress"]  # that is the command line's
        assert own and not any((folder / "secrets.key").exists() for folder in own)


def network(web: Web, **inject: str) -> dict[str, Any]:
    """In the clear only with addresses: nobody proves who he is here."""
    addresses = ["127.0.0.1/32"]
    rule: dict[str, Any] = {"host": "127.0.0.1", "ports": [web.port], "protocol": "http"}
    rule["addresses"] = addresses
    if inject:
        rule["inject"] = {"placeholder": "{{secret:key}}", **inject}
    return {"mode": "egress", "allow": [rule]}


def curl(service: Serving, box: str, web: Web, key: str = "$TOKEN") -> str:
    """What a request of a real curl inside gets."""
    # Loopback is left out of proxies by a variable, which programs inside may change as they like.
    command = f'curl -sS -m 60 --noproxy "" -x $http_proxy -H "X-Key: {key}" http://127.0.0.1:{web.port}/'
    return str(service.run(box, command)["stdout"])


def proxies(service: Serving) -> list[int]:
    """The egress processes of the service."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if (
            b"ringfence.egress" in words
            and any(str(service.home).encode() in each for each in words)
            and state not in ("Z", "X")
        ):
            found.append(int(path.parent.name))
    return found


def kill_proxy(service: Serving) -> None:
    """SIGKILL the egress process, and wait until there is another."""
    (pid,) = proxies(service)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: proxies(service) not in ([], [pid]), "it is started again")


def restart_api(service: Serving) -> None:
    (pid,) = service.children()["api"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: service.children()["api"] not in ([], [pid]), "there is another one")
    eventually(lambda: service.http.get("/readyz").status_code == 200, "it is back")


def test_programs_use_a_key_that_they_never_have(service: Serving, web: Web) -> None:
    box = service.sandbox(network=network(web, env="TOKEN"))["id"]
    assert curl(service, box, web) == "beyond"
    assert web.keys[-1] == KEY
    told = service.run(box, "env; cat /proc/1/environ /proc/self/environ /run/secrets/*; echo $TOKEN > kept")
    assert "TOKEN=rfsecret0" in told["stdout"]
    shown = service.http.get(f"/v1/sandboxes/{box}")
    assert KEY not in told["stdout"] + shown.text
    # What the caller binds anew does not take it away, and may not take its place.
    patch = service.http.patch(f"/v1/sandboxes/{box}", json={"env": {"OTHER": "1"}})
    assert patch.status_code == 200, patch.text
    assert curl(service, box, web) == "beyond" and web.keys[-1] == KEY
    assert service.run(box, "echo $OTHER")["stdout"] == "1\n"
    patch = service.http.patch(f"/v1/sandboxes/{box}", json={"env": {"TOKEN": KEY}})
    assert patch.status_code == 400 and "TOKEN is the policy's" in patch.text
    body = {"runtime": "jail", "network": network(web, env="TOKEN"), "env": {"TOKEN": KEY}}
    refused = service.http.post("/v1/sandboxes", json=body)
    assert refused.status_code == 400 and "TOKEN is the policy's" in refused.text
    # Another sandbox's is worth nothing.
    other = service.sandbox(network=network(web, env="TOKEN"))["id"]
    mine = service.run(box, "cat kept")["stdout"].strip()
    assert '"code": "placeholder"' in curl(service, other, web, mine)
    for each in (box, other):
        service.http.delete(f"/v1/sandboxes/{each}")


def test_a_rule_that_comes_later_brings_its_placeholder(service: Serving, web: Web) -> None:
    box = service.sandbox(network=network(web))["id"]
    assert service.run(box, "echo ${TOKEN-none}")["stdout"] == "none\n"
    rules = network(web, env="TOKEN")
    assert service.http.patch(f"/v1/sandboxes/{box}", json={"network": rules}).status_code == 200
    assert curl(service, box, web) == "beyond" and web.keys[-1] == KEY
    service.http.delete(f"/v1/sandboxes/{box}")


def test_copies_inherit_until_it_is_taken_back(service: Serving, web: Web) -> None:
    box = service.sandbox(network=network(web, env="TOKEN"))["id"]
    service.run(box, "echo $TOKEN > /workspace/kept")
    forked = service.http.post(f"/v1/sandboxes/{box}/fork", json={"count": 1})
    assert forked.status_code == 201, forked.text
    copy = forked.json()["items"][0]["id"]
    grandchild = service.http.post(f"/v1/sandboxes/{copy}/fork", json={}).json()["items"][0]["id"]
    family = (copy, grandchild)
    own = [service.run(each, "echo $TOKEN; cat /workspace/kept")["stdout"].split() for each in (box, *family)]
    assert len({token for token, _ in own}) == 3 and len({kept for _, kept in own}) == 1
    for each in family:
        assert curl(service, each, web) == "beyond" and web.keys[-1] == KEY
        assert curl(service, each, web, "$(cat /workspace/kept)") == "beyond" and web.keys[-1] == KEY
    revoke = f"/v1/sandboxes/{copy}/placeholders/revoke"
    assert service.http.post(revoke, json={"sandboxes": [grandchild]}).status_code == 400
    _, key = service.tenant("other-project")
    assert service.client(key).post(revoke, json={}).status_code == 404
    assert service.http.post(revoke, json={}).status_code == 200

    def inherited(each: str) -> str:
        return curl(service, each, web, "$(cat /workspace/kept)")

    assert '"code": "placeholder"' in inherited(copy)
    assert inherited(grandchild) == "beyond"  # its own family is another matter
    assert inherited(box) == "beyond" and curl(service, copy, web) == "beyond"
    later = service.http.post(f"/v1/sandboxes/{copy}/fork", json={}).json()["items"][0]["id"]
    assert '"code": "placeholder"' in inherited(later)
    for end in (kill_proxy, restart_api):
        end(service)
        eventually(lambda: curl(service, copy, web) == "beyond", "its door is open again")
        assert '"code": "placeholder"' in eventually(lambda: inherited(copy), "it is answered")
    for each in (box, *family, later):
        service.http.delete(f"/v1/sandboxes/{each}")


def test_sandboxes_of_a_project_share_its_budget(service: Serving, web: Web) -> None:
    project, key = service.tenant("spender")
    client = service.client(key)
    quota = f"/v1/projects/{project}/quota"
    assert service.http.patch(quota, json={"egress_requests": 6}).status_code == 200
    boxes = [service.sandbox(client, network=network(web))["id"] for _ in range(2)]

    def ask(box: str) -> str:
        command = f'curl -sS -m 60 --noproxy "" -x $http_proxy http://127.0.0.1:{web.port}/'
        return str(service.run(box, command, client)["stdout"])

    def used(box: str) -> int:
        return int(client.get(f"/v1/sandboxes/{box}/connections").json()["usage"]["requests"])

    came = len(web.keys)
    assert [ask(box) for box in (*boxes, *boxes)] == ["beyond"] * 4
    # What was counted is on disk within a second, and a crash takes nothing of that.
    folder = next(service.home.glob("**/egress/usage"))
    eventually(
        lambda: sum(text.read_text().count(project) for text in folder.glob("*.json")), "it is written"
    )
    eventually(lambda: f'"project/{project}": [4' in _all(folder), "all of it is written")
    kill_proxy(service)
    eventually(lambda: ask(boxes[0]) == "beyond", "its door is open again")
    assert used(boxes[0]) >= 3  # the link that was lost has cleared nothing
    eventually(lambda: ask(boxes[1]), "the other one's is, too")
    answers = [ask(box) for box in (*boxes, *boxes)]
    assert "beyond" not in answers[-2:] and "budget_requests" in answers[-1] and "project" in answers[-1]
    assert len(web.keys) - came <= 6
    # A higher one reaches the doors that are open; another project never had one.
    assert service.http.patch(quota, json={"egress_requests": None}).status_code == 200
    eventually(lambda: ask(boxes[1]) == "beyond", "the limit is gone")
    assert service.http.patch(quota, json={"connections": 0}).status_code == 200
    eventually(lambda: "connections" in ask(boxes[0]) or not ask(boxes[0]), "no connection is too many")
    for box in boxes:
        client.delete(f"/v1/sandboxes/{box}")


def _all(folder: Path) -> str:
    return "".join(each.read_text() for each in folder.iterdir() if each.suffix in (".json", ""))


def test_what_wants_attention_is_among_the_events(service: Serving, web: Web) -> None:
    rules = network(web, env="TOKEN") | {"budget": {"maxRequests": 2, "pause": True}}
    box = service.sandbox(network=rules)["id"]
    one = f"/v1/sandboxes/{box}"

    def told(name: str) -> list[dict[str, Any]]:
        events = service.http.get(f"{one}/events").json()["items"]
        return [each for each in events if each["name"] == f"sandbox.{name}"]

    assert curl(service, box, web) == "beyond"
    elsewhere = f'curl -sS -m 60 --noproxy "" -x $http_proxy http://$TOKEN.example.test:{web.port}/'
    assert '"code": "placeholder"' in service.run(box, elsewhere)["stdout"]
    (alarm,) = eventually(lambda: told("egress_alarm"), "it is among the events")
    assert "rfsecret0" not in json.dumps(alarm)
    assert told("egress_over_budget") == []
    # The next ones are too many; it is paused before it can go on so.
    command = f'while :; do curl -sS -m 60 --noproxy "" -x $http_proxy http://127.0.0.1:{web.port}/; done'
    body = {"command": command, "id": "loop", "wait": False, "detached": True}
    assert service.http.post(f"{one}/processes", json=body).status_code in (201, 202)
    eventually(lambda: service.http.get(one).json()["state"] == "paused", "it is paused")
    over, *_ = eventually(lambda: told("egress_over_budget"), "it is among the events")
    assert "budget of this sandbox" in json.dumps(over)
    service.http.delete(one)


def test_a_webhook_answers_questions(service: Serving, web: Web, hook: Hook) -> None:
    rules = {"mode": "egress", "onUnknown": "ask", "askTimeout": 60}
    box = service.sandbox(network=rules, task="nightly")["id"]
    told = curl(service, box, web, "none")
    assert '"code": "denied"' in told  # private ranges are opened by nobody's answer, and it says no
    (question,) = [each for each in hook.asked if each["sandbox"] == box]
    assert (question["host"], question["port"], question["task"]) == ("127.0.0.1", web.port, "nightly")

    def names() -> set[str]:
        return {each["name"] for each in service.http.get(f"/v1/sandboxes/{box}/events").json()["items"]}

    wanted = {"sandbox.egress_asked", "sandbox.egress_answered"}
    eventually(lambda: wanted <= names(), "they are among the events")
    service.http.delete(f"/v1/sandboxes/{box}")


def test_a_network_mode_can_not_change(service: Serving, web: Web) -> None:
    for had, wanted in (("none", network(web)), ("egress", "none"), ("none", "open"), ("egress", "open")):
        box = service.sandbox(network=had)
        one = f"/v1/sandboxes/{box['id']}"
        before = service.http.get(one).json()
        refused = service.http.patch(one, json={"network": wanted, "env": {"A": "1"}, "timeout": 77})
        assert refused.status_code in ((409,) if wanted != "open" else (409, 400)), refused.text
        if refused.status_code == 409:
            assert f"network mode {had}" in refused.json()["error"]["message"]
        after = service.http.get(one).json()
        same = ("policy", "env", "deadline_at", "state")
        assert {name: after.get(name) for name in same} == {name: before.get(name) for name in same}
        assert service.run(box["id"], "echo ${A-none}")["stdout"] == "none\n"
        service.http.delete(one)


def test_a_sandbox_that_begins_anew_has_its_door(service: Serving, web: Web) -> None:
    box = service.sandbox(network=network(web, env="TOKEN"))["id"]
    bundle = service.run(box, "cat $CURL_CA_BUNDLE")["stdout"]
    assert "BEGIN CERTIFICATE" in bundle
    for _ in range(2):  # the second finds a wall that stands by
        service.run(box, "rm -f $CURL_CA_BUNDLE; touch /workspace/mine")
        assert service.http.post(f"/v1/sandboxes/{box}/reset").status_code == 200
        assert service.run(box, "ls /workspace")["stdout"] == ""
        assert service.run(box, "cat $CURL_CA_BUNDLE")["stdout"] == bundle
        assert curl(service, box, web) == "beyond" and web.keys[-1] == KEY
    service.http.delete(f"/v1/sandboxes/{box}")


def test_what_a_template_starts_finds_the_door_open(service: Serving, web: Web, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "FROM busybox:1\n"
        f"START wget -q -O /tmp/got --header X-Key:$TOKEN http://127.0.0.1:{web.port}/ || exit 3; "
        "exec sleep 1000\nREADY test -s /tmp/got\n"
    )
    ringfence = Ringfence(os.environ | {"RINGFENCE_HOME": str(service.home)})
    for command in (
        ("add", f"rootfs:{images.busybox()}", "--name", "busybox:1"),
        ("build", str(tmp_path), "-t", "fetches:1"),
    ):
        done = ringfence("template", *command)
        assert done.returncode == 0, done.stderr
    rules = network(web, env="TOKEN")
    box = service.sandbox(template="fetches:1", network=rules)["id"]
    assert service.run(box, "cat /tmp/got")["stdout"] == "beyond" and web.keys[-1] == KEY
    for _ in range(2):
        web.keys.clear()
        assert service.http.post(f"/v1/sandboxes/{box}/reset").status_code == 200
        assert service.run(box, "cat /tmp/got")["stdout"] == "beyond" and web.keys == [KEY]
    copy = service.http.post(f"/v1/sandboxes/{box}/fork", json={}).json()["items"][0]["id"]
    # It begins its day with a fetch. What READY looks for is there from before: it may be up earlier.
    eventually(lambda: web.keys == [KEY, KEY], "the copy fetches")
    for each in (box, copy):
        service.http.delete(f"/v1/sandboxes/{each}")
    # What fails there fails the start, and leaves nothing.
    before = {each["id"] for each in service.http.get("/v1/sandboxes?state=running").json()["items"]}
    body = {"runtime": "jail", "template": "fetches:1", "network": {"mode": "egress"}, "start_timeout": 80}
    refused = service.http.post("/v1/sandboxes", json=body)
    assert refused.status_code >= 500 and "start command ended with 3" in refused.text, refused.text
    after = {each["id"] for each in service.http.get("/v1/sandboxes?state=running").json()["items"]}
    assert after == before
    policy = tmp_path / "policy.yaml"
    document = {"apiVersion": "ringfence/v1", "kind": "Policy", "metadata": {"name": "it"}, "network": rules}
    policy.write_text(json.dumps(document))
    done = ringfence("egress", "secret", "set", "key", input=KEY.encode())
    assert done.returncode == 0, done.stderr
    done = ringfence("run", "--policy", str(policy), "--template", "fetches:1", "--", "cat", "/tmp/got")
    assert (done.returncode, done.stdout) == (0, b"beyond"), done.stderr
    assert web.keys[-1] == KEY
