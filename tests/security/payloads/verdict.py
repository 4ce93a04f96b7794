# ruff: noqa
"""Put before every Python payload: one line of JSON that says what came of the attack."""

import errno
import json
import os
import sys


def verdict(outcome, **details):
    sys.stdout.flush()
    os.write(1, ("\n" + json.dumps({"outcome": outcome, **details}) + "\n").encode())
    os._exit(0)


def describe(error):
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "invisible"
    return "denied:" + errno.errorcode.get(error.errno, str(error.errno))


def denied(error):
    verdict(describe(error))
