"""Life of a sandbox through the API, on either store."""

from __future__ import annotations

import time
import uuid

from support.serving import Serving, eventually


def test_a_sandbox_is_made_used_and_deleted(either: Serving) -> None:
    made = either.sandbox(
        labels={"team": "blue"}, env={"COLOUR": "red"}, files={"/workspace/in.txt": "given"}
    )
    assert made["state"] == "running" and made["boundary"]["runtime"] == "jail"
    ran = either.run(made["id"], "echo $COLOUR; cat in.txt; echo oops >&2; exit 3", cwd="/workspace")
    assert (ran["stdout"], ran["stderr"], ran["exit_code"], ran["cause"]) == (
        "red\ngiven",
        "oops\n",
        3,
        "exited",
    )
    one = f"/v1/sandboxes/{made['id']}"
    assert either.http.get(one).json()["id"] == made["id"]
    names = [event["name"] for event in either.http.get(f"{one}/events").json()["items"]]
    assert names[:2] == ["sandbox.created", "sandbox.running"]
    ended = either.http.delete(one)
    assert (
        ended.status_code == 200 and ended.json()["state"] == "stopped" and ended.json()["cause"] == "killed"
    )
    assert either.http.delete(one).json()["state"] == "stopped"  # idempotent
    gone = either.http.post(f"{one}/processes", json={"argv": ["true"]})
    assert gone.status_code == 409 and gone.json()["error"]["code"] == "wrong_state"


def test_the_same_key_makes_one_sandbox(either: Serving) -> None:
    key = {"idempotency-key": str(uuid.uuid4())}
    body = {"runtime": "jail", "memory": "128MiB", "disk": "16MiB"}
    first = either.http.post("/v1/sandboxes", json=body, headers=key)
    again = either.http.post("/v1/sandboxes", json=body, headers=key)
    assert first.status_code == again.status_code == 201
    assert first.json()["id"] == again.json()["id"]
    other = either.http.post("/v1/sandboxes", json={**body, "labels": {"a": "b"}}, headers=key)
    assert other.status_code == 409 and other.json()["error"]["code"] == "idempotency_conflict"
    either.http.delete(f"/v1/sandboxes/{first.json()['id']}")


def test_other_creates_take_keys_as_well(either: Serving) -> None:
    key = {"idempotency-key": str(uuid.uuid4())}
    name = f"p{uuid.uuid4().hex[:10]}"
    body = {"name": name, "min": 0, "max": 0, "runtime": "jail"}
    first = either.http.post("/v1/pools", json=body, headers=key)
    again = either.http.post("/v1/pools", json=body, headers=key)
    assert first.status_code == again.status_code == 201, (first.text, again.text)
    assert first.json()["id"] == again.json()["id"] and again.headers["idempotent-replayed"] == "true"
    other = either.http.post("/v1/pools", json={**body, "max": 1}, headers=key)
    assert other.status_code == 409 and other.json()["error"]["code"] == "idempotency_conflict"
    taken = either.http.post("/v1/pools", json=body)
    assert taken.status_code == 409 and taken.json()["error"]["code"] == "conflict"
    assert either.http.get(f"/v1/pools/{name}/queue").json() == {
        "pool": name, "waiting": 0, "oldest_waiting_seconds": 0.0, "warm": 0, "running": 0,
    }  # fmt: skip
    assert either.http.delete(f"/v1/pools/{name}").status_code == 204


def test_lists_have_pages_and_filters(either: Serving) -> None:
    mark = uuid.uuid4().hex
    ids = [either.sandbox(labels={"mark": mark, "n": str(n)})["id"] for n in range(3)]
    found, cursor = [], ""
    for _ in range(3):
        query = {"label": f"mark={mark}", "limit": 1, **({"cursor": cursor} if cursor else {})}
        page = either.http.get("/v1/sandboxes", params=query).json()
        found += [each["id"] for each in page["items"]]
        cursor = page["next_cursor"]
    assert found == ids and cursor is None
    newest = either.http.get("/v1/sandboxes", params={"label": f"mark={mark}", "order": "newest"}).json()
    assert [each["id"] for each in newest["items"]] == ids[::-1]
    both = {"label": [f"mark={mark}", "n=1"]}
    assert [e["id"] for e in either.http.get("/v1/sandboxes", params=both).json()["items"]] == [ids[1]]
    none = {"label": f"mark={mark}", "state": "paused"}
    assert either.http.get("/v1/sandboxes", params=none).json()["items"] == []
    wrong = either.http.get("/v1/sandboxes", params={"cursor": "AAAA"})
    assert wrong.status_code == 400 and "cursor" in wrong.json()["error"]["message"]
    for id in ids:
        either.http.delete(f"/v1/sandboxes/{id}")


