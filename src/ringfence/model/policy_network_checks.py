"""What the network part of a policy may not say; ``policy_checks`` has the rest, and says how it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ringfence.model.policy import Budget, Inference, Network, NetworkRule
from ringfence.model.quantities import format_duration, format_size

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY")
_URL_PATH = r"/[A-Za-z0-9\-._~!$&'()+,;=:@%/]*\*?"
_HEADER = r"[A-Za-z0-9-]{1,64}"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
_FIELD = r"[A-Za-z0-9_.\-\[\]]{1,64}"
# Personal data that the inference guard knows how to find; anything else is a regular expression.
MASKS = ("email", "phone", "card", "iban", "ip", "ssn")
# Headers that say where a request goes or where it ends: with them a rule could reach past its own host.
_FRAMING = ("host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect",
            "proxy-authorization", "proxy-connection")  # fmt: skip
SECRET = r"\{\{secret:([A-Za-z0-9][A-Za-z0-9._-]{0,63})\}\}"  # noqa: S105 (a pattern)

# Each way to put a credential into a request, by the key that says which.
INJECTIONS: dict[str, tuple[str, ...]] = {
    "header": ("header", "value"),
    "bearer": ("bearer",),
    "basic": ("basic",),
    "query": ("query", "value"),
    "field": ("field", "value"),
    "aws": ("aws", "region", "service"),
    "placeholder": ("placeholder", "env"),
}


class Problem(NamedTuple):
    """Why a policy can't be: the field as the file names it, what is wrong, and the remedy."""

    field: str
    what: str
    hint: str


def between(field: str, value: float, low: float, high: float, show: object = str) -> Iterator[Problem]:
    """A problem unless the value lies in the range."""
    # Written so that NaN, which compares false with everything, is refused.
    if isinstance(value, bool) or not low <= value <= high:
        text = show if callable(show) else str
        yield Problem(field, f"{text(value)} is out of range", f"choose from {text(low)} to {text(high)}")


def size_text(value: float) -> str:
    """Bytes as a person writes them."""
    return format_size(int(value)) if value == value and abs(value) < 1e30 else str(value)


def duration_text(value: float) -> str:
    """Seconds as a person writes them."""
    return format_duration(value) if 0 <= value < 1e12 else str(value)


def _is_ipv4_range(text: str) -> bool:
    import ipaddress

    try:
        ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        return False
    return text.partition("/")[2].isdigit() or "/" not in text


def network_problems(network: Network) -> Iterator[Problem]:
    """Everything that is wrong with the network part, in the order of the file."""
    if network.allow and network.mode == "none":
        yield Problem(
            "network.mode",
            "is none, so the rules in allow would never be used",
            "write mode: egress, or remove allow",
        )
    for index, rule in enumerate(network.allow if network.mode == "open" else ()):
        # All that is public can be reached: what a rule adds is a private range, by its addresses.
        if not _is_ipv4_range(rule.host) or rule.methods or rule.paths or rule.inject:
            yield Problem(
                f"network.allow[{index}]",
                "is in a policy whose network is open, where rules can only name private IPv4 ranges",
                "write mode: egress, or remove the rule; a private range is named as in 10.1.0.0/16",
            )
    for index, rule in enumerate(network.allow):
        yield from _rule(rule, f"network.allow[{index}]")
    yield from _one_secret_each(network)
    yield from between("network.askTimeout", network.ask_timeout, 1, 3600, duration_text)
    yield from between("network.connections", network.connections, 1, 900)
    yield from between("network.connectTimeout", network.connect_timeout, 0.1, 600, duration_text)
    yield from between("network.idleTimeout", network.idle_timeout, 1, 86400, duration_text)
    if network.total_timeout is not None:
        yield from between("network.totalTimeout", network.total_timeout, 1, 30 * 86400, duration_text)
    for index, pattern in enumerate(network.redact):
        yield from _pattern(pattern, f"network.redact[{index}]")
    if network.budget is not None:
        yield from _budget(network.budget, "network.budget")
    if network.inference is not None:
        if network.mode != "egress":
            yield Problem("network.inference", "is for mode egress only", "write mode: egress")
        yield from _inference(network.inference, "network.inference")
    if network.learn and network.mode != "egress":
        yield Problem("network.learn", "is for mode egress only", "write mode: egress")


