# ruff: noqa
# Takes another user id or group.
seen = set()
for attempt in (
    lambda: os.setuid(0),
    lambda: os.setresuid(64999, 64999, 64999),
    lambda: os.setuid(2000),
    lambda: os.setgid(0),
    lambda: os.setgroups([0]),
    lambda: os.setgroups([]),
):
    try:
        attempt()
        verdict("succeeded")
    except OSError as error:
        seen.add(describe(error))
verdict("+".join(sorted(seen)))
