"""The short form of a network rule."""

from __future__ import annotations

import pytest

from ringfence.cli.allowing import rule
from ringfence.cli.options import parse_quickly
from ringfence.cli.requesting import policy
from ringfence.model.errors import InvalidRequest, PolicyError
from ringfence.model.policy import NetworkRule


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("api.example.test", NetworkRule("api.example.test", (443,))),
        ("api.example.test:8443", NetworkRule("api.example.test", (8443,))),
        ("*.example.test:443,8443", NetworkRule("*.example.test", (443, 8443))),
        ("http://example.test/", NetworkRule("example.test", (80,), protocol="http")),
        ("https://example.test", NetworkRule("example.test", (443,), protocol="tls")),
        ("tcp://db.example.test:5432", NetworkRule("db.example.test", (5432,), protocol="tcp")),
        ("203.0.113.7:22", NetworkRule("203.0.113.7", (22,))),
        ("203.0.113.0/24:22", NetworkRule("203.0.113.0/24", (22,))),
        ("2001:db8::1", NetworkRule("2001:db8::1", (443,))),
        ("[2001:db8::1]:22", NetworkRule("2001:db8::1", (22,))),
        ("[2001:db8::]/32:22", NetworkRule("2001:db8::/32", (22,))),
    ],
)
def test_forms(text: str, expected: NetworkRule) -> None:
    assert rule(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host"),
        (":443", "no host"),
        ("tcp://db.example.test", "no port"),
        ("ftp://example.test", "no protocol"),
        ("https://user@example.test", "more than a host"),
        ("example.test/path", "more than a host"),
        ("http://example.test/path", "more than a host"),
        ("example.test:0", "is no port"),
        ("example.test:70000", "is no port"),
        ("example.test:443,", "is no port"),
        ("example.test:https", "is no port"),
        ("example.test:\uff14\uff14\uff13", "is no port"),
    ],
)
def test_what_is_none(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        rule(text)
    assert caught.value.hint


def test_allow_means_egress() -> None:
    options = parse_quickly(["--allow", "api.example.test", "--allow", "x.test:1", "true"])
    network = policy(options).door.network  # type: ignore[arg-type]
    assert network.mode == "egress"
    assert [each.host for each in network.allow] == ["api.example.test", "x.test"]


@pytest.mark.parametrize("mode", ["none", "open"])
def test_allow_and_another_mode(mode: str) -> None:
    options = parse_quickly(["--net", mode, "--allow", "api.example.test", "true"])
    with pytest.raises(InvalidRequest, match="exclude each other"):
        policy(options)  # type: ignore[arg-type]


def test_hosts_are_judged_as_in_a_file() -> None:
    options = parse_quickly(["--allow", "*", "true"])
    with pytest.raises(PolicyError, match="host"):
        policy(options)  # type: ignore[arg-type]
