"""``ringfence serve``: the service, all of it, in one command."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.cli.output import print_json
from ringfence.cli.parsing import add_json

if TYPE_CHECKING:
    from ringfence.serving.starting import Request

PORT = 8717


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Serve sandboxes over HTTP until SIGTERM. Starts the node (the only part with privileges) and the\n"
        "API, watches over them, and adopts the sandboxes that live already. Started as root, the API runs\n"
        "as a user of its own without any capability. The first start makes a key and prints it, once."
    )
    parser.epilog = (
        "examples:\n  ringfence serve\n"
        "  ringfence serve --store postgresql://ringfence@db/ringfence --workers 2\n"
        "  ringfence serve --bind 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --domain boxes.example"
    )
    parser.add_argument(
        "--bind", metavar="ADDRESS:PORT", default=f"127.0.0.1:{PORT}", help="where to listen (127.0.0.1:8717)"
    )
    parser.add_argument("--uds", metavar="PATH", help="also listen on this unix socket")
    parser.add_argument("--no-tcp", action="store_true", help="listen on the unix socket only")
    parser.add_argument(
        "--store", metavar="URL", help="sqlite:///PATH or postgresql://… (a file in the state folder)"
    )
    parser.add_argument("--service", default="default", metavar="NAME", help="name of this service (default)")
    parser.add_argument("--state", metavar="FOLDER", help="state folder (RINGFENCE_HOME)")
    parser.add_argument(
        "--domain", default="localhost", metavar="NAME", help="ports are served on PORT-ID.NAME (localhost)"
    )
    parser.add_argument("--public-url", default="", metavar="URL", help="what clients call this service")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    parser.add_argument(
        "--behind-tls",
        action="store_true",
        help="something in front of us speaks TLS: any address may be bound",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="API processes (1)")
    parser.add_argument("--user", metavar="NAME", help="user of the API when started as root (ringfence)")
    parser.add_argument("--node", metavar="SOCKET", help="use the node that listens there; start none")
    parser.add_argument("--key-file", metavar="PATH", help="write the first key there instead of printing it")
    parser.add_argument("--no-egress", action="store_true", help="no proxy: network mode egress is closed")
    parser.add_argument(
        "--egress-webhook",
        default="",
        metavar="URL",
        help="gets each question of `onUnknown: ask`, may answer",
    )
    parser.add_argument(
        "--egress-key-command",
        default="",
        metavar="CMD",
        help="prints the key of the doors' secrets, in base64",
    )
    parser.add_argument(
        "--cpu-ratio", type=float, default=0.0, metavar="N", help="CPUs promised for each that there is (32)"
    )
    parser.add_argument(
        "--memory-ratio", type=float, default=0.0, metavar="N", help="the same for memory (4)"
    )
    parser.add_argument(
        "--keep-events",
        type=float,
        default=7.0,
        metavar="DAYS",
        help="how long events are kept (7); 0: for ever",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Serve."""
    from ringfence.model.errors import InvalidRequest

    try:
        import uvicorn  # noqa: F401 - the extra's own
    except ImportError:
        raise InvalidRequest(
            "the service needs packages that are not installed", hint="pip install 'ringfence[service]'"
        ) from None
    from ringfence.serving.starting import Request, serve

    request = Request(
        bind=None if options.no_tcp else options.bind,
        uds=Path(options.uds).absolute() if options.uds else None,
        store=options.store or "",
        service=options.service,
        state=Path(options.state).absolute() if options.state else None,
        domain=options.domain,
        public_url=options.public_url,
        tls_cert=options.tls_cert or "",
        tls_key=options.tls_key or "",
        behind_tls=options.behind_tls,
        workers=options.workers,
        user=options.user,
        node=Path(options.node).absolute() if options.node else None,
        key_file=Path(options.key_file).absolute() if options.key_file else None,
        egress=not options.no_egress,
        egress_webhook=options.egress_webhook,
        egress_key=tuple(shlex.split(options.egress_key_command)),
        cpu_ratio=options.cpu_ratio,
        memory_ratio=options.memory_ratio,
        keep_events=options.keep_events,
    )
    serve(request, _Told(request, as_json=options.json))
    return 0


class _Told:
    """What the operator sees."""

    def __init__(self, request: Request, *, as_json: bool) -> None:
        self._request = request
        self._json = as_json

    def ready(self, url: str) -> None:
        """It serves."""
        if self._json:
            print_json({"ready": True, "url": url, "pid": os.getpid()})
        else:
            print(f"ready: {url}", flush=True)

    def key(self, secret: str, file: Path | None) -> None:
        """The first key, once."""
        if self._json:
            print_json({"key": secret} if file is None else {"key_file": str(file)})
        elif file is None:
            print(f"The first key, shown once: {secret}", flush=True)
        else:
            print(f"The first key is in {file}", flush=True)

    def said(self, text: str) -> None:
        """Something happened to a part."""
        import sys

        print(f"ringfence serve on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
