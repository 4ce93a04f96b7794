"""``ringfence setup``: installs what runtimes need on Debian and Ubuntu, and shows what works afterwards."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringfence.cli.output import note, print_json, printable, table
from ringfence.cli.parsing import Parser, add_json

if TYPE_CHECKING:
    from ringfence.node.provisioning import Step

DONE, FAILED, NEEDED, LEFT = "done", "failed", "needed", "left to you"


def configure(parser: Parser) -> None:
    """Add the options."""
    from ringfence.node.provisioning import DEFAULT, RECIPES

    parser.description = (
        "Install what runtimes need: Debian packages with apt (as root), Python packages with pip into the\n"
        "environment of Ringfence itself, a guest kernel, compiled interpreters. Does only what is missing,\n"
        "then starts a sandbox with each and shows which work.\n\n"
        "Exits 0 if all of them work, else 1."
    )
    parser.epilog = (
        "examples:\n  ringfence setup --dry-run\n  sudo ringfence setup gvisor qemu\n"
        "  ringfence setup wasm\n  ringfence setup all --dry-run --json | jq '.steps[].command'"
    )
    parser.add_argument(
        "runtimes",
        nargs="*",
        metavar="RUNTIME",
        help=f"{', '.join(RECIPES)}, or all (default: {' '.join(DEFAULT)})",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Do what is missing, prove what is there, and tell."""
    from ringfence.node import provisioning

    wanted = list(dict.fromkeys(options.runtimes)) or list(provisioning.DEFAULT)
    if "all" in wanted:
        wanted = [name for name in provisioning.RECIPES if name != "fake"]
    steps = provisioning.plan(wanted)
    quiet = options.json
    records = [_take(step, dry_run=options.dry_run, quiet=quiet) for step in steps]
    probes: list[dict[str, Any]] = []
    if not options.dry_run:
        import asyncio

        names = [name for name in wanted if name not in provisioning.NOT_RUNTIMES]
        probes = asyncio.run(_prove(names, records))
    ok = all(record["state"] in (DONE, NEEDED) for record in records if not _only_advice(record))
    ok = ok and all(probe["works"] for probe in probes)
    if options.json:
        print_json({"ok": ok, "dry_run": options.dry_run, "steps": records, "runtimes": probes})
    else:
        _print(records, probes, dry_run=options.dry_run)
    return 0 if ok else 1


def _only_advice(record: dict[str, Any]) -> bool:
    """Advice is followed or not: the probe at the end knows."""
    return bool(record["kind"] == "advice")


def _take(step: Step, *, dry_run: bool, quiet: bool) -> dict[str, Any]:
    """Do one step, or say why not; what is printed of it."""
    from dataclasses import asdict

    from ringfence.model.errors import HostLimit
    from ringfence.node import provisioning

    record = asdict(step) | {"state": NEEDED, "detail": "", "remedy": ""}
    reason, remedy = provisioning.hindrance(step)
    if reason:
        record |= {"state": LEFT, "detail": reason, "remedy": remedy}
    elif not dry_run:
        if not quiet:
            note(step.text)
        try:
            provisioning.do(step)
            record["state"] = DONE
        except HostLimit as error:
            record |= {"state": FAILED, "detail": error.message, "remedy": error.hint}
    if dry_run and record["state"] == LEFT and step.kind != "advice":
        record["state"] = NEEDED
    return record


async def _prove(names: list[str], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The probes of these runtimes, after what only a node can do."""
    from dataclasses import asdict

    from ringfence.model.errors import RingfenceError
    from ringfence.node.service import Node

    found = []
    async with await Node.open(adopt=False) as node:
        for record in records:
            if record["kind"] == "modules" and record["state"] == DONE:
                try:
                    runtime = await node.runtime("wasm")
                    driver: Any = getattr(runtime, "driver", runtime)
                    await driver.prepare(str(node.state.path / "sandboxes" / "setup"))
                except RingfenceError as error:
                    record |= {"state": FAILED, "detail": error.message, "remedy": error.hint}
        known = node.names()
        for name in (each for each in names if each in known):
            probe = await node.probe(name)
            found.append(
                asdict(probe)
                | {
                    "level": probe.level.value,
                    "boundary": probe.boundary.value,
                    "works": probe.health in ("healthy", "degraded"),
                }
            )
    return found


def _print(records: list[dict[str, Any]], probes: list[dict[str, Any]], *, dry_run: bool) -> None:
    if not records:
        print("Nothing is missing.")
    for record in records:
        print(f"{record['state']}: {printable(record['text'])}")
        if record["command"] and record["state"] == NEEDED:
            print(f"  {' '.join(record['command'])}")
        if record["detail"] and record["detail"] != record["text"]:
            print(f"  {printable(record['detail'])}")
        if record["remedy"]:
            print(f"  to do: {printable(record['remedy'])}")
    if dry_run:
        print("Nothing was changed (--dry-run).")
        return
    rows = [
        (
            probe["runtime"],
            probe["health"],
            probe["level"],
            probe["version"],
            printable(probe["reason"]),
            printable(probe["remedy"]),
        )
        for probe in probes
    ]
    table(("runtime", "health", "level", "version", "reason", "to do"), rows, title="Runtimes")