def _rule(rule: NetworkRule, field: str) -> Iterator[Problem]:
    what, hint = _host_problem(rule.host)
    if what:
        yield Problem(f"{field}.host", f"{rule.host[:80]!r} {what}", hint)
    if not rule.ports:
        yield Problem(f"{field}.ports", "is empty, so the rule allows nothing", "name ports, as in [443]")
    for number, port in enumerate(rule.ports):
        yield from between(f"{field}.ports[{number}]", port, 1, 65535)
    for number, method in enumerate(rule.methods):
        if method not in _METHODS:
            yield Problem(
                f"{field}.methods[{number}]",
                f"{method[:30]!r} is not an HTTP method",
                f"use {', '.join(_METHODS)}; leave methods out to allow all",
            )
    for number, path in enumerate(rule.paths):
        if (
            not re.fullmatch(_URL_PATH, path)
            or ".." in path.split("/")
            or re.search(r"%(?![0-9A-Fa-f]{2})", path)
        ):
            yield Problem(
                f"{field}.paths[{number}]",
                f"{path[:80]!r} is not a URL path",
                "start with /, leave out query and fragment; * may stand at the end only, as in /v1/*",
            )
    if rule.inject is not None:
        yield from _inject(rule, f"{field}.inject")
    yield from _addresses(rule.addresses, f"{field}.addresses")
    if rule.budget is not None:
        yield from _budget(rule.budget, f"{field}.budget")
    if rule.methods or rule.paths:
        if rule.tls == "pass":
            yield Problem(
                f"{field}.tls",
                "is pass, so methods and paths would never be seen",
                "write tls: inspect, or leave out methods and paths",
            )
        if rule.protocol == "tcp":
            yield Problem(
                f"{field}.protocol", "is tcp, which has no methods or paths", "leave out methods and paths"
            )
    if rule.tls == "inspect" and rule.protocol in ("tcp", "http"):
        yield Problem(f"{field}.tls", f"is inspect, but protocol is {rule.protocol}", "leave one of them out")


def _inject(rule: NetworkRule, field: str) -> Iterator[Problem]:
    inject = rule.inject or {}
    how = next((key for key in INJECTIONS if key in inject), "header")
    for key in INJECTIONS[how]:
        if not isinstance(inject.get(key), str) and key not in ("region", "service", "env"):
            yield Problem(
                f"{field}.{key}", "is missing", 'write {header: NAME, value: "Bearer {{secret:NAME}}"}'
            )
            return
    for key in sorted(set(inject) - set(INJECTIONS[how])):
        yield Problem(
            f"{field}.{key[:40]}", "is not known", f"inject by {how} has {', '.join(INJECTIONS[how])}"
        )
    if how in ("header", "query", "field"):
        name = inject[how]
        if not re.fullmatch(_HEADER if how == "header" else _FIELD, name):
            yield Problem(f"{field}.{how}", f"{name[:70]!r} is not the name of a {how}", "e.g. Authorization")
        elif how == "header" and name.lower() in _FRAMING:
            yield Problem(
                f"{field}.header",
                f"{name} can't be injected: it says where a request goes or ends",
                "inject credentials only, e.g. Authorization",
            )
    key = "value" if "value" in INJECTIONS[how] else how
    yield from _secret_value(inject[key], f"{field}.{key}")
    if how == "basic" and ":" not in re.sub(SECRET, "", inject[key]):
        yield Problem(f"{field}.basic", "has no colon", 'write "USER:{{secret:NAME}}"')
    if how == "aws" and len(re.findall(SECRET, inject[key])) != 2:
        yield Problem(f"{field}.aws", "is no pair of secrets", 'write "{{secret:KEY-ID}}:{{secret:KEY}}"')
    if "env" in inject and how == "placeholder":
        yield from _variable(inject["env"], inject[key], field)
    if rule.host.startswith("*.") or _is_range(rule.host):
        yield Problem(
            f"{field}",
            "would send the secret to any host under a wildcard",
            f"name the host that may have it, e.g. api{rule.host[1:]}",
        )
    if rule.tls == "pass":
        yield Problem(
            f"{field}",
            "needs requests that can be read, but tls is pass",
            "write tls: inspect, or leave it out",
        )
    if rule.protocol == "tcp":
        yield Problem(
            f"{field}", "has no place in a protocol that nobody looks at", "leave out protocol: tcp"
        )


def _variable(name: str, value: str, field: str) -> Iterator[Problem]:
    """The variable that a placeholder is given to programs in."""
    if not re.fullmatch(_VARIABLE, name):
        yield Problem(
            f"{field}.env",
            f"{name[:70]!r} is not the name of a variable",
            "letters, digits and _, as in API_TOKEN",
        )
    if not re.fullmatch(SECRET, value):
        yield Problem(
            f"{field}.env",
            "is for the placeholder of one secret",
            'write {placeholder: "{{secret:NAME}}", env: NAME}',
        )


def _one_secret_each(network: Network) -> Iterator[Problem]:
    """A variable has one value, whatever the rules."""
    taken: dict[str, str] = {}
    for index, rule in enumerate(network.allow):
        inject = rule.inject or {}
        if "env" in inject and taken.setdefault(inject["env"], inject.get("placeholder", "")) != inject.get(
            "placeholder", ""
        ):
            yield Problem(
                f"network.allow[{index}].inject.env",
                f"{inject['env'][:70]} is the placeholder of another secret in an earlier rule",
                "give each secret a variable of its own",
            )


