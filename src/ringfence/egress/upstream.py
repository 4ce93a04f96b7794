"""Connections to the outside: to addresses that were decided on, and to no others."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ringfence.egress.names import Address, Host
from ringfence.egress.resolver import Resolver
from ringfence.egress.streams import BROKEN, SocketStream, TlsStream

_PROOF = 600.0  # seconds that a verified handshake with an address stands for the name
_MOST_PROOFS = 4096
_FAILURES = 5  # in a row, until a destination is given a rest
_REST = (2.0, 60.0)  # seconds: the first, the longest


class Unreachable(Exception):
    """A destination can't be reached, or is not who it should be. ``status`` and ``code``: the answer."""

    def __init__(self, why: str, status: int = 502, code: str = "unreachable", hint: str = "") -> None:
        super().__init__(why)
        self.status = status
        self.code = code
        self.hint = hint


class Breaker:
    """A circuit breaker for one destination: closed, open (fails at once), half open (one may try)."""

    __slots__ = ("failures", "trying", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0
        self.trying = False

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open``."""
        if self.failures < _FAILURES:
            return "closed"
        return "open" if time.monotonic() < self.until else "half-open"

    def enter(self, where: str) -> None:
        """Before a try.

        Raises:
            Unreachable: it is open.
        """
        state = self.state
        if state == "open" or (state == "half-open" and self.trying):
            rest = max(1, round(self.until - time.monotonic()))
            raise Unreachable(
                f"{where} failed {self.failures} times in a row and is left alone for {rest} s",
                503,
                "circuit_open",
            )
        self.trying = state == "half-open"

    def leave(self, good: bool | None) -> None:
        """After it; ``None``: nothing is known about the destination (the client left)."""
        self.trying = False
        if good is None:
            return
        if good:
            self.failures = 0
            return
        self.failures += 1
        if self.failures >= _FAILURES:
            self.until = time.monotonic() + min(_REST[0] * 2 ** (self.failures - _FAILURES), _REST[1])


class Upstreams:
    """Makes connections for all doors of this process."""

    def __init__(self, resolver: Resolver, ca_file: str | None = None) -> None:
        self.resolver = resolver
        self.breakers: dict[tuple[str, str, int], Breaker] = {}
        # Read at once: whoever we are later may not read it.
        self._authorities = None if ca_file is None else Path(ca_file).read_text()
        self._contexts: dict[tuple[str, ...], ssl.SSLContext] = {}
        self._proofs: dict[tuple[str, str, int], float] = {}

    def context(self, *alpn: str) -> ssl.SSLContext:
        """How TLS to the outside is spoken: verified, always."""
        made = self._contexts.get(alpn)
        if made is None:
            made = ssl.create_default_context(cadata=self._authorities)
            made.minimum_version = ssl.TLSVersion.TLSv1_2
            if alpn:
                made.set_alpn_protocols(list(alpn))
            self._contexts[alpn] = made
        return made

    async def resolve(self, host: Host) -> list[Address]:
        """The addresses of a host.

        Raises:
            Unreachable: its name can't be resolved.
        """
        if host.address is not None:
            return [host.address]
        try:
            found = await self.resolver.resolve(host.name)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Unreachable(f"{host} can't be resolved: {error}", 502, "name") from None
        if not found:
            raise Unreachable(f"{host} has no address", 502, "name")
        return found

    def breaker(self, whose: str, host: Host, port: int) -> Breaker:
        """The circuit breaker of a project's destination: whose connections fail, by a short patience of its
        policy for example, must not take the destination from others.
        """
        key = (whose, str(host), port)
        found = self.breakers.get(key)
        if found is None:
            if len(self.breakers) >= 4096:
                for old in [key for key, breaker in self.breakers.items() if breaker.state == "closed"]:
                    del self.breakers[old]
                while len(self.breakers) >= 4096:
                    del self.breakers[next(iter(self.breakers))]
            found = self.breakers[key] = Breaker()
        return found

    async def connect(
        self, host: Host, port: int, addresses: Sequence[Address], patience: float, whose: str = ""
    ) -> tuple[SocketStream, Address]:
        """A connection to the first of the addresses that takes one, for a project.

        Raises:
            Unreachable: none does, or the circuit breaker is open.
        """
        breaker = self.breaker(whose, host, port)
        breaker.enter(f"{host}:{port}")
        good: bool | None = None
        try:
            async with asyncio.timeout(patience):
                why: OSError | None = None
                for address in addresses[:8]:
                    try:
                        # One that never answers must not cost the others their turn.
                        async with asyncio.timeout(max(1.0, patience / min(len(addresses), 8))):
                            stream = await self._connect(address, port)
                    except TimeoutError:
                        why = OSError(errno.ETIMEDOUT, "no answer")
                        continue
                    except OSError as error:
                        why = error
                        continue
                    good = True
                    return stream, address
            good = False
            if why is not None and why.errno == errno.ETIMEDOUT:
                raise TimeoutError
            text = "" if why is None else os.strerror(why.errno or errno.EIO)
            raise Unreachable(f"{host}:{port} can't be reached: {text}", 502, "connect")
        except TimeoutError:
            good = False
            raise Unreachable(f"{host}:{port} did not answer within {patience:g} s", 504, "timeout") from None
        finally:
            breaker.leave(good)

    async def _connect(self, address: Address, port: int) -> SocketStream:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
            return await SocketStream.over(sock)
        except BaseException:
            sock.close()
            raise

    async def secure(self, stream: SocketStream, host: Host, *alpn: str, patience: float = 10.0) -> TlsStream:
        """TLS over a connection, with the host verified. The stream is closed on failure.

        Raises:
            Unreachable: it is not the host, or speaks no TLS.
        """
        try:
            async with asyncio.timeout(patience):
                return await TlsStream.client(stream, self.context(*alpn), str(host))
        except ssl.SSLCertVerificationError as error:
            stream.abort()
            text = f"{host} does not prove that it is {host}: {error.verify_message}"
            raise Unreachable(text, 502, "certificate") from None
        except (*BROKEN, TimeoutError) as error:
            stream.abort()
            raise Unreachable(f"{host}: no TLS with it: {error}", 502, "tls") from None
        except BaseException:
            stream.abort()
            raise

    async def prove(
        self, host: Host, port: int, addresses: Sequence[Address], patience: float, whose: str = ""
    ) -> list[Address]:
        """Those addresses that have proven, in a handshake of our own, to be the host. At least one.

        Raises:
            Unreachable: none has.
        """
        now = time.monotonic()
        known = [one for one in addresses if self._proofs.get((str(host), str(one), port), 0.0) > now]
        if known:
            return known
        why: Unreachable | None = None
        for address in addresses[:4]:
            try:
                stream, _ = await self.connect(host, port, [address], patience, whose)
                tls = await self.secure(stream, host, patience=patience)
            except Unreachable as error:
                why = error
                continue
            with suppress(*BROKEN):
                await tls.close()
            if len(self._proofs) >= _MOST_PROOFS:
                self._proofs.clear()
            self._proofs[str(host), str(address), port] = now + _PROOF
            return [address]
        raise why or Unreachable(f"{host} has no address")
