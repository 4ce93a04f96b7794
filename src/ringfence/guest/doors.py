"""The inner side of the egress door: where a sandbox's programs find it, and what they are told about it.

The agent listens on loopback for whoever holds the link; the wall's network namespace may send there what
is meant for elsewhere (``Capabilities.transparent``). Ports lie above those that kernels give out.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ringfence.model.errors import GuestRefused
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    from ringfence.guest.link import GuestLink
    from ringfence.guest.ports import GuestDatagrams, GuestListener

HTTP_PORT = 61128  # HTTP proxy: absolute-form requests and CONNECT
SOCKS_PORT = 61080  # SOCKS5, names resolved by the proxy
CAUGHT_PORT = 61443  # connections that were meant for elsewhere
DNS_PORT = 61053  # where questions to port 53 are sent, if the namespace does that
NAMES_PORT = 53  # where programs ask if it does not
BACKLOG = 256

BUNDLE = "/run/secrets/ringfence-ca.pem"  # authorities inside: the system's, and the sandbox's own
_WGETRC = "/run/secrets/ringfence-wgetrc"

_PROXY = f"http://127.0.0.1:{HTTP_PORT}"
_LOCAL = "localhost,127.0.0.1,::1"


@dataclass(frozen=True, slots=True)
class DoorPorts:
    """What listens inside for one link. They close with it."""

    http: GuestListener
    socks: GuestListener
    caught: GuestListener
    names_tcp: tuple[GuestListener, ...]
    names_udp: tuple[GuestDatagrams, ...]


async def open_ports(link: GuestLink) -> DoorPorts:
    """Let the agent listen for everything that a door offers.

    Port 53 is taken where the sandbox allows it: where its namespace sends questions on, it is not needed.

    Raises:
        GuestRefused: EADDRINUSE, somebody inside was faster, or another link has the door already.
        LinkLost, ProtocolViolation: the link ended.
    """
    names_tcp = [await link.listen(DNS_PORT, BACKLOG)]
    names_udp = [await link.datagrams(DNS_PORT)]
    with contextlib.suppress(GuestRefused):
        names_udp.append(await link.datagrams(NAMES_PORT))
        names_tcp.append(await link.listen(NAMES_PORT, BACKLOG))
    return DoorPorts(
        http=await link.listen(HTTP_PORT, BACKLOG),
        socks=await link.listen(SOCKS_PORT, BACKLOG),
        caught=await link.listen(CAUGHT_PORT, BACKLOG),
        names_tcp=tuple(names_tcp),
        names_udp=tuple(names_udp),
    )


def environment() -> dict[str, str]:
    """What tells common programs of the door, and whom to trust behind it."""
    java = {
        "http.proxyHost": "127.0.0.1",
        "http.proxyPort": str(HTTP_PORT),
        "https.proxyHost": "127.0.0.1",
        "https.proxyPort": str(HTTP_PORT),
        "http.nonProxyHosts": "localhost|127.*|[::1]",
    }
    proxies = {
        "http_proxy": _PROXY,
        "https_proxy": _PROXY,
        # Not SOCKS: clients that lack a library for that would fail on every request.
        "all_proxy": _PROXY,
        "no_proxy": _LOCAL,
    }
    trusting = (
        "SSL_CERT_FILE",  # OpenSSL, Python, Go, Ruby
        "CURL_CA_BUNDLE",
        "REQUESTS_CA_BUNDLE",
        "AWS_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS",
        "GIT_SSL_CAINFO",
        "PIP_CERT",
        "NPM_CONFIG_CAFILE",
        "CARGO_HTTP_CAINFO",
        "DENO_CERT",
    )
    return {
        **proxies,
        **{name.upper(): value for name, value in proxies.items()},
        **dict.fromkeys(trusting, BUNDLE),
        "NPM_CONFIG_PROXY": _PROXY,
        "NPM_CONFIG_HTTPS_PROXY": _PROXY,
        "NODE_USE_ENV_PROXY": "1",
        "WGETRC": _WGETRC,  # where wget is built without OpenSSL no variable names authorities
        "JAVA_TOOL_OPTIONS": " ".join(f"-D{name}={value}" for name, value in java.items()),
    }


_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_MOST_BUNDLE = 900_000  # bytes; what holds secrets inside is small


async def place_bundle(link: GuestLink, own: bytes = b"") -> None:
    """Write the bundle of authorities that the environment names: the system's inside, then ``own`` (PEM).

    Raises:
        GuestRefused: it can't be written.
        LinkLost, ProtocolViolation: the link ended.
    """
    # Binding a secret makes the folder the workload's; what is larger than a frame follows as a file.
    wgetrc = f"ca_certificate = {BUNDLE}\n".encode()
    await link.bind(secrets={_WGETRC.rpartition("/")[2]: wgetrc})
    system = b""
    for path in _SYSTEM_BUNDLES:
        with contextlib.suppress(GuestRefused):
            system = await link.files.read_bytes(path, _MOST_BUNDLE)
            break
    await link.files.write(BUNDLE, system.rstrip(b"\n") + b"\n" + own, mode=0o444)
