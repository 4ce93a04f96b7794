"""Time limits of one task's waits, one timer for all of them: a request has several, and few ever expire."""

from __future__ import annotations

import asyncio
from math import inf
from types import TracebackType


class Patience:
    """``with patience(seconds):`` as ``asyncio.timeout``, again and again, one wait at a time.

    The timer stays where it is while limits move: when it fires early, it is set to what is due by then.
    Whoever has no more use for it calls :meth:`close`, since the timer holds what it would cancel.
    """

    __slots__ = ("_at", "_before", "_due", "_expired", "_loop", "_seconds", "_task", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at = inf  # when the timer fires
        self._due = inf
        self._seconds = 0.0
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self._expired = False

    def __call__(self, seconds: float) -> Patience:
        """The next wait may take so long."""
        self._seconds = seconds
        return self

    def __enter__(self) -> Patience:
        task = asyncio.current_task()
        if task is None or self._task is not None:
            raise RuntimeError("one wait at a time, in a task")
        self._task, self._before, self._expired = task, task.cancelling(), False
        self.extend()
        return self

    def extend(self) -> None:
        """Something moved: the time begins anew."""
        self._due = self._loop.time() + self._seconds
        if self._timer is None or self._at > self._due:
            self.close()
            self._set(self._due)

    def _set(self, at: float) -> None:
        self._at = at
        self._timer = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._timer, self._at = None, inf
        if self._task is None:
            return
        if self._loop.time() < self._due:
            self._set(self._due)
            return
        self._expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the wait.

        Raises:
            TimeoutError: it took too long.
        """
        task, self._task, self._due = self._task, None, inf
        ours = self._expired and task is not None and task.uncancel() <= self._before
        if ours and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def close(self) -> None:
        """Let the timer go. Idempotent; it may be used again."""
        timer, self._timer, self._at = self._timer, None, inf
        if timer is not None:
            timer.cancel()
