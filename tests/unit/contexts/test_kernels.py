"""The kernels as programs of their own, with whichever interpreters this machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from ringfence.guest.contexts.languages import LANGUAGES


def _pythons() -> list[str]:
    found = [sys.executable]
    for minor in range(8, 16):
        program = shutil.which(f"python3.{minor}")
        # A version manager's shim may stand for a version that is not there.
        if program and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0:
            found.append(program)
    return found


def talk(language: str, program: str, *calls: str) -> list[dict[str, Any]]:
    """What a kernel says to some calls and the end of its input."""
    kind = LANGUAGES[language]
    requests = [kind.request(f"c{n}", code, {}) for n, code in enumerate(calls)]
    done = subprocess.run(
        kind.argv(program), input=kind.source() + b"".join(requests), capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("program", _pythons())
def test_python_of_every_version(program: str) -> None:
    told = talk(
        "python",
        program,
        "import asyncio, sys, os\nx = 20\nprint('out')\n"
        "print('err', file=sys.stderr); os.system('echo child');",
        "class R:\n    def _repr_html_(self): return '<b>'\nawait asyncio.sleep(0)\nR()",
        "def f():\n    return 1/0\nf()",
        "x",
        "é = '\\ud800€'; é",
    )
    assert told[0]["t"] == "ready"
    kinds = [(each["x"], each["t"]) for each in told[1:]]
    assert [kind for call, kind in kinds if call == "c1"] == ["start", "result", "end"]
    assert [kind for call, kind in kinds if call == "c2"] == ["start", "error", "end"]
    text = "".join(each["s"] for each in told if each["t"] == "stdout")
    assert text == "out\nchild\n"
    (html,) = [each for each in told if each["x"] == "c1" and each["t"] == "result"]
    assert html["html"] == "<b>"
    (error,) = [each for each in told if each["t"] == "error"]
    assert error["name"] == "ZeroDivisionError" and "in f" in error["traceback"]
    assert "ringfence" not in error["traceback"]
    shown = [each["text"] for each in told if each["t"] == "result" and each["x"] in ("c3", "c4")]
    assert shown == ["20", "'\\ud800€'"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_node() -> None:
    told = talk("javascript", "node", "const a = {n: 1}; a", "await 1; let b = 2", "b")
    texts = [each["text"] for each in told if each["t"] == "result"]
    assert texts == ["{ n: 1 }", "2"], told


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_leaves_nothing_of_itself_in_children() -> None:
    kind = LANGUAGES["bash"]
    requests = kind.request("a", "env | grep -c __rf_; ls /proc/self/fd | wc -l", {})
    done = subprocess.run(
        kind.argv("bash"), input=kind.source() + requests, capture_output=True, timeout=60,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0
    head, begin, rest = done.stdout.split(b"\x1e")[1:4]
    assert (head, begin) == (b"ringfence ready - 0", b"")
    assert rest == b"ringfence begin a 0"
    assert done.stdout.split(b"\x1e")[4] == b"0\n4\n"
