# ruff: noqa
# NAME: sends a descriptor of /proc to a listener of the host (abstract): is there a way to hand one out?
import socket

made = socket.socket(socket.AF_UNIX)
made.settimeout(2)
try:
    made.connect("\0" + sys.argv[1])
    socket.send_fds(made, [b"x"], [os.open("/proc", os.O_RDONLY)])
    verdict("succeeded")
except OSError as error:
    denied(error)
