"""``ringfence.sdk.process`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from collections.abc import Iterator

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade
from ringfence.sdk.process import AsyncProcess, Sink
from ringfence.sdk.results import CommandResult, Output


class Process(Facade):
    """A command. Iterate for its output, or :meth:`wait` for its end; one of them at a time.

    >>> with Sandbox.create() as sandbox:
    ...     process = sandbox.start(["sh", "-c", "echo one; sleep 0.1; echo two"])
    ...     for piece in process:
    ...         print(piece.text, end="")
    ...     print(process.wait().exit_code)
    one
    two
    0
    """

    _async: AsyncProcess

    @property
    def pid(self) -> int:
        """Its process number inside (reported)."""
        return self._async.pid

    @property
    def offsets(self) -> tuple[int, int]:
        """Positions in stdout and stderr after what came so far: where to attach to go on."""
        return self._async.offsets

    @property
    def lost(self) -> int:
        """Bytes of output that were dropped before we could have them."""
        return self._async.lost

    @property
    def ended(self) -> bool:
        """Whether its end is known here."""
        return self._async.ended

    def __iter__(self) -> Process:
        return self

    def __next__(self) -> Output:
        """The next piece of output.

        Raises:
            ServiceUnreachable: the connection was lost and can't be made again.
        """
        try:
            return BACKGROUND.run(self._async.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def wait(self, timeout: float | None = None) -> CommandResult:
        """How it ended; with the output that nobody has iterated over.

        Raises:
            DeadlineExceeded: it has not, within ``timeout`` seconds. It goes on.
        """
        return BACKGROUND.run(self._async.wait(timeout))

    def communicate(
        self, stdin: bytes | str | None = None, on_stdout: Sink | None = None, on_stderr: Sink | None = None
    ) -> CommandResult:
        """Give it all of its input, take all of its output, and return how it ended."""
        return BACKGROUND.run_calling(
            lambda here: self._async.communicate(stdin, here(on_stdout), here(on_stderr))
        )

    def stdout(self) -> Iterator[bytes]:
        """Only its output, without its errors."""
        return BACKGROUND.iterate(self._async.stdout())

    def write(self, data: bytes | str) -> None:
        """Write to its input, as fast as it takes it.

        Raises:
            WrongState: the input was closed, or the command has ended.
        """
        BACKGROUND.run(self._async.write(data))

    def close_stdin(self) -> None:
        """End its input. Idempotent."""
        BACKGROUND.run(self._async.close_stdin())

    def signal(self, signal: int | str, *, scope: str = "group") -> None:
        """Send a signal (``"TERM"``, ``15``) to its ``group`` or to the ``process`` alone.

        Raises:
            GuestRefused: it has ended (ESRCH).
        """
        BACKGROUND.run(self._async.signal(signal, scope=scope))

    def kill(self) -> None:
        """SIGKILL to it and all that descends from it. That it has ended is no error."""
        BACKGROUND.run(self._async.kill())

    def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal its new size."""
        BACKGROUND.run(self._async.resize(rows, columns))

    def remove(self) -> None:
        """Kill it if it runs, and forget its output."""
        BACKGROUND.run(self._async.remove())

    def close(self) -> None:
        """Let go of it; it goes on. Idempotent."""
        BACKGROUND.run(self._async.close())

    def __enter__(self) -> Process:
        BACKGROUND.run(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        BACKGROUND.run(self._async.__aexit__(*_))

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")

    @property
    def id(self) -> str:
        """As it was last seen."""
        return self._async.id
