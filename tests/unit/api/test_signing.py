"""Tokens, signatures, cursors: only what was made is taken, for what it was made."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.api.signing import Signer
from ringfence.model.errors import InvalidRequest, NotAuthenticated

ONE, OTHER = Signer(b"1" * 32), Signer(b"2" * 32)
BOX = "sb-00000000000000000000"


def test_tokens_open_their_ports_for_their_time() -> None:
    ONE.check_token(ONE.token(BOX), BOX, 1)
    some = ONE.token(BOX, (80, 443), time.time() + 60)
    ONE.check_token(some, BOX, 443)
    for signer, token, box, port in (
        (ONE, some, BOX, 8443),
        (ONE, some, BOX, 4),
        (ONE, some, BOX[:-1] + "1", 443),
        (OTHER, some, BOX, 443),
        (ONE, ONE.token(BOX, (443,), time.time() - 1), BOX, 443),
    ):
        with pytest.raises(NotAuthenticated):
            signer.check_token(token, box, port)


@given(st.text(max_size=80), st.integers(0, 70))
def test_no_other_text_is_a_token(text: str, at: int) -> None:
    real = ONE.token(BOX, (80,))
    changed = real[:at] + text + real[at + 1 :]
    for token in (text, "rft_" + text, changed):
        if token == real:
            continue
        with pytest.raises(NotAuthenticated):
            ONE.check_token(token, BOX, 80)


def test_signatures_are_of_one_method_path_and_time() -> None:
    later = int(time.time()) + 60
    signature = ONE.sign("GET", BOX, "/a", later)
    ONE.check_signature(signature, "GET", BOX, "/a", str(later))
    for given_ in (
        ("PUT", BOX, "/a", str(later)),
        ("GET", BOX, "/b", str(later)),
        ("GET", BOX, "/a", str(later + 1)),
        ("GET", BOX, "/a", "-1"),
        ("GET", BOX, "/a", "9" * 40),
        ("GET", BOX, "/a", "²"),
        ("GETs", BOX[1:], "/a", str(later)),
    ):
        with pytest.raises(NotAuthenticated):
            ONE.check_signature(signature, *given_)
    past = int(time.time()) - 1
    with pytest.raises(NotAuthenticated):
        ONE.check_signature(ONE.sign("GET", BOX, "/a", past), "GET", BOX, "/a", str(past))


def test_parts_can_not_be_moved_into_one_another() -> None:
    assert ONE.sign("GET", "sb-a", "b/c", 1) != ONE.sign("GET", "sb-ab", "/c", 1)


@given(st.text(max_size=60))
def test_cursors(text: str) -> None:
    cursor = ONE.cursor("things", "p", "id-1")
    assert ONE.after("things", "p", cursor) == "id-1"
    for what, project, given_ in (("others", "p", cursor), ("things", "q", cursor), ("things", "p", text)):
        if given_ == cursor and (what, project) == ("things", "p"):
            continue
        with pytest.raises(InvalidRequest):
            ONE.after(what, project, given_)


def test_a_weak_secret_is_none() -> None:
    with pytest.raises(ValueError, match="32"):
        Signer(b"short")
