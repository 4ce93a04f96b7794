"""A remembered answer lets through what was asked, and nothing beside it."""

from __future__ import annotations

from itertools import product

import pytest

from ringfence.egress.names import parse_host
from ringfence.egress.policy import Decision, Protocol, Rules
from ringfence.egress.remembering import as_text, rule_of
from ringfence.model.policy import Network, NetworkRule

HOST, OTHER = parse_host("a.example"), parse_host("b.example")
PROTOCOLS: tuple[Protocol, ...] = ("http", "tls")
REQUESTS = tuple(product((HOST, OTHER), (443, 444), PROTOCOLS, ("GET", "POST"), ("/x", "/xy", "/x*")))


def _rules(port: int, protocol: str | None, method: str, path: str) -> Rules:
    asked = {"host": str(HOST), "port": port, "protocol": protocol, "method": method, "path": path}
    return Rules(Network(mode="egress"), None, [rule_of(as_text(asked), None)])


def _request(rules: Rules, host: object, port: int, protocol: str, method: str, path: str) -> Decision:
    return rules.request(host, port, "https" if protocol == "tls" else "http", method, path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("protocol", "method", "path"), list(product(PROTOCOLS, ("GET", "POST"), ("/x", "/x*")))
)
def test_a_request(protocol: Protocol, method: str, path: str) -> None:
    rules = _rules(443, protocol, method, path)
    passed = [each for each in REQUESTS if _request(rules, *each).allowed]
    assert passed == [(HOST, 443, protocol, method, path)]
    other = next(each for each in PROTOCOLS if each != protocol)
    assert not rules.connect(HOST, 443, other).allowed
    assert rules.connect(HOST, 443, protocol).allowed


@pytest.mark.parametrize("protocol", ["http", "tls", "tcp"])
def test_a_connection(protocol: str) -> None:
    rules = _rules(443, protocol, "", "")
    every: tuple[Protocol, ...] = ("http", "tls", "tcp")
    assert [each for each in every if rules.connect(HOST, 443, each).allowed] == [protocol]
    assert {each[2] for each in REQUESTS if _request(rules, *each).allowed} == {protocol} - {"tcp"}


def test_another_protocol_is_asked_for_again() -> None:
    """What was answered excludes nothing; what a policy says does."""
    rules = _rules(443, "http", "GET", "/x")
    assert rules.connect(HOST, 443, "tls").unknown
    assert _request(rules, HOST, 443, "tls", "GET", "/x").unknown
    stated = Rules(Network(mode="egress", allow=(NetworkRule("a.example", (443,), protocol="tcp"),)))
    decision = stated.connect(HOST, 443, "tls")
    assert not decision.allowed and not decision.unknown
