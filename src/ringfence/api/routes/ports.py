"""Ports of a sandbox below the API: tokens, HTTP and WebSocket by path, the tunnel."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import Field

from ringfence.api.app import SPOKEN, allow
from ringfence.api.calls import Call
from ringfence.api.ports import TOKEN_HEADER, Target, target_of
from ringfence.api.proxying import Proxied
from ringfence.api.proxying_sockets import proxied
from ringfence.api.proxying_sockets import tunnel as tunnelled
from ringfence.api.routing import Routes
from ringfence.api.sockets import Socket
from ringfence.api.types import Body, Shown

routes = Routes("ports")
_ONE = "/v1/sandboxes/{sandbox}"
Port = Annotated[int, Field(ge=1, le=65535)]


class MakeToken(Body):
    """A token, please: for these ports (none: all), for so long (none: the sandbox's life)."""

    ports: Annotated[tuple[Port, ...], Field(max_length=64)] = ()
    seconds: Annotated[float, Field(gt=0, le=366 * 24 * 3600, allow_inf_nan=False)] | None = None


class Token(Shown):
    """What opens ports. Send `headers`, or put `?ringfence_token=` behind a URL for a browser."""

    token: str
    expires_at: float | None
    headers: dict[str, str]
    urls: dict[str, str]


@routes.post(_ONE + "/token", body=MakeToken, answer=Token)
async def token(call: Call, body: MakeToken) -> dict[str, Any]:
    """A token for ports of this sandbox, and where they are served."""
    await call.control.sandboxes.get(call.principal, call.sandbox)
    expires = None if body.seconds is None else time.time() + body.seconds
    made = call.service.signer.token(call.sandbox, body.ports, expires)
    urls = {str(port): call.service.hosts.url(Target(call.sandbox, port), call.scope) for port in body.ports}
    return {
        "token": made,
        "expires_at": expires,
        "headers": {TOKEN_HEADER.decode(): made},
        "urls": urls,
        "url": call.service.hosts.url(Target(call.sandbox, 1), call.scope).replace("//1-", "//PORT-", 1),
    }


def _by_path(call: Call | Socket) -> Target:
    raw = str(call.scope["raw_path"].decode("ascii", "replace"))
    prefix = "/".join(raw.split("/")[:6])  # as it came: what follows is the port's own, byte for byte
    target = target_of(call.sandbox, call.params["port"])
    return Target(target.sandbox, target.port, prefix)


@routes.add("*", _ONE + "/ports/{port}/{rest:path}", scope="token")
async def http(call: Call) -> object:
    """HTTP to a port, by a token. HTML comes with `Content-Security-Policy: sandbox`; no cookies."""
    proxied_call = Proxied(
        call.service, _by_path(call), call.scope, call._receive, call._send, call.request_id
    )
    await proxied_call.serve()
    return SPOKEN


@routes.websocket(_ONE + "/ports/{port}/{rest:path}", scope="token")
async def websocket(socket: Socket) -> None:
    """A WebSocket to a port, by a token."""
    await proxied(socket, _by_path(socket))


@routes.websocket(_ONE + "/tunnel/{port}", scope="token")
async def tunnel(socket: Socket) -> None:
    """One TCP connection to a port: bytes as binary messages. By a token, or a key with the scope run."""
    target = target_of(socket.sandbox, socket.params["port"])
    given = socket.headers.get(TOKEN_HEADER.decode()) or socket.argument("ringfence_token")
    if given:
        socket.service.signer.check_token(given, target.sandbox, target.port)
    else:
        socket.principal = await socket.service.authenticate(socket.headers)
        allow(socket.principal, "run")
        await socket.control.links.touch(target.sandbox, socket.principal.project)
    await tunnelled(socket, target)


__all__ = ["quote", "routes"]
