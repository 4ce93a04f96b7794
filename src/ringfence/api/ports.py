"""Ports of sandboxes: who may reach them, where they are served, which headers pass.

Two places. ``<port>-<sandbox>.<domain>``, told by Host: an origin of its own for each port. And a path below
the API, for programs: there every answer says ``Content-Security-Policy: sandbox``, sets no cookies and gets
none. A port is opened by a token of its sandbox. The API's key never does, and neither key nor token ever
gets inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from ringfence.api.calls import Scope
from ringfence.model.errors import InvalidRequest, NotAllowed, NotAuthenticated, NotFound
from ringfence.model.ids import SANDBOX_ID
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    from ringfence.api.app import Service
    from ringfence.api.calls import Receive, Send

TOKEN_HEADER = b"x-ringfence-token"
TOKEN_NAME = "ringfence_token"  # noqa: S105 - of a parameter and a cookie
_LABEL = re.compile(r"([1-9][0-9]{0,4})-(.+)", re.ASCII)
Headers = list[tuple[bytes, bytes]]

# RFC 9110, 7.6.1, and what clients use for the same.
HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization",
        b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
    }
)  # fmt: skip
_OURS = frozenset({TOKEN_HEADER, b"x-api-key", b"idempotency-key", b"x-request-id", b"expect"})
_FORWARDED = frozenset(
    {
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-forwarded-prefix",
        b"x-real-ip",
    }
)
_HANDSHAKE = frozenset(
    {b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol",
     b"sec-websocket-accept"}
)  # fmt: skip
# What a sandbox may say about the origin that serves it: nothing that reaches beyond one answer.
_ORIGIN_WIDE = frozenset(
    {b"clear-site-data", b"strict-transport-security", b"public-key-pins", b"alt-svc", b"report-to", b"nel",
     b"reporting-endpoints", b"origin-agent-cluster", b"service-worker-allowed", b"server", b"date"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One port of one sandbox; ``prefix``: the path below which it is served, empty on a host of its own."""

    sandbox: str
    port: int
    prefix: str = ""


def target_of(sandbox: str, port: str, prefix: str = "") -> Target:
    """A target from texts.

    Raises:
        NotFound: there can be no such port.
    """
    if not SANDBOX_ID.fullmatch(sandbox) or not port.isascii() or not port.isdigit() or len(port) > 5:
        raise NotFound("no such sandbox or port", hint="<port>-<sandbox id>, as in 8000-sb-0123…")
    number = int(port)
    if not 1 <= number <= 65535:
        raise NotFound("no such port", hint="1 to 65535")
    return Target(sandbox, number, prefix)


class PortHosts:
    """Tells hosts of ports from those of the API."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._suffix = "." + service.settings.domain.lower().strip(".")

    def match(self, scope: Scope) -> Target | None:
        """The port that the Host header names; ``None``: none, this is for the API.

        Raises:
            NotFound: a name below the domain that can't be a port. InvalidRequest: more than one Host.
        """
        found = [value for name, value in scope["headers"] if name == b"host"]
        if len(found) != 1:
            if not found and scope.get("http_version") == "1.0":
                return None
            raise InvalidRequest("one Host header, please", hint="HTTP/1.1 wants exactly one")
        host = found[0].decode("latin-1").lower()
        host = host.rpartition(":")[0] if re.search(r":[0-9]*$", host) else host
        host = host.rstrip(".")
        if not host.endswith(self._suffix):
            return None
        label = _LABEL.fullmatch(host[: -len(self._suffix)])
        if label is None:
            raise NotFound("no such host", hint="ports are served on <port>-<sandbox id>" + self._suffix)
        return target_of(label[2], label[1])

    async def http(self, target: Target, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        """Serve a request to a port's own host."""
        from ringfence.api.proxying import Proxied

        await Proxied(self._service, target, scope, receive, send, request_id).serve()

    async def websocket(
        self, target: Target, scope: Scope, receive: Receive, send: Send, request_id: str
    ) -> None:
        """Serve a WebSocket to a port's own host."""
        from ringfence.api.proxying_sockets import proxy

        await proxy(self._service, target, scope, receive, send, request_id)

    def url(self, target: Target, scope: Scope) -> str:
        """Where a browser finds the port, seen from how this request came."""
        scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
        host = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"host"), "")
        port = re.search(r":[0-9]+$", host)
        return f"{scheme}://{target.port}-{target.sandbox}{self._suffix}{port[0] if port else ''}/"


class Admission:
    """How a request proved that it may: by header, parameter or cookie."""

    __slots__ = ("query", "token", "way")

    def __init__(self, token: str, way: str, query: bytes) -> None:
        self.token = token
        self.way = way
        self.query = query  # without the token


