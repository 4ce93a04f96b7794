"""Payloads, ready to run: C compiled once, Python put behind its prelude; and reading a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "payloads"
PYTHON = "/usr/bin/python3"


@cache
def program(name: str) -> bytes:
    """The bytes of a payload: a static program, or a Python script."""
    source = FOLDER / name
    if source.suffix == ".py":
        return (FOLDER / "verdict.py").read_bytes() + source.read_bytes()
    # Sub-sessions as another user share what the first one compiled.
    cache = os.environ.get("RINGFENCE_TEST_PAYLOADS")
    if cache and (ready := Path(cache) / source.stem).exists():
        return ready.read_bytes()
    with tempfile.TemporaryDirectory(prefix="rf-payload-") as folder:
        made = Path(folder) / "program"
        options = ["-static", "-O1", "-s", "-Wall", "-Wno-unused-result", "-o", str(made), str(source)]
        done = subprocess.run(["gcc", *options], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return made.read_bytes()


def command(name: str, at: str) -> list[str]:
    """How a payload that lies at ``at`` is run."""
    return [PYTHON, "-I", "-S", at] if name.endswith(".py") else [at]


def verdict(output: bytes) -> str | None:
    """The outcome in a payload's output: its last line of JSON. None if there is none."""
    for line in reversed(output.split(b"\n")):
        if line.startswith(b'{"outcome"'):
            return str(json.loads(line)["outcome"])
    return None
