"""Commands of the worker: a forked child each, its rings of output, its input, and who listens to it."""

from __future__ import annotations

import errno
import os
import select
import time

from ringfence.guest import frames
from ringfence.guest.fields import Fields, encode
from ringfence.runtimes.wasm import commands
from ringfence.runtimes.wasm.lean import signal, suppress
from ringfence.runtimes.wasm.serving import HOST_WINDOW, Channel, Link, window_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.runtimes.wasm.worker import Worker

_PTY, _STDIN, _DROP, _ROOT, _MERGE, _DETACHED = 1, 2, 4, 8, 16, 32
_RING, _LEAST_RING, _MOST_RING = 262_144, 4096, 16 << 20
_NOW = 2**64 - 1
_MOST_ENDED = 512
_PIECE = 65_536
_EXIT, _DISPLACED = 1, 4
_MOST_LIST = 60_000
_ID = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class Ring:
    """The last bytes of one output stream, by offset; fed from a pipe."""

    def __init__(self, descriptor: int | None, limit: int, drop: bool) -> None:
        self.descriptor = descriptor
        self.limit = limit
        self.drop = drop
        self.start = 0
        self.data = bytearray()

    @property
    def end(self) -> int:
        """Offset of the next byte."""
        return self.start + len(self.data)

    @property
    def ended(self) -> bool:
        """Nothing more comes."""
        return self.descriptor is None

    def add(self, data: bytes, keep: int) -> None:
        """Take bytes; nothing from ``keep`` on is lost (the caller has looked at ``space``)."""
        self.data += data
        surplus = len(self.data) - self.limit
        if surplus > 0:
            cut = surplus if self.drop else min(surplus, max(0, keep - self.start))
            del self.data[:cut]
            self.start += cut

    def space(self, keep: int) -> int:
        """How much may come without losing what somebody needs."""
        return self.limit - (self.end - max(self.start, min(keep, self.end)))


