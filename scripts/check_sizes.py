"""The file-size rule: a module, C file or test above 600 lines fails, above 400 is named."""

from __future__ import annotations

import sys
from pathlib import Path

SOFT, HARD = 400, 600
PATTERNS = (
    "src/**/*.py",
    "native/**/*.c",
    "native/**/*.h",
    "tests/**/*.py",
    "scripts/*.py",
    "examples/**/*.py",
)


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    failed = False
    for path in sorted({path for pattern in PATTERNS for path in root.glob(pattern)}):
        name = path.relative_to(root)
        if "build" in name.parts:
            continue
        lines = len(path.read_bytes().splitlines())
        if lines > HARD:
            failed = True
            print(f"{name}: {lines} lines; more than {HARD} is not allowed: split it", file=sys.stderr)
        elif lines > SOFT:
            print(f"{name}: {lines} lines; more than {SOFT}: think about splitting it")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