def test_a_create_that_is_not_waited_for(either: Serving) -> None:
    body = {"runtime": "jail", "memory": "128MiB", "disk": "16MiB", "wait": False}
    accepted = either.http.post("/v1/sandboxes", json=body)
    assert accepted.status_code in (201, 202)
    one = f"/v1/sandboxes/{accepted.json()['id']}"
    assert either.http.get(f"{one}/wait", params={"timeout": 60}).json()["state"] == "running"
    either.http.delete(one)


def test_deadlines_and_their_extension(either: Serving) -> None:
    made = either.sandbox(timeout=3600)
    one = f"/v1/sandboxes/{made['id']}"
    assert abs(made["deadline"] - time.time() - 3600) < 60
    extended = either.http.post(f"{one}/extend", json={"timeout": 7200}).json()
    assert extended["deadline"] > made["deadline"] + 1800
    either.http.post(f"{one}/extend", json={"timeout": 0.5})
    ended = either.http.get(f"{one}/wait", params={"state": "stopped", "timeout": 60}).json()
    assert (ended["state"], ended["cause"]) == ("stopped", "deadline")


def test_powers(either: Serving) -> None:
    made = either.sandbox()
    one = f"/v1/sandboxes/{made['id']}"
    either.run(made["id"], "echo kept > /workspace/f")
    pause = either.http.post(f"{one}/pause")
    if made["capabilities"]["pause"]:
        assert pause.json()["state"] == "paused"
        refused = either.http.post(f"{one}/processes", json={"argv": ["true"]})
        assert refused.status_code == 409
        assert either.http.post(f"{one}/resume").json()["state"] == "running"
    else:  # without a cgroup of its own
        assert pause.status_code == 501 and pause.json()["error"]["details"]["capability"] == "pause"
    saved = either.http.post(f"{one}/snapshot", json={"kind": "disk"})
    assert saved.status_code == 201, saved.text
    snapshot = saved.json()
    assert [each["id"] for each in either.http.get("/v1/snapshots").json()["items"]] == [snapshot["id"]]
    copy = either.http.post("/v1/sandboxes", json={"snapshot": snapshot["id"]})
    assert copy.status_code == 201, copy.text
    assert either.run(copy.json()["id"], "cat /workspace/f")["stdout"] == "kept\n"
    memory = either.http.post(f"{one}/snapshot", json={"kind": "memory"})
    assert memory.status_code == 501 and memory.json()["error"]["code"] == "unsupported"
    forked = either.http.post(f"{one}/fork", json={"count": 2, "labels": {"copy": "yes"}})
    assert forked.status_code == 201, forked.text
    for each in forked.json()["items"]:
        assert each["labels"] == {"copy": "yes"} and each["id"] != made["id"]
        assert either.run(each["id"], "cat /workspace/f")["stdout"] == "kept\n"
    assert either.http.post(f"{one}/reset").json()["state"] == "running"
    assert either.run(made["id"], "ls /workspace")["stdout"] == ""
    for each in either.http.get("/v1/sandboxes", params={"state": "running"}).json()["items"]:
        either.http.delete(f"/v1/sandboxes/{each['id']}")
    assert either.http.delete(f"/v1/snapshots/{snapshot['id']}").status_code == 204


def test_the_door_can_change(either: Serving) -> None:
    made = either.sandbox(labels={"a": "1"})
    one = f"/v1/sandboxes/{made['id']}"
    changed = either.http.patch(one, json={"labels": {"b": "2"}, "env": {"X": "y"}})
    assert changed.status_code == 200 and changed.json()["labels"] == {"b": "2"}, changed.text
    assert either.run(made["id"], "echo $X")["stdout"] == "y\n"
    wall = either.http.patch(one, json={"memory": "1GiB"})
    assert wall.status_code == 400 and "memory" in wall.json()["error"]["message"]
    either.http.delete(one)


def test_metrics_changes_boundary(either: Serving) -> None:
    made = either.sandbox()
    one = f"/v1/sandboxes/{made['id']}"
    either.run(made["id"], "echo x > /workspace/new; echo 12345")
    changes = either.http.get(f"{one}/changes").json()["items"]
    assert ("/workspace/new", "added") in [(each["path"], each["kind"]) for each in changes]
    counted = eventually(
        lambda: either.http.get(f"{one}/metrics").json()["usage"]["output_bytes"] >= 6, "output is counted"
    )
    assert counted
    assert either.http.get(f"{one}/boundary").json()["runtime"] == "jail"
    assert "ringfence_requests_total" in either.http.get("/metrics").text
    either.http.delete(one)
