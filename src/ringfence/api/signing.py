"""Tokens for ports, signatures for URLs of files, cursors: all by HMAC with the service's one secret.

Nothing of these is stored: whichever API process gets one can check it. They end with their time or with
the sandbox, whose id is part of every one and is never used twice.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

from ringfence.model.errors import InvalidRequest, NotAuthenticated

_FOREVER = 4102444800  # 2100: a token of the sandbox's whole life


class Signer:
    """Makes and checks; ``secret``: at least 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 32:
            raise ValueError("a secret of at least 32 bytes")
        self._secret = secret

    def _mac(self, *parts: str) -> str:
        # Lengths first: no two lists of parts may be the same bytes.
        text = "".join(f"{len(raw)}:{raw}" for raw in parts).encode("utf-8", "surrogateescape")
        digest = hmac.new(self._secret, text, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def token(self, sandbox: str, ports: tuple[int, ...] = (), expires: float | None = None) -> str:
        """A token for ports of one sandbox (``()``: all), until ``expires`` (seconds since the epoch)."""
        until = str(int(expires if expires is not None else _FOREVER))
        listed = ",".join(str(port) for port in sorted(set(ports)))
        return f"rft_{until}.{listed or 'all'}.{self._mac('port', sandbox, until, listed)}"

    def check_token(self, token: str, sandbox: str, port: int) -> None:
        """Whether a token opens this port.

        Raises:
            NotAuthenticated: it does not; nothing is said about why.
        """
        until, _, rest = token.removeprefix("rft_").partition(".")
        listed, _, mac = rest.partition(".")
        listed = "" if listed == "all" else listed
        right = self._mac("port", sandbox, until, listed)
        if (
            not token.startswith("rft_")
            or not _same(mac, right)
            or int(until) < time.time()
            or (listed and str(port) not in listed.split(","))
        ):
            raise NotAuthenticated(
                "no valid token for this port",
                hint="POST /v1/sandboxes/ID/token gives one; send it as X-Ringfence-Token",
            )

    def sign(self, method: str, sandbox: str, path: str, expires: int) -> str:
        """The signature of a URL for one file."""
        return self._mac("file", method, sandbox, str(expires), path)

    def check_signature(self, signature: str, method: str, sandbox: str, path: str, expires: str) -> None:
        """Whether a signature is right and its time has not passed.

        Raises:
            NotAuthenticated.
        """
        if not expires.isascii() or not expires.isdigit() or len(expires) > 12:
            raise NotAuthenticated("no valid signature", hint="ask for a new URL")
        right = self.sign(method, sandbox, path, int(expires))
        if not _same(signature, right) or int(expires) < time.time():
            raise NotAuthenticated(
                "the signature of this URL is not valid, or its time has passed", hint="ask for a new URL"
            )

    def cursor(self, what: str, project: str, after: str) -> str:
        """An opaque place in a list."""
        raw = json.dumps([after, self._mac("cursor", what, project, after)[:16]]).encode()
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    def after(self, what: str, project: str, cursor: str) -> str:
        """Where a cursor points.

        Raises:
            InvalidRequest: it is none of this list.
        """
        try:
            after, mac = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            right = _same(mac, self._mac("cursor", what, project, after)[:16])
        except (ValueError, TypeError, AttributeError):
            right = False
        if not right:
            raise InvalidRequest(
                "the cursor is none of this list", hint="use next_cursor of the page before, unchanged"
            )
        return str(after)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())
