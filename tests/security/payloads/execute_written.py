# ruff: noqa
# Not an attack but its frame: code that the workload wrote runs. If this is denied, every "denied" below means nothing.
import subprocess

with open("./rf-own-program", "w") as file:
    file.write("#!/bin/sh\nexit 7\n")
os.chmod("./rf-own-program", 0o755)
verdict("succeeded" if subprocess.run(["./rf-own-program"]).returncode == 7 else "failed")
