"""What a command line imports, and what each module costs: where the time of ``ringfence run`` goes.

    python benchmarks/imports.py                     # ringfence run -- true
    python benchmarks/imports.py doctor --json

Modules that ``import asyncio`` alone brings are left out: the promise is about what comes on top. Each figure
is the smallest of several runs, in microseconds; run it with ``nice -n -20`` on a machine that others use.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

RUNS = 8
LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def cost(arguments: list[str]) -> dict[str, int]:
    """Microseconds of each module by itself."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "src")
    best: dict[str, int] = {}
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *arguments],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        for line in done.stderr.splitlines():
            if match := LINE.match(line):
                best[match[2]] = min(best.get(match[2], 10**9), int(match[1]))
    return best


def main() -> None:
    """Print a table."""
    plain = cost(["-c", "import asyncio"])
    ours = cost(["-m", "ringfence", *(sys.argv[1:] or ["run", "--", "true"])])
    extra = {name: spent for name, spent in ours.items() if name not in plain}
    for name, spent in sorted(extra.items(), key=lambda item: -item[1])[:40]:
        print(f"{spent:>8}  {name}")
    spared = sum(spent for name, spent in plain.items() if name not in ours)
    print(f"{sum(extra.values()):>8}  in {len(extra)} modules on top of asyncio's")
    print(f"{-spared:>8}  of asyncio's own that are not imported")


if __name__ == "__main__":
    main()
