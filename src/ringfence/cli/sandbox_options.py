"""Options of those verbs of ``ringfence sandbox`` that speak to a service."""

from __future__ import annotations

import argparse

from ringfence.cli.parsing import Parser, add_json
from ringfence.model.levels import Level
from ringfence.model.policy import SIZES


def _id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="sandbox: its id, or its name")
    add_json(parser)


def create(parser: argparse.ArgumentParser) -> None:
    """Of ``create``."""
    what = parser.add_argument_group("what")
    what.add_argument("--template", "-t", metavar="NAME", help="root file system (default: host)")
    what.add_argument("--pool", metavar="NAME", help="take a started one from this pool")
    what.add_argument("--snapshot", metavar="NAME", help="go on from this saved sandbox")
    what.add_argument("--policy", metavar="FILE", help="policy file; options given here win over it")
    what.add_argument("--preset", metavar="NAME", help="built-in policy: untrusted, controlled or trusted")
    what.add_argument("--runtime", metavar="NAME", help="start it with this runtime")
    levels = [level.value for level in Level]
    what.add_argument(
        "--isolation", metavar="LEVEL", choices=levels, help="the weakest wall that will do: L1 to L4"
    )
    what.add_argument(
        "--net", metavar="MODE", choices=["none", "egress", "open"], help="network: none, egress, open"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--size", metavar="NAME", choices=list(SIZES), help="small, medium or large")
    limits.add_argument("--cpus", type=float, metavar="N", help="CPUs, a fraction will do")
    limits.add_argument("--memory", metavar="SIZE", help="memory: 64M, 2GiB")
    limits.add_argument("--disk", metavar="SIZE", help="what may be written")
    limits.add_argument("--timeout", metavar="TIME", help="it ends then, whatever happens: 30m, 8h")
    limits.add_argument("--idle", metavar="TIME", help="time without use until it is paused or stopped")
    limits.add_argument("--on-idle", metavar="WHAT", choices=["pause", "stop"], help="what happens then")
    bound = parser.add_argument_group("what is bound to it")
    bound.add_argument(
        "--env", "-e", action="append", default=[], metavar="K[=V]", help="set a variable inside"
    )
    bound.add_argument(
        "--secret", action="append", default=[], metavar="NAME=VALUE",
        help="a file in /run/secrets, never stored; @FILE for a value that stands in a file",
    )  # fmt: skip
    bound.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="LOCAL[:PATH]",
        help="copy a file in before it is yours",
    )
    bound.add_argument(
        "--volume", action="append", default=[], metavar="NAME:PATH[:ro]", help="attach a volume (writable)"
    )
    bound.add_argument("--label", action="append", default=[], metavar="K=V", help="label")
    bound.add_argument("--name", metavar="TEXT", help="its name: short for --label name=TEXT")
    bound.add_argument("--task", metavar="ID", help="your own id of the piece of work this belongs to")
    bound.add_argument("--agent", metavar="NAME", help="the agent that asks")
    how = parser.add_argument_group("how")
    how.add_argument("--no-wait", action="store_true", help="return as soon as it is accepted")
    how.add_argument(
        "--start-timeout", type=float, metavar="SECONDS", help="for queueing and starting (default: 60)"
    )
    how.add_argument("--idempotency-key", metavar="KEY", help="the same key again gives the same sandbox")
    add_json(parser)


def ls(parser: argparse.ArgumentParser) -> None:
    """Of ``ls``; the local node knows no labels and states, and shows all that it has."""
    parser.add_argument("--label", action="append", default=[], metavar="K=V", help="those with this label")
    parser.add_argument("--state", action="append", default=[], metavar="STATE", help="those in this state")
    parser.add_argument("--all", "-a", action="store_true", help="also those that have ended")
    add_json(parser)


def shell(parser: argparse.ArgumentParser) -> None:
    """Of ``shell``."""
    parser.add_argument("--env", "-e", action="append", default=[], metavar="K[=V]", help="set a variable")
    parser.add_argument("--workdir", "-w", metavar="PATH", help="folder it starts in")
    parser.add_argument("--quiet", "-q", action="store_true", help="say nothing on stderr but errors")
    _id(parser)


def code(parser: argparse.ArgumentParser) -> None:
    """Of ``code``."""
    parser.add_argument(
        "--language", "-l", default="python", choices=["python", "javascript", "bash"], metavar="NAME",
        help="python (default), javascript or bash",
    )  # fmt: skip
    parser.add_argument("--file", "-f", metavar="FILE", help="the code is in this file; - for the input")
    parser.add_argument("--timeout", metavar="TIME", help="interrupt it after this time")
    parser.add_argument(
        "--save", metavar="DIR", help="write pictures and pages that it shows into this folder"
    )
    parser.add_argument("id", metavar="ID", help="sandbox: its id, or its name")
    parser.add_argument("code", nargs="?", metavar="CODE", help="the code itself; - for the input")
    add_json(parser)


def cp(parser: argparse.ArgumentParser) -> None:
    """Of ``cp``."""
    parser.add_argument("source", metavar="FROM", help="file or folder here, ID:PATH, or - for the input")
    parser.add_argument("target", metavar="TO", help="ID:PATH, file or folder here, or - for the output")
    add_json(parser)


def ls_files(parser: argparse.ArgumentParser) -> None:
    """Of ``ls-files``."""
    parser.add_argument("--long", "-l", action="store_true", help="with mode, owner, size and time")
    parser.add_argument("--recursive", "-R", action="store_true", help="all levels")
    parser.add_argument("--depth", type=int, default=1, metavar="N", help="so many levels (default: 1)")
    parser.add_argument("id", metavar="ID", help="sandbox: its id, or its name")
    parser.add_argument("path", nargs="?", default=".", metavar="PATH", help="folder (default: the workdir)")
    add_json(parser)


def port(parser: argparse.ArgumentParser) -> None:
    """Of ``port``."""
    parser.add_argument("id", metavar="ID", help="sandbox: its id, or its name")
    parser.add_argument("port", type=int, metavar="PORT", help="port that something inside listens on")
    parser.add_argument(
        "--forward", type=int, nargs="?", const=0, metavar="LOCAL",
        help="listen on this local port (default: any) and lead its connections there, until Ctrl-C",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", metavar="TIME", help="how long the token is good for (default: its life)"
    )
    add_json(parser)


def logs(parser: argparse.ArgumentParser) -> None:
    """Of ``logs``."""
    parser.add_argument("--follow", "-f", action="store_true", help="go on until it has ended")
    _id(parser)


def extend(parser: argparse.ArgumentParser) -> None:
    """Of ``extend``."""
    parser.add_argument("id", metavar="ID", help="sandbox: its id, or its name")
    parser.add_argument("time", metavar="TIME", help="from now: 30m, 2h")
    add_json(parser)


def wait(parser: argparse.ArgumentParser) -> None:
    """Of ``wait``."""
    parser.add_argument(
        "--state", action="append", default=[], metavar="STATE", help="running (default), stopped …"
    )
    parser.add_argument("--timeout", default="5m", metavar="TIME", help="give up after this time (5m)")
    _id(parser)


__all__ = ["Parser", "code", "cp", "create", "extend", "logs", "ls", "ls_files", "port", "shell", "wait"]
