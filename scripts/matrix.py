"""Writes docs/matrix.md, and the table in README.md, from the committed tables and from a real run.

usage: matrix.py --run [OPTIONS] [RUNTIME…]   run conformance, probe and bench on every runtime that works
                                              here (or on these, and keep what docs/matrix.json says of the
                                              others), and write
           --parts PART[,PART]                these only, of: suites, probe, bench
           --suites FILE                      what `ringfence conformance --json` has printed here, instead
                                              of running it (may be repeated)
       matrix.py --write                      write the pages anew from docs/matrix.json
       matrix.py --check                      exit 1 if the pages are not what docs/matrix.json and the tables
                                              say, or if that run saw other capabilities than the table has

A container engine of the run's own is started where none is named (DOCKER_HOST, CONTAINER_HOST), and virtual
machines get a small Debian. Run it as root, on an idle machine: some minutes a runtime, and up to hours where
machines are emulated. `--parts bench` measures the times again.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "scripts")]

from matrix_run import PARTS, Table, end_well, measure  # noqa: E402
from spec_figures import row  # noqa: E402

from ringfence.conformance.tables.capabilities import RUNTIMES  # noqa: E402

PAGE = ROOT / "docs" / "matrix.md"
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "matrix.json"
BEGIN = "<!-- matrix: written by scripts/matrix.py; do not edit by hand -->\n"
END = "<!-- end of matrix -->\n"
UNMEASURED = "Not measured yet: `make matrix`.\n"
NOTHING = "–"


# -- the pages


def order(run: Table) -> list[str]:
    """Runtimes of the committed table first, in its order; then what else the run saw."""
    return [*RUNTIMES, *(name for name in run["runtimes"] if name not in RUNTIMES)]


def count(entry: Table, outcome: str) -> int:
    """Tests of all areas with this outcome."""
    return sum(int(counts.get(outcome, 0)) for counts in entry["areas"].values())


def suite(entry: Table) -> str:
    """``142 of 144``, of which the rest was skipped by the table."""
    passed, failed = count(entry, "passed") + count(entry, "xfailed"), count(entry, "failed")
    total = passed + failed + count(entry, "skipped")
    return f"{passed} of {total}" + (f", **{failed} failed**" if failed else "")


def cold(entry: Table) -> str:
    """Median, in milliseconds."""
    found = entry.get("cold")
    return f"{found['p50']:.1f} ms" if found else NOTHING


def memory(entry: Table) -> str:
    """What one idle sandbox takes from the host."""
    found = entry.get("memory")
    return (
        f"{max(0.0, found['value']):.1f} MB" if found else NOTHING
    )  # next to nothing may measure below zero


def probe(entry: Table) -> str:
    """How many promises hold."""
    states = list(entry.get("probe", {}).values())
    return f"{states.count('held')} of {len(states)}" if states else NOTHING


def attacks(name: str) -> str:
    """How many attacks of the committed table are stopped, as root of the machine."""
    from security.attacks import WALLS
    from security.tables import ATTACKS, wasm

    wall = f"{name}/root"
    if name == "wasm":  # it runs no programs: its attacks have a table of their own
        outcomes = [attack.expect for attack in wasm.ATTACKS.values()]
    elif wall not in WALLS:
        return NOTHING
    else:
        outcomes = [attack.expect[wall] for attack in ATTACKS.values() if wall in attack.expect]
    return f"{sum(outcome not in ('succeeded', 'reached') for outcome in outcomes)} of {len(outcomes)}"


def overview(run: Table) -> list[str]:
    """One line a runtime."""
    head = (
        "runtime",
        "level",
        "boundary",
        "normal user",
        "cold start",
        "idle",
        "conformance",
        "probe",
        "attacks",
    )
    lines = [row(*head), "| --- | --- | --- | --- |" + " ---: |" * 5]
    for name in order(run):
        entry = run["runtimes"].get(name)
        if entry is None:
            lines.append(row(f"`{name}`", *[NOTHING] * 3, "not in this run", *[NOTHING] * 4))
            continue
        rootless = "yes" if name in RUNTIMES and RUNTIMES[name]["user"].rootless else NOTHING
        facts = (f"`{name}`", entry["level"], entry["boundary"], rootless)
        if entry["ran"]:
            figures = (cold(entry), memory(entry), suite(entry), probe(entry), attacks(name))
        else:
            figures = ("not in this run", *[NOTHING] * 3, attacks(name))
        lines.append(row(*facts, *figures))
    return lines


def machine(run: Table) -> str:
    """Where it was measured."""
    found = run["machine"]
    who = "root" if run["root"] else "a normal user"
    if not found:
        return f"Linux {run['kernel']}, as {who}"
    return (
        f"{found['cpus']} CPUs, {found['memory'] / 1024**3:.0f} GiB, Linux {found['kernel']}, Python "
        f"{found['python']}, as {who}"
    )


def features() -> list[str]:
    """The committed capabilities, one line each."""
    from dataclasses import asdict

    rows = {name: (asdict(who["root"]), asdict(who["user"])) for name, who in RUNTIMES.items()}
    lines = [row("capability", *(f"`{name}`" for name in rows)), "| --- |" + " --- |" * len(rows)]
    for key in next(iter(rows.values()))[0]:
        cells = []
        for root, user in rows.values():
            if not isinstance(root[key], bool):
                cells.append(" ".join(root[key]))
            elif not root["rootless"] and key != "rootless":
                cells.append("as root" if root[key] else NOTHING)
            else:
                cells.append(
                    {(1, 1): "yes", (1, 0): "as root", (0, 1): "as user"}.get((root[key], user[key]), NOTHING)
                )
        lines.append(row(key.replace("_", " "), *cells))
    return lines


def areas(run: Table) -> list[str]:
    """Area by runtime: passed, of those that there are."""
    ran = [name for name in order(run) if run["runtimes"].get(name, {}).get("ran")]
    names = list(dict.fromkeys(area for name in ran for area in run["runtimes"][name]["areas"]))
    lines = [row("area", *(f"`{name}`" for name in ran)), "| --- |" + " ---: |" * len(ran)]
    for area in names:
        cells = []
        for name in ran:
            counts = run["runtimes"][name]["areas"].get(area, {})
            passed, total = counts.get("passed", 0) + counts.get("xfailed", 0), sum(counts.values())
            text = NOTHING if not total else str(passed) if passed == total else f"{passed}/{total}"
            cells.append(text + (f" **{counts['failed']} failed**" if counts.get("failed") else ""))
        lines.append(row(area, *cells))
    return lines


def skips(run: Table) -> list[str]:
    """Why tests did not run, and what is known not to hold."""
    lines = [row("runtime", "tests", "reason"), "| --- | ---: | --- |"]
    for name in order(run):
        entry = run["runtimes"].get(name, {})
        for kind, before in (("skipped", ""), ("xfailed", "known deviation: ")):
            for reason, number in sorted(entry.get(kind, {}).items()):
                lines.append(row(f"`{name}`", number, before + reason))
    return lines


def promises(run: Table) -> list[str]:
    """Promise by runtime."""
    ran = [name for name in order(run) if run["runtimes"].get(name, {}).get("probe")]
    names = list(dict.fromkeys(promise for name in ran for promise in run["runtimes"][name]["probe"]))
    lines = [row("promise", *(f"`{name}`" for name in ran)), "| --- |" + " --- |" * len(ran)]
    shown = {"violated": "**violated**"}
    for promise in names:
        states = [run["runtimes"][name]["probe"].get(promise, NOTHING) for name in ran]
        lines.append(row(promise, *(shown.get(state, state) for state in states)))
    return lines


def absent(run: Table) -> list[str]:
    """Runtimes that could not run, and why."""
    lines = []
    for name in order(run):
        entry = run["runtimes"].get(name)
        if entry is None:
            lines.append(f"* `{name}`: not known to that run, or not installed there.")
        elif not entry["ran"]:
            lines.append(f"* `{name}`: {entry['reason']}")
        else:
            lines += [f"* `{name}`: {reason}" for reason in entry["unmeasured"]]
            if "cold" not in entry and not entry["unmeasured"]:
                lines.append(f"* `{name}`: times and memory; `scripts/matrix.py --run --parts bench {name}`.")
    return lines


def page(run: Table | None) -> str:
    """docs/matrix.md."""
    text = f"{BEGIN}# What runs where\n\n"
    text += paragraph(INTRODUCTION)
    if run is None:
        return text + UNMEASURED + "\n## Capabilities\n\n" + "\n".join(features()) + "\n" + END
    parts = [
        ("", overview(run)),
        ("Capabilities", features()),
        ("Conformance, by area", areas(run)),
        ("What was not run, and why", skips(run)),
        ("The security probe", promises(run)),
    ]
    for title, lines in parts:
        text += (f"## {title}\n\n" if title else "") + "\n".join(lines) + "\n\n"
        if not title:
            text += paragraph(LEGEND.format(machine=machine(run)))
            missing = absent(run)
            text += "Not measured there:\n\n" + "\n".join(missing) + "\n\n" if missing else ""
        if title == "The security probe":
            text += "`fake` is no wall: what it violates shows that the probe sees what is open.\n"
    return text + END


INTRODUCTION = """Every runtime, what it can do, what a real run of its suites printed, what a start and an
idle sandbox cost, and what the probe found. `make matrix` runs all of it and writes this page; `make check`
sees that page, run and tables agree."""
LEGEND = """Measured on {machine}. Cold start: median from the request for a wall to the first byte of a
command's output, through the contract (`wasm`: of a Python program). Idle: what one more idle sandbox takes
from the host's memory. Conformance: tests passed, of those that there are; the rest is skipped by the
table, with the reasons below. Probe: promises of [SECURITY.md](SECURITY.md) that `ringfence probe` found to
hold. Attacks: those of the committed table in `tests/security` that come to nothing; where one succeeds or
reaches a kernel, that is the sandbox's own, and the table has a note."""


