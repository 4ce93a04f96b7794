"""``ringfence snapshot``: sandboxes that were saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ringfence.cli import remote
from ringfence.cli.listing import clock
from ringfence.cli.output import note, print_json, printable, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs

if TYPE_CHECKING:
    from ringfence.node.service import Node

_Result = TypeVar("_Result")

DESCRIPTION = """\
Snapshots are saved sandboxes: their files, and with gvisor and qemu everything that ran in them. They are
made by `ringfence sandbox snapshot` and started, any number of times, by `ringfence sandbox restore`.

With a service (`ringfence login`, or RINGFENCE_URL) `ls`, `show` and `rm` are about your project's there;
`check` and `gc` always look at what lies on this machine. RINGFENCE_URL=local: all of them do."""

EPILOG = """\
examples:
  ringfence snapshot ls            # every verb has --json and --help
  ringfence snapshot show ready
  ringfence snapshot check --all
  ringfence snapshot rm ready
  ringfence snapshot gc --older-than 7d"""


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_verbs(parser, "snapshot", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    code: int = options.work(options)
    return code


def _in_node(work: Callable[[Node], _Result]) -> _Result:
    """Do something with the store; opening the node removes what dead ones left half made."""
    import asyncio

    from ringfence.node.service import Node

    async def do() -> _Result:
        async with await Node.open(adopt=False) as node:
            return work(node)

    return asyncio.run(do())


def _list(options: argparse.Namespace) -> int:
    found, damaged = _in_node(lambda node: (node.snapshots.all(), node.snapshots.damaged()))
    if options.json:
        print_json({"snapshots": [each.as_dict() for each in found], "damaged": damaged})
        return 0
    if not found and not damaged:
        print("no snapshots are here")
    if found:
        from ringfence.model.quantities import format_size

        rows = [
            (s.name, s.kind, s.runtime, format_size(s.size), clock(s.made_at), "yes" if s.secrets else "no")
            for s in found
        ]
        table(("name", "kind", "runtime", "size", "made", "held secrets"), rows)
    for name, why in damaged.items():
        note(f"{safe(name)} is damaged: {printable(why)}")
    return 0


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="SNAPSHOT", help="name or id")
    add_json(parser)


def _show(options: argparse.Namespace) -> int:
    def look(node: Node) -> dict[str, Any]:
        snapshot = node.snapshots.get(options.name)
        return snapshot.as_dict() | {"used_by": node.snapshots.users(snapshot.name)}

    found = _in_node(look)
    if options.json:
        print_json(found)
        return 0
    for key, value in found.items():
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        elif isinstance(value, dict):
            value = ", ".join(f"{name}={part}" for name, part in value.items() if part)
        elif key == "made_at":
            value = clock(value)
        print(f"{key:<16} {safe(str(value))}")
    return 0


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="SNAPSHOT", help="names or ids")
    parser.add_argument("--all", action="store_true", help="every snapshot")
    add_json(parser)


def _check(options: argparse.Namespace) -> int:
    from ringfence.model.errors import InvalidRequest

    if bool(options.names) == options.all:
        raise InvalidRequest("name snapshots, or --all", hint="see `ringfence snapshot ls`")

    def check(node: Node) -> dict[str, str]:
        store = node.snapshots
        found = {} if options.names else dict(store.damaged())
        for snapshot in [store.get(name) for name in options.names] or store.all():
            try:
                store.verify(snapshot)
                found[snapshot.name] = ""
            except InvalidRequest as error:
                found[snapshot.name] = error.message
        return found

    found = _in_node(check)
    if options.json:
        print_json({"snapshots": [{"name": name, "damaged": why or None} for name, why in found.items()]})
    else:
        for name, why in found.items():
            print(f"{safe(name)}: {printable(why) or 'as it was made'}")
    return 1 if any(found.values()) else 0


def _remove_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="SNAPSHOT", help="names or ids")
    add_json(parser)


def _remove(options: argparse.Namespace) -> int:
    from contextlib import suppress

    from ringfence.model.errors import InvalidRequest

    def remove(node: Node) -> None:
        for name in options.names:  # one that is misspelt: nothing is removed
            with suppress(InvalidRequest):  # damaged ones can be removed
                node.snapshots.get(name)
        for name in dict.fromkeys(options.names):
            node.snapshots.remove(name)

    _in_node(remove)
    if options.json:
        print_json({"removed": options.names})
    else:
        for name in options.names:
            print(f"removed {safe(name)}")
    return 0


def _gc_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="TIME", help="also whole ones older than that: 7d")
    parser.add_argument("--damaged", action="store_true", help="also those that are damaged")
    add_json(parser)


def _gc(options: argparse.Namespace) -> int:
    import time

    from ringfence.model.errors import RingfenceError
    from ringfence.model.quantities import parse_duration

    age = parse_duration(options.older_than) if options.older_than else None

    def collect(node: Node) -> list[str]:
        store = node.snapshots
        gone = store.collect()
        wanted = list(store.damaged()) if options.damaged else []
        if age is not None:
            wanted += [s.name for s in store.all() if s.made_at < time.time() - age]
        for name in wanted:
            try:
                store.remove(name)
                gone.append(name)
            except RingfenceError as error:
                note(f"{safe(name)} stays: {printable(error.message)}")
        return gone

    gone = _in_node(collect)
    if options.json:
        print_json({"removed": gone})
    else:
        print("\n".join(f"removed {safe(name)}" for name in gone) or "nothing to remove")
    return 0


Verb = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
VERBS: dict[str, Verb] = {
    "ls": ("list snapshots", add_json, remote.either(_list, "remote_snapshot", "ls")),
    "show": ("show a snapshot, and who uses it", _name, remote.either(_show, "remote_snapshot", "show")),
    "check": ("read snapshots whole and compare them with what was saved", _check_options, _check),
    "rm": (
        "remove snapshots that nobody uses",
        _remove_options,
        remote.either(_remove, "remote_snapshot", "rm"),
    ),
    "gc": ("remove what is left of forks and crashes, and old or damaged ones if told so", _gc_options, _gc),
}
