"""``--allow``: one destination, in the short form of a network rule."""

from __future__ import annotations

from typing import Literal

from ringfence.model.errors import InvalidRequest
from ringfence.model.policy import NetworkRule

_SCHEMES: dict[str, tuple[Literal["http", "tls", "tcp"], int | None]] = {
    "http": ("http", 80),
    "https": ("tls", 443),
    "tls": ("tls", 443),
    "tcp": ("tcp", None),
}
_FORM = "write HOST, HOST:PORT, http://HOST, or tcp://HOST:PORT; methods and paths go into a policy file"


def rule(text: str) -> NetworkRule:
    """The rule that ``[SCHEME://]HOST[:PORT[,PORT…]]`` means. What the host may be is the policy's to judge.

    Raises:
        InvalidRequest: it is not of that form.
    """
    protocol: Literal["http", "tls", "tcp"] | None = None
    default: int | None = 443
    scheme, separator, rest = text.partition("://")
    if separator:
        if scheme not in _SCHEMES:
            raise InvalidRequest(f"--allow {text}: {scheme} is no protocol of a rule", hint=_FORM)
        protocol, default = _SCHEMES[scheme]
    else:
        rest = text
    if any(letter in rest.rstrip("/") for letter in "/@?# ") and not _is_range(rest):
        raise InvalidRequest(f"--allow {text}: more than a host and ports", hint=_FORM)
    if not _is_range(rest):
        rest = rest.rstrip("/")
    host, ports = _divided(rest)
    if not host:
        raise InvalidRequest(f"--allow {text}: no host", hint=_FORM)
    numbers = tuple(_port(text, word) for word in ports.split(",")) if ports else ()
    if not numbers:
        if default is None:
            raise InvalidRequest(f"--allow {text}: no port", hint="as in tcp://db.example.com:5432")
        numbers = (default,)
    return NetworkRule(host, numbers, protocol=protocol)


def _is_range(rest: str) -> bool:
    """An address range: 203.0.113.0/24 or [2001:db8::]/32, with ports behind it or not."""
    host, slash, tail = rest.partition("/")
    return bool(slash) and tail.partition(":")[0].isdigit() and (host.startswith("[") or host[:1].isdigit())


def _divided(rest: str) -> tuple[str, str]:
    if rest.startswith("["):
        address, _, tail = rest[1:].partition("]")
        size, colon, ports = tail.partition(":")
        return address + size, ports if colon else ""
    host, _, ports = rest.partition(":") if rest.count(":") == 1 else (rest, "", "")
    return host, ports


def _port(text: str, word: str) -> int:
    if not (word.isascii() and word.isdigit() and 1 <= int(word) <= 65535):
        raise InvalidRequest(f"--allow {text}: {word[:20]!r} is no port", hint=_FORM)
    return int(word)
