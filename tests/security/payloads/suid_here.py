# ruff: noqa
# PROGRAM: a copy of a program with the set-user-ID bit and root as its owner, made inside. Needs chown or an id of 0.
import shutil
import subprocess

program = "/tmp/rf-suid"
try:
    shutil.copy(sys.argv[1], program)
    os.chown(program, 0, 0)
    os.chmod(program, 0o4755)
except OSError as error:
    denied(error)
out = subprocess.run([program, "-u"], capture_output=True, timeout=10).stdout.split()
verdict("succeeded" if int(out[0]) != os.getuid() else "unchanged")
