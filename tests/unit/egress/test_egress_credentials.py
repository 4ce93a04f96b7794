"""Secrets, placeholders, injection, redaction."""

from __future__ import annotations

import base64
import datetime
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress import injection
from ringfence.egress.injection import CannotInject, Outgoing
from ringfence.egress.keys import MasterKey, SecretsUnavailable
from ringfence.egress.redaction import MARK, Redactor, Starring
from ringfence.egress.secrets import PLACEHOLDER, SecretStore
from ringfence.model.errors import InvalidRequest, NotFound


def store(folder: Path, *command: str) -> SecretStore:
    return SecretStore(folder, MasterKey(folder, command))


async def test_secrets_are_encrypted_and_come_back_to_the_proxy_only(tmp_path: Path) -> None:
    secrets = store(tmp_path)
    info = await secrets.put("p1", "openai", "sk-verysecret")
    assert (info.version, info.project) == (1, "p1")
    assert await secrets.value("p1", "openai") == "sk-verysecret"
    for path in tmp_path.iterdir():
        assert b"sk-verysecret" not in path.read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "sk-verysecret" not in repr(secrets.list()) + repr(info)
    with pytest.raises(SecretsUnavailable):
        await secrets.value("p2", "openai")  # of another project
    assert (await store(tmp_path).value("p1", "openai")) == "sk-verysecret"  # another process


async def test_rotation_is_seen_by_who_has_the_store_open(tmp_path: Path) -> None:
    proxy, operator = store(tmp_path), store(tmp_path)
    await operator.put("", "key", "first")
    assert await proxy.value("", "key") == "first"
    assert (await operator.put("", "key", "second")).version == 2
    assert await proxy.value("", "key") == "second"
    operator.remove("", "key")
    with pytest.raises(SecretsUnavailable):
        await proxy.value("", "key")
    with pytest.raises(NotFound):
        operator.remove("", "key")


async def test_a_moved_or_damaged_secret_is_no_secret(tmp_path: Path) -> None:
    secrets = store(tmp_path)
    await secrets.put("", "a", "value-a")
    await secrets.put("", "b", "value-b")
    path = tmp_path / "secrets.json"
    entries = json.loads(path.read_text())
    entries["/a"]["sealed"], entries["/b"]["sealed"] = entries["/b"]["sealed"], entries["/a"]["sealed"]
    path.write_text(json.dumps(entries))
    with pytest.raises(SecretsUnavailable):
        await secrets.value("", "a")
    path.write_text("{")
    with pytest.raises(SecretsUnavailable):
        await secrets.value("", "b")
    (tmp_path / "secrets.key").write_bytes(b"short")
    with pytest.raises(SecretsUnavailable):
        await store(tmp_path).value("", "b")


async def test_a_command_holds_the_key(tmp_path: Path) -> None:
    key = base64.b64encode(os.urandom(32)).decode()
    with_key = store(tmp_path, "/bin/sh", "-c", f"echo {key}")
    await with_key.put("", "a", "value-a")
    assert not (tmp_path / "secrets.key").exists()
    assert await store(tmp_path, "/bin/sh", "-c", f"echo {key}").value("", "a") == "value-a"
    for command in ("exit 3", "echo short", "echo '!!!'", "true"):
        with pytest.raises(SecretsUnavailable):
            await store(tmp_path, "/bin/sh", "-c", command).value("", "a")
    with pytest.raises(SecretsUnavailable):
        await store(tmp_path, "/nonexistent/kms").value("", "a")


