"""Signals of ``ringfence run``: whose they are, and what they do before, during and after the command."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from ringfence.cli.run import Run

GRACE = 5.0  # seconds between SIGTERM and SIGKILL when we are told to stop
PATIENCE = 2  # signals that a clean-up ignores; whoever sends more wants us gone, the next run will sweep
FORWARDED = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Handlers of one run. ``ending`` is the signal that is to end us, 0 if there was none."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ending = 0
        self.interrupts = 0
        self.ignored = 0

    def catch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to handle signals."""
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._stop, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGHUP, self._stop, signal.SIGHUP)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        loop.add_signal_handler(signal.SIGCONT, self._continue)
        for number in FORWARDED:
            loop.add_signal_handler(number, self._forward, number)
        if self.run.options.interactive:
            loop.add_signal_handler(signal.SIGWINCH, self._resize)

    def _interrupt(self) -> None:
        """The first Ctrl-C is the command's, the second one is for the whole sandbox."""
        self.interrupts += 1
        if self.run.process is None:
            self._give_up(signal.SIGINT)
        elif self.interrupts == 1:
            self._forward(signal.SIGINT)
        else:
            self.run.errand(self.run.end(0))

    def _stop(self, number: int) -> None:
        if self.run.process is None:
            self._give_up(number)
        elif self.ending:
            self.run.errand(self.run.end(0))
        else:
            self.ending = number
            self.run.errand(self.run.end(GRACE))

    def _give_up(self, number: int) -> None:
        """No command to tell it to (not yet, or not any more): we are what is interrupted."""
        if self.ending:
            # We are cleaning up. That is not to be cut short by impatience, only by despair.
            self.ignored += 1
            if self.ignored > PATIENCE:
                if self.run.raw is not None:
                    self.run.raw.restore()
                os._exit(128 + number)
            return
        self.ending = number
        if self.run.task is not None:
            self.run.task.cancel()

    def _forward(self, number: int) -> None:
        if self.run.process is not None:
            self.run.errand(self.run.process.signal(number, "group"))

    def _suspend(self) -> None:
        """Ctrl-Z: the command stops, then we do. Its deadline goes on meanwhile."""
        if self.run.process is not None:
            self.run.errand(self._suspend_after(self.run.process))
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    async def _suspend_after(self, process: Any) -> None:
        await process.signal(signal.SIGSTOP, "group")
        if self.run.raw is not None:
            self.run.raw.restore()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _continue(self) -> None:
        if self.run.raw is not None:
            self.run.raw.resume()
        if self.run.source is not None:
            self.run.source.resume()
        if self.run.process is not None:
            self.run.errand(self.run.process.signal(signal.SIGCONT, "group"))

    def _resize(self) -> None:
        from ringfence.cli.terminal import window_size

        if self.run.process is not None:
            self.run.errand(self.run.process.resize(*window_size(0, 1, 2)))
