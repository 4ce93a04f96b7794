"""Hosts as hostile programs write them, in one form; addresses, and what lies behind them. No I/O.

Whatever a host is written like (case, trailing dot, IDN, brackets, decimal, octal or hexadecimal numbers, an
IPv6 address around an IPv4 one), it becomes one :class:`Host`, or is refused. So a rule is compared with what
a resolver or a socket would make of it, never with what somebody typed.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from ringfence.model.values import dataclass

Address = IPv4Address | IPv6Address

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]+)", re.ASCII)
_BAD = re.compile(r"[\x00-\x20\x7f\\/@?#<>\"^`{|}%]")


class BadHost(ValueError):
    """The text names no host, or means different things to different readers. The message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A name (lower case ASCII, no trailing dot) or an address; the other is empty or ``None``."""

    name: str
    address: Address | None = None

    def __str__(self) -> str:
        return self.name or str(self.address)

    def bracketed(self) -> str:
        """As it stands in a URL."""
        return f"[{self.address}]" if isinstance(self.address, IPv6Address) else str(self)


@lru_cache(maxsize=4096)
def parse_host(text: str) -> Host:
    """One form for all spellings of a host.

    Raises:
        BadHost: it is none, or an ambiguous one.
    """
    if not text or len(text) > 512:
        raise BadHost("it is empty" if not text else "it is too long")
    if text.startswith("[") and text.endswith("]"):
        return Host("", _ipv6(text[1:-1]))
    found = _BAD.search(text)
    if found is not None:
        raise BadHost(f"a host has no {found[0]!r}")
    if ":" in text:
        return Host("", _ipv6(text))
    name = text.lower() if text.isascii() else _ascii(text)
    if name.endswith("."):
        name = name[:-1]
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return Host("", _ipv4(labels))
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadHost("it is not a host name")
    for label in labels:
        if label.startswith("xn--"):
            _check_idn(label)
    return Host(name)


def _ascii(text: str) -> str:
    import idna

    try:
        # Full-width digits and dots, ligatures and the like become what a resolver would see.
        return idna.encode(text, uts46=True, std3_rules=True, transitional=False).decode("ascii").lower()
    except idna.IDNAError as error:
        try:
            mapped = idna.uts46_remap(text, std3_rules=True, transitional=False)
        except idna.IDNAError:
            mapped = ""
        if mapped.isascii() and mapped:  # an address in full-width digits is no IDN, but an address
            return mapped.lower()
        raise BadHost(f"it is not an international name: {str(error)[:80]}") from None


def _check_idn(label: str) -> None:
    import idna

    try:
        idna.ulabel(label)
    except (idna.IDNAError, UnicodeError):
        raise BadHost("it has a label that is not a valid international one") from None


def _ipv4(labels: list[str]) -> IPv4Address:
    """As ``inet_aton`` reads it: one to four parts, decimal, octal or hexadecimal."""
    if len(labels) > 4:
        raise BadHost("it ends in a number, but is no address")
    parts = []
    for label in labels:
        if not _NUMBER.fullmatch(label):
            raise BadHost("it ends in a number, but is no address")
        try:
            if label[:2] in ("0x", "0X"):
                parts.append(int(label[2:] or "0", 16))
            elif len(label) > 1 and label[0] == "0":
                parts.append(int(label, 8))
            else:
                parts.append(int(label))
        except ValueError:
            raise BadHost("it has a number that is not octal") from None
    if any(part > 255 for part in parts[:-1]) or parts[-1] >= 256 ** (5 - len(parts)):
        raise BadHost("it has a number that is too large")
    value = parts[-1]
    for index, part in enumerate(parts[:-1]):
        value += part << (8 * (3 - index))
    return IPv4Address(value)


def _ipv6(text: str) -> Address:
    if "%" in text:
        raise BadHost("an address with a zone means something on its own machine only")
    try:
        return plain(IPv6Address(text))
    except ValueError:
        raise BadHost("it is not an IPv6 address") from None


def plain(address: Address) -> Address:
    """The IPv4 address that an IPv4-mapped one is; any other as it is."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _nets(*texts: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


# The first that holds an address names its class. Documentation ranges are nobody's and not here.
_CLASSES: tuple[tuple[str, tuple[IPv4Network | IPv6Network, ...]], ...] = (
    # The addresses at which clouds give a machine's credentials away.
    ("metadata", _nets("169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", "100.100.100.200/32",
                       "192.0.0.192/32", "168.63.129.16/32", "fd00:ec2::254/128", "fd00:ec2::23/128",
                       "fd20:ce::254/128")),
    ("unspecified", _nets("0.0.0.0/8", "::/128")),
    ("loopback", _nets("127.0.0.0/8", "::1/128")),
    ("link-local", _nets("169.254.0.0/16", "fe80::/10")),
    ("private", _nets("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")),
    ("cgnat", _nets("100.64.0.0/10")),
    ("multicast", _nets("224.0.0.0/4", "ff00::/8")),
    ("broadcast", _nets("255.255.255.255/32")),
    ("reserved", _nets("192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4", "100::/64",
                       "2001:2::/48", "64:ff9b:1::/48", "5f00::/16")),
)  # fmt: skip


def address_class(address: Address) -> str | None:
    """What kind of special range an address lies in; ``None``: a public one.

    An IPv6 address that carries an IPv4 one to its destination (mapped, compatible, 6to4, NAT64, Teredo,
    ISATAP) is of the class of what it carries, unless it is special by itself.
    """
    return _address_class(plain(address))


@lru_cache(maxsize=8192)
def _address_class(address: Address) -> str | None:
    for name, ranges in _CLASSES:
        if any(address.version == one.version and address in one for one in ranges):
            return name
    if isinstance(address, IPv6Address):
        for carried in _carried(address):
            found = _address_class(carried)
            if found is not None:
                return found
    return None


def _carried(address: IPv6Address) -> list[IPv4Address]:
    number = int(address)
    found = []
    if number >> 32 == 0 or number >> 32 == 0x64FF9B << 64:  # compatible; NAT64
        found.append(IPv4Address(number & 0xFFFFFFFF))
    if number >> 112 == 0x2002:  # 6to4
        found.append(IPv4Address(number >> 80 & 0xFFFFFFFF))
    if number >> 96 == 0x20010000:  # Teredo: its server, and its client with all bits turned
        found += [IPv4Address(number >> 64 & 0xFFFFFFFF), IPv4Address(~number & 0xFFFFFFFF)]
    if number >> 32 & 0xFEFFFFFF == 0x00005EFE:  # ISATAP
        found.append(IPv4Address(number & 0xFFFFFFFF))
    return found