class Process:
    """One command."""

    def __init__(
        self, worker: Worker, name: str, pid: int, argv: list[bytes], rings: dict[int, Ring]
    ) -> None:
        self.worker = worker
        self.id = name
        self.pid = pid
        self.argv = argv
        self.rings = rings
        self.ring = min(ring.limit for ring in rings.values())
        self.readers: set[ProcessChannel] = set()
        self.status: int | None = None
        self.usage = (0, 0, 0)
        self.ends = {1: 0, 2: 0}
        self.started = time.time_ns()
        self.stdin: int | None = None
        self.input = bytearray()
        self.input_taken = 0
        self.input_ended = False
        self.pidfd = os.pidfd_open(pid)
        worker.loop.watch(self.pidfd, select.EPOLLIN, self._exited)
        for stream in rings:
            self.arm(stream)

    # -- output

    def _keep(self, stream: int) -> int:
        """The oldest offset that somebody may still need."""
        ring = self.rings[stream]
        readers = [reader for reader in self.readers if stream in reader.credit]
        # What is under way to a reader is kept until it has taken it: a whole window, if that is more.
        ring.limit = max([self.ring, *(reader.window for reader in readers)])
        if not readers:
            return ring.end if ring.drop else ring.start
        return min(reader.surely_taken(stream) for reader in readers)

    def arm(self, stream: int) -> None:
        """Watch the pipe if there is room, else leave it unread."""
        ring = self.rings.get(stream)
        if ring is None or ring.descriptor is None:
            return
        keep = self._keep(stream)
        if (not self.readers and ring.drop) or ring.space(keep) > 0:
            self.worker.loop.watch(ring.descriptor, select.EPOLLIN, lambda _: self.read(stream))
        else:
            self.worker.loop.forget(ring.descriptor)

    def read(self, stream: int) -> bool:
        """Take from the pipe what there is room for; False if nothing came."""
        ring = self.rings[stream]
        if ring.descriptor is None:
            return False
        keep = self._keep(stream)
        most = _PIECE if not self.readers and ring.drop else min(_PIECE, ring.space(keep))
        if most <= 0:
            self.arm(stream)
            return False
        try:
            data = os.read(ring.descriptor, most)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            ring.add(data, keep)
        else:
            self.worker.loop.forget(ring.descriptor)
            os.close(ring.descriptor)
            ring.descriptor = None
        for reader in list(self.readers):
            reader.pump()
        self.arm(stream)
        return bool(data)

    def _exited(self, _: int) -> None:
        try:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        self.worker.loop.forget(self.pidfd)
        os.close(self.pidfd)
        self.status = status
        self.usage = (int(usage.ru_utime * 1e6), int(usage.ru_stime * 1e6), usage.ru_maxrss * 1024)
        for stream, ring in self.rings.items():
            # A child has no children: what its pipe holds now is all there will ever be.
            held = _held(ring.descriptor)
            self.ends[stream] = ring.end + held
        self._close_stdin()
        for reader in list(self.readers):
            reader.pump()
        self.worker.ended(self)

    # -- input

    def write(self, data: bytes) -> None:
        """Bytes for standard input, which the credit has bounded."""
        self.input += data
        self._feed(0)

    def _feed(self, _: int) -> None:
        written = 0
        while self.input and self.stdin is not None:
            try:
                count = os.write(self.stdin, self.input[:_PIECE])
            except BlockingIOError:
                break
            except OSError:
                self._close_stdin()
                break
            del self.input[:count]
            written += count
        if self.stdin is None:  # nobody reads: it is taken, and gone
            written += len(self.input)
            self.input.clear()
        self.input_taken += written
        if self.stdin is not None:
            if self.input:
                self.worker.loop.watch(self.stdin, select.EPOLLOUT, self._feed)
            else:
                self.worker.loop.forget(self.stdin)
                if self.input_ended:
                    self._close_stdin()
        for reader in list(self.readers):
            reader.taken()

    def end_input(self) -> None:
        """No more input comes."""
        self.input_ended = True
        if not self.input:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self.stdin is not None:
            self.worker.loop.forget(self.stdin)
            os.close(self.stdin)
            self.stdin = None

    # -- the rest

    def signal(self, number: int) -> None:
        """Send a signal.

        Raises:
            ProcessLookupError: it has ended.
        """
        if self.status is not None:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        os.kill(self.pid, number)

    def exit_fields(self) -> bytes:
        """EVENT 1."""
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        return encode(
            [
                (1, code if code >= 0 else None),
                (2, -code if code < 0 else None),
                (3, self.ends[1]),
                (4, self.ends[2]),
                (5, self.usage[0]),
                (6, self.usage[1]),
                (7, self.usage[2]),
            ]
        )

    def record(self) -> bytes:
        """For process.list."""
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        return encode(
            [
                (1, self.id),
                (2, self.pid),
                (3, 0 if code is None else 1 if code >= 0 else 2),
                (4, None if code is None else abs(code)),
                (5, self.rings[1].end if 1 in self.rings else 0),
                (6, self.rings[2].end if 2 in self.rings else 0),
                (7, self.argv[0][:256]),
                (8, self.started),
            ]
        )

    def close(self) -> None:
        """Forget it and its output."""
        for ring in self.rings.values():
            if ring.descriptor is not None:
                self.worker.loop.forget(ring.descriptor)
                os.close(ring.descriptor)
                ring.descriptor = None
        self._close_stdin()


