"""``ringfence doctor``: what works here, what does not, and how to fix it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ringfence.cli.output import printable, table
from ringfence.cli.parsing import Parser, add_json

if TYPE_CHECKING:
    from ringfence.runtimes.contract import Capabilities, Probe

LEAST = 2  # rank of the weakest level that counts as a wall


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.description = (
        "Look at this machine: every runtime known (proved by starting a sandbox with it), what the kernel\n"
        "has, programs with known holes, and what is lost without root.\n\n"
        "Exits 0 if at least one runtime of level L2 or more works, else 1."
    )
    parser.epilog = "examples:\n  ringfence doctor\n  ringfence doctor --json | jq '.runtimes[].health'"
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Look, and print."""
    import asyncio

    found = asyncio.run(examine())
    if options.json:
        from ringfence.cli.output import print_json

        print_json(found)
    else:
        _print(found)
    return 0 if found["ok"] else 1


async def examine() -> dict[str, Any]:
    """The document of ``--json``: ok, version, root, runtimes, host, programs, rootless_losses."""
    from ringfence import __version__
    from ringfence.node import checking
    from ringfence.node.service import Node

    async with await Node.open(adopt=False) as node:
        probes = await node.probe_all()
        runtimes = [_runtime(probe, await _capabilities(node, probe)) for probe in probes]
        state, leftovers = str(node.state.path), node.leftovers
    return {
        "ok": any(found["works"] and found["level_rank"] >= LEAST for found in runtimes),
        "version": __version__,
        "python": sys.version.split()[0],
        "user": os.geteuid(),
        "root": os.geteuid() == 0,
        "state": state,
        "leftovers": leftovers,
        "runtimes": runtimes,
        "host": [check._asdict() for check in checking.host()],
        "programs": [program._asdict() for program in checking.programs()],
        "rootless_losses": checking.rootless_losses(),
    }


async def _capabilities(node: Any, probe: Probe) -> Capabilities | None:
    from ringfence.model.errors import RingfenceError

    try:
        found: Capabilities = (await node.runtime(probe.runtime)).capabilities()
    except (RingfenceError, ImportError):
        return None
    return found


def _runtime(probe: Probe, has: Capabilities | None) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(probe) | {
        "level": probe.level.value,
        "level_rank": probe.level.rank,
        "boundary": probe.boundary.value,
        "works": probe.health in ("healthy", "degraded"),
        "capabilities": asdict(has) if has is not None else None,
    }


def _print(found: dict[str, Any]) -> None:
    who = "root" if found["root"] else f"user {found['user']} (rootless)"
    print(f"Ringfence {found['version']}, Python {found['python']}, as {who}, state in {found['state']}\n")
    rows: list[tuple[str, ...]] = []
    for runtime in found["runtimes"]:
        start = runtime["cold_start_ms"]
        rows.append(
            (
                runtime["runtime"],
                runtime["health"],
                runtime["level"],
                runtime["boundary"],
                runtime["version"],
                f"{start:.1f} ms" if start is not None else "",
                printable("; ".join(filter(None, [runtime["reason"], *runtime["vulnerabilities"]]))),
            )
        )
    table(("runtime", "health", "level", "boundary", "version", "start", "reason"), rows, title="Runtimes")
    rows = [(c["name"], c["state"], printable(c["value"]), printable(c["meaning"])) for c in found["host"]]
    table(("host", "state", "found", "what follows"), rows, title="Host")
    if found["programs"]:
        rows = [
            (p["name"], p["version"] or "?", p["path"], ", ".join(p["vulnerabilities"]) or "none known")
            for p in found["programs"]
        ]
        table(("program", "version", "path", "holes"), rows, title="Programs of other projects")
    title = "Without root" if found["root"] else "Lost without root"
    print(f"{title}:")
    for loss in found["rootless_losses"]:
        print(f"  - {loss}")
    remedies = [(r["runtime"], r["remedy"]) for r in found["runtimes"] if r["remedy"]]
    remedies += [(c["name"], c["remedy"]) for c in found["host"] if c["remedy"]]
    if remedies:
        print("\nTo do:")
        for name, remedy in remedies:
            print(f"  - {name}: {printable(remedy)}")
    if found["leftovers"]:
        print(f"\nLeft by a dead process and not removable: {printable(found['leftovers'])}")
    if not found["ok"]:
        print("\nNo runtime of level L2 or more works here: `ringfence run` will refuse to run anything.")
