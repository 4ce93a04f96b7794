"""Attacks over sockets: the host's listeners, the metadata address, raw traffic, other sandboxes."""

from __future__ import annotations

from security.attacks import Attack, Control, NoControl, row

PLAIN = Control()
_NET = Control(namespaces=("net",))
# A network namespace of the test's own that has the address: asking for a route there sends nothing either.
_METADATA = Control(
    namespaces=("net",),
    before="ip link set lo up && "
    "ip address add 169.254.169.254/32 dev lo && ip address add 192.0.2.1/24 dev lo",
)
_SOCKETS = {
    "raw": ("denied:EPERM", _NET),
    "raw6": ("denied:EPERM", _NET),
    "packet": ("denied:EPERM", _NET),
    "packet-dgram": ("denied:EPERM", _NET),
    "high-family": ("denied:EPERM", _NET),
    "netfilter": ("denied:EPERM", PLAIN),
    "xfrm": ("denied:EPERM", NoControl("this kernel is built without IPsec")),
    "audit": ("denied:EPROTONOSUPPORT", PLAIN),
    "uevent": ("denied:EPERM", PLAIN),
    "vsock": ("denied:EPERM", PLAIN),
    "alg": ("denied:EPERM", NoControl("this kernel is built without the family")),
    "key": ("denied:EPERM", NoControl("this kernel is built without the family")),
    "xdp": ("denied:EPERM", NoControl("this kernel is built without the family")),
}

NETWORKS = [
    Attack(
        "abstract-socket",
        "connect.py",
        ("abstract", "{abstract}"),
        row("denied:ECONNREFUSED"),
        PLAIN,
        fake="succeeded",
    ),
    Attack("descriptor-out", "send_descriptor.py", ("{abstract}",), row("denied:ECONNREFUSED"), PLAIN),
    Attack("path-socket", "connect.py", ("unix", "{unix}"), row("invisible"), PLAIN, fake="succeeded"),
    Attack(
        "host-loopback",
        "connect.py",
        ("tcp", "127.0.0.1", "{tcp}"),
        row("denied:ECONNREFUSED"),
        PLAIN,
        fake="succeeded",
    ),
    Attack("host-loopback6", "connect.py", ("tcp", "::1", "{tcp6}"), row("denied:ECONNREFUSED"), PLAIN),
    Attack(
        "metadata-address",
        "connect.py",
        ("udp", "169.254.169.254", "80"),
        row("denied:ENETUNREACH"),
        _METADATA,
    ),
    Attack("any-route", "connect.py", ("udp", "192.0.2.7", "53"), row("denied:ENETUNREACH"), _METADATA),
    Attack(
        "interfaces",
        "interfaces.py",
        (),
        row("loopback-only"),
        Control(
            namespaces=("net",),
            before="(ip link add rf0 type dummy || ip link add rf0 type veth) && ip link set rf0 up",
        ),
    ),
    *[
        Attack(f"socket-{kind}", "sockets.c", (kind,), row(outcome), control)
        for kind, (outcome, control) in _SOCKETS.items()
    ],
]
