"""Prints the sub-commands of `ringfence`, one a line, as its own `--help` lists them."""

from __future__ import annotations

import re
import subprocess
import sys


def main() -> int:
    text = subprocess.run(
        [sys.executable, "-m", "ringfence", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for name in dict.fromkeys(re.findall(r"^  +([a-z][a-z-]+) {2,}\S", text, re.MULTILINE)):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
