"""The application's own conduct when parts of it fail, driven over plain ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ringfence.api.app import Service, make_app
from ringfence.api.calls import Answer, Call
from ringfence.api.routing import Dispatcher, Routes
from ringfence.api.settings import Settings
from ringfence.api.types import Body
from ringfence.control.principals import Principal
from ringfence.model.errors import NodeUnavailable, NotAuthenticated, RateLimited


class Tenancy:
    """Keys for tests: the scope is the key."""

    def __init__(self) -> None:
        self.limited = False

    async def authenticate(self, secret: str) -> Principal:
        if secret not in ("read", "run", "admin"):
            raise NotAuthenticated("no key")
        return Principal("o", "p", scopes=(secret,))

    async def admit_request(self, principal: Principal) -> None:
        if self.limited:
            raise RateLimited("too many", retry_after=2.5)


class Thing(Body):
    name: str


routes = Routes("test")


@routes.get("/fault")
async def fault(call: Call) -> None:
    """A mistake of ours."""
    raise ZeroDivisionError("with a secret in it")


@routes.get("/away")
async def away(call: Call) -> None:
    """A part that does not answer."""
    raise NodeUnavailable("the node does not answer")


@routes.get("/cut")
async def cut(call: Call) -> Answer:
    """Fails in the middle of a stream."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"begun"
        raise NodeUnavailable("it went away")

    return Answer(200, stream=pieces())


@routes.post("/things", body=Thing)
async def things(call: Call, body: Thing) -> dict[str, str]:
    """A body."""
    return {"name": body.name}


@routes.websocket("/socket")
async def socket(socket: Any) -> None:
    """A mistake of ours after the handshake."""
    await socket.accept()
    raise ZeroDivisionError("with a secret in it")


@pytest.fixture
def service() -> Service:
    made = make_app(None, Tenancy(), Settings(b"s" * 32))  # type: ignore[arg-type]
    made.dispatcher = Dispatcher([routes.table])
    return made


async def ask(
    service: Service,
    path: str,
    *,
    method: str = "GET",
    key: str = "run",
    body: list[bytes] | None = None,
    **headers: str,
) -> tuple[int, dict[str, str], bytes, bool]:
    """Status, headers, body, and whether the answer was ended."""
    given = [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]
    given += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": given, "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    left = list(body if body is not None else [b""])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        piece = left.pop(0)
        return {
            "type": "http.request",
            "body": piece,
            "more_body": bool(left) or (body is not None and piece != b""),
        }

    async def send(message: Any) -> None:
        sent.append(message)

    await service(scope, receive, send)
    got = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    ended = not sent[-1].get("more_body", False)
    return sent[0]["status"], got, b"".join(m.get("body", b"") for m in sent[1:]), ended


async def test_a_fault_is_told_without_its_text_and_logged_once(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        status, headers, body, _ = await ask(service, "/fault", x_request_id="mine")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["details"]) == (500, "internal", {"request_id": "mine"})
    assert headers["x-request-id"] == "mine" and b"secret" not in body
    records = [record for record in caplog.records if "mine" in record.getMessage()]
    assert len(records) == 1 and records[0].exc_info is not None


async def test_a_part_that_is_away(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    status, headers, body, _ = await ask(service, "/away")
    assert status == 503 and headers["retry-after"] == "1"
    assert json.loads(body)["error"]["details"]["request_id"] == headers["x-request-id"]
    assert len(caplog.records) == 1


async def test_half_of_a_stream_is_not_taken_for_all(service: Service) -> None:
    status, _, body, ended = await ask(service, "/cut")
    assert (status, body, ended) == (200, b"begun", False)


async def test_limits_come_after_who_and_before_what(service: Service) -> None:
    service.tenancy.limited = True  # type: ignore[attr-defined]
    status, headers, _, _ = await ask(service, "/fault")
    assert status == 429 and headers["retry-after"] == "3"
    assert (await ask(service, "/fault", key="wrong"))[0] == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ([b'{"name": "x"}', b""], 200),
        ([b'{"na', b'me": "x"}', b""], 200),
        ([b"{}", b""], 400),
        ([b'{"name": 1}', b""], 400),
    ],
)
async def test_bodies_in_pieces(service: Service, body: list[bytes], status: int) -> None:
    found = await ask(service, "/things", method="POST", body=body, content_type="application/json")
    assert found[0] == status, found


async def test_a_body_that_stops_coming() -> None:
    made = make_app(None, Tenancy(), Settings(b"s" * 32, body_timeout=0.05))  # type: ignore[arg-type]
    made.dispatcher = Dispatcher([routes.table])
    status, headers, _, _ = await ask(
        made, "/things", method="POST", body=[b"{"], content_type="application/json"
    )
    assert status == 408 and headers["connection"] == "close"


async def test_scopes(service: Service) -> None:
    assert (await ask(service, "/things", method="POST", key="read"))[0] == 403
    assert (await ask(service, "/away", key="read"))[0] == 503
    assert (await ask(service, "/away", key="admin"))[0] == 503


async def test_a_fault_of_a_socket(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket", "path": "/socket", "raw_path": b"/socket", "query_string": b"", "scheme": "ws",
        "headers": [(b"host", b"x"), (b"x-api-key", b"run")], "subprotocols": [],
    }  # fmt: skip
    await service(scope, receive, send)
    assert [m["type"] for m in sent] == ["websocket.accept", "websocket.send", "websocket.close"]
    assert json.loads(sent[1]["text"])["code"] == "internal" and "secret" not in sent[1]["text"]
    assert sent[2]["code"] == 1011 and len(caplog.records) == 1
