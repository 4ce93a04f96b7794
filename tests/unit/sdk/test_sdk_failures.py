"""Errors from the wire are the classes of the model."""

from __future__ import annotations

import errno
import json

import pytest

from ringfence.model import errors
from ringfence.sdk import failures


def test_every_code_of_the_model_comes_back_as_its_class() -> None:
    def below(kind: type[errors.RingfenceError]) -> list[type[errors.RingfenceError]]:
        return [kind, *(found for each in kind.__subclasses__() for found in below(each))]

    kinds = [kind for kind in below(errors.RingfenceError) if kind.__module__ == "ringfence.model.errors"]
    assert len(kinds) > 20
    for kind in kinds:
        made = failures.from_object({"code": kind.code, "message": "why", "hint": "how", "details": {"a": 1}})
        assert type(made) is kind
        assert (made.message, made.hint, made.details["a"]) == ("why", "how", 1)
        assert str(made) == "why"


def test_the_errno_of_the_guest_survives() -> None:
    sent = errors.GuestRefused(errno.ENOENT, "read /nothing").as_dict()
    made = failures.from_object(json.loads(json.dumps(sent)))
    assert isinstance(made, errors.GuestRefused)
    assert made.errno == errno.ENOENT
    assert made.message == sent["message"]


def test_what_an_answer_says_about_itself_is_kept() -> None:
    body = json.dumps(
        {"error": {"code": "rate_limited", "message": "slowly", "hint": "", "details": {}}}
    ).encode()
    made = failures.from_response(429, {"retry-after": "7", "x-request-id": "rq-1"}, body)
    assert isinstance(made, errors.RateLimited)
    assert made.details == {"status": 429, "request_id": "rq-1", "retry_after": 7.0}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, errors.NotFound),
        (413, errors.InvalidRequest),
        (502, errors.NodeUnavailable),
        (599, errors.RingfenceError),
    ],
)
def test_an_answer_of_somebody_else_is_told_by_its_status(
    status: int, kind: type[errors.RingfenceError]
) -> None:
    made = failures.from_response(status, {}, b"<html>gateway\x1b[2J</html>")
    assert type(made) is kind
    assert "\x1b" not in made.message


def test_a_code_of_a_later_version_is_told_by_its_status() -> None:
    made = failures.from_object({"code": "moon_phase", "message": "no"}, status=409)
    assert type(made) is errors.Conflict
    assert made.details["code"] == "moon_phase"


@pytest.mark.parametrize(
    "value", [None, 7, [], "x", {"details": 5}, {"details": {"message": "m", "hint": "h"}}]
)
def test_nonsense_is_an_error_too(value: object) -> None:
    assert isinstance(failures.from_object(value, status=500), errors.RingfenceError)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\udcff.txt", "a\\xff.txt"),
        ('{"argv": ["echo", "one two\udcff\udcfe"]}', "two\\xff\\xfe"),
        ("/v1/sandboxes/\udc80?x=1", "\\x80"),
        ("x" * 1000 + "\udcff", "x" * 80 + "\\xff"),
    ],
)
def test_what_is_not_utf8_is_named(text: str, shown: str) -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        text.encode()
    made = failures.not_utf8(caught.value)
    assert made.message == f"'{shown}' is not UTF-8"
    assert made.message.isprintable()
    assert made.hint
