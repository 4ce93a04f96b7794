"""``ringfence quota``: limits of a project, and what it has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.output import print_json, table
from ringfence.cli.parsing import Parser, add_json, add_verbs

if TYPE_CHECKING:
    from ringfence.sdk.service import AsyncService

# option: what it limits
LIMITS = {
    "alive": "sandboxes alive at once",
    "cpus": "CPUs of all of them",
    "memory": "memory of all of them: 64GiB",
    "storage": "disks, volumes and snapshots: 1TiB",
    "creates": "creates a minute",
    "pool": "members of pools",
    "requests": "requests a second",
    "burst": "requests at once beyond that",
    "connections": "connections at once, through egress doors",
    "bandwidth": "bits a second through egress doors, each way",
    "egress_requests": "requests through egress doors, in all",
    "egress_bytes": "bytes through egress doors, in all: 50GiB",
    "egress_rate": "requests a second through egress doors",
    "egress_spend": "spent by egress rules with prices, in all",
}
_BYTES = frozenset({"memory", "storage", "egress_bytes"})
_FRACTIONS = frozenset({"cpus", "requests", "egress_rate", "egress_spend"})


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description = "Limits of a project at a service, and what it has now."
    parser.epilog = (
        "examples:\n  ringfence quota show                # every verb has --json and --help\n"
        "  ringfence quota set default --alive 200 --memory 128GiB\n"
        "  ringfence quota set default --creates none"
    )
    add_verbs(parser, "quota", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    remote.need("`ringfence quota`")
    code: int = options.work(options)
    return code


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("project", nargs="?", metavar="PROJECT", help="another project; for the operator")
    add_json(parser)


def _show(options: argparse.Namespace) -> int:
    return _told(options, remote.with_service(lambda service: service.quota(options.project)))


def _told(options: argparse.Namespace, found: Mapping[str, Any]) -> int:
    if options.json:
        print_json(found)
        return 0
    usage = found["usage"]
    rows = [
        (
            name,
            LIMITS.get(name, "").partition(":")[0],
            _amount(name, most),
            _amount(name, usage[name]) if name in usage else "",
        )
        for name, most in found["limits"].items()
    ]
    table(("limit", "of", "most", "now"), rows, title=f"project {found['project']}")
    return 0


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name in _BYTES:
        from ringfence.model.quantities import format_size

        return format_size(int(value))
    return str(int(value)) if value == int(value) else f"{value:g}"


def _set_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("project", metavar="PROJECT", help="its id; `ringfence quota show` names your own")
    for name, text in LIMITS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="N",
            help=text if name == "burst" else f"{text}; none: no limit",
        )
    add_json(parser)


def _set(options: argparse.Namespace) -> int:
    from ringfence.model.errors import InvalidRequest
    from ringfence.model.quantities import parse_size

    limits: dict[str, float | None] = {}
    for name in LIMITS:
        text = getattr(options, name)
        if text is None:
            continue
        if name == "burst" and text == "none":
            raise InvalidRequest("--burst can't be without a limit", hint="a number from 1 on")
        try:
            limits[name] = (
                None
                if text == "none"
                else parse_size(text)
                if name in _BYTES
                else (float if name in _FRACTIONS else int)(text)
            )
        except ValueError:
            option = name.replace("_", "-")
            raise InvalidRequest(f"--{option} {text!r} is no number", hint="a number, or none") from None
    if not limits:
        raise InvalidRequest(
            "no limit was named", hint="for example --alive 200; see `ringfence quota set --help`"
        )

    async def do(service: AsyncService) -> Mapping[str, Any]:
        return await service.set_quota(options.project, **limits)

    return _told(options, remote.with_service(do))


VERBS = {
    "show": (
        "show limits, and what the project has",
        _show_options,
        _show,
        ("show", "show --json | jq .usage"),
    ),
    "set": (
        "change limits; for the operator",
        _set_options,
        _set,
        ("set default --alive 200 --memory 128GiB", "set default --creates none"),
    ),
}
