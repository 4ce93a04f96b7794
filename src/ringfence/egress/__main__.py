"""``python -m ringfence.egress FOLDER DESCRIPTOR SETTINGS``: the proxy process. ``Doors`` starts it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from ringfence.egress.engine import Settings
from ringfence.egress.server import Server

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38


def _drop(user: int | None) -> None:
    """Give up every right that a proxy does not need. Modules may be root's: they are imported before."""
    import encodings.idna

    import idna

    idna.encode("bücher.example", uts46=True)
    encodings.idna.nameprep("x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process of this user may look into it


def main(arguments: list[str]) -> int:
    """Serve until whoever started us has gone."""
    folder, descriptor, text = arguments
    values = json.loads(text)
    user = values.pop("user", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for whoever started us
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    values["key_command"] = tuple(values.get("key_command") or ())
    settings = Settings(**values)
    # From here on every path is below the folder, and the folders above it may be root's alone.
    os.chdir(folder)
    os.umask(0o077)
    owner = socket.socket(fileno=int(descriptor))

    async def serve() -> None:
        server = Server(Path(), settings)
        _drop(user)
        gc.collect()
        gc.freeze()  # what is here now stays: it need not be looked through again and again
        gc.set_threshold(20_000, 20, 50)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.done.set)
        await server.run(owner)

    try:
        import uvloop

        uvloop.run(serve())
    except ImportError:
        asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
