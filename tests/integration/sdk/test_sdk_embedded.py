"""A program that uses the SDK with no service configured: what it gets, and that it leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.leaks import Leaks
from support.serving import needs_root_or_users

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 90
PROGRAM = """
import json, os, sys
from ringfence import Sandbox
box = Sandbox.create(memory="128MiB", disk="32MiB", runtime="jail", timeout=600)
box.start("sleep 3000")
print(json.dumps({"id": box.id, "said": box.run("echo inside").stdout}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def leaks() -> Iterator[Leaks]:
    needs_root_or_users()
    with Leaks() as found:
        yield found


def environment(leaks: Leaks) -> dict[str, str]:
    env = {name: value for name, value in leaks.env.items() if not name.startswith("RINGFENCE_")}
    return env | {
        "RINGFENCE_HOME": str(leaks.home), "RINGFENCE_LOGIN": "/nonexistent", "PYTHONPATH": str(ROOT / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def program(leaks: Leaks, text: str = PROGRAM) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    started = subprocess.Popen(
        [sys.executable, "-c", text], env=environment(leaks), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert started.stdout is not None
    line = started.stdout.readline()
    if not line:
        pytest.fail(f"it said nothing: {started.communicate()[1][-3000:]}")
    return started, json.loads(line)


def finish(started: subprocess.Popen[str]) -> int:
    out, err = started.communicate("\n", timeout=PATIENCE)
    assert (out, err) == ("", "")
    return started.returncode


def test_a_program_gets_a_service_of_its_own_and_leaves_nothing(leaks: Leaks) -> None:
    started, told = program(leaks)
    assert told["said"] == "inside\n"
    assert leaks.home is not None
    assert (leaks.home / "sandboxes" / told["id"]).is_dir()  # the control: it is a real one
    assert leaks.processes()
    assert finish(started) == 0
    leaks.check()
    assert not list((leaks.home / "services").iterdir())


def test_a_program_that_is_killed_leaves_nothing(leaks: Leaks) -> None:
    started, told = program(leaks)
    started.send_signal(signal.SIGKILL)
    started.communicate(timeout=PATIENCE)
    leaks.check(PATIENCE)
    assert leaks.home is not None
    assert not (leaks.home / "sandboxes" / told["id"]).exists()
    assert not list((leaks.home / "services").iterdir())


def test_an_interrupt_ends_the_program_and_then_its_service(leaks: Leaks) -> None:
    started, _ = program(leaks)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in err
    leaks.check(PATIENCE)


def test_what_a_killed_keeper_left_is_removed_by_the_next(leaks: Leaks) -> None:
    assert leaks.home is not None
    started, told = program(leaks)
    keepers = [each.pid for each in leaks.processes() if "ringfence.sdk.embedded" in each.command]
    assert len(keepers) == 1
    os.kill(keepers[0], signal.SIGKILL)
    started.send_signal(signal.SIGKILL)
    started.communicate(timeout=PATIENCE)
    end = time.monotonic() + PATIENCE
    while any(" serve " in each.command or " node " in each.command for each in leaks.processes()):
        assert time.monotonic() < end, "serve lives on without its keeper"
        time.sleep(0.05)
    again, other = program(leaks)
    assert other["id"] != told["id"]
    assert not (leaks.home / "sandboxes" / told["id"]).exists()
    assert finish(again) == 0
    leaks.check(PATIENCE)
    assert not list((leaks.home / "services").iterdir())


def test_two_programs_do_not_take_each_others(leaks: Leaks) -> None:
    one, first = program(leaks)
    two, second = program(leaks)
    assert first["id"] != second["id"]
    assert finish(one) == 0
    assert leaks.home is not None
    assert (leaks.home / "sandboxes" / second["id"]).is_dir()
    assert finish(two) == 0
    leaks.check(PATIENCE)


ASYNC = """
import asyncio, json, sys
from ringfence import AsyncSandbox
async def main():
    async with AsyncSandbox.create(memory="128MiB", disk="32MiB", runtime="jail") as box:
        print(json.dumps({"said": (await box.run("echo inside")).stdout}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""


def test_the_asynchronous_half_does_the_same(leaks: Leaks) -> None:
    started, told = program(leaks, ASYNC)
    assert told["said"] == "inside\n"
    assert finish(started) == 0
    leaks.check()


def test_a_start_that_fails_says_why(leaks: Leaks, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    env = environment(leaks) | {"RINGFENCE_HOME": str(taken)}
    done = subprocess.run(
        [sys.executable, "-c", "from ringfence import Sandbox; Sandbox.create()"], env=env,
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "HostLimit" in done.stderr
    leaks.check()
