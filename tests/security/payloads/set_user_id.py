# ruff: noqa
# PROGRAM…: runs each set-user-ID program, which prints its effective uid; gained anything?
import subprocess

seen = set()
for program in sys.argv[1:]:
    try:
        out = subprocess.run(
            [program], capture_output=True, timeout=10, stdin=subprocess.DEVNULL
        ).stdout.split()
    except OSError as error:
        seen.add(describe(error))
        continue
    seen.add("succeeded" if int(out[0]) != os.getuid() else "unchanged")
verdict("+".join(sorted(seen)) if "succeeded" not in seen else "succeeded")
