"""`ringfence bench --runtimes` with what it needs: container engines of its own, and a template for machines.

usage: bench_runtimes.py [OPTIONS OF ringfence bench…]

As root, on an idle machine; some minutes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "scripts")]

from matrix_run import end_well, engine, home, template  # noqa: E402


def main(arguments: list[str]) -> int:
    """See the module."""
    end_well()
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine("docker"))
        stack.enter_context(home())
        words = ["bench", "--runtimes", "--template", template(), *arguments]
        child = subprocess.Popen([sys.executable, "-m", "ringfence", *words], cwd=ROOT)
        try:
            return child.wait()
        except BaseException:
            child.send_signal(signal.SIGINT)  # which it cleans up after
            child.wait()
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
