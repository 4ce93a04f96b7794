"""``ringfence key``: keys of a project."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.listing import clock
from ringfence.cli.output import note, print_json, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs

if TYPE_CHECKING:
    from ringfence.sdk.service import AsyncService

SCOPES = ("read", "run", "admin")


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description = (
        "Keys of your project at a service. A key is shown once, when it is made; the service keeps its\n"
        "digest. Scopes: read (look), run (create and use sandboxes), admin (keys, quotas), which this needs."
    )
    parser.epilog = (
        "examples:\n  ringfence key create --name ci --expires 30d    # every verb has --json and --help\n"
        "  ringfence key ls\n  ringfence key rotate ID --overlap 1h\n  ringfence key revoke ID"
    )
    add_verbs(parser, "key", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    remote.need("`ringfence key`")
    code: int = options.work(options)
    return code


def _create_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", metavar="TEXT", help="what it is for")
    parser.add_argument("--user", default="", metavar="NAME", help="whose it is")
    parser.add_argument(
        "--scope",
        action="append",
        choices=SCOPES,
        metavar="SCOPE",
        help="read, run (default) or admin; repeatable",
    )
    parser.add_argument(
        "--expires", metavar="TIME", help="it is good for this long: 12h, 30d (default: for ever)"
    )
    parser.add_argument("--project", metavar="ID", help="of another project; for the operator")
    add_json(parser)


def _create(options: argparse.Namespace) -> int:
    from ringfence.model.quantities import parse_duration

    seconds = parse_duration(options.expires) if options.expires else None

    async def do(service: AsyncService) -> Any:
        return await service.create_key(
            options.name,
            scopes=options.scope or ["run"],
            user=options.user,
            seconds=seconds,
            project=options.project,
        )

    return _made(options, remote.with_service(do))


def _made(options: argparse.Namespace, made: Any) -> int:
    if options.json:
        print_json(made)
        return 0
    note(f"key {made['id']} ({', '.join(made['scopes'])}); this is the only time that it is shown")
    print(made["secret"])
    return 0


def _ls(options: argparse.Namespace) -> int:
    found = remote.with_service(lambda service: service.keys())
    if options.json:
        print_json({"keys": found})
        return 0
    rows = [
        (
            key["id"], safe(key["name"]), safe(str(key.get("user") or "")), " ".join(key["scopes"]),
            key["state"],
            clock(key["created_at"]), clock(key["expires_at"]) if key.get("expires_at") else "never",
            clock(key["used_at"]) if key.get("used_at") else "never",
        )
        for key in found
    ]  # fmt: skip
    table(("id", "name", "user", "scopes", "state", "created", "expires", "used"), rows)
    return 0


def _one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="key, as `ringfence key ls` shows it")
    add_json(parser)


def _rotate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overlap", default="0s", metavar="TIME", help="the old one is good for so long (0s)"
    )
    _one(parser)


def _rotate(options: argparse.Namespace) -> int:
    from ringfence.model.quantities import parse_duration

    overlap = parse_duration(options.overlap)
    return _made(
        options, remote.with_service(lambda service: service.rotate_key(options.id, overlap=overlap))
    )


def _revoke(options: argparse.Namespace) -> int:
    gone = remote.with_service(lambda service: service.revoke_key(options.id))
    return remote.say(options, gone, f"revoked {gone['id']}")


VERBS = {
    "create": (
        "make a key",
        _create_options,
        _create,
        ("create --name ci --expires 30d", "create --scope read --user kim"),
    ),
    "ls": ("list keys", add_json, _ls, ("ls", "ls --json | jq -r '.keys[].id'")),
    "rotate": (
        "replace a key by another that may do the same",
        _rotate_options,
        _rotate,
        ("rotate 06h2k29ttkxv7wgvb0wy --overlap 1h",),
    ),
    "revoke": ("make a key good for nothing, at once", _one, _revoke, ("revoke 06h2k29ttkxv7wgvb0wy",)),
}
