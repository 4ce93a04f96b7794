# ruff: noqa
# PATH: writes to a file of the host by its host path (a decoy of the test's own).
try:
    fd = os.open(sys.argv[1], os.O_WRONLY)
    os.write(fd, b"overwritten")
    verdict("succeeded")
except OSError as error:
    denied(error)