@pytest.mark.parametrize(
    ("name", "value"), [("a b", "x"), ("", "x"), ("a", ""), ("a", "x\ny"), ("a", "x" * 40000)]
)
async def test_what_can_be_no_secret(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(InvalidRequest):
        await store(tmp_path).put("", name, value)


async def test_placeholders_belong_to_a_sandbox_and_its_forks(tmp_path: Path) -> None:
    secrets = store(tmp_path)
    mine, theirs = await secrets.placeholder("sb-1", "a"), await secrets.placeholder("sb-2", "a")
    assert mine != theirs and PLACEHOLDER.fullmatch(mine)
    assert mine == await store(tmp_path).placeholder("sb-1", "a")
    assert await secrets.bound(["sb-1"], ["a", "b"]) == {
        mine: "a",
        await secrets.placeholder("sb-1", "b"): "b",
    }
    assert (await secrets.bound(["sb-2", "sb-1"], ["a"])).keys() == {mine, theirs}


VALUES = {"key": "s3cr&t/ü", "id": "AKIA"}


def put(
    inject: dict[str, str], target: str = "/x", headers: object = (), body: bytes | None = None
) -> Outgoing:
    request = Outgoing("POST", "a.example", target, list(headers), body)  # type: ignore[call-overload]
    return injection.apply(inject, VALUES, request)


def test_header_bearer_basic_query() -> None:
    own = [("authorization", "mine"), ("X-Other", "1")]
    assert put({"header": "Authorization", "value": "Key {{secret:id}}"}, headers=own).headers == [
        ("X-Other", "1"),
        ("Authorization", "Key AKIA"),
    ]
    assert put({"bearer": "{{secret:id}}"}).headers == [("Authorization", "Bearer AKIA")]
    [(_, basic)] = put({"basic": "me:{{secret:key}}"}).headers
    assert base64.b64decode(basic.partition(" ")[2]).decode() == "me:s3cr&t/ü"
    found = put({"query": "api_key", "value": "{{secret:key}}"}, "/x?a=1&api%5Fkey=mine&b=2")
    assert found.target == "/x?a=1&b=2&api_key=s3cr%26t%2F%C3%BC"


def test_body_fields() -> None:
    inject = {"field": "token", "value": "{{secret:key}}"}
    form = put(
        inject, headers=[("Content-Type", "application/x-www-form-urlencoded")], body=b"a=1&token=mine&b=%20"
    )
    assert form.body == b"a=1&b=+&token=s3cr%26t%2F%C3%BC"
    document = put(
        inject, headers=[("Content-Type", "application/json; charset=utf-8")], body=b'{"token": 1, "a": [2]}'
    )
    assert json.loads(document.body or b"") == {"token": "s3cr&t/ü", "a": [2]}
    for kind, body in (("text/plain", b"x"), ("application/json", b"[1]"), ("application/json", b"{")):
        with pytest.raises(CannotInject):
            put(inject, headers=[("Content-Type", kind)], body=body)


def test_a_value_that_a_header_cant_carry() -> None:
    request = Outgoing("GET", "a", "/", [], None)
    with pytest.raises(CannotInject):
        injection.apply({"bearer": "{{secret:x}}"}, {"x": "snow\u2603"}, request)


def test_signature_version_4_as_published() -> None:
    """The example of the published documentation of Signature Version 4 (GET object of S3)."""
    values = {"id": "AKIAIOSFODNN7EXAMPLE", "key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}
    request = Outgoing("GET", "examplebucket.s3.amazonaws.com", "/test.txt", [], None)
    inject = {"aws": "{{secret:id}}:{{secret:key}}", "service": "s3", "region": "us-east-1"}
    now = datetime.datetime(2013, 5, 24, tzinfo=datetime.UTC)
    # The page signs a Range header too; here is what its rules give without one.
    signed = dict(injection.apply(inject, values, request, now).headers)
    assert signed["X-Amz-Date"] == "20130524T000000Z"
    assert (
        signed["X-Amz-Content-Sha256"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )
    assert signed["Authorization"].startswith(
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature="
    )
    lists = Outgoing("GET", "examplebucket.s3.amazonaws.com", "/?max-keys=2&prefix=J", [], None)
    signed = dict(injection.apply(inject, values, lists, now).headers)
    # "GET Bucket (List Objects)" of the same page, whole.
    assert signed["Authorization"].endswith(
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("s3.eu-west-1.amazonaws.com", ("s3", "eu-west-1")),
        ("bucket.s3.us-gov-east-1.amazonaws.com:443", ("s3", "us-gov-east-1")),
        ("sts.amazonaws.com", ("sts", "us-east-1")),
        ("dynamodb.us-east-2.amazonaws.com", ("dynamodb", "us-east-2")),
        ("example.com", ("", "")),
    ],
)
def test_endpoints(host: str, endpoint: tuple[str, str]) -> None:
    assert injection._endpoint(host) == endpoint


MARKS = "rfsecret0" + "a" * 32


def test_placeholders_are_found_wherever_they_stand() -> None:
    basic = "Basic " + base64.b64encode(f"u:{MARKS}".encode()).decode()
    for target, headers, body in (
        (f"/x?k={MARKS.upper()}", [], None),
        (f"/{MARKS}", [], None),
        ("/", [("X-Key", f"a {MARKS}")], None),
        ("/", [("Authorization", basic)], None),
        ("/", [], f'{{"k": "{MARKS}"}}'.encode()),
    ):
        assert injection.found_in(target, headers, body) == {MARKS}
    assert not injection.found_in("/rfsecret0abc", [("A", "rfsecret0")], b"rfsecret")


def test_placeholders_are_swapped_where_they_stand() -> None:
    basic = "Basic " + base64.b64encode(f"u:{MARKS}".encode()).decode()
    request = Outgoing(
        "POST", "a", f"/x?k={MARKS}", [("X", MARKS), ("Authorization", basic), ("Content-Type", "application/json")],  # noqa: E501
        json.dumps({"k": MARKS}).encode(),
    )  # fmt: skip
    found = injection.swap(request, {MARKS: 'va"l&ue'})
    assert found.target == "/x?k=va%22l%26ue"
    assert found.headers[0] == ("X", 'va"l&ue')
    assert base64.b64decode(found.headers[1][1][6:]) == b'u:va"l&ue'
    assert json.loads(found.body or b"") == {"k": 'va"l&ue'}


def test_redaction() -> None:
    redactor = Redactor()
    redactor.learn(["s3cret/value", "ab"])
    encoded = base64.b64encode(b"s3cret/value").decode()
    for text in ("x s3cret/value y", "s3cret%2Fvalue", encoded, MARKS, MARKS.upper()):
        assert redactor.text(text) in (MARK, f"x {MARK} y")
    assert redactor.text("ab cab") == "ab cab"  # too short to be looked for
    assert (
        redactor.target("/x?api_key=abc&q=1&access_token=x") == f"/x?api_key={MARK}&q=1&access_token={MARK}"
    )
    assert redactor.headers([("Cookie", "a=1"), ("X", "1 s3cret/value")]) == [
        ["Cookie", MARK],
        ["X", f"1 {MARK}"],
    ]
    assert redactor.values({"a": ["s3cret/value", 1]}) == {"a": [MARK, 1]}


@given(st.binary(max_size=40), st.binary(max_size=40), st.lists(st.integers(1, 7), max_size=30))
def test_an_echoed_secret_never_gets_through_however_it_is_cut(
    before: bytes, after: bytes, cuts: list[int]
) -> None:
    secret = "topsecretvalue"
    body = before + secret.encode() + after
    starring, got, rest = Starring([secret]), b"", body
    for cut in cuts:
        got += starring.feed(rest[:cut])
        rest = rest[cut:]
    got += starring.feed(rest) + starring.end()
    assert len(got) == len(body) and secret.encode() not in got
    assert got.startswith(before) and got.endswith(after)


def test_a_stream_of_events_is_not_held_back() -> None:
    starring = Starring(["topsecretvalue"])
    assert starring.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert starring.feed(b"data: top") == b"data: "
    assert starring.feed(b"ic\n\n") == b"topic\n\n"
