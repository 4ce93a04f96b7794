"""``ringfence version``."""

from __future__ import annotations

import argparse
import sys

from ringfence import __version__
from ringfence.cli.output import print_json
from ringfence.cli.parsing import Parser, add_json


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.description = "Print the version of Ringfence, of Python and of the kernel."
    parser.epilog = "examples:\n  ringfence version\n  ringfence version --json"
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Print it."""
    import os

    python = ".".join(map(str, sys.version_info[:3]))
    kernel = os.uname().release
    if options.json:
        print_json({"ringfence": __version__, "python": python, "kernel": kernel})
    else:
        print(f"ringfence {__version__} (Python {python}, Linux {kernel})")
    return 0
