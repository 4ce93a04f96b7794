"""Nobody sees or reaches another project's: every route of the table, with every kind of key.

The cases are made from the table itself. A new route with a parameter that this file does not know fails
here, and so does one that answers a stranger in another way than an unknown id.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from ringfence.api.app import tables
from ringfence.api.routing import Route
from support.serving import Serving

TABLE = [route for table in tables() for route in table.table]
OPEN = {"/healthz", "/readyz", "/openapi.json"}
PORT = "8000"
# Bodies and queries that pass the checks of shape, so that the answer is about whose it is.
BODIES: dict[str, Any] = {
    "/v1/sandboxes/{sandbox}/processes": {"argv": ["true"]},
    "/v1/sandboxes/{sandbox}/processes/{process}/resize": {"rows": 1, "columns": 1},
    "/v1/sandboxes/{sandbox}/extend": {"timeout": 60},
    "/v1/sandboxes/{sandbox}/files/mkdir": {"path": "/workspace/x"},
    "/v1/sandboxes/{sandbox}/files/move": {"source": "/workspace/x", "target": "/workspace/y"},
    "/v1/sandboxes/{sandbox}/files/sign": {"path": "/workspace/x"},
}
QUERIES = {
    "path": "/workspace/x",
    "expires": "4102444800",
    "signature": "x",
}  # fmt: skip


def label(route: Route) -> str:
    return f"{'WS' if route.socket else route.method} {route.path}"


class World:
    """Two projects: one with everything in it, and a stranger."""

    def __init__(self, service: Serving) -> None:
        self.service = service
        self.project, self.key = service.tenant(f"a{uuid.uuid4().hex[:8]}")
        _, self.stranger = service.tenant(f"b{uuid.uuid4().hex[:8]}")
        owner = service.client(self.key)
        self.owner = owner
        self.box = service.sandbox(owner)
        base = f"/v1/sandboxes/{self.box['id']}"
        body = {"argv": ["sleep", "600"], "id": "cmd", "wait": False}
        assert owner.post(f"{base}/processes", json=body).status_code == 201
        pool = owner.post("/v1/pools", json={"name": "mine", "min": 0, "max": 0}).json()
        snapshot = owner.post(f"{base}/snapshot", json={}).json()
        key = owner.post("/v1/keys", json={"scopes": ["read"]}).json()
        self.real = {
            "sandbox": self.box["id"],
            "process": "cmd",
            "pool": pool["id"],
            "snapshot": snapshot["id"],
            "key": key["id"],
            "project": self.project,
            "template": "host",
            "port": PORT,
            "rest": "x",
            "call": "call-1",
            "artifact": "out",
            "secret": "s",
            "question": "ask-1",
        }
        self.unknown = {
            **self.real,
            "sandbox": "sb-00000000000000000000",
            "pool": "pl-00000000000000000000",
            "snapshot": "sn-00000000000000000000",
            "key": "0" * 20,
            "project": "pr-00000000000000000000",
        }
        self._more()

    def _more(self) -> None:
        """Objects of routes that others have added: by the parameter's name, how one is made."""
        base = f"/v1/sandboxes/{self.box['id']}"
        for name, (path, body) in MAKERS.items():
            if any(name in route.names for route in TABLE):
                made = self.owner.post(path.format(base=base), json=body)
                assert made.status_code in (200, 201, 202), (name, made.text)
                self.real[name] = made.json()["id"]
                prefix = self.real[name].partition("-")[0]
                self.unknown[name] = f"{prefix}-00000000000000000000"


MAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "context": ("{base}/contexts", {}),
    "job": ("/v1/jobs", {"command": "true"}),
    "volume": ("/v1/volumes", {"name": "mine"}),
}


@pytest.fixture(scope="module")
def world(service: Serving) -> World:
    return World(service)


def ask(world: World, route: Route, names: dict[str, str], key: str) -> tuple[int, str]:
    """Status and error code of a request to a route."""
    path = route.path.replace(":path}", "}")
    for name in route.names:
        bare = name.removesuffix(":path")
        assert bare in names, f"tell {__name__} what a {bare} is: a real one, and one that nobody has"
        path = path.replace("{" + bare + "}", names[bare])
    headers = {"authorization": f"Bearer {key}"} if key else {}
    query = {}
    if route.query is not None:
        wanted = [name for name, field in route.query.model_fields.items() if field.is_required()]
        query = {name: QUERIES.get(name, "x") for name in wanted}
    if route.socket:
        url = world.service.url.replace("http", "ws") + path
        try:
            with connect(url, additional_headers=headers, proxy=None, open_timeout=60) as socket:
                socket.send(json.dumps({"type": "execute", "argv": ["true"]}))
                return 101, str(socket.recv(60))
        except InvalidStatus as refused:
            body = refused.response.body or b"{}"
            return refused.response.status_code, json.loads(body).get("error", {}).get("code", "")
    options: dict[str, Any] = {}
    if route.body == "stream":
        options["content"] = b"x"
    elif route.body is not None:
        options["json"] = BODIES.get(route.path, filled(route))
    method = "GET" if route.method == "*" else route.method
    client = world.service.client(follow_redirects=False)
    with client, client.stream(method, path, params=query, headers=headers, **options) as answer:
        if answer.status_code < 300:
            return answer.status_code, ""
        answer.read()
        return answer.status_code, answer.json()["error"]["code"]


