"""Writes the figures of docs/SPECIFICATION.md from what `ringfence bench --json` printed.

usage: spec_figures.py BENCH.json [MORE.json…]   keep them as docs/figures.json and rewrite the page
       spec_figures.py --check                   exit 1 if the page is not what docs/figures.json says

More: what other runs on the same machine measured (`ringfence bench --api --json`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "SPECIFICATION.md"
FIGURES = ROOT / "docs" / "figures.json"
BEGIN = "<!-- figures: written by scripts/spec_figures.py from docs/figures.json; do not edit by hand -->\n"
END = "<!-- end of figures -->\n"
UNMEASURED = "Not measured yet.\n"


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def render(bench: dict[str, Any]) -> str:
    """The tables."""
    machine = bench["machine"]
    who = "root" if machine["root"] else "a normal user"
    lines = [
        f"Machine: {machine['cpus']} CPUs, {machine['memory'] / 1024**3:.0f} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, as {who}; load average {machine['load']:.1f} at the end of the run.",
        "",
    ]
    for wall in bench["boundaries"]:
        limits = ", ".join(f"{name} {how}" for name, how in wall["limits"].items())
        lines += [
            f"Measured behind: {wall['runtime']}, {wall['level']} {wall['boundary']}; own namespaces "
            f"{' '.join(wall['namespaces'])}; seccomp {wall['seccomp']}; no_new_privs "
            f"{'yes' if wall['no_new_privs'] else 'no'}; Landlock {wall['landlock']}; capabilities "
            f"{', '.join(wall['capabilities']) or 'none'}; limits: {limits}.",
            "",
        ]
    lines += [row("promise", "limit", "measured", "state", "beside"), row(*["---"] * 5)]
    for promise in bench["promises"]:
        state = "held" if promise["held"] else "**not held**"
        measured = f"{promise['measured']:g} {promise['unit']}".strip()
        lines.append(row(promise["what"], promise["promise"], measured, state, promise["reference"]))
    timed = [figure for figure in bench["figures"] if "p50" in figure]
    lines += ["", row("milliseconds", "n", "min", "p50", "p95", "p99"), "| --- |" + " ---: |" * 5]
    for figure in timed:
        lines.append(
            row(figure["name"], figure["n"], *(f"{figure[k]:.2f}" for k in ("min", "p50", "p95", "p99")))
        )
    lines += ["", row("other figures", "n", "value"), "| --- | ---: | ---: |"]
    for figure in bench["figures"]:
        if "value" in figure:
            value = f"{figure['value']:.2f} {figure['unit']}".strip()
            lines.append(row(figure["name"], figure.get("n", ""), value))
    for name, reason in bench["absent"].items():
        lines += ["", f"Not measured: {name} ({reason})."]
    return "\n".join(lines) + "\n"


def page_with(bench: dict[str, Any]) -> str:
    """The whole page with these figures."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE.name} has lost the marks between which the figures belong")
    return before + begin + render(bench) + end + after


def together(paths: list[str]) -> dict[str, Any]:
    """What several runs measured, as one."""
    first, *others = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    for other in others:
        for name in ("boundaries", "figures", "promises"):
            first[name] += other[name]
        first["absent"] |= other["absent"]
    return dict(first)


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    if arguments == ["--check"] and not FIGURES.exists():
        honest = BEGIN + UNMEASURED + END in PAGE.read_text(encoding="utf-8")
        print(
            "not measured yet: make figures" if honest else "figures without docs/figures.json",
            file=sys.stderr,
        )
        return int(not honest)
    if arguments == ["--check"]:
        if page_with(json.loads(FIGURES.read_text(encoding="utf-8"))) != PAGE.read_text(encoding="utf-8"):
            print("docs/SPECIFICATION.md is not what docs/figures.json says", file=sys.stderr)
            return 1
        return 0
    bench = together(arguments)
    wanted = page_with(bench)
    FIGURES.write_text(json.dumps(bench, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(wanted, encoding="utf-8")
    print(f"wrote {FIGURES.relative_to(ROOT)} and the figures of {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