class ProcessChannel(Channel):
    """A host that started a command or attached to it."""

    takes_input = True

    def __init__(self, link: Link, number: int, window: int, process: Process, output: bool) -> None:
        self.streams = (1, 2) if output else ()
        super().__init__(link, number, window)
        self.process = process
        self.at = dict.fromkeys(self.streams, 0)
        self.first = dict.fromkeys(self.streams, 0)
        self._ended: set[int] = set()
        self._told = self.mute = False
        self._taken = process.input_taken
        self._started = False

    def begin(self) -> None:
        """After REPLY: the output so far, and what comes."""
        self.first = dict(self.at)
        self.position = self._taken = self.process.input_taken + len(self.process.input)
        self.room = HOST_WINDOW - len(self.process.input)
        self._started = True
        self.process.readers.add(self)
        self.pump()

    def surely_taken(self, stream: int) -> int:
        """What the host has got for sure. It may lose what is under way, and attach again to get that."""
        return min(self.at[stream], self.first[stream] + self.granted[stream])

    def on_data(self, data: bytes) -> None:
        """See the base."""
        if self.mute:
            self.grant(len(data))
        else:
            self.process.write(data)

    def on_eof(self) -> None:
        """See the base."""
        if not self.mute:
            self.process.end_input()

    def displace(self) -> None:
        """Somebody else writes from now on: what this host still sends is dropped."""
        if not self.mute:
            self.mute = True
            self.grant(HOST_WINDOW - self.room)
            self.link.send(frames.event_frame(self.number, _DISPLACED, b""))

    def taken(self) -> None:
        """Input was taken: the host may send more."""
        if self.mute:
            return
        count = self.process.input_taken - self._taken
        if count > 0:
            self._taken += count
            self.grant(min(count, HOST_WINDOW - self.room))

    def pump(self) -> None:
        """See the base."""
        if not self._started or not self.open():
            return
        process = self.process
        for stream in self.streams:
            self._send(stream)
        done = True
        for stream in self.streams:
            ring = process.rings.get(stream)
            if stream not in self._ended:
                if ring is None or (ring.ended and self.at[stream] >= ring.end):
                    self._ended.add(stream)
                    self.link.send(frames.eof_frame(self.number, stream, self.at[stream]))
                else:
                    done = False
        if process.status is not None and not self._told:
            self._told = True
            self.link.send(frames.event_frame(self.number, _EXIT, process.exit_fields()))
        if done and self._told:
            self.finish()

    def _send(self, stream: int) -> None:
        ring = self.process.rings.get(stream)
        if ring is None:
            return
        moved = False
        while not self.link.full and self.link.alive:
            self.at[stream] = max(self.at[stream], ring.start)
            at = self.at[stream]
            count = min(self.credit[stream], ring.end - at, frames.MAX_DATA)
            if count <= 0:
                break
            piece = bytes(memoryview(ring.data)[at - ring.start : at - ring.start + count])
            self.credit[stream] -= count
            self.at[stream] += count
            self.link.send(frames.data_frame(self.number, stream, at, piece))
            moved = True
        if moved or ring.descriptor is not None:
            self.process.arm(stream)

    def gone(self) -> None:
        """See the base."""
        self.process.readers.discard(self)
        for stream in self.process.rings:
            self.process.arm(stream)


def start(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """process.start

    Raises:
        OSError: the errno of what failed.
    """
    name, argv = fields.text(1, limit=64), fields.all(2)
    flags = fields.number(5, 0)
    ring = fields.number(9, _RING, most=_MOST_RING)
    if (
        not _is_id(name)
        or not argv
        or not argv[0]
        or any(b"\0" in word for word in argv)
        or ring < _LEAST_RING
    ):
        raise OSError(errno.EINVAL, "an impossible id, command or ring")
    if name in worker.processes:
        raise OSError(errno.EEXIST, "the id is in use")
    if flags & _PTY:
        raise OSError(errno.ENOTSUP, "WebAssembly has no terminals")
    if flags & _ROOT:
        raise OSError(errno.EPERM, "nobody is root here")
    env = dict(worker.env)
    for pair in fields.all(3):
        key, _, value = os.fsdecode(pair).partition("=")
        env[key] = value
    cwd = os.path.join(worker.config["workdir"], os.fsdecode(fields.raw(4, b"")))
    if not os.path.isdir(cwd):
        raise OSError(errno.ENOTDIR if os.path.exists(cwd) else errno.ENOENT, "the working directory")
    command = commands.resolve(argv, cwd)
    fuel, _ = commands.limits_of(env)
    worker.modules.preload(command.kind, fuel is not None)
    process = _spawn(worker, name, argv, command, env, cwd, flags, ring)
    worker.add(process)
    if flags & _DETACHED:
        link.answer(number, [(1, process.pid)])
        return
    channel = ProcessChannel(link, number, window_of(fields, 8), process, True)
    link.add(channel)
    channel.reply([(1, process.pid)])
    channel.begin()


def _spawn(
    worker: Worker,
    name: str,
    argv: list[bytes],
    command: commands.Command,
    env: dict[str, str],
    cwd: str,
    flags: int,
    ring: int,
) -> Process:
    opened: list[int] = []
    try:
        out, out_end = _pipe(opened)
        streams = {1: out}
        error_end = out_end
        if not flags & _MERGE:
            streams[2], error_end = _pipe(opened)
        if flags & _STDIN:
            input_end, feed = _pipe(opened)
        else:
            input_end, feed = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1
            opened.append(input_end)
        pid = os.fork()
        if pid == 0:
            try:
                commands.enter(
                    (input_end, out_end, error_end), worker.config["cgroups"], worker.config["max_open_files"]
                )
            except BaseException:
                os._exit(125)
            commands.run(worker.modules, command, env, cwd)
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise
    kept = {*streams.values(), feed}
    for descriptor in opened:
        if descriptor in kept:
            os.set_blocking(descriptor, False)
        else:
            os.close(descriptor)
    drop = bool(flags & _DROP)
    process = Process(worker, name, pid, argv, {s: Ring(fd, ring, drop) for s, fd in streams.items()})
    if feed >= 0:
        process.stdin = feed
    return process


def _pipe(opened: list[int]) -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC)
    opened += ends
    return ends