def filled(route: Route) -> dict[str, Any]:
    """A body with something in every field that must be there."""
    schema = route.body.model_json_schema()
    values = {
        "boolean": False,
        "integer": 1,
        "number": 1.0,
        "array": [],
        "object": {},
        "string": f"n{uuid.uuid4().hex[:8]}",
    }
    shapes = schema.get("properties", {})
    return {name: values[shapes[name].get("type", "string")] for name in schema.get("required", ())}


def owned(route: Route) -> bool:
    """Whether its path names something that belongs to a project."""
    return any(name in ("sandbox", "pool", "snapshot", "key", "project", *MAKERS) for name in route.names)


@pytest.mark.parametrize("route", [r for r in TABLE if r.path not in OPEN], ids=label)
def test_nobody_without_a_key(world: World, route: Route) -> None:
    for key in ("", "rf_" + "0" * 20 + "_" + "0" * 64):
        status, code = ask(world, route, world.real, key)
        assert (status, code) == (401, "not_authenticated")


@pytest.mark.parametrize("route", [r for r in TABLE if owned(r) and r.scope not in ("", "token")], ids=label)
def test_a_stranger_sees_what_is_not_there(world: World, route: Route) -> None:
    stranger = ask(world, route, world.real, world.stranger)
    nothing = ask(world, route, world.unknown, world.stranger)
    assert stranger == nothing, "the same as for an id that nobody has"
    assert stranger[0] in (403, 404), stranger
    # The control: its owner is answered otherwise, or has not even got one of that id.
    if (
        route.method == "GET"
        and not route.socket
        and not route.path.endswith(("/stream", "/watch", "{artifact:path}"))
    ):
        mine = ask(world, route, world.real, world.key)
        assert mine != (404, "not_found"), mine


@pytest.mark.parametrize("route", [r for r in TABLE if r.scope in ("run", "admin")], ids=label)
def test_a_key_that_may_only_read_changes_nothing(world: World, route: Route) -> None:
    reader = world.service.make_key(scopes=["read"])
    status, code = ask(world, route, world.real, reader)
    assert (status, code) == (403, "not_allowed")


@pytest.mark.parametrize("route", [r for r in TABLE if r.scope == "token"], ids=label)
def test_a_token_opens_its_own_sandbox_only(world: World, route: Route) -> None:
    service = world.service
    own = service.sandbox()
    token = service.http.post(f"/v1/sandboxes/{own['id']}/token", json={}).json()["token"]
    path = route.path.replace("{sandbox}", world.box["id"]).replace("{port}", PORT).replace("{rest:path}", "")
    headers = {"x-ringfence-token": token}
    if route.socket:
        url = service.url.replace("http", "ws") + path
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers, proxy=None, open_timeout=60)
        assert refused.value.response.status_code == 401
    else:
        query = QUERIES if "signed" in route.path else {}
        method = "GET" if route.method == "*" else route.method
        assert service.client().request(method, path, headers=headers, params=query).status_code == 401
    service.http.delete(f"/v1/sandboxes/{own['id']}")


def test_lists_show_one_project_only(world: World) -> None:
    client: Callable[[str], httpx.Client] = world.service.client
    mine, theirs = client(world.key), client(world.stranger)
    for path in ("/v1/sandboxes", "/v1/pools", "/v1/snapshots", "/v1/keys", "/v1/projects"):
        ids = {each["id"] for each in mine.get(path).json()["items"]}
        others = {each["id"] for each in theirs.get(path).json()["items"]}
        assert ids and not ids & others, path
    events = theirs.get("/v1/events").json()["items"]
    assert not [event for event in events if event["subject"] == world.box["id"]]
    assert [e for e in mine.get("/v1/events").json()["items"] if e["subject"] == world.box["id"]]
    cursor = mine.get("/v1/keys", params={"limit": 1}).json()["next_cursor"]
    assert cursor and theirs.get("/v1/keys", params={"cursor": cursor}).status_code == 400


def test_what_a_stranger_names_in_a_body_is_not_there(world: World) -> None:
    theirs = world.service.client(world.stranger)
    bodies: list[dict[str, Any]] = [{"snapshot": world.real["snapshot"]}, {"pool": world.real["pool"]}]
    for name in (world.real["volume"], "mine"):
        bodies.append({"volumes": [{"volume": name, "path": "/data"}]})
    for body in (*bodies, {"pool": "mine"}):
        answer = theirs.post("/v1/sandboxes", json=body)
        assert answer.status_code == 404, (body, answer.text)
    escalate = theirs.post("/v1/keys", json={"project": world.project})
    assert escalate.status_code == 403
    run = world.service.make_key(scopes=["run"])
    assert world.service.client(run).post("/v1/projects", json={"name": "x"}).status_code == 403


def test_everything_still_stands(world: World) -> None:
    """After all that: what belongs to the first project is as it was."""
    owner = world.owner
    assert owner.get(f"/v1/sandboxes/{world.box['id']}").json()["state"] == "running"
    assert owner.get(f"/v1/sandboxes/{world.box['id']}/processes/cmd").json()["state"] == "running"
    assert owner.get("/v1/pools/mine").status_code == 200
    assert owner.get(f"/v1/snapshots/{world.real['snapshot']}").status_code == 200
    assert owner.get(f"/v1/keys/{world.real['key']}").json()["state"] == "active"
