# ruff: noqa
# MODE PATH…: opens files of /proc and /sys that steer the kernel; never writes. The first that opens is the verdict.
flags = os.O_WRONLY if sys.argv[1] == "w" else os.O_RDONLY
seen = set()
for path in sys.argv[2:]:
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
        if flags == os.O_RDONLY and not os.read(fd, 16):
            seen.add("empty")
            continue
        verdict("succeeded", by=path)
    except OSError as error:
        seen.add(describe(error))
verdict("+".join(sorted(seen)))
