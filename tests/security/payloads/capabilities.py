# ruff: noqa
# Any capability in any set, or one to be had?
import ctypes

sets = {}
with open("/proc/self/status") as file:
    for line in file:
        if line.startswith("Cap"):
            sets[line.split(":")[0]] = int(line.split()[1], 16)
libc = ctypes.CDLL(None, use_errno=True)
ambient = libc.prctl(47, 2, 0, 0, 0) == 0  # PR_CAP_AMBIENT_RAISE CAP_CHOWN
gained = ambient or any(sets.values())
verdict("succeeded" if gained else "none", sets={k: hex(v) for k, v in sets.items() if v})
