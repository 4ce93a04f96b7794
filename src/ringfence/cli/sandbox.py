"""``ringfence sandbox``: what can be done with sandboxes, of a service or of this machine's own node.

With a service configured (``ringfence login``, ``RINGFENCE_URL``) every verb speaks to it. Without one, those
for sandboxes that ``run --keep`` left do their work here. Each verb is (what it does, options, work,
examples) in ``VERBS``. Here, those that only look, or run a command, leave the sandbox to whoever holds it;
the others take it over for a moment, one ``ringfence`` at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ringfence.cli import listing, sandbox_options, stopping
from ringfence.cli.output import print_json, safe
from ringfence.cli.parsing import Parser, add_json, add_verbs
from ringfence.cli.remote import either, need, only

if TYPE_CHECKING:
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.node.service import Node

_Result = TypeVar("_Result")

DESCRIPTION = """\
A sandbox lives until its deadline, and can be used, saved, copied and begun anew by its id, or by its name.
With a service (`ringfence login`, or RINGFENCE_URL) these are the service's; else those that `ringfence run
--keep` left on this machine. RINGFENCE_URL=local asks for the latter in any case."""

EPILOG = """\
examples:
  ringfence sandbox create --name build && ringfence sandbox exec build -- make
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


def _list(options: argparse.Namespace) -> int:
    if options.label or options.state:
        need("choosing by label or state")
    return listing.main(options)


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
ID = "sb-01h9z3k8w6q4n2v7c5x0"
VERBS: dict[str, Verb] = {
    "create": (
        "start a sandbox of a service",
        sandbox_options.create,
        only("remote_sandbox", "create"),
        (
            "create --name build --timeout 1h",
            "create --memory 256M --file data.csv:/workspace/data.csv -e LANG=C.UTF-8",
            "create --pool small --label team=blue --json | jq -r .id",
        ),
    ),
    "ls": (
        "list sandboxes: the service's, or those that were kept here",
        sandbox_options.ls,
        either(_list, "remote_sandbox", "ls"),
        ("ls", "ls --label team=blue --all", "ls --json | jq -r '.sandboxes[].id'"),
    ),
    "show": (
        "show a sandbox: its measured boundary, what it took, what runs",
        _one,
        either(_show, "remote_sandbox", "show"),
        (f"show {ID}", f"show --json {ID} | jq .boundary"),
    ),
    "exec": (
        "run a command in a sandbox; input, output and signals pass through",
        _exec_options,
        either(_exec, "remote_exec", "execute"),
        (f"exec {ID} -- ls -l", f"exec -i {ID} -- bash", f"exec -w /tmp -e LANG=C {ID} -- sort < names"),
    ),
    "shell": (
        "a shell in a sandbox of a service",
        sandbox_options.shell,
        only("remote_exec", "shell"),
        (f"shell {ID}", "shell build"),
    ),
    "code": (
        "run code in a sandbox's interpreter; variables live on from call to call",
        sandbox_options.code,
        only("remote_exec", "code"),
        (f"code {ID} 'x = 6'", f"code {ID} 'x * 7'", f"code {ID} --file job.py --save pictures"),
    ),
    "cp": (
        "copy files and folders into and out of a sandbox of a service",
        sandbox_options.cp,
        only("remote_files", "cp"),
        (f"cp data.csv {ID}:/workspace/", f"cp {ID}:report report", f"cp {ID}:out.log - | less"),
    ),
    "ls-files": (
        "list files in a sandbox of a service",
        sandbox_options.ls_files,
        only("remote_files", "ls_files"),
        (f"ls-files {ID}", f"ls-files -l -R {ID} /workspace"),
    ),
    "port": (
        "how a port inside is reached: its address with a token, or a local port that leads there",
        sandbox_options.port,
        only("remote_files", "port"),
        (f"port {ID} 8000", f"port {ID} 5432 --forward 15432"),
    ),
    "logs": (
        "what happened to a sandbox of a service",
        sandbox_options.logs,
        only("remote_sandbox", "logs"),
        (f"logs {ID}", f"logs -f {ID}"),
    ),
    "changes": (
        "files that a sandbox of a service added, modified or deleted",
        _one,
        only("remote_sandbox", "changes"),
        (f"changes {ID}",),
    ),
    "pause": (
        "stop everything in a sandbox for a while",
        _one,
        either(_pause, "remote_sandbox", "pause"),
        (f"pause {ID}",),
    ),
    "resume": (
        "let a paused sandbox go on",
        _one,
        either(_resume, "remote_sandbox", "resume"),
        (f"resume {ID}",),
    ),
    "snapshot": (
        "save a sandbox; it goes on",
        _snapshot_options,
        either(_snapshot, "remote_sandbox", "snapshot"),
        (f"snapshot {ID} --name ready", f"snapshot --disk {ID}"),
    ),
    "restore": (
        "start a sandbox from a snapshot, and keep it",
        _restore_options,
        either(_restore, "remote_sandbox", "restore"),
        ("restore ready", "restore ready --name second"),
    ),
    "fork": (
        "copies of a sandbox, each with an identity of its own",
        _fork_options,
        either(_fork, "remote_sandbox", "fork"),
        (f"fork {ID} -n 3",),
    ),
    "reset": (
        "begin anew from the template: no process and no file is left, the id stays",
        _one,
        either(_reset, "remote_sandbox", "reset"),
        (f"reset {ID}",),
    ),
    "extend": (
        "let a sandbox of a service live for so long from now",
        sandbox_options.extend,
        only("remote_sandbox", "extend"),
        (f"extend {ID} 2h",),
    ),
    "wait": (
        "wait until a sandbox of a service is in a state; exit 1 if it ends in another",
        sandbox_options.wait,
        only("remote_sandbox", "wait"),
        (f"wait {ID}", f"wait {ID} --state stopped --timeout 1h"),
    ),
    "kill": (
        "end sandboxes and remove what is theirs; the same as rm",
        stopping.configure,
        either(stopping.main, "remote_sandbox", "kill"),
        (f"kill {ID}", "kill build", "kill --all --grace 0s"),
    ),
    "rm": (
        "end sandboxes and remove what is theirs",
        stopping.configure,
        either(stopping.main, "remote_sandbox", "kill"),
        (),
    ),
}