def paragraph(text: str) -> str:
    """Text in the lines that Markdown has here."""
    return textwrap.fill(" ".join(text.split()), 140, break_on_hyphens=False) + "\n\n"


def readme(run: Table | None) -> str:
    """README.md with the overview between the marks."""
    text = README.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit("README.md has lost the marks between which the matrix belongs")
    if run is None:
        return before + begin + UNMEASURED + end + after
    text = f"Measured by `make matrix` on {machine(run)}; [docs/matrix.md](docs/matrix.md) explains it.\n\n"
    return before + begin + text + "\n".join(overview(run)) + "\n" + end + after


def disagreements(run: Table) -> list[str]:
    """Where the run saw something else than the committed tables say, or is no proof."""
    from dataclasses import asdict

    found = []
    who = "root" if run["root"] else "user"
    for name, entry in run["runtimes"].items():
        if not entry["ran"]:
            continue
        if entry["failed"] or entry["trouble"]:
            found.append(f"{name}: the recorded run failed: make matrix")
        expected = RUNTIMES.get(name)
        if expected is None:
            continue
        row_ = json.loads(json.dumps(asdict(expected[who])))
        other = sorted(key for key in row_ if row_[key] != entry["capabilities"].get(key))
        if other:
            found.append(
                f"{name}: the recorded run saw other capabilities than the table: {', '.join(other)}"
            )
    return found


def _measured(words: list[str], run: Table | None) -> Table:
    parser = argparse.ArgumentParser(prog="matrix.py --run", usage=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), type=lambda text: text.split(","))
    parser.add_argument("--suites", action="append", default=[])
    parser.add_argument("runtimes", nargs="*")
    options = parser.parse_args(words)
    if unknown := sorted({*options.parts} - {*PARTS}):
        parser.error(f"--parts {unknown[0]}: known are {', '.join(PARTS)}")
    return measure(options.runtimes, options.parts, options.suites, run)


def main(arguments: list[str]) -> int:
    """See the module."""
    if (
        not arguments
        or arguments[0] not in ("--run", "--write", "--check")
        or (len(arguments) > 1 and arguments[0] != "--run")
    ):
        print(__doc__, file=sys.stderr)
        return 2
    run: Table | None = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else None
    if arguments[0] == "--run":
        end_well()
        run = _measured(arguments[1:], run)
        FIGURES.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    wanted = {PAGE: page(run), README: readme(run)}
    if arguments[0] != "--check":
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    problems = [] if run is None else disagreements(run)
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            name = path.relative_to(ROOT)
            problems.append(
                f"{name} is not what docs/matrix.json and the tables say: scripts/matrix.py --write"
            )
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
