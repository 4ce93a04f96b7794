"""What is repeated, what is not, and what an answer becomes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from ringfence.model.errors import DeadlineExceeded, InvalidRequest, NotFound, QuotaExceeded, StoreUnavailable
from ringfence.sdk.failures import ServiceUnreachable
from ringfence.sdk.settings import Settings
from ringfence.sdk.transport import Transport
from support.scripted_http import DROP, Scripted, scripted

OK = (200, {"fine": True})


def error(status: int, code: str, **headers: str) -> tuple[int, dict[str, object], dict[str, str]]:
    value = {"error": {"code": code, "message": "m", "hint": "h", "details": {}}}
    return status, value, {name.replace("_", "-"): text for name, text in headers.items()}


def transport(server: Scripted, **settings: float) -> Transport:
    return Transport(Settings(server.url, "key", **settings))


async def test_the_key_goes_along_and_the_answer_is_json() -> None:
    async with scripted(OK) as server, transport(server) as wire:
        assert await wire.call("GET", "/v1/x", params={"a": 1, "b": None, "c": True}) == {"fine": True}
    method, path, headers, _ = server.requests[0]
    assert (method, path) == ("GET", "/v1/x?a=1&c=true")
    assert headers["authorization"] == "Bearer key"
    assert headers["user-agent"].startswith("ringfence-python/")


@pytest.mark.parametrize("failure", [DROP, error(503, "store_unavailable"), error(503, "node_unavailable")])
@pytest.mark.parametrize(("method", "key"), [("GET", ""), ("PUT", ""), ("DELETE", ""), ("POST", "again")])
async def test_what_may_be_repeated_is(failure: object, method: str, key: str) -> None:
    async with scripted(failure, failure, OK) as server, transport(server) as wire:
        assert await wire.call(method, "/v1/x", json={"n": 1}, key=key) == {"fine": True}
    assert len(server.requests) == 3
    assert {headers.get("idempotency-key", "") for _, _, headers, _ in server.requests} == {key}
    assert {body for _, _, _, body in server.requests} == {b'{"n":1}'}


@pytest.mark.parametrize(
    ("failure", "kind"), [(DROP, ServiceUnreachable), (error(503, "store_unavailable"), StoreUnavailable)]
)
async def test_a_post_without_a_key_is_not_repeated(failure: object, kind: type[Exception]) -> None:
    async with scripted(failure, OK) as server, transport(server) as wire:
        with pytest.raises(kind):
            await wire.call("POST", "/v1/x", json={})
    assert len(server.requests) == 1


async def test_a_body_that_flows_is_sent_once() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    async with scripted(DROP, OK) as server, transport(server) as wire:
        with pytest.raises(ServiceUnreachable):
            await wire.call("PUT", "/v1/x", content=pieces())
    assert [body for _, _, _, body in server.requests] == [b"onetwo"]


async def test_what_was_refused_for_now_is_asked_again_when_the_service_says() -> None:
    async with (
        scripted(error(429, "rate_limited", Retry_After="0.05"), OK) as server,
        transport(server) as wire,
    ):
        assert await wire.call("POST", "/v1/x", json={}) == {"fine": True}
    assert len(server.requests) == 2


async def test_a_wait_that_is_too_long_is_the_callers() -> None:
    async with (
        scripted(error(429, "quota_exceeded", Retry_After="900"), OK) as server,
        transport(server) as wire,
    ):
        with pytest.raises(QuotaExceeded) as refused:
            await wire.call("POST", "/v1/x", json={})
    assert refused.value.details["retry_after"] == 900
    assert len(server.requests) == 1


async def test_a_full_quota_is_told_at_once_unless_the_caller_waits_for_room() -> None:
    full = error(429, "quota_exceeded", Retry_After="0.05")
    async with scripted(full, OK) as server, transport(server) as wire:
        with pytest.raises(QuotaExceeded):
            await wire.call("POST", "/v1/x", json={}, key="k")
        assert len(server.requests) == 1
    async with scripted(full, full, OK) as server, transport(server) as wire:
        assert await wire.call("POST", "/v1/x", json={}, room=60.0) == {"fine": True}
        assert len(server.requests) == 3


async def test_what_is_wrong_is_not_repeated() -> None:
    async with scripted(error(404, "not_found", X_Request_Id="rq-9")) as server, transport(server) as wire:
        with pytest.raises(NotFound) as refused:
            await wire.call("GET", "/v1/x")
    assert len(server.requests) == 1
    assert refused.value.details["request_id"] == "rq-9"
    assert refused.value.hint == "h"


async def test_repeating_ends() -> None:
    for patience in (2.0, 30.0):  # the second time on a machine that stood still for all of the first
        async with scripted(DROP) as server, transport(server, retry_for=patience) as wire:
            with pytest.raises(ServiceUnreachable):
                await wire.call("GET", "/v1/x")
        if len(server.requests) >= 2:
            break
    assert len(server.requests) >= 2


async def test_nobody_there_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets it meanwhile
        settings = Settings(
            f"http://127.0.0.1:{taken.getsockname()[1]}", retry_for=0.1, source="RINGFENCE_URL"
        )
        async with Transport(settings) as wire:
            with pytest.raises(ServiceUnreachable, match="does not answer") as refused:
                await wire.call("GET", "/v1/x")
            assert "RINGFENCE_URL" in refused.value.hint
            with pytest.raises(ServiceUnreachable):
                await wire.connect("/v1/ws")


async def test_no_answer_in_time_is_not_repeated(unanswered: str) -> None:
    async with Transport(Settings(unanswered, timeout=0.2)) as wire:
        with pytest.raises(DeadlineExceeded, match="within"):
            await wire.call("GET", "/v1/x")


@pytest.fixture
def unanswered() -> object:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_a_stream_says_its_error_before_it_flows() -> None:
    async with scripted(error(404, "not_found")) as server, transport(server) as wire:
        with pytest.raises(NotFound):
            async with wire.stream("GET", "/v1/x"):
                pytest.fail("an error is no stream")


async def test_pages_are_followed_to_the_last() -> None:
    first, last = {"items": [1, 2], "next_cursor": "more"}, {"items": [3], "next_cursor": None}
    async with scripted((200, first), (200, last)) as server, transport(server) as wire:
        assert [item async for item in wire.pages("/v1/things", {"limit": 2})] == [1, 2, 3]
    assert [path for _, path, _, _ in server.requests] == [
        "/v1/things?limit=2",
        "/v1/things?limit=2&cursor=more",
    ]


async def test_an_answer_that_is_no_json_is_an_error() -> None:
    async with scripted((200, b"<html>")) as server, transport(server) as wire:
        with pytest.raises(Exception, match="answered 200"):
            await wire.call("GET", "/v1/x")


async def test_a_refused_websocket_says_why() -> None:
    async with scripted(error(409, "wrong_state")) as server, transport(server) as wire:
        with pytest.raises(Exception, match="m") as refused:
            await wire.connect("/v1/ws")
    assert refused.value.code == "wrong_state"  # type: ignore[attr-defined]


async def test_the_key_does_not_follow_a_redirect() -> None:
    async with scripted(OK) as other:
        away = (302, b"", {"location": other.url})
        async with scripted(away) as server, transport(server) as wire:
            answered = await wire.answer("GET", "/v1/x")
            assert answered.status_code == 302
        assert other.requests == []


def test_a_path_segment_can_not_leave_its_place() -> None:
    from ringfence.sdk.wire import segment

    assert segment("a/b?c#d") == "a%2Fb%3Fc%23d"
    for bad in ("", ".", ".."):
        with pytest.raises(InvalidRequest):
            segment(bad)
