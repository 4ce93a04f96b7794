"""``ringfence sandbox``: what can be done with a sandbox that was kept.

Each verb is (what it does, options, work, examples) in ``VERBS``. Those that only look, or run a command,
leave the sandbox to whoever holds it; the others take it over for a moment, one ``ringfence`` at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ringfence.cli import listing, stopping
from ringfence.cli.output import print_json, safe
from ringfence.cli.parsing import Parser, add_json, add_verbs

if TYPE_CHECKING:
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.node.service import Node

_Result = TypeVar("_Result")

DESCRIPTION = """\
A sandbox that was started with `ringfence run --keep` lives until its deadline. It can be used, saved, copied
and begun anew by its id."""

EPILOG = """\
examples:
  ringfence run --keep --name build -- sh -c 'echo 1 > state'
  ringfence sandbox ls             # every verb has --json and --help
  ringfence sandbox exec ID -- cat state
  ringfence sandbox snapshot ID --name ready && ringfence sandbox restore ready
  ringfence sandbox fork ID -n 3
  ringfence sandbox reset ID
  ringfence sandbox rm --all"""


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_verbs(parser, "sandbox", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    code: int = options.work(options)
    return code


# -- taking one


def _with(name: str, work: Callable[[Node, NodeSandbox], Awaitable[_Result]]) -> _Result:
    """Do something to a sandbox as its holder."""
    import asyncio

    from ringfence.node import kept
    from ringfence.node.service import Node

    async def do() -> _Result:
        async with await Node.open(adopt=False) as node:
            return await work(node, await kept.take(node, name))

    return asyncio.run(do())


def _say(options: argparse.Namespace, value: dict[str, Any], text: str) -> int:
    if options.json:
        print_json(value)
    else:
        print(text)
    return 0


def _one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="sandbox, as `ringfence sandbox ls` shows it")
    add_json(parser)


# -- looking


def _show(options: argparse.Namespace) -> int:
    import asyncio

    from ringfence.node import kept
    from ringfence.node.service import Node

    async def look() -> dict[str, Any]:
        async with await Node.open(adopt=False) as node:
            sandbox = await kept.visit(node, options.id)
            try:
                found = kept.look(node, options.id) or {}
                found["boundary"] = (await sandbox.boundary()).as_dict()
                if found["state"] == "running":
                    link = await sandbox.link()
                    found["processes"] = [each._asdict() for each in await link.processes()]
                return found
            finally:
                await sandbox.detach()

    found = asyncio.run(look())
    if options.json:
        print_json(found)
        return 0
    boundary, usage = found["boundary"], found["usage"]
    wall = (
        f"{found['runtime']}, {boundary['level'].value} ({boundary['boundary'].value}), {boundary['kernel']}"
    )
    clocks = f"{listing.clock(found['started_at'])}, deadline {listing.clock(found['deadline'])}"
    peak = (usage["memory_peak"] or 0) >> 20
    lines = [
        f"{found['id']}  {found['state']}  {safe(found['labels'].get('name', ''))}".rstrip(),
        f"  runtime    {wall}",
        f"  started    {clocks}",
        f"  template   {found['template']}",
        f"  snapshot   {found['snapshot'] or 'none'}",
        f"  policy     {found['policy_digest']}",
        f"  used       {usage['cpu_seconds'] or 0:.2f} s of CPU, {peak} MiB at most",
    ]
    for each in found.get("processes", ()):
        if each["state"] == "running":
            lines.append(f"  command    {safe(each['id'])}  {safe(each['argv0'])}")
    print("\n".join(lines))
    return 0


# -- using


def _exec_options(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, Parser)
    parser.usage = "ringfence sandbox exec [options] ID [--] COMMAND [ARGUMENT…]"
    parser.add_argument("--interactive", "-i", action="store_true", help="give the command a terminal")
    parser.add_argument("--env", "-e", action="append", default=[], metavar="K[=V]", help="set a variable")
    parser.add_argument("--workdir", "-w", metavar="PATH", help="folder the command starts in")
    parser.add_argument("--quiet", "-q", action="store_true", help="say nothing on stderr but errors")
    parser.add_argument(
        "--stream", action="store_true", help="with --json: pass the output on as it comes, to stderr"
    )
    _one(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="and its arguments")


def _exec(options: argparse.Namespace) -> int:
    from ringfence.cli.sandbox_exec import execute

    return execute(options)


def _pause(options: argparse.Namespace) -> int:
    async def pause(_: Node, sandbox: NodeSandbox) -> None:
        await sandbox.pause()

    _with(options.id, pause)
    return _say(options, {"id": options.id, "state": "paused"}, f"paused {options.id}")


def _resume(options: argparse.Namespace) -> int:
    async def resume(_: Node, sandbox: NodeSandbox) -> None:
        await sandbox.resume()

    _with(options.id, resume)
    return _say(options, {"id": options.id, "state": "running"}, f"resumed {options.id}")


# -- saving


def _kind(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--disk", dest="kind", action="store_const", const="disk", help="files only: any runtime with a disk"
    )
    group.add_argument(
        "--memory",
        dest="kind",
        action="store_const",
        const="memory",
        help="with everything that runs (default where the runtime can: gvisor, qemu); open links end",
    )


def _snapshot_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", "-n", metavar="NAME", help="its name (default: its id)")
    _kind(parser)
    _one(parser)


def _snapshot(options: argparse.Namespace) -> int:
    async def save(_: Node, sandbox: NodeSandbox) -> dict[str, Any]:
        return (await sandbox.snapshot(options.name, kind=options.kind)).as_dict()

    made = _with(options.id, save)
    return _say(options, made, made["name"])


def _restore_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("snapshot", metavar="SNAPSHOT", help="name or id: see `ringfence snapshot ls`")
    parser.add_argument("--name", "-n", metavar="TEXT", help="name of the sandbox: its label `name`")
    add_json(parser)


def _restore(options: argparse.Namespace) -> int:
    import asyncio

    from ringfence.node.service import Node

    async def restore() -> str:
        async with await Node.open(adopt=False) as node:
            changes: dict[str, Any] = {"keep": True}
            if options.name:
                snapshot = node.snapshots.get(options.snapshot)
                changes["labels"] = dict(snapshot.request["labels"]) | {"name": options.name}
            return (await node.restore(options.snapshot, **changes)).id

    name = asyncio.run(restore())
    return _say(options, {"id": name, "snapshot": options.snapshot}, name)


def _fork_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", "-n", type=int, default=1, metavar="N", help="copies (default: 1)")
    _kind(parser)
    _one(parser)


def _fork(options: argparse.Namespace) -> int:
    async def fork(_: Node, sandbox: NodeSandbox) -> list[str]:
        return [copy.id for copy in await sandbox.fork(options.count, kind=options.kind, keep=True)]

    copies = _with(options.id, fork)
    return _say(options, {"id": options.id, "copies": copies}, "\n".join(copies))


def _reset(options: argparse.Namespace) -> int:
    async def reset(_: Node, sandbox: NodeSandbox) -> None:
        await sandbox.reset(standby=False)

    _with(options.id, reset)
    return _say(options, {"id": options.id}, f"reset {options.id}")


Verb = tuple[
    str,
    Callable[[argparse.ArgumentParser], None],
    Callable[[argparse.Namespace], int],
    tuple[str, ...],
]
VERBS: dict[str, Verb] = {
    "ls": ("list kept sandboxes", listing.configure, listing.main, ()),
    "show": (
        "show a sandbox: its measured boundary, what it took, what runs",
        _one,
        _show,
        ("show sb-01h9z3k8w6q4n2v7c5x0", "show --json sb-01h9z3k8w6q4n2v7c5x0 | jq .boundary"),
    ),
    "exec": (
        "run a command in a sandbox; input, output and signals pass through",
        _exec_options,
        _exec,
        (
            "exec sb-01h9z3k8w6q4n2v7c5x0 -- ls -l",
            "exec -i sb-01h9z3k8w6q4n2v7c5x0 -- bash",
            "exec -w /tmp -e LANG=C sb-01h9z3k8w6q4n2v7c5x0 -- sort < names",
        ),
    ),
    "pause": ("stop everything in a sandbox for a while", _one, _pause, ("pause sb-01h9z3k8w6q4n2v7c5x0",)),
    "resume": ("let a paused sandbox go on", _one, _resume, ("resume sb-01h9z3k8w6q4n2v7c5x0",)),
    "snapshot": (
        "save a sandbox; it goes on",
        _snapshot_options,
        _snapshot,
        ("snapshot sb-01h9z3k8w6q4n2v7c5x0 --name ready", "snapshot --disk sb-01h9z3k8w6q4n2v7c5x0"),
    ),
    "restore": (
        "start a sandbox from a snapshot, and keep it",
        _restore_options,
        _restore,
        ("restore ready", "restore ready --name second"),
    ),
    "fork": (
        "copies of a sandbox, each with an identity of its own",
        _fork_options,
        _fork,
        ("fork sb-01h9z3k8w6q4n2v7c5x0 -n 3",),
    ),
    "reset": (
        "begin anew from the template: no process and no file is left, the id stays",
        _one,
        _reset,
        ("reset sb-01h9z3k8w6q4n2v7c5x0",),
    ),
    "rm": ("end sandboxes and remove what is theirs", stopping.configure, stopping.main, ()),
}
