# ruff: noqa
# PATH MARKER: reads a file of the host by its host path.
path, marker = sys.argv[1], sys.argv[2].encode()
try:
    with open(path, "rb") as file:
        verdict("succeeded" if marker in file.read() else "different")
except OSError as error:
    denied(error)
