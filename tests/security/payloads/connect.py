# ruff: noqa
# KIND ADDRESS [PORT]: reaches for a listener of the host. UDP only asks for a route: nothing is sent.
import socket

kind, address = sys.argv[1:3]
try:
    if kind == "abstract":
        made, target = socket.socket(socket.AF_UNIX), "\0" + address
    elif kind == "unix":
        made, target = socket.socket(socket.AF_UNIX), address
    elif kind == "udp":
        made, target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), (address, int(sys.argv[3]))
    else:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made, target = socket.socket(family), (address, int(sys.argv[3]))
    made.settimeout(3)
    made.connect(target)
    verdict("succeeded")
except OSError as error:
    denied(error)
