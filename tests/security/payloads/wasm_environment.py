# ruff: noqa
# MARKER: what the host has in its environment or arguments.
marker = sys.argv[1]
places = [*os.environ.values(), *getattr(sys, "orig_argv", [])[:-1]]
for name in ("/proc/self/environ", "/proc/1/environ", "/proc/self/cmdline"):
    try:
        with open(name, errors="replace") as file:
            places.append(file.read())
    except OSError:
        pass
verdict("succeeded" if any(marker in place for place in places) else "invisible")
