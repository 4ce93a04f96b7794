"""Work whose length somebody else decides, for a bounded time: patterns of policies, bodies to look through.

One process serves the doors of many sandboxes. A pattern that takes for ever on the right text would hold up
all of them; the interpreter's matcher looks for signals while it works, so a timer of CPU time ends it.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

MARK = "[redacted]"
_PATIENCE = 0.05  # seconds of CPU for the patterns of one text
_STRIKES = 3  # texts that took longer, until a policy's patterns are not tried any more

T = TypeVar("T")
_armed = False


class TooLong(Exception):
    """It took more than its time."""


def _ring(_number: int, _frame: object) -> None:
    if _armed:
        raise TooLong


def bounded(seconds: float, work: Callable[[], T]) -> T:
    """The result of ``work``, which may take so many seconds of this process's CPU time. Does not nest.

    Only the main thread can be interrupted; in others there is no limit.

    Raises:
        TooLong: it took more. And whatever it raises.
    """
    global _armed
    if threading.current_thread() is not threading.main_thread():
        return work()
    if signal.getsignal(signal.SIGVTALRM) is not _ring:
        signal.signal(signal.SIGVTALRM, _ring)
    # Not the timer of real time: how loaded the machine is must not decide, and others use that one.
    _armed = True
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        return work()
    finally:
        _armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class Patterns:
    """Patterns that must not be found in what is written down. False if there are none."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._patterns = [re.compile(text) for text in texts]
        self._strikes = 0

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def mark(self, text: str) -> str:
        """The text with a mark in place of what they find; nothing but a mark if that takes too long."""
        if not self._patterns:
            return text
        if self._strikes >= _STRIKES:
            return MARK
        try:
            return bounded(_PATIENCE, lambda: self._marked(text))
        except TooLong:
            self._strikes += 1
            return MARK

    def _marked(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(MARK, text)
        return text
