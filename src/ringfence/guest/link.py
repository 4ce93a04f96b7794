"""A link to a guest agent: everything that a host process can ask of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import signal as _signal
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringfence.guest import processes
from ringfence.guest.channels import Channel
from ringfence.guest.fields import Fields, Value, encode
from ringfence.guest.processes import GuestProcess, ProcessSpec
from ringfence.guest.wire import ANSWER_TIMEOUT, REQUEST_TIMEOUT, Wire
from ringfence.model.errors import GuestError, InvalidRequest, LinkLost
from ringfence.model.ids import new_id

if TYPE_CHECKING:
    from ringfence.guest.files import GuestFiles
    from ringfence.guest.ports import GuestDatagrams, GuestListener, GuestStream
    from ringfence.guest.reports import GuestStats, ProcessList

_START, _ATTACH, _SIGNAL, _LIST, _REMOVE = 1, 2, 3, 4, 6
_DIAL, _LISTEN, _DATAGRAMS, _BIND, _STATS, _QUIESCE, _SHUTDOWN = 32, 33, 35, 48, 49, 50, 51
_NO_OUTPUT = 1  # flag of process.attach
_ALONE = 2


class GuestLink:
    """One independent connection to the agent of a sandbox. Any number may be open at once.

    Every call may raise, besides what its own docstring names:
        GuestRefused: the guest answered with an errno.
        LinkLost: the connection ended; dial again, attach by offset and go on.
        ProtocolViolation: the guest broke the protocol; the link is closed.
        DeadlineExceeded: the guest did not answer a simple request within 30 seconds.

    A cancelled call closes its channel. Nothing that the guest says is trusted for cause, usage or limits.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._files: GuestFiles | None = None

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        role: str = "control",
        timeout: float = ANSWER_TIMEOUT,  # noqa: ASYNC109
        *,
        resync: bool = False,
        wait: bool = True,
    ) -> GuestLink:
        """Begin a link over a connected stream socket, which it owns from now on, even on failure.

        Args:
            sock: from ``Runtime.connect``.
            role: ``control``, ``stream`` or ``egress``; for the agent's log.
            timeout: seconds for the whole HELLO.
            resync: the stream was used by an earlier host process (serial port, attached container).
            wait: for the answer to HELLO. Else calls go out behind the HELLO and may fail as below, and
                nothing is known about the agent before :meth:`ready`.

        Raises:
            LinkLost: no answer in time.
            ProtocolViolation: whoever answered does not speak the protocol.
        """
        return cls(await Wire.dial(sock, role, timeout, resync=resync, wait=wait))

    async def ready(self) -> None:
        """Return when the agent has answered HELLO.

        Raises:
            LinkLost, ProtocolViolation: see :meth:`open`.
        """
        await self._wire.greeted()

    # -- about the link

    @property
    def epoch(self) -> int:
        """Grows by one with every wake from quiesce."""
        return self._wire.epoch

    @property
    def instance(self) -> bytes:
        """16 bytes that the agent drew when it started or woke."""
        return self._wire.instance

    @property
    def agent(self) -> str:
        """The agent's version text (reported)."""
        return self._wire.agent

    @property
    def failure(self) -> GuestError | None:
        """Why the link ended; ``None`` while it lives."""
        return self._wire.failure

    async def ping(self, timeout: float = ANSWER_TIMEOUT) -> None:  # noqa: ASYNC109
        """Return when the agent has answered.

        Raises:
            DeadlineExceeded: it did not, within ``timeout`` seconds.
        """
        await self._wire.ping(timeout)

    async def close(self) -> None:
        """End the link. Commands in the sandbox live on. Idempotent."""
        await self._wire.close()

    def abort(self) -> None:
        """End the link at once: what is under way is lost. Idempotent."""
        self._wire.fail(LinkLost("the link was given up", hint="dial again"))

    async def __aenter__(self) -> GuestLink:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- processes

    async def start(self, spec: ProcessSpec) -> GuestProcess:
        """Start a command; returns when it runs.

        When the caller is cancelled before that, the command is killed should it have started.

        Raises:
            InvalidRequest: the spec can't be right, or is longer than a frame.
            GuestRefused: the errno of the step that failed (ENOENT: no such program, EEXIST: id in use …).
        """
        number = new_id("p") if spec.id is None else spec.id
        fields = spec.fields(number)
        process = GuestProcess(number, 0, self.signal)
        channel = await self._wire.open(
            _START,
            fields,
            f"start {spec.name}",
            single=spec.detached,
            receives=() if spec.detached else (processes.STDOUT, processes.STDERR),
            window=spec.stream_window,
            sends=spec.stdin or spec.pty,
            gaps=spec.drop,
            on_event=process.on_event,
        )
        try:
            reply = await channel.answer(keep=True)
        except asyncio.CancelledError:
            self._abandon(channel, number)
            raise
        process.bind(channel, reply)
        return process

    def _abandon(self, channel: Channel, number: str) -> None:
        """Nobody waits for this command any more: kill it as soon as the guest says that it runs."""

        def running(channel: Channel, _: Fields) -> None:
            fields: list[tuple[int, Value | None]] = [
                (1, number),
                (2, int(_signal.SIGKILL)),
                (3, processes.SCOPES["group"]),
            ]
            with contextlib.suppress(GuestError):
                self._wire.open_now(_SIGNAL, fields, f"kill {number}", single=True)
            channel.close()

        if channel.reply is not None:
            running(channel, channel.reply)
        else:
            channel.on_reply = running

    async def attach(
        self,
        number: str,
        stdout: int | None = None,
        stderr: int | None = None,
        *,
        output: bool = True,
        alone: bool = False,
        window: int | None = None,
    ) -> GuestProcess:
        """Attach to a command by its id, also one that has ended.

        Args:
            number: the id.
            stdout, stderr: offsets to go on from (:attr:`GuestProcess.offsets`); ``None``: the oldest kept,
                ``processes.FROM_NOW``: only what comes. What was dropped from the ring shows in
                :attr:`Output.offset` of the first piece.
            output: False for the exit only.
            alone: take the input over: whoever is attached now is told (:attr:`GuestProcess.displaced`), and
                what they send from now on is dropped. :attr:`GuestProcess.stdin_offset`: what was taken
                till then.
            window: bytes a stream that may be on their way (default 65,536). More than the command's ring,
                and a link that is lost may cost what was on its way.

        Raises:
            GuestRefused: ENOENT, no such command; EINVAL, a guest that knows no ``alone``.
        """
        window = processes.check_window(window, processes.ATTACH_WINDOW)
        process = GuestProcess(number, 0, self.signal)
        streams = (processes.STDOUT, processes.STDERR) if output else ()
        asked = {processes.STDOUT: stdout, processes.STDERR: stderr}
        channel = await self._wire.open(
            _ATTACH,
            [
                (1, processes.check_id(number)),
                (2, stdout),
                (3, stderr),
                (4, (0 if output else _NO_OUTPUT) | (_ALONE if alone else 0) or None),
                (8, window),
            ],
            f"attach to {number}",
            receives=streams,
            window=window,
            sends=True,
            gaps=True,
            on_event=process.on_event,
            on_reply=process.begin(asked),
        )
        process.bind(channel, await channel.answer())
        return process

    async def signal(self, number: str, signal: int, scope: str = "group") -> None:
        """Send a signal to a command's ``group`` or to the ``process`` alone.

        Raises:
            GuestRefused: ESRCH, it has ended.
        """
        if scope not in ("process", "group"):
            raise InvalidRequest(f"signal scope {scope!r} is neither process nor group")
        fields: list[tuple[int, Value | None]] = [
            (1, processes.check_id(number)),
            (2, int(signal)),
            (3, processes.SCOPES[scope]),
        ]
        await self._wire.request(_SIGNAL, fields, f"signal {number}")

    async def signal_all(self, signal: int) -> None:
        """Send a signal to every process inside but the agent."""
        await self._wire.request(
            _SIGNAL, [(2, int(signal)), (3, processes.SCOPES["sandbox"])], "signal all processes"
        )

    async def processes(self) -> ProcessList:
        """The commands that the guest knows: running, and ended until removed (at most 512)."""
        from ringfence.guest.reports import parse_list

        return parse_list(await self._wire.request(_LIST, [], "list processes"))

    async def remove(self, number: str) -> None:
        """Forget an ended command and its output.

        Raises:
            GuestRefused: EBUSY, it runs; ENOENT.
        """
        await self._wire.request(_REMOVE, [(1, processes.check_id(number))], f"remove {number}")

    # -- files and ports

    @property
    def files(self) -> GuestFiles:
        """The sandbox's files."""
        if self._files is None:
            from ringfence.guest.files import GuestFiles

            self._files = GuestFiles(self._wire)
        return self._files

    async def dial(self, port: int, address: str = "127.0.0.1") -> GuestStream:
        """Connect to a port that something inside listens on.

        Raises:
            GuestRefused: ECONNREFUSED, nobody listens; EACCES, not a loopback address.
        """
        from ringfence.guest.ports import GuestStream

        channel = await self._wire.open(
            _DIAL, [(1, _port(port)), (2, address)], f"dial port {port}", receives=(0,), sends=True
        )
        await channel.answer()
        return GuestStream(channel)

    async def listen(self, port: int = 0, backlog: int = 64) -> GuestListener:
        """Listen on a loopback port inside (0: any) and take its connections here.

        Raises:
            GuestRefused: EADDRINUSE, EACCES.
        """
        from ringfence.guest.ports import GuestListener

        listener = GuestListener(backlog)
        channel = await self._wire.open(
            _LISTEN,
            [(1, _port(port)), (2, backlog)],
            f"listen on port {port}",
            on_reply=listener.bind,
        )
        await channel.answer()
        return listener

    async def datagrams(self, port: int = 0) -> GuestDatagrams:
        """Take what is sent to a UDP port of loopback inside (0: any), and answer it.

        Raises:
            GuestRefused: EADDRINUSE, EACCES; ENOSYS, an agent that is older than this.
        """
        from ringfence.guest.ports import GuestDatagrams

        channel = await self._wire.open(
            _DATAGRAMS, [(1, _port(port))], f"datagrams on port {port}", receives=(0,), sends=True
        )
        reply = await channel.answer()
        return GuestDatagrams(channel, reply.number(1, most=65535))

    # -- the sandbox as a whole

    async def bind(
        self,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes] | None = None,
        hostname: str | None = None,
        seed: bytes | None = None,
        time_offset_ns: int | None = None,
    ) -> None:
        """Give a started sandbox its identity.

        Args:
            env: replaces the environment that later commands start from, when not ``None`` or empty.
            secrets: files under ``/run/secrets``, in memory only.
            hostname: its name.
            seed: for its random generator.
            time_offset_ns: of its clock.

        Raises:
            GuestRefused: what can't be set, by name.
        """
        fields: list[tuple[int, Value | None]] = [(1, f"{k}={v}") for k, v in (env or {}).items()]
        fields += [(2, encode([(1, name), (2, value)])) for name, value in (secrets or {}).items()]
        fields += [(3, hostname), (4, seed), (5, time_offset_ns)]
        await self._wire.request(_BIND, fields, "bind")

    async def stats(self) -> GuestStats:
        """What the guest says about itself."""
        from ringfence.guest.reports import parse_stats

        reply = await self._wire.request(_STATS, [], "stats")
        return parse_stats(reply)

    async def quiesce(self, deadline: float = 30.0) -> int:
        """Prepare for a snapshot; the guest closes every link after its answer.

        Args:
            deadline: seconds that it may take: what was written is brought to the disk first.

        Returns:
            The epoch that ends now; after the wake it is one more.
        """
        reply = await self._wire.request(_QUIESCE, [(1, int(deadline * 1000))], "quiesce", deadline + 5)
        return reply.number(1)

    async def shutdown(self, grace: float = 5.0) -> None:
        """SIGTERM to everything inside, SIGKILL after ``grace`` seconds, then the agent ends."""
        fields: list[tuple[int, Value | None]] = [(1, int(grace * 1000))]
        await self._wire.request(_SHUTDOWN, fields, "shutdown", grace + REQUEST_TIMEOUT)


def _port(port: int) -> int:
    if not 0 <= port <= 65535:
        raise InvalidRequest(f"port {port} is not 0 to 65535")
    return port
