"""``ringfence node``: the part that touches the operating system, as a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.cli.output import print_json
from ringfence.cli.parsing import add_json

if TYPE_CHECKING:
    from ringfence.placement.serving import NodeServer


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Serve this machine's sandboxes to an API over a unix socket, until SIGTERM. Sandboxes live on; the\n"
        "next node of the same service adopts them. `ringfence serve` starts one by itself."
    )
    parser.epilog = (
        "examples:\n  ringfence node --service prod\n"
        "  ringfence node --service prod --socket /run/ringfence/node.sock --api-uid ringfence-api"
    )
    parser.add_argument("--socket", metavar="PATH", help="unix socket to listen on (in the state folder)")
    parser.add_argument(
        "--api-uid", metavar="USER", help="user, by name or number, that may connect besides root and you"
    )
    parser.add_argument(
        "--service", default="default", metavar="NAME", help="whose sandboxes these are (default)"
    )
    parser.add_argument("--state", metavar="FOLDER", help="state folder (RINGFENCE_HOME)")
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="write a line to this open file when ready, and close it"
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Serve."""
    from ringfence.placement.serving import serve

    uid = _user(options.api_uid)
    _many_files()
    socket = Path(options.socket).absolute() if options.socket else None

    def ready(node: NodeServer) -> None:
        found = len(node.hosting.node.sandboxes())
        if options.json:
            print_json(
                {"ready": True, "socket": str(node.socket), "service": options.service, "found": found}
            )
        else:
            print(
                f"ready: service {options.service}, {found} sandboxes found, listening on {node.socket}",
                flush=True,
            )
        if options.ready_fd is not None:
            os.write(options.ready_fd, b"ready\n")
            os.close(options.ready_fd)

    _run(serve(options.state, options.service, socket, uid, ready))
    return 0


def _run(main: object) -> None:
    import asyncio

    try:
        import uvloop
    except ImportError:
        asyncio.run(main)  # type: ignore[arg-type]
    else:
        uvloop.run(main)  # type: ignore[arg-type]


def _many_files() -> None:
    """As many open files as this user may have: every sandbox takes a few."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _user(text: str | None) -> int | None:
    from ringfence.model.errors import InvalidRequest

    if text is None:
        return None
    if text.isdigit():
        return int(text)
    import pwd

    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise InvalidRequest(f"there is no user {text!r}", hint="give a name or a number") from None
