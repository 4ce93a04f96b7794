"""From names to addresses: the system's resolver, or one DNS server. And answers to questions from inside.

What was resolved for a decision is what is connected to: callers keep the addresses, and never ask twice for
one connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import struct
import time
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from ringfence.egress.names import Address, plain

_A, _AAAA = 1, 28
_TIMEOUT = 5.0  # seconds for one question
_KEEP = 30.0  # seconds that an answer is used again at most, and an error
_MOST_KEPT = 4096


class Resolver(Protocol):
    """Whoever turns a name into addresses."""

    async def resolve(self, name: str) -> list[Address]:
        """All addresses of a name.

        Raises:
            OSError: there are none, or nobody could be asked.
        """
        ...


class SystemResolver:
    """What this machine would answer: hosts file, DNS, whatever it is set up for."""

    async def resolve(self, name: str) -> list[Address]:
        """See :class:`Resolver`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_TIMEOUT * 2):
            # The dot at the end keeps the machine's search list out: `api` never means `api.corp.example`.
            found = await loop.getaddrinfo(_full(name), None, type=socket.SOCK_STREAM)
        addresses = [plain(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found]
        return list(dict.fromkeys(addresses))


def _full(name: str) -> str:
    return name + "." if "." in name else name


class DnsResolver:
    """One DNS server, asked over UDP, over TCP where the answer is long."""

    def __init__(self, address: str, port: int = 53) -> None:
        self._server = (address, port)

    async def resolve(self, name: str) -> list[Address]:
        """See :class:`Resolver`."""
        try:
            async with asyncio.timeout(_TIMEOUT):
                found = await asyncio.gather(self._ask(name, _A), self._ask(name, _AAAA))
        except TimeoutError:
            raise OSError(f"no DNS server answered for {name}") from None
        addresses = list(dict.fromkeys(found[0] + found[1]))
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, f"{name} is not known")
        return addresses

    async def _ask(self, name: str, kind: int) -> list[Address]:
        number = int.from_bytes(os.urandom(2))
        question = query(name, kind, number)
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self._server[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.connect(self._server)
            for _ in range(3):
                await loop.sock_sendall(sock, question)
                try:
                    async with asyncio.timeout(_TIMEOUT / 4):
                        while True:
                            answer = await loop.sock_recv(sock, 4096)
                            if answer[:2] == question[:2] and same_question(answer, question):
                                break
                except TimeoutError:
                    continue
                if answer[2] & 2:  # truncated
                    answer = await self._over_tcp(question)
                return parse_answer(answer, kind)
        raise OSError(f"no DNS server answered for {name}")

    async def _over_tcp(self, question: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._server)
        try:
            writer.write(struct.pack(">H", len(question)) + question)
            size = struct.unpack(">H", await reader.readexactly(2))[0]
            answer = await reader.readexactly(size)
        except EOFError:
            raise OSError("the DNS server hung up") from None
        finally:
            writer.close()
        if answer[:2] != question[:2]:
            raise OSError("the DNS server answered something else")
        return answer


class CachingResolver:
    """Another resolver, whose answers are used for up to half a minute."""

    def __init__(self, inner: Resolver) -> None:
        self._inner = inner
        self._kept: dict[str, tuple[float, list[Address]]] = {}

    async def resolve(self, name: str) -> list[Address]:
        """See :class:`Resolver`. What could not be resolved is asked for again."""
        now = time.monotonic()
        kept = self._kept.get(name)
        if kept is not None and kept[0] > now:
            return list(kept[1])
        found = await self._inner.resolve(name)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[name] = (now + _KEEP, found)
        return list(found)


# -- DNS messages


def encode_name(name: str) -> bytes:
    """A name as a DNS message has it."""
    labels = [label.encode("ascii") for label in name.split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def query(name: str, kind: int, number: int) -> bytes:
    """A question for one record type."""
    head = struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0)
    return head + encode_name(name) + struct.pack(">HH", kind, 1)


def read_name(message: bytes, at: int) -> tuple[str, int]:
    """The name at an offset, and the offset after it.

    Raises:
        ValueError: malformed.
    """
    labels: list[str] = []
    end = -1
    for _ in range(128):
        if at >= len(message):
            raise ValueError("a name ends early")
        size = message[at]
        if size & 0xC0 == 0xC0:
            if at + 1 >= len(message):
                raise ValueError("a name ends early")
            if end < 0:
                end = at + 2
            at = (size & 0x3F) << 8 | message[at + 1]
            continue
        if size & 0xC0:
            raise ValueError("a label of an unknown kind")
        at += 1
        if not size:
            return ".".join(labels), at if end < 0 else end
        label = message[at : at + size]
        if len(label) < size or b"." in label:
            raise ValueError("a label ends early, or has a dot")
        labels.append(label.decode("ascii", "surrogateescape").lower())
        at += size
    raise ValueError("a name without end")


def same_question(answer: bytes, question: bytes) -> bool:
    """Whether an answer is to this question."""
    try:
        asked, end = read_name(question, 12)
        told, told_end = read_name(answer, 12)
    except ValueError:
        return False
    return asked == told and question[end : end + 4] == answer[told_end : told_end + 4]


def parse_answer(message: bytes, kind: int) -> list[Address]:
    """The addresses of one type in an answer.

    Raises:
        OSError: the server says no, or nonsense.
    """
    try:
        _, flags, questions, answers = struct.unpack_from(">HHHH", message)
        if not flags & 0x8000 or flags & 15 not in (0, 3):
            raise OSError(f"the DNS server refused (code {flags & 15})")
        at = 12
        for _ in range(questions):
            at = read_name(message, at)[1] + 4
        found: list[Address] = []
        for _ in range(answers):
            at = read_name(message, at)[1]
            type_, class_, _, size = struct.unpack_from(">HHIH", message, at)
            data = message[at + 10 : at + 10 + size]
            at += 10 + size
            if class_ == 1 and type_ == kind and len(data) == (4 if kind == _A else 16):
                found.append(plain(IPv4Address(data) if kind == _A else IPv6Address(data)))
    except (ValueError, struct.error):
        raise OSError("the DNS server sent nonsense") from None
    return found


def reply(question: bytes, addresses: list[Address], code: int = 0, ttl: int = 10) -> bytes:
    """The answer to a question: these addresses, or an error code (3: no such name, 5: refused).

    Raises:
        ValueError: the question is malformed.
    """
    end = read_name(question, 12)[1]
    kind = struct.unpack_from(">H", question, end)[0]
    found = (
        [one for one in addresses if one.version == (4 if kind == _A else 6)] if kind in (_A, _AAAA) else []
    )
    flags = 0x8180 | code if question[2] & 1 else 0x8080 | code
    head = question[:2] + struct.pack(">HHHHH", flags, 1, len(found), 0, 0)
    records = [struct.pack(">HHHIH", 0xC00C, kind, 1, ttl, len(one.packed)) + one.packed for one in found]
    return head + question[12 : end + 4] + b"".join(records)


def read_question(message: bytes) -> tuple[str, int, int]:
    """Name, type and class that a query asks for.

    Raises:
        ValueError: it is no query with one question.
    """
    if len(message) < 17 or len(message) > 4096:
        raise ValueError("too short or too long")
    _, flags, questions, answers, authority = struct.unpack_from(">HHHHH", message)
    if flags & 0xF800 or questions != 1 or answers or authority:
        raise ValueError("no query with one question")
    name, end = read_name(message, 12)
    kind, class_ = struct.unpack_from(">HH", message, end)
    return name, kind, class_
