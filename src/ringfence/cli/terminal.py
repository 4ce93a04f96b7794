"""The user's terminal: raw while a command inside has one of its own, and as it was on any way out."""

from __future__ import annotations

import os
import termios
import tty
from types import TracebackType


class RawTerminal:
    """A context in which keys reach the command unchanged. No effect if ``descriptor`` is no terminal.

    ``suspend`` and ``resume`` are for the time we are stopped. Every exit of
    ``ringfence run`` but SIGKILL passes through ``__exit__``.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self.descriptor = descriptor
        self._saved: list[object] | None = None

    def __enter__(self) -> RawTerminal:
        try:
            self._saved = termios.tcgetattr(self.descriptor)
            tty.setraw(self.descriptor, termios.TCSADRAIN)
        except (termios.error, OSError):
            self._saved = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Back to what it was; may be called again."""
        if self._saved is not None:
            try:
                termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self._saved)  # type: ignore[arg-type]
            except (termios.error, OSError):
                return

    def resume(self) -> None:
        """Raw again, after ``restore``."""
        if self._saved is not None:
            tty.setraw(self.descriptor, termios.TCSADRAIN)


def window_size(*descriptors: int) -> tuple[int, int]:
    """Rows and columns of the first terminal among them; 24 × 80 if none is one."""
    for descriptor in descriptors:
        try:
            columns, rows = os.get_terminal_size(descriptor)
        except OSError:
            continue
        if rows and columns:
            return rows, columns
    return 24, 80