def attach(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """process.attach"""
    process = worker.find(fields)
    channel = ProcessChannel(link, number, window_of(fields, 8), process, not fields.number(4, 0) & 1)
    firsts = {}
    for stream in (1, 2):
        ring = process.rings.get(stream)
        oldest, newest = (0, 0) if ring is None else (ring.start, ring.end)
        asked = fields.number(stream + 1, oldest)
        firsts[stream] = newest if asked == _NOW else max(oldest, min(asked, newest))
        if stream in channel.at:
            channel.at[stream] = firsts[stream]
    if fields.number(4, 0) & 2:
        for reader in list(process.readers):
            reader.displace()
    link.add(channel)
    taken = process.input_taken + len(process.input)
    channel.reply([(1, process.pid), (2, firsts[1]), (3, firsts[2]), (4, taken)])
    channel.begin()


def send_signal(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """process.signal"""
    value = fields.number(2, most=64)
    if fields.number(3, 1, most=2) == 2:
        for process in worker.processes.values():
            with suppress(ProcessLookupError):
                process.signal(value)
    else:
        worker.find(fields).signal(value)
    link.answer(number, [])


def listing(worker: Worker, link: Link, number: int, _: Fields) -> None:
    """process.list"""
    found: list[tuple[int, bytes | int]] = []
    size = 0
    for process in worker.processes.values():
        record = process.record()
        size += len(record) + 5
        if size > _MOST_LIST:
            found.append((2, 1))
            break
        found.append((1, record))
    link.answer(number, list(found))


def remove(worker: Worker, link: Link, number: int, fields: Fields) -> None:
    """process.remove"""
    process = worker.find(fields)
    if process.status is None:
        raise OSError(errno.EBUSY, "it runs")
    worker.forget(process)
    link.answer(number, [])


def trim(worker: Worker) -> None:
    """At most so many ended ones are remembered: the oldest go first."""
    ended = [process for process in worker.processes.values() if process.status is not None]
    for process in ended[: max(0, len(ended) - _MOST_ENDED)]:
        if not process.readers:
            worker.forget(process)


def kill(process: Process) -> None:
    """SIGKILL, if it lives."""
    with suppress(ProcessLookupError):
        process.signal(signal.SIGKILL)


def _is_id(name: str) -> bool:
    # As in guest.processes, whose import brings asyncio: a third of a worker's start.
    return 1 <= len(name) <= 64 and _ID.issuperset(name)


def _held(descriptor: int | None) -> int:
    """Bytes that lie in a pipe."""
    if descriptor is None:
        return 0
    import array
    import fcntl
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]
