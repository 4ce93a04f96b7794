"""Names for programs inside: only allowed ones have an address, and it is a made-up one.

Each allowed name gets an address of its own out of a range that no network uses. A connection that was caught
on its way there is known by its name again. Nothing that a program asks is ever asked outside, so questions
carry nothing out; the real address is found when a connection is made.
"""

from __future__ import annotations

import hashlib
import struct
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from ringfence.egress.names import BadHost, parse_host
from ringfence.egress.resolver import read_question, reply
from ringfence.egress.secrets import PLACEHOLDER

if TYPE_CHECKING:
    from ringfence.egress.door import Door

_BASE = int(IPv4Address("198.18.0.0"))
_SIZE = 2**17 - 4
_MOST = 4096  # names of one sandbox
REFUSED, NO_NAME = 5, 3


class MadeUpNames:
    """The made-up addresses of one sandbox. Offset 0 and 1 of the range are left out."""

    def __init__(self) -> None:
        self._by_name: dict[str, IPv4Address] = {}
        self._by_address: dict[IPv4Address, str] = {}

    def address(self, name: str) -> IPv4Address | None:
        """The address of a name, always the same; ``None``: there are too many."""
        found = self._by_name.get(name)
        if found is None:
            if len(self._by_name) >= _MOST:
                return None
            # From the name itself: after a restart of the proxy a remembered address means the same name.
            start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
            found = IPv4Address(_BASE + 2 + start % _SIZE)
            while found in self._by_address:
                found = IPv4Address(_BASE + 2 + (int(found) - _BASE - 1) % _SIZE)
            self._by_name[name] = found
            self._by_address[found] = name
        return found

    def name(self, address: str) -> str | None:
        """The name whose address this is."""
        return self._by_address.get(IPv4Address(address))

    def answer(self, door: Door, message: bytes) -> bytes | None:
        """The answer to a DNS message; ``None``: it is none that deserves one."""
        try:
            name, _, class_ = read_question(message)
        except (ValueError, IndexError, struct.error):
            return None
        try:
            host = parse_host(name)
        except BadHost:
            return reply(message, [], NO_NAME)
        if class_ != 1 or not host.name:
            return reply(message, [], REFUSED)
        if PLACEHOLDER.search(host.name) or not door.knows(host.name):
            return reply(message, [], NO_NAME)
        address = self.address(host.name)
        return reply(message, [] if address is None else [address], 0 if address is not None else REFUSED)
