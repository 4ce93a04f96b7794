"""The options of ``ringfence run``; what they add up to is in ``ringfence.cli.requesting``."""

from __future__ import annotations

from ringfence.cli.parsing import Parser, add_json
from ringfence.model.levels import Level
from ringfence.model.policy import SIZES

DESCRIPTION = """\
Run one command in a sandbox of its own: no network, no host files but /usr, a deadline, and limits on memory,
CPUs, processes, disk and output. The sandbox and everything in it is gone when the command ends.

Input, output and signals pass through. Ctrl-C interrupts the command, a second Ctrl-C kills the sandbox."""

EPILOG = """\
examples:
  ringfence run -- python3 -c 'print(6 * 7)'
  ringfence run --memory 256M --timeout 30s --file job.py --file data.csv --out report.md -- python3 job.py
  ringfence run --mount .:/src:ro --changes -- sh -c 'cp -r /src/. . && make'
  generate | ringfence run -- sort | less
  ringfence run -i -- bash
  ringfence run --json -- ./test.sh | jq .cause

exit codes: the command's own; 124 the deadline came, 125 Ringfence itself failed, 126 the command can't be
executed, 127 it was not found, 137 it was killed (the reason is printed)."""

AGENT_CLASSES = ("conversational", "tool-calling", "code-executing", "planning", "multi-agent")


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.usage = "ringfence run [options] [--] COMMAND [ARGUMENT…]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument_group("isolation").add_argument
    add("--runtime", metavar="NAME", help="start it with this runtime; `ringfence doctor` lists them")
    add(
        "--isolation",
        metavar="LEVEL",
        choices=[level.value for level in Level],
        help="the weakest wall that will do: L1 to L4 (default: L2, the fastest healthy runtime)",
    )
    add("--policy", metavar="FILE", help="policy file; options given here win over it")
    add("--preset", metavar="NAME", help="built-in policy: untrusted, controlled or trusted")
    add(
        "--user",
        type=int,
        metavar="UID",
        help="user inside: 1000 (default), or 0 for root of the sandbox's own user namespace",
    )
    add("--readonly", action="store_true", help="writes only where the policy says (/workspace, /tmp)")
    add(
        "--net",
        metavar="MODE",
        choices=["none", "egress", "open"],
        help="network: none (default: loopback only), egress or open where the runtime has it",
    )
    add = parser.add_argument_group("limits").add_argument
    add("--size", metavar="NAME", choices=list(SIZES), help="small (default: 1 CPU, 1GiB), medium or large")
    add("--cpus", type=float, metavar="N", help="CPUs, a fraction will do: 0.5")
    add("--memory", metavar="SIZE", help="memory, swap included: 64M, 2GiB")
    add("--disk", metavar="SIZE", help="what may be written (default: half of the memory)")
    add("--pids", type=int, metavar="N", help="processes and threads at once (default: 256)")
    add("--timeout", metavar="TIME", help="deadline: 2s, 10m, 1h30m (default: 30m)")
    add("--cpu-time", metavar="TIME", help="CPU seconds of all its processes together")
    add("--output", metavar="SIZE", help="bytes it may print (default: 10MiB)")
    add = parser.add_argument_group("files and environment").add_argument
    add(
        "--file",
        action="append",
        default=[],
        metavar="LOCAL[:PATH]",
        help="copy a file or folder in before the command starts (default PATH: its name in the workdir)",
    )
    add(
        "--out",
        action="append",
        default=[],
        metavar="PATH[:LOCAL]",
        help="copy a file or folder out afterwards, also when the command failed",
    )
    add(
        "--mount",
        action="append",
        default=[],
        metavar="SRC:DST[:ro|rw]",
        help="show a host folder or file inside; read-only unless :rw",
    )
    add(
        "--allow-dangerous-mount",
        action="append",
        default=[],
        metavar="SRC",
        help="allow a mount that hands the sandbox (part of) the host, by its source",
    )
    add(
        "--env",
        "-e",
        action="append",
        default=[],
        metavar="K[=V]",
        help="set a variable inside; without =V it is taken from here",
    )
    add("--env-file", action="append", default=[], metavar="FILE", help="variables, one K=V a line")
    add("--workdir", "-w", metavar="PATH", help="folder the command starts in (default: /workspace)")
    add = parser.add_argument_group("what is shown").add_argument
    add("--interactive", "-i", action="store_true", help="give the command a terminal")
    add("--changes", action="store_true", help="list the files that were added, modified and deleted")
    add("--quiet", "-q", action="store_true", help="say nothing on stderr but errors")
    add_json(parser)
    add(
        "--stream",
        action="store_true",
        help="with --json: pass the output on as it comes (both streams to stderr), not in the document",
    )
    add = parser.add_argument_group("who asks, and for whom").add_argument
    add("--name", metavar="TEXT", help="name of the sandbox: short for --label name=TEXT")
    add("--label", action="append", default=[], metavar="K=V", help="label of the sandbox")
    add("--task", metavar="ID", help="your own id of the piece of work this belongs to")
    add("--agent", metavar="NAME", help="the agent that asks")
    add("--parent-agent", metavar="NAME", help="the agent that started that agent")
    add("--agent-class", metavar="CLASS", choices=AGENT_CLASSES, help=", ".join(AGENT_CLASSES))
    add(
        "--keep",
        action="store_true",
        help="leave the sandbox running until its deadline; see `ringfence list` and `ringfence stop`",
    )
    parser.add_command("COMMAND", "the command and its arguments")
