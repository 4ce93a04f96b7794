"""Ways out of a sandbox with network mode egress, and what must come of each: on every runtime the same.

``reached``: it came through; ``stopped``: it did not. Each way has its control: the same aim, taken from a
place with a network and no door, succeeds. What *must* pass is in here too: a shut door stops everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.internet import METADATA

Seen = dict[str, Any]

# The policy's network part that the ways are tried against.
NETWORK: dict[str, Any] = {
    "mode": "egress",
    "allow": [
        {"host": "api.example.test", "ports": [443], "tls": "pass"},
        {"host": "api.example.test", "ports": [5432], "protocol": "tcp"},
        {"host": "web.example.test", "ports": [80], "protocol": "http"},
        {"host": "front.example.test", "ports": [443], "tls": "pass"},
        {"host": "front.example.test", "ports": [80], "protocol": "tls"},
        {"host": "inspected.example.test", "methods": ["GET"], "paths": ["/mark-*"], "tls": "inspect"},
        {"host": "keyed.example.test", "inject": {"placeholder": "{{secret:token}}"}},
        {"host": "metadata.example.test", "ports": [80]},
        {"host": "inner.example.test", "ports": [80]},
        {"host": "mapped.example.test", "ports": [80]},
        {"host": "loop.example.test", "ports": [80]},
        {"host": "rebind.example.test", "ports": [80]},
        {"host": "selfsigned.example.test"},
        {"host": "wrongname.example.test"},
        {"host": "expired.example.test"},
    ],
}


SECRET = "made-up-secret-7f3a"  # what the placeholder stands for


def has_secret(seen: Seen) -> bool:
    """The secret itself came through."""
    return SECRET in json.dumps(seen)


@dataclass(frozen=True, slots=True)
class Way:
    """One way out. ``aim``: which of the servers' lines with its mark mean that it reached its aim; without
    one any line does, and so does its own word. ``elsewhere``: the outcome on runtimes that can't catch
    connections, where it differs. ``control``: why there is none, where there is none."""

    name: str
    outcome: str
    what: str
    aim: Callable[[Seen], bool] | None = None
    elsewhere: str = ""
    control: str = ""

    def expected(self, transparent: bool) -> str:
        """The outcome on a runtime."""
        return self.outcome if transparent or not self.elsewhere else self.elsewhere


def _pass(name: str, what: str, **more: Any) -> Way:
    return Way(name, "reached", what, **more)


def _stop(name: str, what: str, **more: Any) -> Way:
    return Way(name, "stopped", what, **more)


# A virtual machine is slow to emulate: these are tried in it unless it is chosen by name.
IN_MACHINES = (
    "allowed-https", "allowed-http", "allowed-socks", "allowed-caught", "allowed-tcp", "direct-address",
    "direct-name", "direct-ipv6", "direct-metadata", "no-proxy", "unset-variables", "udp", "raw-socket",
    "dns-tunnel-udp", "dns-tunnel-tcp", "connect-evil", "connect-metadata", "name-to-private", "socks-evil",
    "http-evil", "sni-other", "fronting-inspected", "smuggling-both-lengths",
)  # fmt: skip

WAYS = (
    _pass("allowed-https", "an allowed host over HTTPS, by CONNECT"),
    _pass("allowed-http", "an allowed host over plain HTTP, by the proxy"),
    _pass("allowed-socks", "an allowed host by SOCKS5"),
    _pass("allowed-caught", "an allowed host, from a program that knows of no proxy", elsewhere="stopped"),
    _pass("allowed-websocket", "a WebSocket to an allowed host"),
    _pass("allowed-spelling", "an allowed host in other spelling: capitals, a dot at the end"),
    _pass("allowed-tcp", "plain TCP where a rule says so"),
    # past the door
    _stop("direct-address", "a connection straight to an address"),
    _stop("direct-address-tls", "the same with TLS"),
    _stop("direct-allowed-address", "the address of an allowed host, not by its name"),
    _stop("direct-name", "a name that no rule allows, resolved and connected to"),
    _stop("direct-ipv6", "an IPv6 address"),
    _stop("direct-mapped", "an IPv4 address written as IPv6"),
    _stop("direct-metadata", "the metadata address"),
    _stop("direct-private", "an address of a private network"),
    _stop("caught-wrong-sni", "to an allowed name's address, with another name in the TLS handshake"),
    _stop("no-proxy", "NO_PROXY=*"),
    _stop("unset-variables", "proxy variables removed"),
    _stop("udp", "UDP"),
    _stop("quic", "QUIC (UDP port 443)"),
    _stop("udp-by-socks", "UDP by SOCKS5"),
    _stop("icmp", "ICMP echo (unprivileged socket)"),
    _stop("raw-socket", "a raw socket"),
    _stop("packet-socket", "a packet socket"),
    _stop("set-route", "a route of one's own, by netlink"),
    # names
    _stop("dns-tunnel-udp", "data in a name, asked of the sandbox's resolver"),
    _stop("dns-tunnel-server", "data in a name, asked of a server of one's own choice"),
    _stop("dns-tunnel-tcp", "data in a name, over TCP"),
    _stop(
        "dns-tunnel-txt",
        "data in a name, in a TXT question",
        aim=lambda seen: seen["what"] == "dns",
    ),
    _stop("dns-tunnel-proxy", "data in a name that only the proxy would resolve"),
    # through the door, where no rule leads
    _stop("connect-evil", "CONNECT to another host"),
    _stop("connect-address", "CONNECT to an address"),
    _stop("connect-other-port", "CONNECT to another port of an allowed host"),
    _stop("connect-metadata", "CONNECT to the metadata address"),
    _stop("connect-metadata-decimal", "the same, as a decimal number"),
    _stop("connect-metadata-octal", "the same, in octal"),
    _stop("connect-metadata-hex", "the same, in hexadecimal"),
    _stop("connect-metadata-mapped", "the same, as IPv6"),
    _stop("name-to-metadata", "an allowed name that points to the metadata address"),
    _stop("name-to-private", "an allowed name that points into a private network"),
    _stop("name-to-mapped", "the same, by an IPv6 address that carries it"),
    _stop("name-to-loopback", "an allowed name that points to loopback"),
    _stop(
        "rebinding",
        "an allowed name that changes its address between look-ups",
        aim=lambda seen: bool(seen.get("address") == METADATA),
    ),
    _stop("socks-evil", "SOCKS5 to another host"),
    _stop("socks-metadata", "SOCKS5 to the metadata address"),
    _stop("http-evil", "the proxy asked for another host"),
    _stop("http-userinfo", "another host behind an allowed one and an @"),
    _stop(
        "http-other-host",
        "an allowed URL with another Host header",
        aim=lambda seen: bool(seen.get("host") == "hidden.example.test"),
    ),
    _stop("connect-other-host", "CONNECT with another Host header"),
    _stop("sni-other", "CONNECT to an allowed host, another name in the TLS handshake"),
    _stop("sni-none", "CONNECT to an allowed host, no name in the TLS handshake"),
    Way(
        "fronting-passed",
        "reached",
        "domain fronting inside TLS that is passed on: not stopped, use tls: inspect for shared addresses",
    ),
    _stop("fronting-inspected", "domain fronting inside TLS that is inspected"),
    _stop("relayed-connect", "CONNECT within a connection to an allowed host that relays"),
    _stop("relayed-connect-tls", "the same within inspected TLS"),
    _stop("plain-where-tls", "plain HTTP where a rule says TLS"),
    _stop("method-other", "a method that the rule does not allow"),
    _stop("path-traversal", "a path that servers may read as another"),
    _stop("redirect-metadata", "an allowed host redirects to the metadata address", aim=lambda seen: False),
    _stop("redirect-evil", "an allowed host redirects to another host", aim=lambda seen: False),
    _stop("certificate-selfsigned", "an allowed name, a certificate of nobody known"),
    _stop("certificate-wrongname", "an allowed name, another one's certificate"),
    _stop("certificate-expired", "an allowed name, a certificate from the past"),
    _stop("smuggling-both-lengths", "a request with a length and chunks"),
    _stop("smuggling-two-lengths", "a request with two lengths", control="careful servers refuse it too"),
    _stop("smuggling-odd-coding", "a request with an odd transfer coding"),
    _stop(
        "smuggling-bare-newline",
        "a header hidden behind a bare newline",
        control="careful servers refuse it too",
    ),
    _stop("smuggling-space", "a space before the colon", control="careful servers refuse it too"),
    # credentials
    _pass("placeholder-bound", "a placeholder on its way to its own host becomes the secret", aim=has_secret),
    _stop("placeholder-elsewhere", "a placeholder on its way to another allowed host"),
    _stop("placeholder-encoded", "the same, in Basic authentication"),
    _stop(
        "placeholder-passed",
        "the same, in TLS that is passed on: what arrives is worth nothing",
        aim=has_secret,
    ),
    # other ways
    _stop("abstract-socket", "an abstract socket of the host's"),
    _stop("neighbour", "another sandbox as a relay"),
    _stop("agent-ports", "the agent's port for caught connections, spoken to at once"),
    _stop("pass-descriptor", "a descriptor of a socket outside"),
    # too much of it
    _pass("oversized-headers", "two megabytes of headers: the door serves on"),
    _pass("slow-requests", "60 requests that never end: the door serves on"),
    _pass("slow-readers", "8 answers that nobody reads: the door serves on"),
    _pass("flood", "320 connections at once, more than a policy lets in: the door serves on"),
)
