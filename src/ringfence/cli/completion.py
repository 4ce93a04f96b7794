"""``ringfence completion``: a script for the shell, made from the parsers themselves."""

from __future__ import annotations

import argparse
from importlib import import_module

from ringfence.cli.main import COMMANDS
from ringfence.cli.output import print_json
from ringfence.cli.parsing import Parser, add_json

SHELLS = ("bash", "zsh", "tcsh")


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.description = "Print the completion script for a shell."
    parser.epilog = (
        "examples:\n"
        "  ringfence completion bash > /etc/bash_completion.d/ringfence\n"
        "  ringfence completion bash > ~/.local/share/bash-completion/completions/ringfence\n"
        '  ringfence completion zsh > "${fpath[1]}/_ringfence"'
    )
    parser.add_argument("shell", choices=SHELLS, help=" or ".join(SHELLS))
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Print it."""
    import shtab

    script = shtab.complete(everything(), options.shell)
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        print(script)
    return 0


def everything() -> Parser:
    """One parser with every command below it; made for this purpose only."""
    parser = Parser(prog="ringfence", description="Run code inside a wall.")
    commands = parser.add_subparsers(dest="subcommand", parser_class=Parser)
    for name, (module, text) in COMMANDS.items():
        import_module("ringfence.cli." + module).configure(commands.add_parser(name, help=text))
    _complete_paths(parser)
    return parser


def _complete_paths(parser: Parser) -> None:
    import shtab

    kinds = {"FILE": shtab.FILE, "LOCAL[:PATH]": shtab.FILE, "SRC": shtab.DIRECTORY}
    for action in parser._actions:
        if isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _complete_paths(child)
