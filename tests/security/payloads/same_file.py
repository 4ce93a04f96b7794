# ruff: noqa
# PATH SHA256: is the sandbox's own copy of a well-known file the host's?
import hashlib

path, digest = sys.argv[1:3]
try:
    with open(path, "rb") as file:
        verdict("succeeded" if hashlib.sha256(file.read()).hexdigest() == digest else "different")
except OSError as error:
    denied(error)
