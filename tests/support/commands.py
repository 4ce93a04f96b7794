"""The real command line, started as a user starts it: by its own process, in its own session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "ringfence")
PATIENCE = 180  # seconds; a machine with two busy cores is slow, never this slow


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which ``python -m ringfence`` is this checkout, without colours."""
    env = dict(os.environ if base is None else base)
    return env | {"PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Ringfence:
    """Runs ``ringfence`` with one state folder. Call it with arguments; ``start`` leaves it running."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = environment(env)

    def __call__(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run to the end; output captured, no input unless given."""
        options.setdefault("env", self.env)
        options.setdefault("timeout", PATIENCE)
        if "stdin" not in options and "input" not in options:
            options["stdin"] = subprocess.DEVNULL
        if "stdout" not in options and "stderr" not in options:
            options["capture_output"] = True
        return subprocess.run([*COMMAND, *arguments], **options)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start and leave running, output on pipes."""
        for stream in ("stdin", "stdout", "stderr"):
            options.setdefault(stream, subprocess.PIPE)
        options.setdefault("env", self.env)
        return subprocess.Popen([*COMMAND, *arguments], **options)

    def json(self, *arguments: str, code: int = 0, **options: Any) -> Any:
        """Run with ``--json`` among the arguments; the document, after the exit code was checked."""
        done = self(*arguments, **options)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def json_any(self, *arguments: str, **options: Any) -> Any:
        """As :meth:`json` where exit code 1 is a verdict and not a failure."""
        done = self(*arguments, **options)
        assert done.returncode in (0, 1), (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)
