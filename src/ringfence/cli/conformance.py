"""``ringfence conformance``: the shipped suite on the runtimes of this machine, and what came of it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ringfence.cli.output import note, print_json, printable, table
from ringfence.cli.parsing import Parser, add_json
from ringfence.model.errors import InvalidRequest, RingfenceError

if TYPE_CHECKING:
    from ringfence.cli.conforming import Session
    from ringfence.runtimes.contract import Probe

ALL = "all"
_MOST_SHOWN = 1500  # characters of a failure that people get to see


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.description = (
        "Run the conformance suite that ships with Ringfence: what every runtime must do, as tests on real\n"
        "sandboxes. Prints how many tests of each area passed, why others were skipped, and what each\n"
        "runtime can do here. One runtime takes half a minute to some minutes.\n\n"
        "Needs pytest: pip install 'ringfence[conformance]'. Exits 0 if every test passed, 1 if one failed\n"
        "or a runtime that was named does not work here. With `all`, runtimes that don't work here are\n"
        "listed with the reason and are no failure. Ctrl-C takes down what runs, and ends."
    )
    parser.epilog = (
        "examples:\n  ringfence conformance --runtime jail\n  ringfence conformance --runtime all\n"
        "  ringfence conformance --runtime runc --runtime crun -k 'Lifecycle or Files'\n"
        "  ringfence conformance --runtime mine          # a driver of another package, by its entry point\n"
        "  ringfence conformance --runtime all --json | jq '.runtimes[] | {runtime, ok}'"
    )
    parser.add_argument(
        "--runtime",
        action="append",
        metavar="NAME",
        help="which runtime, or `all` that work here (may be repeated; default: all)",
    )
    parser.add_argument(
        "-k", metavar="EXPR", dest="keyword", help="only tests whose names match, as in pytest"
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Run, and print."""
    from ringfence.cli.conforming import Interrupted, Signals, require_pytest

    require_pytest()
    signals = Signals()
    suites = Suites(options)
    with signals.caught():
        try:
            suites.run(signals)
        except Interrupted as stopped:
            note("interrupted")
            return 128 + stopped.number
    if options.json:
        print_json(suites.as_dict())
    else:
        suites.print()
    return 0 if suites.ok else 1


