"""Ctrl-C before ``ringfence run`` handles signals itself: wherever Python is just then, it ends us."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

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
