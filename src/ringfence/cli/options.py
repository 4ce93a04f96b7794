"""The options of ``ringfence run``; what they add up to is in ``ringfence.cli.requesting``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ringfence.model.levels import Level
from ringfence.model.policy import SIZES

if TYPE_CHECKING:
    from ringfence.cli.parsing import Parser

# The names of an option, and what ``add_argument`` is told of it.
Option = tuple[tuple[str, ...], dict[str, Any]]

DESCRIPTION = """\
Run one command in a sandbox of its own: no network unless asked for, no host files but /usr, a deadline, and
limits on memory, CPUs, processes, disk and output. The sandbox and everything in it is gone when the command
ends.

Input, output and signals pass through. Ctrl-C interrupts the command, a second Ctrl-C kills the sandbox."""

EPILOG = """\
examples:
  ringfence run -- python3 -c 'print(6 * 7)'
  ringfence run --memory 256M --timeout 30s --file job.py --file data.csv --out report.md -- python3 job.py
  ringfence run --mount .:/src:ro --changes -- sh -c 'cp -r /src/. . && make'
  ringfence run --allow api.example.com --allow tcp://db.example.com:5432 -- ./agent.py
  generate | ringfence run -- sort | less
  ringfence run -i -- bash
  ringfence run --json -- ./test.sh | jq .cause