def _secret_value(value: str, field: str) -> Iterator[Problem]:
    rest = re.sub(SECRET, "", value)
    if not re.search(SECRET, value):
        # The value isn't shown: it may be the secret itself.
        yield Problem(
            field,
            "names no secret",
            "write {{secret:NAME}} where the secret belongs; it never stands in a policy itself",
        )
    elif "{{" in rest or "}}" in rest:
        yield Problem(
            field,
            "has braces that are no {{secret:NAME}}",
            "a secret's name has letters, digits, '.', '_' and '-', no spaces",
        )
    if not all(32 <= ord(letter) < 127 for letter in value):
        yield Problem(field, "has characters that a header can't carry", "use printable ASCII")


def _budget(budget: Budget, field: str) -> Iterator[Problem]:
    if budget.rate is not None:
        yield from between(f"{field}.rate", budget.rate, 1e-6, 1e6)
    for key, value in (("maxRequests", budget.max_requests), ("maxBytes", budget.max_bytes)):
        if value is not None:
            yield from between(f"{field}.{key}", value, 0, 2**62)
    for key, amount in (
        ("maxSpend", budget.max_spend),
        ("price", budget.price),
        ("tokenPrice", budget.token_price),
    ):
        if amount is not None:
            yield from between(f"{field}.{key}", amount, 0, 1e12)
    if budget.max_spend is not None and not budget.price and not budget.token_price:
        yield Problem(f"{field}.maxSpend", "has no price", "write price (a request) or tokenPrice (a token)")


def _addresses(addresses: tuple[str, ...], field: str) -> Iterator[Problem]:
    for number, text in enumerate(addresses):
        if not _is_address(text) and not _is_range(text):
            yield Problem(
                f"{field}[{number}]", f"{text[:60]!r} is no address or range", "e.g. 10.1.2.0/24 or 10.1.2.3"
            )


def _inference(inference: Inference, field: str) -> Iterator[Problem]:
    match = re.fullmatch(r"(https?)://([^/?#@\\]+?)(?::(\d{1,5}))?(/[^?#]*)?", inference.upstream)
    if match is None or _host_problem(match[2])[0] or match[2].startswith("*"):
        yield Problem(
            f"{field}.upstream",
            f"{inference.upstream[:80]!r} is not the URL of an API",
            "write e.g. https://api.example.com/v1",
        )
        return
    rule = NetworkRule(
        match[2], paths=inference.paths, inject=inference.inject, addresses=inference.addresses
    )
    for problem in _rule(rule, field):
        if not problem.field.endswith(".host"):
            yield problem
    for number, pattern in enumerate(inference.mask):
        if pattern not in MASKS:
            yield from _pattern(pattern, f"{field}.mask[{number}]")
    if inference.budget is not None:
        yield from _budget(inference.budget, f"{field}.budget")


def _pattern(pattern: str, field: str) -> Iterator[Problem]:
    try:
        if len(pattern) > 500:
            raise re.error("it is longer than 500 characters")
        if re.compile(pattern).fullmatch(""):
            raise re.error("it matches the empty text")
    except (re.error, OverflowError, RecursionError) as error:
        yield Problem(field, f"{pattern[:60]!r} is no pattern: {error}", "write a regular expression")


def _host_problem(host: str) -> tuple[str, str]:
    """What is wrong with a rule's host, and the remedy; two empty strings if nothing is."""
    if host == "*":
        return "allows every host", "name hosts, or, for trusted code only, write mode: open without allow"
    if "://" in host:
        return "is a URL", "write the host name only; ports and paths have fields of their own"
    if _is_range(host):
        return "", ""
    if "/" in host:
        return "has a path", "write the host name only and the path in paths"
    if _is_address(host):
        return "", ""
    if ":" in host:
        return "has a port", "write the host name only and the port in ports"
    if not host.isascii():
        return "is not ASCII", "write the xn-- form of the name"
    if host != host.lower():
        return "has capital letters", f"write {host.lower()}"
    name = host[2:] if host.startswith("*.") else host
    if "*" in name:
        return "has a wildcard that is not the left-most label", "write *.example.com"
    labels = name.split(".")
    if len(name) > 253 or not all(re.fullmatch(_LABEL, label) for label in labels) or labels[-1].isdigit():
        return "is not a host name", "write a name such as api.example.com, or an address"
    return "", ""


def _is_range(text: str) -> bool:
    """A range of addresses in its shortest form, narrower than a continent's share of the internet."""
    address, slash, bits = text.partition("/")
    if not slash or not bits.isdigit() or not _is_address(address):
        return False
    import ipaddress

    try:
        return str(ipaddress.ip_network(text)) == text and int(bits) >= 8
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    if not (host[:1].isdigit() or ":" in host):
        return False
    import ipaddress

    try:
        # Only the shortest form: "010.0.0.1" and "::ffff:0:1" have meanings that readers disagree on.
        return str(ipaddress.ip_address(host)) == host and "%" not in host
    except ValueError:
        return False
