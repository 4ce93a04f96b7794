"""Hosts and addresses as hostile programs write them."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.names import BadHost, Host, address_class, parse_host, plain


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("EXAMPLE.com", "example.com"),
        ("example.com.", "example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example.", "xn--bcher-kva.example"),
        ("exa\u3002mple.com", "exa.mple.com"),
        ("ｅｘａｍｐｌｅ.com", "example.com"),
        ("a_b.example", "a_b.example"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("169.254.43518", "169.254.169.254"),
        ("0xa9fea9fe", "169.254.169.254"),
        ("１２７.０.０.１", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[::ffff:127.0.0.1]", "127.0.0.1"),
        ("::ffff:a9fe:a9fe", "169.254.169.254"),
        ("[0:0:0:0:0:ffff:7f00:1]", "127.0.0.1"),
    ],
)
def test_one_form_for_all_spellings(text: str, meaning: str) -> None:
    assert str(parse_host(text)) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "a..b", ".a", "a b", "a\tb", "a\nb", "a\x00b", "user@host", "good.example@evil.example",  # noqa: E501
        "good.example%2eevil.example", "good.example%00.evil.example", "a/b", "a\\b", "a?b", "a#b", "a:80", "[::1",  # noqa: E501
        "::1]", "[::1]:80", "fe80::1%eth0", "[fe80::1%25eth0]", "1.2.3.4.5", "256.1.1.1", "1.2.3.256", "08.0.0.1",  # noqa: E501
        "0x100000000", "4294967296", "1.2.3.0x", "example.1", "-a.example", "a-.example", "xn--a.example",
        "xn--\u00fc.example", "a" * 64 + ".example", "a." * 130 + "example", "\u2024example.com", "ex\u00adam\u200bple.com",  # noqa: E501
        "https://example.com", "*.example.com", "{a}.example", "'a'.example",
    ],
)  # fmt: skip
def test_what_is_no_host_or_an_ambiguous_one_is_refused(text: str) -> None:
    try:
        found = parse_host(text)
    except BadHost:
        return
    # Characters that a resolver drops may be dropped, but nothing else may come of it.
    assert (text == "ex\u00adam\u200bple.com" and found == Host("example.com")) or text == "1.2.3.0x"


@given(st.text(max_size=80))
def test_whatever_comes_is_a_canonical_host_or_refused(text: str) -> None:
    try:
        host = parse_host(text)
    except BadHost:
        return
    assert parse_host(str(host)) == host
    assert str(host) == str(host).lower() and str(host).isascii()
    assert (host.address is None) == bool(host.name)
    if host.name:
        with pytest.raises(ValueError, match="does not appear"):
            ipaddress.ip_address(host.name)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["decimal", "hex", "octal", "dotted-octal", "two", "mapped"])
)
def test_every_way_to_write_an_address_is_that_address(number: int, how: str) -> None:
    address = ipaddress.IPv4Address(number)
    octets = address.packed
    text = {
        "decimal": str(number),
        "hex": hex(number),
        "octal": "0" + oct(number)[2:],
        "dotted-octal": ".".join("0" + oct(octet)[2:] for octet in octets),
        "two": f"{octets[0]}.{number & 0xFFFFFF}",
        "mapped": f"::ffff:{address}",
    }[how]
    assert parse_host(text).address == address


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("8.8.8.8", None),
        ("203.0.113.9", None),
        ("2001:4860:4860::8888", None),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("::1", "loopback"),
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("::", "unspecified"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.32.0.1", None),
        ("192.168.1.1", "private"),
        ("fd12::1", "private"),
        ("169.254.1.1", "link-local"),
        ("fe80::1", "link-local"),
        ("169.254.169.254", "metadata"),
        ("169.254.170.2", "metadata"),
        ("100.100.100.200", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("100.64.0.1", "cgnat"),
        ("224.0.0.251", "multicast"),
        ("ff02::1", "multicast"),
        ("255.255.255.255", "broadcast"),
        ("240.0.0.1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("192.0.0.9", "reserved"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:169.254.169.254", "metadata"),
        ("::10.0.0.1", "private"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("64:ff9b::808:808", None),
        ("2002:7f00:1::", "loopback"),
        ("2002:808:808::1", None),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", "loopback"),  # Teredo whose client is 127.0.0.1
        ("2001:db8::5efe:10.0.0.1", "private"),
    ],
)
def test_classes_of_addresses(text: str, kind: str | None) -> None:
    assert address_class(ipaddress.ip_address(text)) == kind


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_nothing_special_is_taken_for_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    kind = address_class(address)
    real = plain(address)
    if real.is_loopback or real.is_link_local or real.is_multicast or real.is_unspecified:
        assert kind is not None
    if isinstance(real, ipaddress.IPv4Address):
        assert address_class(ipaddress.IPv6Address(f"::ffff:{real}")) == kind
        assert address_class(ipaddress.IPv6Address(0x64FF9B << 96 | int(real))) == kind