exit codes: the command's own; 124 the deadline came, 125 Ringfence itself failed, 126 the command can't be
executed, 127 it was not found, 137 it was killed (the reason is printed)."""

AGENT_CLASSES = ("conversational", "tool-calling", "code-executing", "planning", "multi-agent")


def _option(*names: str, **told: Any) -> Option:
    if told.get("action") == "append":
        told["default"] = []
    return names, told


GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    (
        "isolation",
        (
            _option(
                "--runtime", metavar="NAME", help="start it with this runtime; `ringfence doctor` lists them"
            ),
            _option(
                "--isolation",
                metavar="LEVEL",
                choices=[level.value for level in Level],
                help="the weakest wall that will do: L1 to L4 (default: L2, the fastest healthy runtime)",
            ),
            _option("--policy", metavar="FILE", help="policy file; options given here win over it"),
            _option("--preset", metavar="NAME", help="built-in policy: untrusted, controlled or trusted"),
            _option(
                "--user",
                type=int,
                metavar="UID",
                help="user inside: 1000 (default), or 0 for root of the sandbox's own user namespace",
            ),
            _option(
                "--readonly", action="store_true", help="writes only where the policy says (/workspace, /tmp)"
            ),
            _option(
                "--net",
                metavar="MODE",
                choices=["none", "egress", "open"],
                help="network: none (default: loopback only), egress (what --allow or the policy names), or "
                "open where the runtime has it",
            ),
            _option(
                "--allow",
                action="append",
                metavar="HOST[:PORT]",
                help="let it reach this host (default port: 443), with --net egress: api.example.com, "
                "*.example.com:443,8443, http://example.com, tcp://db.example.com:5432, 203.0.113.7:22",
            ),
        ),
    ),
    (
        "limits",
        (
            _option(
                "--size",
                metavar="NAME",
                choices=list(SIZES),
                help="small (default: 1 CPU, 1GiB), medium or large",
            ),
            _option("--cpus", type=float, metavar="N", help="CPUs, a fraction will do: 0.5"),
            _option("--memory", metavar="SIZE", help="memory, swap included: 64M, 2GiB"),
            _option("--disk", metavar="SIZE", help="what may be written (default: half of the memory)"),
            _option("--gpus", type=int, metavar="N", help="whole GPUs (default: none); see docs/gpu.md"),
            _option("--pids", type=int, metavar="N", help="processes and threads at once (default: 256)"),
            _option("--timeout", metavar="TIME", help="deadline: 2s, 10m, 1h30m (default: 30m)"),
            _option("--cpu-time", metavar="TIME", help="CPU seconds of all its processes together"),
            _option("--output", metavar="SIZE", help="bytes it may print (default: 10MiB)"),
        ),
    ),
    (
        "files and environment",
        (
            _option(
                "--file",
                action="append",
                metavar="LOCAL[:PATH]",
                help="copy a file or folder in before the command starts (default PATH: its name in "
                "the workdir)",
            ),
            _option(
                "--out",
                action="append",
                metavar="PATH[:LOCAL]",
                help="copy a file or folder out afterwards, also when the command failed",
            ),
            _option(
                "--mount",
                action="append",
                metavar="SRC:DST[:ro|rw]",
                help="show a host folder or file inside; read-only unless :rw",
            ),
            _option(
                "--allow-dangerous-mount",
                action="append",
                metavar="SRC",
                help="allow a mount that hands the sandbox (part of) the host, by its source",
            ),
            _option(
                "--env",
                "-e",
                action="append",
                metavar="K[=V]",
                help="set a variable inside; without =V it is taken from here",
            ),
            _option(
                "--template",
                "-t",
                metavar="NAME",
                help="root file system: host (default), or what `ringfence template ls` lists; without a "
                "command, run the template's own",
            ),
            _option("--env-file", action="append", metavar="FILE", help="variables, one K=V a line"),
            _option(
                "--workdir", "-w", metavar="PATH", help="folder the command starts in (default: /workspace)"
            ),
        ),
    ),
    (
        "what is shown",
        (
            _option("--interactive", "-i", action="store_true", help="give the command a terminal"),
            _option(
                "--changes", action="store_true", help="list the files that were added, modified and deleted"
            ),
            _option("--quiet", "-q", action="store_true", help="say nothing on stderr but errors"),
            _option("--json", action="store_true", help="print one JSON document instead of text"),
            _option(
                "--stream",
                action="store_true",
                help="with --json: pass the output on as it comes (both streams to stderr), not in "
                "the document",
            ),
        ),
    ),
    (
        "who asks, and for whom",
        (
            _option("--name", metavar="TEXT", help="name of the sandbox: short for --label name=TEXT"),
            _option("--label", action="append", metavar="K=V", help="label of the sandbox"),
            _option("--task", metavar="ID", help="your own id of the piece of work this belongs to"),
            _option("--agent", metavar="NAME", help="the agent that asks"),
            _option("--parent-agent", metavar="NAME", help="the agent that started that agent"),
            _option("--agent-class", metavar="CLASS", choices=AGENT_CLASSES, help=", ".join(AGENT_CLASSES)),
            _option(
                "--keep",
                action="store_true",
                help="leave the sandbox running until its deadline; see `ringfence list` and "
                "`ringfence stop`",
            ),
        ),
    ),
)


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.usage = "ringfence run [options] [--] COMMAND [ARGUMENT…]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    for title, options in GROUPS:
        group = parser.add_argument_group(title)
        for names, told in options:
            group.add_argument(*names, **told)
    parser.add_command("COMMAND", "the command and its arguments")


def parse_quickly(arguments: list[str]) -> SimpleNamespace | None:
    """What argparse would make of a plain, right command line; None for everything else.

    Importing argparse and telling it of fifty options takes a tenth of the time that ``ringfence run`` may
    take in all. So it is asked only for help, for errors, and for ways of writing that are not in here.
    """
    known = {name: option for _, options in GROUPS for option in options for name in option[0]}
    values: dict[str, Any] = {
        _key(names): [] if told.get("action") == "append" else False if "action" in told else None
        for _, options in GROUPS
        for names, told in options
    }
    rest = iter(range(len(arguments)))
    values["command"] = []
    for at in rest:
        word = arguments[at]
        if word == "--":
            values["command"] = arguments[at + 1 :]
            break
        if not word.startswith("-"):
            values["command"] = arguments[at:]
            break
        name, equals, value = word.partition("=")
        names, told = known.get(name, ((), {}))
        if not names or (not name.startswith("--") and equals):
            return None
        if told.get("action") == "store_true":
            if equals:
                return None
            values[_key(names)] = True
            continue
        if not equals:
            following = next(rest, None)
            if following is None or arguments[following].startswith("-"):
                return None  # missing, or something that only argparse can tell from an option
            value = arguments[following]
        try:
            converted = told.get("type", str)(value)
        except ValueError:
            return None
        if "choices" in told and converted not in told["choices"]:
            return None
        if told.get("action") == "append":
            values[_key(names)].append(converted)
        else:
            values[_key(names)] = converted
    return SimpleNamespace(**values)


def _key(names: tuple[str, ...]) -> str:
    return names[0].lstrip("-").replace("-", "_")