class Suites:
    """One command line's runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        names = options.runtime or [ALL]
        self.everything = ALL in names
        self.named = list(dict.fromkeys(name for name in names if name != ALL))
        self.keyword: str | None = options.keyword
        self.quiet: bool = options.json
        self.probes: list[Probe] = []
        self.capabilities: dict[str, dict[str, Any]] = {}
        self.sessions: dict[str, Session] = {}

    @property
    def ok(self) -> bool:
        """Every session passed, what was named did run, and at least one thing did."""
        return (
            any(session.count("passed") for session in self.sessions.values())
            and all(session.ok for session in self.sessions.values())
            and all(name in self.sessions for name in self.named)
        )

    def run(self, signals: Any) -> None:
        """Probe, then one session a runtime.

        Raises:
            NotFound: no such runtime.
            InvalidRequest: no test matches.
            Interrupted: a signal came.
        """
        import asyncio

        from ringfence.cli import conforming

        asyncio.run(self._probe())
        progress = Progress(quiet=self.quiet)
        for probe in self.probes:
            if probe.health == "unavailable":
                continue
            try:
                session = conforming.run(probe.runtime, self.keyword, signals, progress.tell)
            finally:
                progress.clear()
            self.sessions[probe.runtime] = session
            progress.ended(session)
        found = self.sessions.values()
        if self.keyword and found and not any(session.done for session in found):
            wrong = next((each.trouble for each in found if "'-k'" in each.trouble), "")
            if wrong or not any(session.trouble for session in found):
                raise InvalidRequest(
                    f"-k {self.keyword!r} is no expression"
                    if wrong
                    else f"no test matches -k {self.keyword!r}",
                    hint="try parts of tests' or areas' names, joined by `or`, `and`, `not`",
                )

    async def _probe(self) -> None:
        from dataclasses import asdict

        from ringfence.node.service import Node

        async with await Node.open(adopt=False) as node:
            for name in node.names() if self.everything else self.named:
                self.probes.append(await node.probe(name))
                try:
                    self.capabilities[name] = asdict((await node.runtime(name)).capabilities())
                except (RingfenceError, ImportError):
                    continue

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``."""
        from ringfence import __version__

        return {
            "ok": self.ok,
            "version": __version__,
            "root": os.geteuid() == 0,
            "kernel": os.uname().release,
            "keyword": self.keyword,
            "runtimes": [self._runtime(probe) for probe in self.probes],
        }

    def _runtime(self, probe: Probe) -> dict[str, Any]:
        session = self.sessions.get(probe.runtime)
        return {
            "runtime": probe.runtime,
            "level": probe.level.value,
            "boundary": probe.boundary.value,
            "health": probe.health,
            "version": probe.version,
            "reason": probe.reason,
            "ran": session is not None,
            "capabilities": self.capabilities.get(probe.runtime),
            "expected": session.expected if session is not None else None,
            **(session.as_dict() if session is not None else {}),
        }

    def print(self) -> None:
        """The matrix, what was skipped and why, capabilities, failures."""
        areas = list(dict.fromkeys(area for session in self.sessions.values() for area in session.areas))
        rows = [
            (name, *(cell(session.areas.get(area)) for area in areas), "passed" if session.ok else "FAILED")
            for name, session in self.sessions.items()
        ]
        if rows:
            table(("runtime", *areas, "verdict"), rows, title="Tests passed, of those that there are")
        rest = [(p.runtime, printable(p.reason)) for p in self.probes if p.runtime not in self.sessions]
        if rest:
            table(("not run", "reason"), rest)
        skipped = [
            (name, count, printable(reason))
            for name, session in self.sessions.items()
            for reason, count in (session.skipped + session.xfailed).items()
        ]
        if skipped:
            table(("runtime", "skipped", "reason"), skipped)
        self._print_capabilities()
        for name, session in self.sessions.items():
            for failure in session.failures:
                print(f"{name}: {printable(failure['test'])} failed:")
                lines = failure["text"][-_MOST_SHOWN:].splitlines()
                print("\n".join("  " + printable(line) for line in lines) + "\n")
            if session.trouble:
                print(f"{name}: {printable(session.trouble)}\n")

    def _print_capabilities(self) -> None:
        shown = {name: self.capabilities[name] for name in self.sessions if name in self.capabilities}
        if not shown:
            return
        names = list(dict.fromkeys(key for row in shown.values() for key in row))
        rows = [(name, *(_yes(shown[runtime].get(name)) for runtime in shown)) for name in names]
        table(("capability", *shown), rows, title="Capabilities here")


class Progress:
    """What is under way: one line that is written over on a terminal, one a runtime elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._live = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._quiet = quiet

    def tell(self, session: Session, line: dict[str, Any]) -> None:
        """A line of the session's."""
        if not self._live or "state" not in line:
            return
        failed = session.count("failed")
        text = f"{session.runtime}: {session.done}/{session.collected}"
        text += f", {failed} failed" if failed else ""
        text += f"  {line['area']}: {line['test']}"
        try:
            width = os.get_terminal_size(2).columns
        except OSError:
            width = 80
        print("\r\x1b[K" + printable(text)[: width - 1], end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """The line is over."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def ended(self, session: Session) -> None:
        """A session is over."""
        if self._quiet:
            return
        counts = [f"{n} {kind}" for kind in ("failed", "skipped", "xfailed") if (n := session.count(kind))]
        parts = [f"{session.count('passed')} passed", *counts, f"{session.seconds:.0f} s"]
        note(f"{session.runtime}: " + ", ".join(parts) + (f"; {session.trouble}" if session.trouble else ""))


def cell(counts: Any) -> str:
    """``9``, ``8/9`` where some were skipped, ``7/9, 2 FAILED``; a dash where the area has no test."""
    if not counts:
        return "-"
    total = sum(counts.values())
    passed = counts.get("passed", 0) + counts.get("xfailed", 0)
    text = str(passed) if passed == total else f"{passed}/{total}"
    return text + (f", {counts['failed']} FAILED" if counts.get("failed") else "")


def _yes(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "-"
    return {True: "yes", False: "-"}.get(value, str(value))
