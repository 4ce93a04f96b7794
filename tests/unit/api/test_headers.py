"""What passes between a client and a port, in both directions; queries and JSON of odd text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.api.calls import as_json, parse_query, query_of
from ringfence.api.errors import STATUS, retry_after, status_of
from ringfence.api.ports import Target, inward, outward, target_of
from ringfence.api.types import SandboxQuery
from ringfence.model import errors
from ringfence.model.errors import GuestRefused, InvalidRequest, NotFound, QuotaExceeded

PATH = Target("sb-x", 80, "/v1/sandboxes/sb-x/ports/80")
HOST = Target("sb-x", 80)
SCOPE: dict[str, Any] = {"scheme": "http"}


def names(headers: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {name for name, _ in headers}


def test_inward() -> None:
    given_ = [
        (b"host", b"evil"), (b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"x-ringfence-token", b"t"),
        (b"authorization", b"Bearer rf_k"), (b"cookie", b"a=1; ringfence_token=t"), (b"content-type", b"a/b"),
        (b"sec-websocket-key", b"x"), (b"x-forwarded-host", b"lie"), (b"accept", b"*/*"),
    ]  # fmt: skip
    path = inward(given_, PATH, SCOPE, secret=True)
    assert names(path) == {
        b"host", b"content-type", b"accept", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-prefix",
    }  # fmt: skip
    assert (b"host", b"localhost:80") in path
    host = inward(given_, HOST, SCOPE, secret=False)
    assert (b"cookie", b"a=1") in host and (b"authorization", b"Bearer rf_k") in host
    assert (b"x-forwarded-host", b"evil") in host and (b"x-forwarded-host", b"lie") not in host


def test_connection_can_not_name_what_frames_a_request() -> None:
    given_ = [(b"connection", b"content-length, host"), (b"content-length", b"5"), (b"host", b"h")]
    assert {b"host", b"content-length"} <= names(inward(given_, HOST, SCOPE, secret=False))


@pytest.mark.parametrize("target", [PATH, HOST])
def test_outward(target: Target) -> None:
    given_ = [
        (b"Set-Cookie", b"a=b; DOMAIN = .example.com; Path=/"), (b"Set-Cookie", b"ringfence_token=x"),
        (b"Access-Control-Allow-Origin", b"*"), (b"Clear-Site-Data", b"*"),
        (b"Connection", b"X-A"), (b"X-A", b"1"),
        (b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"9"), (b"Content-Type", b"text/html"),
    ]  # fmt: skip
    out = outward(given_, target, "req-1")
    assert not names(out) & {
        b"clear-site-data",
        b"connection",
        b"x-a",
        b"transfer-encoding",
        b"content-length",
    }
    cookies = [value for name, value in out if name == b"set-cookie"]
    if target.prefix:
        assert not cookies and (b"content-security-policy", b"sandbox") in out
        assert b"access-control-allow-origin" not in names(out)
    else:
        assert cookies == [b"a=b; Path=/"]


@pytest.mark.parametrize(
    ("sandbox", "port"),
    [("sb-x", "80"), ("sb-00000000000000000000", "0"), ("sb-00000000000000000000", "65536"),
     ("sb-00000000000000000000", "8²"), ("sb-00000000000000000000/", "80"), ("../etc", "80")],
)  # fmt: skip
def test_no_such_target(sandbox: str, port: str) -> None:
    with pytest.raises(NotFound):
        target_of(sandbox, port)


@given(st.binary(max_size=200))
def test_queries_of_any_bytes(raw: bytes) -> None:
    try:
        found = query_of({"query_string": raw})
        parse_query(SandboxQuery, found)
    except InvalidRequest as error:
        as_json(error.as_dict())  # what it says can be said


def test_queries() -> None:
    query: Any = parse_query(SandboxQuery, query_of({"query_string": b"label=a%3Db&label=c=d&limit=5"}))
    assert query.label == ("a=b", "c=d") and query.limit == 5


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
        max_leaves=10,
    )
)
def test_json_of_anything(value: Any) -> None:
    json.loads(as_json({"value": value}))


def test_json_of_names_that_are_no_text() -> None:
    assert json.loads(as_json({"path": "a\udcff"})) == {"path": "a?"}


def test_every_code_has_a_status() -> None:
    def tree(kind: type[errors.RingfenceError]) -> set[str]:
        return {kind.code}.union(*(tree(below) for below in kind.__subclasses__()))

    from ringfence.api import errors as own

    known = {code for code in tree(errors.RingfenceError) if code not in ("guest_refused", "command_failed")}
    ours = {kind.code for kind in (own.PayloadTooLarge, own.IntegrityMismatch, own.RequestTimeout)}
    assert ours <= STATUS.keys()
    model = {
        getattr(errors, name).code
        for name in dir(errors)
        if name[:1].isupper() and hasattr(getattr(errors, name), "code")
    }
    assert model - {"guest_refused"} <= STATUS.keys(), known
    assert (
        status_of(GuestRefused(2)) == 404
        and status_of(GuestRefused(28)) == 507
        and status_of(GuestRefused(22)) == 400
    )
    assert (
        retry_after(QuotaExceeded("x", retry_after=0.2)) == 1
        and retry_after(QuotaExceeded("x", retry_after=7)) == 7
    )
    assert retry_after(NotFound("x")) is None
