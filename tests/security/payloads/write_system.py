# ruff: noqa
# PATH…: writes to host folders that are shown read-only (never creates anything where it works: opens for append).
seen = set()
for path in sys.argv[1:]:
    for attempt in (
        lambda path=path: os.close(os.open(path, os.O_WRONLY | os.O_APPEND)),
        lambda path=path: os.utime(path),
        lambda path=path: os.chmod(path, os.stat(path).st_mode & 0o7777),
    ):
        try:
            attempt()
            verdict("succeeded", by=path)
        except OSError as error:
            seen.add(describe(error))
verdict("+".join(sorted(seen)))
