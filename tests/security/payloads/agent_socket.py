# ruff: noqa
# NAME…: the agent's listening socket, looked for by every name that /proc/net/unix and the test know.
import socket

seen = set()
names = [os.fsencode(name) for name in sys.argv[1:]]
try:
    with open("/proc/net/unix", "rb") as file:
        for line in file.readlines()[1:]:
            fields = line.split()
            if len(fields) > 7:
                names.append(b"\0" + fields[7][1:] if fields[7].startswith(b"@") else fields[7])
except OSError as error:
    seen.add(describe(error))
for name in names:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(2)
    try:
        made.connect(name)
        made.sendall(b"x")
        verdict("succeeded", by=repr(name))
    except OSError as error:
        seen.add(describe(error))
verdict("+".join(sorted(seen)) or "invisible")
