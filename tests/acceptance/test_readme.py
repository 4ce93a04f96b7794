"""The tour in the README is run as it stands, and prints what it says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def steps() -> list[tuple[str, str]]:
    """Commands of the tour with the output that is shown below each."""
    tour = README.read_text(encoding="utf-8").partition("## A 60-second tour")[2].partition("\n## ")[0]
    found = []
    for block in re.findall(r"```console\n(.*?)```", tour, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            while command.endswith("\\"):
                more, _, shown = shown.partition("\n")
                command = command[:-1] + more.removeprefix(">")
            found.append((command, shown))
    return found


def pattern(shown: str) -> str:
    """A regular expression: ``…`` stands for anything, spaces for any number of spaces."""
    parts = re.split(r"(…|\s+)", shown.strip())
    words = {"…": ".*?"}
    return (
        "".join(words.get(part) or (r"\s+" if part.isspace() else re.escape(part)) for part in parts) + r"\s*"
    )


def test_the_tour_prints_what_the_readme_shows(tmp_path: Path) -> None:
    # `ringfence` of this interpreter, wherever it was installed, and nothing of the machine's state.
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / "ringfence"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m ringfence "$@"\n')
    script.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "RINGFENCE_HOME": str(tmp_path / "state"),
        "NO_COLOR": "1",
    }
    tour = steps()
    assert len(tour) >= 8
    for command, shown in tour:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        wanted = pattern(shown)
        if not re.fullmatch(wanted, done.stdout.strip() + "\n", re.DOTALL):
            pytest.fail(f"$ {command}\nprinted:\n{done.stdout}\nthe README shows:\n{shown}")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [("a … c", "a b c", True), ("a  b", "a b", True), ("a b", "a c", False), ("exit 1", "exit 12", False)],
)
def test_the_comparison_itself(shown: str, printed: str, same: bool) -> None:
    assert bool(re.fullmatch(pattern(shown), printed, re.DOTALL)) is same