def admit(service: Service, target: Target, scope: Scope) -> Admission:
    """Check the token.

    Raises:
        NotAuthenticated: none, or none for this port.
        NotAllowed: a cookie that another site made the browser send.
    """
    headers: Headers = scope["headers"]
    raw: bytes = scope["query_string"]
    kept, given = [], ""
    for part in raw.split(b"&"):
        name, _, value = part.partition(b"=")
        if name == TOKEN_NAME.encode():
            given = value.decode("latin-1")
        else:
            kept.append(part)
    query = b"&".join(kept)
    for name, value in headers:
        if name == TOKEN_HEADER:
            admission = Admission(value.decode("latin-1").strip(), "header", query)
            break
    else:
        if given:
            parsed = dict(parse_qsl(f"{TOKEN_NAME}={given}"))
            admission = Admission(parsed.get(TOKEN_NAME, ""), "query", query)
        elif not target.prefix and (cookie := _cookie(headers)):
            admission = Admission(cookie, "cookie", query)
        else:
            raise NotAuthenticated(
                "this port wants a token of its sandbox",
                hint="POST /v1/sandboxes/ID/token gives one; send it as X-Ringfence-Token",
            )
    service.signer.check_token(admission.token, target.sandbox, target.port)
    if admission.way == "cookie":
        _same_origin(headers)
    return admission


def _same_origin(headers: Headers) -> None:
    """A cookie is sent by whichever page asks the browser to: only the port's own pages may, and a person."""
    found = dict(reversed(headers))
    site = found.get(b"sec-fetch-site")
    origin = found.get(b"origin")
    own = found.get(b"host", b"").lower()
    if site is not None and site not in (b"same-origin", b"none"):
        raise NotAllowed("another site's page asks for this", hint="open it directly")
    if origin is not None and origin.lower() not in (b"http://" + own, b"https://" + own):
        raise NotAllowed("another origin's page asks for this", hint="open it directly")


def _cookie(headers: Headers) -> str:
    for name, value in headers:
        if name == b"cookie":
            for part in value.decode("latin-1").split(";"):
                key, _, text = part.strip().partition("=")
                if key == TOKEN_NAME:
                    return text
    return ""


def _named_by_connection(headers: Headers) -> set[bytes]:
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named |= {part.strip().lower() for part in value.split(b",")}
    return named - {b"host", b"content-length", b"content-type"}


def inward(headers: Headers, target: Target, scope: Scope, *, secret: bool) -> Headers:
    """The headers that get inside. ``secret``: Authorization carries a key of ours, and stays here."""
    dropped = HOP_BY_HOP | _OURS | _FORWARDED | _HANDSHAKE | _named_by_connection(headers) | {b"host"}
    host = next((value for name, value in headers if name == b"host"), b"localhost")
    if target.prefix:
        dropped |= {b"cookie"}  # the browser has none for a sandbox here, only for the API's own site
    out: Headers = [(b"host", b"localhost:%d" % target.port if target.prefix else host)]
    for name, value in headers:
        if name in dropped or (secret and name == b"authorization"):
            continue
        if name == b"cookie":
            value = b"; ".join(
                part.strip()
                for part in value.split(b";")
                if part.strip().partition(b"=")[0] != TOKEN_NAME.encode()
            )
            if not value:
                continue
        out.append((name, value))
    scheme = b"https" if scope["scheme"] in ("https", "wss") else b"http"
    out += [(b"x-forwarded-proto", scheme), (b"x-forwarded-host", host)]
    if target.prefix:
        out.append((b"x-forwarded-prefix", target.prefix.encode()))
    return out


def outward(headers: Iterable[tuple[bytes, bytes]], target: Target, request_id: str) -> Headers:
    """The headers of an answer from inside that get out."""
    given = [(name.lower(), value) for name, value in headers]
    dropped = HOP_BY_HOP | _ORIGIN_WIDE | _named_by_connection(given) | {b"x-request-id"}
    if any(name == b"transfer-encoding" for name, _ in given):
        dropped |= {b"content-length"}  # RFC 9112, 6.3: where both are, it means nothing
    out: Headers = []
    for name, value in given:
        if name in dropped:
            continue
        if target.prefix and (name == b"set-cookie" or name.startswith(b"access-control-")):
            continue
        if name == b"set-cookie":
            value = _own_cookie(value)
            if not value:
                continue
        out.append((name, value))
    if target.prefix:
        out += [
            (b"content-security-policy", b"sandbox"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"x-content-type-options", b"nosniff"),
        ]
    out.append((b"referrer-policy", b"no-referrer"))  # a token may be in the address
    out.append((b"x-request-id", request_id.encode()))
    return out


def _own_cookie(value: bytes) -> bytes:
    """A cookie for this host alone: with a Domain it would be sent to every other sandbox's."""
    parts = [part.strip() for part in value.split(b";")]
    if parts[0].partition(b"=")[0].strip() == TOKEN_NAME.encode():
        return b""
    return b"; ".join(part for part in parts if part.partition(b"=")[0].strip().lower() != b"domain")
