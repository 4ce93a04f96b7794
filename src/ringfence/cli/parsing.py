"""Argument parsing that fails with one message and a remedy, and knows what the user may have meant."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from ringfence.model.errors import InvalidRequest


class Parser(argparse.ArgumentParser):
    """One command's parser. Errors are raised, not printed; options can't be abbreviated (an abbreviation
    in a script breaks when another option is added).
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _formatter)
        super().__init__(allow_abbrev=False, **options)
        self.takes_command = False

    def add_command(self, metavar: str, text: str) -> None:
        """The rest of the line is another program's command, after an optional ``--``."""
        self.takes_command = True
        self.add_argument("command", nargs=argparse.REMAINDER, metavar=metavar, help=text)

    def parse_command_line(self, arguments: list[str]) -> argparse.Namespace:
        """Parse; ``command`` is the other program's argv, untouched.

        Raises:
            InvalidRequest: with the nearest option's name as the remedy where there is one.
        """
        own, rest = arguments, []
        if self.takes_command and "--" in arguments:
            cut = arguments.index("--")
            own, rest = arguments[:cut], arguments[cut + 1 :]
        options, unknown = self.parse_known_args(own)
        if self.takes_command:
            # `run python3 -- x`: the command began before the dashes, which are then its own.
            if options.command and len(own) < len(arguments):
                rest = ["--", *rest]
            options.command = options.command + rest
        verb = self._of_verb(options)
        if unknown := verb._late(options, unknown):
            raise verb._unknown(unknown[0])
        return options

    def _late(self, options: argparse.Namespace, unknown: list[str]) -> list[str]:
        """Take arguments that may be left out and stand behind options: argparse has taken them for left out
        by then. What is still unknown.
        """
        for action in self._actions:
            if not unknown or unknown[0].startswith("-"):
                break
            if action.nargs == "?" and not action.option_strings:
                if getattr(options, action.dest, None) is not action.default:
                    continue
                value = self._get_value(action, unknown[0])
                self._check_value(action, value)
                setattr(options, action.dest, value)
                unknown = unknown[1:]
        return unknown

    def _of_verb(self, options: argparse.Namespace) -> Parser:
        """The parser of the verb that was given; our own without one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                verb = action.choices.get(str(getattr(options, action.dest, "")))
                if isinstance(verb, Parser):
                    return verb
        return self

    def error(self, message: str) -> NoReturn:
        """Called by argparse for any mistake."""
        choice = re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
        hint = f"see `{self.prog} --help`"
        if choice:
            names = re.findall(r"'([^']*)'", choice[3])
            message = f"{choice[1]}: {choice[2]!r} is not one of {', '.join(names)}"
            hint = did_you_mean(choice[2], names) or hint
        message = re.sub(r"^argument (\S+): ", lambda m: m[1] + ": ", message)
        message = re.sub(r"invalid (int|float) value: (.*)", _no_number, message, flags=re.DOTALL)
        raise InvalidRequest(message, hint=hint)

    def _unknown(self, text: str) -> InvalidRequest:
        names = [name for action in self._actions for name in action.option_strings]
        text = text.split("=")[0]
        kind = "option" if text.startswith("-") else "argument"
        return InvalidRequest(
            f"unknown {kind} {text}", hint=did_you_mean(text, names) or f"see `{self.prog} --help`"
        )


def _no_number(found: re.Match[str]) -> str:
    return f"{found[2]} is no {'whole ' if found[1] == 'int' else ''}number"


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Text as it was written, to the width of the terminal.

    argparse would ask shutil, whose import (all compressions with it) costs more than argparse's own; and it
    asks when the first argument is added, not only for help.
    """
    try:
        width = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(1).columns
    except (OSError, ValueError):
        width = 112
    return argparse.RawDescriptionHelpFormatter(prog, width=max(width - 2, 40))


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """``did you mean --memory?``, or an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(text, list(names), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def unknown_command(name: str, names: list[str]) -> InvalidRequest:
    """The error for a command that does not exist."""
    hint = did_you_mean(name, names) or "see `ringfence --help`"
    if name.startswith("-"):
        return InvalidRequest(f"unknown option {name}", hint="see `ringfence --help`")
    from shutil import which

    if not did_you_mean(name, names) and which(name):
        hint = f"to run it in a sandbox: `ringfence run -- {name} …`"
    return InvalidRequest(f"unknown command {name!r}", hint=hint)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The ``--json`` of every command."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_verbs(parser: Parser, command: str, verbs: Mapping[str, tuple[Any, ...]]) -> None:
    """Give ``ringfence COMMAND`` its verbs: by name (help, what adds the options, what does the work, and
    lines of examples if there are any). The work is found in the parsed options as ``work``.
    """
    parser.usage = f"ringfence {command} VERB [options]"
    group = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, title="verbs", prog=f"ringfence {command}"
    )
    for name, (text, options, work, *examples) in verbs.items():
        verb = group.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if examples and examples[0]:
            verb.epilog = "examples:\n" + "\n".join(f"  ringfence {command} {line}" for line in examples[0])
        options(verb)
        verb.set_defaults(work=work)
