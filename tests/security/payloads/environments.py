# ruff: noqa
# MARKER: secrets of the host in the environment of any process that can be seen.
marker = sys.argv[1].encode()
if any(marker in value for value in os.environb.values()):
    verdict("succeeded")
for entry in os.listdir("/proc"):
    if entry.isdigit():
        for name in ("environ", "cmdline"):
            try:
                with open(f"/proc/{entry}/{name}", "rb") as file:
                    text = file.read()
            except OSError:
                continue
            if marker in text and int(entry) != os.getpid():
                verdict("succeeded")
verdict("invisible")
