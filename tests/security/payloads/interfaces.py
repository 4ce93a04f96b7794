# ruff: noqa
# Any way out of the network namespace but loopback?
import socket

names = [name for _, name in socket.if_nameindex() if name != "lo"]
up = []
for name in names:
    try:
        with open(f"/sys/class/net/{name}/flags") as file:
            up.append(name) if int(file.read(), 16) & 1 else None
    except OSError:
        up.append(name)
verdict("succeeded" if up else "loopback-only", names=names)
