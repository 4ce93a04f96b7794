# ruff: noqa
# PATH MARKER: descriptors that leak from the host: our own above 2, and those of every visible process.
path, marker = sys.argv[1], sys.argv[2].encode()
found = set()


def escape(fd):
    for way in (path[1:], "../" * 60 + path[1:]):
        try:
            leaf = os.open(way, os.O_RDONLY, dir_fd=fd)
            if marker in os.read(leaf, 4096):
                verdict("succeeded")
        except OSError:
            pass


for number in range(3, 256):
    try:
        os.fstat(number)
    except OSError:
        continue
    found.add("inherited")
    escape(number)
for entry in os.listdir("/proc"):
    if not entry.isdigit() or int(entry) == os.getpid():
        continue
    try:
        names = os.listdir(f"/proc/{entry}/fd")
    except OSError:
        continue
    for name in names:
        try:
            fd = os.open(f"/proc/{entry}/fd/{name}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        escape(fd)
        os.close(fd)
verdict("+".join(sorted(found)) or "nothing-open")
