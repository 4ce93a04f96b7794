"""The policy engine: may this connection, this request, this address be? No I/O.

A rule is asked three times: with host and port when a connection is wanted, with the resolved address before
it is made, with method and path for every request in it. What no rule allows is denied.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import field
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Literal

from ringfence.egress.names import Address, Host, address_class, plain
from ringfence.model.policy import Network, NetworkRule
from ringfence.model.values import dataclass

Protocol = Literal["http", "tls", "tcp"]
Trust = Literal["untrusted", "controlled", "trusted"] | None

UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_HOW = "ask for it: add a rule under network.allow, or have somebody answer `ringfence egress allow`"


class BadPath(ValueError):
    """A path that servers read differently. The message says why."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether something may be, by which rule, and in words why not.

    ``code`` is stable: ``allowed``, ``no_rule``, ``method``, ``path``, ``protocol``, ``address`` …
    ``unknown``: nobody has thought about it (so one may ask), as against what a rule excludes.
    """

    allowed: bool
    code: str
    rule: Rule | None = None
    reason: str = ""
    hint: str = ""
    unknown: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the log and the answer."""
        return {
            "code": self.code,
            "rule": None if self.rule is None else self.rule.label,
            "reason": self.reason,
        }


class Rule:
    """A rule of a policy, ready to be compared with."""

    def __init__(self, index: int, source: NetworkRule, trust: Trust, origin: str = "policy") -> None:
        self.index = index
        self.source = source
        self.origin = origin
        self.ports = frozenset(source.ports)
        self.methods = frozenset(source.methods)
        self.protocol = source.protocol
        self.name = self.suffix = ""
        self.range: IPv4Network | IPv6Network | None = None
        host = source.host
        if host.startswith("*."):
            self.suffix = host[1:]
        else:
            try:
                self.range = ipaddress.ip_network(host)
            except ValueError:
                self.name = host
        self.addresses = tuple(ipaddress.ip_network(text) for text in source.addresses)
        needs = bool(source.methods or source.paths or source.inject)
        self.inspect = source.protocol != "tcp" and (
            needs or source.tls == "inspect" or (source.tls is None and trust == "untrusted")
        )
        self.exact = frozenset(path for path in source.paths if not path.endswith("*"))
        self.prefixes = tuple(path[:-1] for path in source.paths if path.endswith("*"))

    @cached_property
    def key(self) -> str:
        """Names the rule in counts: the same while its destination and requests are."""
        source = self.source
        parts = (
            source.host,
            sorted(self.ports),
            sorted(self.methods),
            source.paths,
            source.protocol,
            self.origin,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def label(self) -> str:
        """How logs and answers name it."""
        where = "network.inference" if self.origin == "inference" else f"network.allow[{self.index}]"
        if self.origin in ("answer", "learn"):
            where = self.origin
        return f"{where} {self.source.host}:{','.join(map(str, sorted(self.ports)[:4]))}"

    def covers(self, host: Host) -> bool:
        """Whether the rule is about this host, whatever the port."""
        if host.address is not None:
            return self.range is not None and _inside(host.address, (self.range,))
        if self.suffix:
            return host.name.endswith(self.suffix) and len(host.name) > len(self.suffix)
        return bool(self.name) and host.name == self.name

    def permits(self, address: Address) -> tuple[bool, str | None]:
        """Whether the name of this rule may lie at ``address``; and the class of the address."""
        kind = address_class(address)
        named = self.addresses or (() if self.range is None else (self.range,))
        if not named:
            return kind is None, kind
        for one in named:
            if _inside(address, (one,)) and (kind is None or _names(one, kind)):
                return True, kind
        return False, kind


def _names(one: IPv4Network | IPv6Network, kind: str) -> bool:
    """Whether a range is about that kind of addresses: 8.0.0.0/5 does not name the private ones in it, and
    what gives a machine's credentials away is named by itself only.
    """
    if kind == "metadata":
        return one.num_addresses <= 16
    return address_class(one[0]) is not None and address_class(one[-1]) is not None


def _inside(address: Address, ranges: Iterable[IPv4Network | IPv6Network]) -> bool:
    address = plain(address)
    return any(address.version == one.version and address in one for one in ranges)


def _only_answers(rules: Iterable[Rule]) -> bool:
    """Whether no policy says anything about it: what else was answered excludes nothing."""
    return all(rule.origin == "answer" for rule in rules)


def normal_path(target: str) -> tuple[str, str]:
    """Path and query of an origin-form target, the path in one form: what is sent is what was judged.

    Encoded letters, digits, ``-._~`` are decoded; dot segments, encoded slashes, backslashes and control
    characters, also twice encoded ones, are refused, since servers read them differently.

    Raises:
        BadPath: it is not such a target, or an ambiguous one.
    """
    if not target.startswith("/"):
        raise BadPath("a path starts with /")
    path, mark, query = target.partition("?")
    if "#" in target:
        raise BadPath("a request has no fragment")
    if not target.isascii() or any(letter <= " " or letter == "\x7f" for letter in target):
        raise BadPath("it has characters that don't belong in a URL")
    if "\\" in path:
        raise BadPath("it has a backslash, which some servers take for a slash")
    if "%" in path:
        path = re.sub("%(.{0,2})", _decode, path)
    if "/." in path or ";" in path:
        for segment in path.split("/"):
            if segment.partition(";")[0] in (".", ".."):
                raise BadPath("it has dot segments, which servers resolve differently")
    return path, mark + query


def _decode(match: re.Match[str]) -> str:
    digits = match[1]
    try:
        byte = int(digits, 16) if len(digits) == 2 and digits.isalnum() else -1
    except ValueError:
        byte = -1
    if byte < 0:
        raise BadPath("it has a % that encodes nothing")
    if byte in UNRESERVED:
        return chr(byte)
    if byte < 32 or byte in (0x2F, 0x5C, 0x7F):
        raise BadPath(
            "it has an encoded slash, backslash or control character, which servers read differently"
        )
    if byte == 0x25 and re.match("(2e|2f|5c|00|25)", match.string[match.end() : match.end() + 2].lower()):
        raise BadPath("it is encoded twice")
    return "%" + digits.upper()


class Rules:
    """The rules of one sandbox, in the order of its policy. Immutable; an update makes another."""

    def __init__(self, network: Network, trust: Trust = None, more: Iterable[Rule] = ()) -> None:
        self.network = network
        self.trust = trust
        allow = network.allow if network.mode == "egress" else ()
        self.rules = [Rule(index, rule, trust) for index, rule in enumerate(allow)] + list(more)

    def about(self, host: Host, port: int) -> list[Rule]:
        """The rules for this destination, in order."""
        return [rule for rule in self.rules if port in rule.ports and rule.covers(host)]

    def name_allowed(self, name: str) -> bool:
        """Whether a resolver inside may know this name."""
        host = Host(name)
        return any(rule.covers(host) for rule in self.rules)

    def connect(self, host: Host, port: int, protocol: Protocol | None = None) -> Decision:
        """May a connection to this destination be opened? With the protocol, as soon as that is known."""
        about = self.about(host, port)
        if not about:
            ports = sorted({port for rule in self.rules if rule.covers(host) for port in rule.ports})
            if ports:
                reason = f"{host} is allowed on port {', '.join(map(str, ports))}, not {port}"
            else:
                reason = f"no rule allows {host} port {port}"
            return Decision(False, "no_rule", None, reason, _HOW, unknown=True)
        if protocol is None:
            return Decision(True, "allowed", about[0])
        for rule in about:
            if rule.protocol == protocol or (rule.protocol is None and protocol != "tcp"):
                return Decision(True, "allowed", rule)
        wanted = about[0].protocol or "HTTP or TLS"
        return Decision(
            False,
            "protocol",
            about[0],
            f"the rule for {host} port {port} is for {wanted}, and this is {protocol}",
            "a rule with protocol: tcp lets bytes through that are neither HTTP nor TLS",
            unknown=_only_answers(about),
        )

    def tls_mode(self, host: Host, port: int) -> Literal["pass", "inspect"]:
        """Whether TLS to this destination is opened: as soon as one rule for it has to see requests."""
        about = [rule for rule in self.about(host, port) if rule.protocol in (None, "tls")]
        return "inspect" if any(rule.inspect for rule in about) else "pass"

    def request(self, host: Host, port: int, scheme: str, method: str, path: str) -> Decision:
        """May this request be made? ``path`` comes from :func:`normal_path`, without the query."""
        protocol: Protocol = "tls" if scheme in ("https", "wss") else "http"
        about = self.about(host, port)
        if not about:
            return self.connect(host, port)
        code, wanted = "protocol", protocol.upper()
        closest = about[0]
        for rule in about:
            if rule.protocol not in (None, protocol):
                continue
            if rule.methods and method not in rule.methods:
                code, closest = ("method", rule) if code == "protocol" else (code, closest)
                continue
            if (
                (rule.exact or rule.prefixes)
                and path not in rule.exact
                and not path.startswith(rule.prefixes)
            ):
                code, closest = "path", rule
                continue
            return Decision(True, "allowed", rule)
        if code == "method":
            reason = f"{method} is not among {', '.join(sorted(closest.methods))}"
        elif code == "path":
            reason = f"{path[:200]} is not among {', '.join(closest.source.paths[:5])}"
        else:
            reason = f"the rule for {host} port {port} is for {closest.protocol}, and this is {wanted}"
        unknown = code in ("method", "path") or _only_answers(about)
        return Decision(False, code, closest, f"{host}: {reason}", _HOW, unknown=unknown)

    def address(self, rule: Rule, host: Host, addresses: Iterable[Address]) -> tuple[list[Address], Decision]:
        """Those addresses at which the rule lets the host be, and the decision (denied if there is none)."""
        good: list[Address] = []
        bad: list[str] = []
        for address in addresses:
            fine, kind = rule.permits(address)
            if fine:
                good.append(plain(address))
            else:
                bad.append(f"{plain(address)} ({kind or 'not in the addresses of the rule'})")
        if good:
            return good, Decision(True, "allowed", rule)
        return [], Decision(
            False,
            "address",
            rule,
            f"{host} lies at {', '.join(bad[:4]) or 'no address'}, where the rule does not let it be",
            "name the range under addresses in its rule, if it really belongs there",
        )
