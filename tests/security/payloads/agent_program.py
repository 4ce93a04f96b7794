# ruff: noqa
# The agent's own program through /proc/1/exe: overwritten it would be the next sandbox's too (CVE-2019-5736).
import ctypes

seen = set()
for way in ("/proc/1/exe", "/proc/self/exe" if os.getpid() == 1 else "/proc/1/exe"):
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        try:
            os.close(os.open(way, flags))
            verdict("succeeded")
        except OSError as error:
            seen.add(describe(error))
try:
    fd = os.open("/proc/1/exe", os.O_PATH)
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY))
    verdict("succeeded")
except OSError as error:
    seen.add(describe(error))
verdict("+".join(sorted(seen)))
