"""Commands in a sandbox: what starts one, what it says, how it ends."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import field
from typing import NamedTuple

from ringfence.guest.channels import DEFAULT_WINDOW, Channel
from ringfence.guest.fields import Fields, Value, clean
from ringfence.guest.frames import MAX_OFFSET
from ringfence.model.errors import GuestRefused, InvalidRequest, ProtocolViolation
from ringfence.model.values import dataclass

STDOUT, STDERR = 1, 2
ATTACH_WINDOW = 65_536  # the ring of a command that somebody else started may be small
FROM_NOW = 2**64 - 1  # an offset for attach: only what comes from now on
SCOPES = {"process": 0, "group": 1, "sandbox": 2}
MOST_RING = 16 * 1024 * 1024
_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_EXIT, _DISPLACED = 1, 4  # EVENT: it has ended; somebody else writes its input from now on
_MOST_SIGNAL = 64


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One command, please.

    ``argv``: a first word without a slash is looked up in PATH inside. ``id``: 1 to 64 of
    ``[A-Za-z0-9._-]``, made up when ``None``; starting an id twice fails with EEXIST.
    ``stdin``: keep it open for :meth:`GuestProcess.write` (else it is empty). ``detached``: no output is
    sent here; attach later. ``drop``: with no reader and a full ring the oldest output is dropped, instead
    of the command waiting. ``ring``: bytes kept a stream (4,096 to 16 MiB, default 256 KiB).
    ``window``: bytes a stream that may be on their way to us, at most the ring. ``as_root``: as the
    sandbox's own root. ``zygote``: its stdin is a socket of packets, on which the guest asks it for copies of
    itself. ``copy_of``: the id of a zygote; the command is a copy of it (:attr:`GuestProcess.copied`), and
    ``argv`` only its name. What makes that impossible is refused (ESRCH: no such zygote runs; ETIMEDOUT: it
    does not answer; ESTALE: it has begun with another environment; ECHILD: it died, or lies).
    """

    argv: tuple[str | bytes, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    id: str | None = None
    pty: bool = False
    stdin: bool = False
    rows: int = 24
    columns: int = 80
    merge_stderr: bool = False
    detached: bool = False
    drop: bool = False
    as_root: bool = False
    ring: int | None = None
    window: int | None = None
    zygote: bool = False
    copy_of: str | None = None

    def fields(self, number: str) -> list[tuple[int, Value | None]]:
        """The fields of process.start for the process id ``number``.

        Raises:
            InvalidRequest: a value that no guest could take.
        """
        if not self.argv:
            raise InvalidRequest("a command needs at least one word")
        words = [
            word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape") for word in self.argv
        ]
        env = [f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in self.env.items()]
        if any(b"\0" in text for text in (*words, *env, (self.cwd or "").encode("utf-8", "surrogateescape"))):
            raise InvalidRequest("a NUL byte in an argument, a variable or the working directory")
        if any(not name or "=" in name for name in self.env):
            raise InvalidRequest("the name of an environment variable is empty or has a '='")
        if not (0 < self.rows < 65536 and 0 < self.columns < 65536):
            raise InvalidRequest("a terminal has 1 to 65535 rows and columns")
        if self.ring is not None and not 4096 <= self.ring <= MOST_RING:
            raise InvalidRequest(f"a ring of {self.ring} bytes; 4096 to {MOST_RING} are possible")
        flags = (
            self.pty * 1
            | self.stdin * 2
            | self.drop * 4
            | self.as_root * 8
            | self.merge_stderr * 16
            | self.detached * 32
            | self.zygote * 64
        )
        size: tuple[int | None, int | None] = (self.rows, self.columns) if self.pty else (None, None)
        return [
            (1, check_id(number)),
            *((2, word) for word in words),
            *((3, pair) for pair in env),
            (4, self.cwd),
            (5, flags),
            (6, size[0]),
            (7, size[1]),
            (8, self.stream_window),
            (9, self.ring),
            (10, None if self.copy_of is None else check_id(self.copy_of)),
        ]

    @property
    def stream_window(self) -> int:
        """The window to ask for: never more than the ring, which must hold what is on its way to us.

        Raises:
            InvalidRequest: an impossible window.
        """
        return min(check_window(self.window), self.ring or DEFAULT_WINDOW)

    @property
    def name(self) -> str:
        """The first word, fit for a message."""
        word = self.argv[0] if self.argv else ""
        return clean(word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape"), 64)


class Output(NamedTuple):
    """Bytes of one stream (1 stdout, 2 stderr); ``offset`` is the position of the first one.

    An offset beyond the end of the piece before means that output in between was dropped.
    """

    stream: int
    offset: int
    data: bytes


class ProcessExit(NamedTuple):
    """How a command ended, as the guest reports it: a code, or the signal that killed it.

    The ends are what the streams held then; times are microseconds of CPU, ``max_rss`` is bytes.
    """

    code: int | None
    signal: int | None
    stdout_end: int
    stderr_end: int
    user_us: int
    system_us: int
    max_rss: int

    @property
    def status(self) -> int:
        """What a shell would show: the code, or 128 + signal."""
        return 128 + self.signal if self.signal is not None else self.code or 0


class GuestProcess:
    """A command in a sandbox, seen through one channel. Iterate for its output::

        async for stream, offset, data in process: ...
        exit = await process.wait()

    The iteration ends when the command has ended and its own output was delivered, even if a background
    descendant keeps the pipe open. One consumer at a time. If nobody iterates, the command waits as soon
    as the window is full, as it would on a full pipe.
    """

    def __init__(self, number: str, pid: int, signaller: Callable[[str, int, str], Awaitable[None]]) -> None:
        self.id = number
        self.pid = pid
        self.exit: ProcessExit | None = None
        self.copied = False  # it is a copy of a zygote: a guest that knows none has started `argv`
        self.stdin_offset = 0  # bytes of input that the guest had taken when we attached
        self.displaced = asyncio.Event()  # another one took the input over: what we write is dropped
        self._channel: Channel | None = None
        self._signaller = signaller

    def bind(self, channel: Channel, reply: Fields) -> None:
        """The guest has begun to answer on ``channel``."""
        self._channel = channel
        self.pid = reply.number(1)
        self.copied = reply.number(2, 0) == 1

    def begin(self, asked: dict[int, int | None]) -> Callable[[Channel, Fields], None]:
        """For attach: what sets the offsets that the guest will send first, not before those asked for."""

        def begun(channel: Channel, reply: Fields) -> None:
            for stream, incoming in channel.incoming.items():
                first = reply.number(stream + 1, most=MAX_OFFSET)
                wanted = asked[stream]
                if wanted is not None and wanted != FROM_NOW and first < wanted:
                    raise ProtocolViolation("output from before the offset that was asked for")
                incoming.position = incoming.delivered = first
            self.stdin_offset = reply.number(4, 0, most=MAX_OFFSET)
            channel.begin_sending(self.stdin_offset)

        return begun

    def on_event(self, number: int, fields: Fields) -> None:
        """EVENT of the channel; unknown ones are from a later version and mean nothing to us."""
        if number == _DISPLACED:
            self.displaced.set()
        if number != _EXIT:
            return
        if self.exit is not None:
            raise ProtocolViolation(f"process {self.id} ended twice")
        code = fields.number(1, most=255) if 1 in fields else None
        signal = fields.number(2, most=_MOST_SIGNAL) if 2 in fields else None
        if (code is None) == (not signal):
            raise ProtocolViolation("a process that ended with neither or both of code and signal")
        self.exit = ProcessExit(
            code,
            signal,
            fields.number(3),
            fields.number(4),
            fields.number(5, 0),
            fields.number(6, 0),
            fields.number(7, 0),
        )

    @property
    def offsets(self) -> tuple[int, int]:
        """Positions in stdout and stderr after what was delivered: where to attach to go on."""
        incoming = self._channel.incoming if self._channel is not None else {}
        return tuple(incoming[s].delivered if s in incoming else 0 for s in (STDOUT, STDERR))  # type: ignore[return-value]

    def __aiter__(self) -> GuestProcess:
        return self

    async def __anext__(self) -> Output:
        """The next piece of output.

        Raises:
            LinkLost, ProtocolViolation: the link ended; everything received was delivered first.
            GuestRefused: the guest gave the command up.
        """
        channel = self._channel
        while channel is not None:
            if self._delivered(channel):
                break
            piece = channel.take()
            if piece is not None:
                output = self._own(*piece)
                if output is not None:
                    return output
                continue
            if channel.left:
                break
            channel.check()
            if channel.sent_close:
                raise GuestRefused(errno.ECONNRESET, f"process {self.id} ended early")
            await channel.changed()
        await self.close()
        raise StopAsyncIteration

    def _delivered(self, channel: Channel) -> bool:
        end = self.exit
        if end is None:
            return False
        for stream, incoming in channel.incoming.items():
            mine = end.stdout_end if stream == STDOUT else end.stderr_end
            if incoming.delivered < mine and (not incoming.ended or channel.holds(stream)):
                return False
        return True

    def _own(self, stream: int, offset: int, data: bytes) -> Output | None:
        """The part that the command itself wrote: nothing after the exit's offset."""
        if self.exit is not None:
            end = self.exit.stdout_end if stream == STDOUT else self.exit.stderr_end
            data = data[: max(0, end - offset)]
        return Output(stream, offset, data) if data else None

    async def wait(self) -> ProcessExit:
        """How the command ended. Does not consume output, and any number may wait.

        Raises:
            LinkLost, ProtocolViolation: the link ended before.
            GuestRefused: the guest gave the command up, or it was started detached.
        """
        while self.exit is None:
            if self._channel is None:
                raise GuestRefused(errno.ECONNRESET, f"process {self.id} is detached; attach to wait for it")
            self._channel.check()
            if self._channel.sent_close:
                raise GuestRefused(errno.ECONNRESET, f"process {self.id} is detached; attach to wait for it")
            await self._channel.changed()
        return self.exit

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write to standard input, as fast as the command takes it.

        Raises:
            GuestRefused: EPIPE, the command has ended, or somebody else writes now.
            WrongState: the input was closed.
            LinkLost, ProtocolViolation: the link ended.
        """
        if self._channel is None:
            raise GuestRefused(errno.EPIPE, f"process {self.id} is detached")
        await self._channel.send(data, until=lambda: self.exit is not None or self.displaced.is_set())

    async def close_stdin(self) -> None:
        """End standard input. Idempotent; harmless when the command has ended."""
        if self._channel is not None:
            self._channel.send_eof()

    async def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal its new size.

        Raises:
            GuestRefused: ENOTTY, no terminal; ESRCH, it has ended.
        """
        if self._channel is None:
            raise GuestRefused(errno.ENOTTY, f"process {self.id} is detached")
        fields: list[tuple[int, Value | None]] = [(1, self.id), (2, rows), (3, columns)]
        await self._channel.wire.request(5, fields, f"resize {self.id}")

    async def signal(self, number: int, scope: str = "group") -> None:
        """Send a signal to the ``group`` or the ``process``.

        Raises:
            GuestRefused: ESRCH, it has ended.
        """
        await self._signaller(self.id, number, scope)

    async def close(self) -> None:
        """Let go of it: no more output comes here, the command lives on. Idempotent."""
        if self._channel is not None:
            self._channel.close()

    async def __aenter__(self) -> GuestProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def is_id(number: str) -> bool:
    """Whether the protocol allows it as a process id."""
    return 1 <= len(number) <= 64 and _ID_CHARACTERS.issuperset(number)


def check_id(number: str) -> str:
    """A process id that the protocol allows.

    Raises:
        InvalidRequest: it is none.
    """
    if not is_id(number):
        raise InvalidRequest(f"process id {number!r} is not 1 to 64 of A-Z a-z 0-9 . _ -")
    return number


def check_window(window: int | None, default: int = DEFAULT_WINDOW) -> int:
    """The window of a stream in bytes; ``default`` for ``None``.

    Raises:
        InvalidRequest: below 1 or above 16 MiB.
    """
    if window is None:
        return default
    if not 1 <= window <= MOST_RING:
        raise InvalidRequest(f"a window of {window} bytes; 1 to {MOST_RING} are possible")
    return window
