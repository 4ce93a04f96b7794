"""The policy engine: what may pass, and why not."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.names import Host, address_class, parse_host
from ringfence.egress.policy import BadPath, Rules, normal_path
from ringfence.model.policies import network_from_dict
from ringfence.model.policy import Network, NetworkRule


def rules(*allow: dict[str, Any], trust: Any = None) -> Rules:
    return Rules(network_from_dict({"mode": "egress", "allow": list(allow)}), trust)


def host(text: str) -> Host:
    return parse_host(text)


@pytest.mark.parametrize(
    ("rule", "name", "covered"),
    [
        ("api.example.com", "api.example.com", True),
        ("api.example.com", "API.Example.com.", True),
        ("api.example.com", "api.example.com.evil.example", False),
        ("api.example.com", "xapi.example.com", False),
        ("api.example.com", "example.com", False),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "evilexample.com", False),
        ("*.example.com", "a.example.com.evil.example", False),
        ("203.0.113.7", "203.0.113.7", True),
        ("203.0.113.7", "3405803783", True),
        ("203.0.113.7", "[::ffff:203.0.113.7]", True),
        ("203.0.113.7", "203.0.113.8", False),
        ("203.0.113.0/24", "203.0.113.200", True),
        ("203.0.113.0/24", "203.0.114.1", False),
        ("2001:db8::/32", "2001:db8::5", True),
        ("127.0.0.1", "localhost", False),  # a name is never an address, and the other way round
    ],
)
def test_hosts(rule: str, name: str, covered: bool) -> None:
    assert rules({"host": rule}).connect(host(name), 443).allowed is covered


def test_port_protocol_method_path() -> None:
    found = rules(
        {"host": "a.example", "ports": [443, 8443], "methods": ["GET"], "paths": ["/v1/*", "/health"]},
        {"host": "a.example", "ports": [443], "methods": ["POST"], "paths": ["/v1/chat"]},
        {"host": "db.example", "ports": [5432], "protocol": "tcp"},
    )
    a, db = host("a.example"), host("db.example")
    assert found.connect(a, 443).allowed and found.connect(a, 8443).allowed
    denied = found.connect(a, 22)
    assert (denied.allowed, denied.code) == (False, "no_rule")
    assert "on port 443, 8443, not 22" in denied.reason and "network.allow" in denied.hint
    assert found.request(a, 443, "https", "GET", "/v1/x").rule is found.rules[0]
    assert found.request(a, 443, "https", "GET", "/health").allowed
    assert found.request(a, 443, "https", "POST", "/v1/chat").rule is found.rules[1]
    assert found.request(a, 443, "https", "POST", "/v1/other").code == "path"
    assert found.request(a, 8443, "https", "POST", "/v1/chat").code == "method"
    for path in ("/v1", "/v2/x", "/healthy", "/V1/x", "/"):
        assert found.request(a, 443, "https", "GET", path).code == "path"
    assert found.connect(db, 5432, "tcp").allowed
    assert found.connect(db, 5432, "tls").code == "protocol"
    assert found.connect(a, 443, "tcp").code == "protocol"
    assert found.request(db, 5432, "http", "GET", "/").code == "protocol"


def test_inspection_is_for_those_who_need_it() -> None:
    where = host("a.example"), 443
    secret = {"header": "Authorization", "value": "Bearer {{secret:x}}"}
    assert rules({"host": "a.example"}).tls_mode(*where) == "pass"
    for more in ({"methods": ["GET"]}, {"paths": ["/v1/*"]}, {"inject": secret}, {"tls": "inspect"}):
        assert rules({"host": "a.example"} | more).tls_mode(*where) == "inspect"
    assert rules({"host": "a.example"}, trust="untrusted").tls_mode(*where) == "inspect"
    assert rules({"host": "a.example", "tls": "pass"}, trust="untrusted").tls_mode(*where) == "pass"
    # One rule that must see requests is enough: the other would let them slip past it.
    both = rules({"host": "a.example"}, {"host": "*.example", "methods": ["GET"]})
    assert both.tls_mode(*where) == "inspect"


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fe80::1", "100.64.1.1", "224.0.0.1"]
)
def test_special_addresses_have_to_be_named(text: str) -> None:
    address = ipaddress.ip_address(text)
    name = host("a.example")
    found = rules({"host": "a.example"})
    good, decision = found.address(found.rules[0], name, [address])
    assert not good and decision.code == "address" and str(address) in decision.reason
    named = rules({"host": "a.example", "addresses": [text]})
    assert named.address(named.rules[0], name, [address])[0] == [address]
    public = ipaddress.ip_address("203.0.113.5")
    assert found.address(found.rules[0], name, [address, public])[0] == [public]  # the control
    # Who names addresses means these: another one, public or not, is not it.
    assert not named.address(named.rules[0], name, [public])[0]


@pytest.mark.parametrize(
    ("wide", "inside"), [("169.254.0.0/16", "169.254.169.254"), ("128.0.0.0/8", "128.0.0.1")]
)
def test_wide_ranges_name_no_credentials(wide: str, inside: str) -> None:
    found = rules({"host": "a.example", "addresses": [wide]})
    address = ipaddress.ip_address(inside)
    good, _ = found.address(found.rules[0], host("a.example"), [address])
    assert bool(good) is (address_class(address) is None)


def test_names_for_the_resolver() -> None:
    found = rules({"host": "a.example"}, {"host": "*.b.example", "ports": [80]}, {"host": "203.0.113.7"})
    assert found.name_allowed("a.example") and found.name_allowed("x.b.example")
    for name in ("b.example", "secret-data.a.example", "c.example", "203.0.113.7"):
        assert not found.name_allowed(name)


def test_mode_none_allows_nothing() -> None:
    network = Network("none", (NetworkRule("a.example"),))
    assert not Rules(network).connect(host("a.example"), 443).allowed


@pytest.mark.parametrize(
    ("target", "normal"),
    [
        ("/", ("/", "")),
        ("/v1/x?q=/../&r=%2e", ("/v1/x", "?q=/../&r=%2e")),
        ("/%76%31/x", ("/v1/x", "")),
        ("/a%20b%c3%bc", ("/a%20b%C3%BC", "")),
        ("/a.b/..c/.d", ("/a.b/..c/.d", "")),
        ("/a//b", ("/a//b", "")),
        ("/v1/x;y=1", ("/v1/x;y=1", "")),
    ],
)
def test_paths_in_one_form(target: str, normal: tuple[str, str]) -> None:
    assert normal_path(target) == normal


@pytest.mark.parametrize(
    "target",
    [
        "", "v1", "*", "/v1/../admin", "/v1/./x", "/v1/..", "/v1/%2e%2e/admin", "/v1/%2E./admin", "/v1/.%2e/admin",  # noqa: E501
        "/v1/..;/admin", "/v1/..;x=1/admin", "/v1/%2e%2e;/admin", "/v1%2f..%2fadmin", "/v1/..%2fadmin", "/v1%5cadmin",  # noqa: E501
        "/v1\\..\\admin", "/v1/%252e%252e/admin", "/v1/%25%32%65/x", "/v1/%00", "/v1/%0d%0aX:y", "/v1/%zz", "/v1/%",  # noqa: E501
        "/v1/%2", "/v1 x", "/v1\tx", "/v1/#x", "/v1/\x7f", "/v1/ü", "/v1/%252f",
    ],
)  # fmt: skip
def test_paths_that_servers_read_differently_are_refused(target: str) -> None:
    try:
        path, _ = normal_path(target)
    except BadPath:
        return
    assert target == "/v1/%25%32%65/x" and path == "/v1/%252e/x", path


@given(st.text(alphabet="/.%2eEfF5cC;v1x\\?#", max_size=24))
def test_a_path_that_passes_stays_below_its_prefix(text: str) -> None:
    """However a server decodes and resolves it, once or twice: what matched /v1/* is below /v1/."""
    import posixpath
    from urllib.parse import unquote

    try:
        path, _ = normal_path("/v1/" + text)
    except BadPath:
        return
    assert normal_path(path) == (path, "")
    for times in range(3):
        seen = path
        for _ in range(times):
            seen = unquote(seen)
        segments = [segment.partition(";")[0] for segment in seen.replace("\\", "/").split("/")]
        assert posixpath.normpath("/".join(segments)).replace("//", "/").startswith("/v1")
        assert ".." not in segments
