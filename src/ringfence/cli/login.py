"""``ringfence login``: which service this user's commands and programs speak to."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ringfence.cli.output import note, print_json
from ringfence.cli.parsing import add_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Keep the address of a service and your key in a file that only you can read. `ringfence sandbox`,\n"
        "the other verbs of a service and the SDK then use it. RINGFENCE_URL and RINGFENCE_API_KEY win.\n"
        "\nWithout --key-file the key is read from the terminal, not shown, or from standard input: on a\n"
        "command line everybody on this machine could read it."
    )
    parser.epilog = (
        "examples:\n"
        "  ringfence login                                      # http://127.0.0.1:8717\n"
        "  ringfence login https://sandboxes.example < key\n"
        "  ringfence login unix:/run/ringfence/api.sock --key-file key\n"
        "  ringfence login --show\n"
        "  ringfence login --forget"
    )
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="http://, https:// or unix:/path (default: http://127.0.0.1:8717)",
    )
    parser.add_argument("--key-file", metavar="FILE", help="take the key from this file")
    parser.add_argument(
        "--insecure", action="store_true", help="send the key over plain HTTP to another machine"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not ask the service whether the key is good"
    )
    parser.add_argument("--show", action="store_true", help="show what is kept, but for the key")
    parser.add_argument("--forget", action="store_true", help="remove the file")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Log in, or show, or forget."""
    from ringfence.model.errors import InvalidRequest
    from ringfence.sdk import settings
    from ringfence.sdk.settings import Settings

    if options.show + options.forget > 1 or ((options.show or options.forget) and options.url):
        raise InvalidRequest("one thing at a time", hint="URL, --show or --forget")
    if options.forget:
        gone = settings.forget()
        if options.json:
            print_json({"forgotten": gone})
        else:
            print("forgotten" if gone else "nothing was kept")
        return 0
    if options.show:
        return _show(options)
    url = options.url or "http://127.0.0.1:8717"
    settings.check(Settings(url, insecure=options.insecure))
    made = settings.check(Settings(url, _key(options), insecure=options.insecure, source="ringfence login"))
    who = {} if options.no_check else _ask(made)
    place = settings.keep(made)
    if options.json:
        print_json({"url": url, "file": str(place), **who})
    else:
        whose = f" as {who['user'] or who['project']} ({', '.join(who['scopes'])})" if who else ""
        print(f"logged in to {url}{whose}; kept in {place}")
    if os.environ.get(settings.URL):
        note(f"{settings.URL} is set and wins over what was kept")
    return 0


def _show(options: argparse.Namespace) -> int:
    from ringfence.sdk import settings

    found = settings.find()
    shown = {
        "url": found.url if found else None,
        "key": bool(found and found.key),
        "from": found.source if found else None,
    }
    if options.json:
        print_json(shown)
    elif found is None:
        print("no service is configured: `ringfence sandbox` works with this machine's own node")
    else:
        print(f"{found.url} {'with' if found.key else 'without'} a key, from {found.source}")
    return 0 if found else 1


def _key(options: argparse.Namespace) -> str:
    from ringfence.model.errors import InvalidRequest

    if options.key_file:
        try:
            with open(options.key_file, encoding="ascii", errors="replace") as file:
                return file.read(4096).strip()
        except OSError as error:
            raise InvalidRequest(f"--key-file {options.key_file}: {error.strerror}") from None
    from ringfence.sdk import settings

    if given := os.environ.get(settings.KEY):
        return given
    if sys.stdin is not None and sys.stdin.isatty():
        import getpass

        return getpass.getpass("key: ").strip()
    return sys.stdin.read(4096).strip() if sys.stdin is not None else ""


def _ask(made: object) -> dict[str, Any]:
    """Whose key it is, as the service says."""
    import asyncio

    from ringfence.sdk.service import AsyncService

    async def ask() -> dict[str, Any]:
        async with AsyncService(settings=made) as service:  # type: ignore[arg-type]
            return dict(await service.whoami())

    return asyncio.run(ask())
