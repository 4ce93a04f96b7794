"""Ctrl-C before ``ringfence run`` handles signals itself: wherever Python is just then, it ends us."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

# In the callback of a weak reference, where the import system often is, an exception is printed and lost.
SCRIPT = """
import os, signal, sys, weakref
from ringfence.cli import main

class Thing:
    pass

def dispatch(arguments):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del thing
    print("went on")
    return 7

main._dispatch = dispatch
main.entry()
"""


def ended(command: str, before: Callable[[], object] | None = None) -> tuple[int, bytes]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=before,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_an_early_interrupt_is_not_lost() -> None:
    assert ended("run") == (-signal.SIGINT, b"")


def test_other_commands_are_interrupted_as_python_does_it() -> None:
    assert ended("doctor") == (7, b"went on\n"), "the attempt is one that Python loses"


def test_whoever_ignores_interrupts_goes_on_ignoring_them() -> None:
    assert ended("run", lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) == (7, b"went on\n")


WORKING = """
import asyncio
from ringfence.cli import doctor, main

async def work():
    try:
        print("began", flush=True)
        await asyncio.sleep(1000)
    finally:
        print("taken down", flush=True)

doctor.main = lambda _: asyncio.run(work())
main.sys.argv = ["ringfence", "doctor"]
main.entry()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_was_begun_is_taken_down_whatever_ends_us(number: signal.Signals) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", WORKING, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"began\n"
    running.send_signal(number)
    assert running.communicate(timeout=60) == (b"taken down\n", b"")
    assert running.returncode == 128 + number


def test_who_ignores_hanging_up_goes_on_and_an_end_is_an_end_without_interrupts() -> None:
    def ignoring() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    running = subprocess.Popen(
        [sys.executable, "-c", WORKING, "doctor"], stdout=subprocess.PIPE, preexec_fn=ignoring
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"began\n"
    running.send_signal(signal.SIGHUP)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == -signal.SIGTERM
