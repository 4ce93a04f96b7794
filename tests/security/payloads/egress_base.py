"""What the ways of ``egress.py`` have in common: requests, tunnels, and who is where."""

import socket
import ssl
import struct

HTTP, SOCKS, CAUGHT = 61128, 61080, 61443
API, SHARED, WEB = "93.184.216.10", "93.184.216.20", "93.184.216.30"
EVIL, METADATA, PRIVATE, API6 = "93.184.217.66", "169.254.169.254", "10.20.30.40", "2606:2800:220:1::10"
WAIT = 10.0


class now:
    """What is being tried, and from where."""

    inside = True
    mark = ""


class Stopped(Exception):
    """It did not come through, and how."""


def unverified(alpn=("http/1.1",)):
    context = ssl._create_unverified_context()
    context.set_alpn_protocols(list(alpn))
    return context


def request(host, path=None, method="GET", more="", target=None):
    """A request as bytes; ``target`` for its absolute form."""
    path = path or "/mark-" + now.mark
    return (
        "{} {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{}\r\n".format(
            method, (target or "") + path, host, more
        )
    ).encode()


def all_of(sock, limit=100000):
    data = b""
    while len(data) < limit:
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
    return data


def status_of(data):
    """2xx answers pass; others say what they were."""
    if not data:
        raise Stopped("closed")
    words = data.split(b" ", 2)
    if not data.startswith(b"HTTP/1.") or len(words) < 2:
        raise Stopped("garbage")
    if words[1][:1] not in b"23":
        raise Stopped(words[1].decode("latin-1"))
    return data


def dial(address, port):
    return socket.create_connection((address, port), WAIT)


def ask(sock, data):
    sock.sendall(data)
    return status_of(all_of(sock))


def connect(host, port, more="", host_header=None):
    """A tunnel through the proxy; directly, a connection to where the name really is."""
    if not now.inside:
        return dial(REAL.get(host.lower().rstrip("."), host), port)
    sock = dial("127.0.0.1", HTTP)
    authority = f"{host}:{port}"
    sock.sendall((f"CONNECT {authority} HTTP/1.1\r\nHost: {host_header or authority}\r\n{more}\r\n").encode())
    head = b""
    while b"\r\n\r\n" not in head:
        piece = sock.recv(1)
        if not piece:
            raise Stopped("closed")
        head += piece
    if head.split(b" ")[1] != b"200":
        raise Stopped(head.split(b" ")[1].decode("latin-1"))
    return sock


REAL = {
    "api.example.test": API, "web.example.test": WEB, "front.example.test": SHARED,
    "hidden.example.test": SHARED, "inspected.example.test": SHARED, "evil.attacker.test": EVIL,
    "metadata.example.test": METADATA,
    "inner.example.test": PRIVATE, "rebind.example.test": METADATA, "mapped.example.test": PRIVATE,
    "keyed.example.test": API,
    "selfsigned.example.test": WEB, "wrongname.example.test": WEB, "expired.example.test": WEB,
    "2852039166": METADATA, "0251.0376.0251.0376": METADATA, "0xa9fea9fe": METADATA,
    "[::ffff:169.254.169.254]": METADATA,
}  # fmt: skip


def https(sock, name, host=None, path=None, verify=False):
    context = ssl.create_default_context() if verify else unverified()
    with context.wrap_socket(sock, server_hostname=name) as tls:
        return ask(tls, request(host or name, path))


def proxied(url_host, header=None, port=80):
    """Plain HTTP through the proxy in absolute form; directly, to the host of the URL."""
    where = url_host.rpartition("@")[2]
    name, _, digits = where.partition(":") if not where.startswith("[") else (where, "", "")
    if not now.inside:
        sock = dial(REAL.get(name.lower().rstrip("."), name), int(digits or port))
        return ask(sock, request(header or where))
    return ask(dial("127.0.0.1", HTTP), request(header or where, target="http://" + url_host))


def question(name, kind=1):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">HHHHHH", 4711, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def answered(data):
    code, count = data[3] & 15, struct.unpack(">H", data[6:8])[0]
    if code or not count:
        raise Stopped(f"dns-{code}")


def socks(host, port):
    if not now.inside:
        return dial(REAL.get(host, host), port)
    sock = dial("127.0.0.1", SOCKS)
    sock.sendall(b"\5\1\0")
    if sock.recv(2) != b"\5\0":
        raise Stopped("socks")
    name = host.encode()
    sock.sendall(b"\5\1\0\3" + bytes([len(name)]) + name + struct.pack(">H", port))
    answer = sock.recv(10)
    if len(answer) < 2 or answer[1]:
        raise Stopped(f"socks-{answer[1] if len(answer) > 1 else 255}")
    return sock
