"""One living sandbox, as its node sees it: links, commands, limits, the cause of its end, its removal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringfence.guest.link import GuestLink
from ringfence.guest.processes import Output, ProcessExit, ProcessSpec
from ringfence.model.errors import GuestRefused, LinkLost, RingfenceError, Unsupported, WrongState
from ringfence.model.levels import Boundary, Cause
from ringfence.model.quantities import format_size
from ringfence.model.sandbox import EffectiveBoundary, End, SandboxRequest, Usage
from ringfence.node import supervising
from ringfence.node.cgroups import Group
from ringfence.node.commands import NodeProcess as NodeProcess
from ringfence.node.journal import ENDING, Journal, request_as_json
from ringfence.node.supervising import Supervisor
from ringfence.runtimes.contract import Exit, Handle, Layered, RootFs, Runtime
from ringfence.runtimes.launching.processes import ProcessRef

if TYPE_CHECKING:
    from ringfence.node.changes import Changes
    from ringfence.node.resetting import Wall
    from ringfence.node.service import Node
    from ringfence.node.snapshots import Snapshot

KILL_TIME = 5.0  # seconds for a killed wall to be gone before its driver is told to destroy it
REDIALS = 3  # links that may be lost during one run before we believe it
OnOutput = Callable[[Output], Awaitable[None] | None]


class RunResult(NamedTuple):
    """How a command ended, and what the sandbox had taken by then."""

    end: End
    usage: Usage


class NodeSandbox:
    """A started sandbox. Made by :meth:`Node.create` or adopted by :meth:`Node.recover`.

    ``ended`` resolves, never fails, when the wall is gone. ``started_at`` and ``deadline`` are seconds since
    the epoch, for people; the deadline is kept on a clock that nobody can set.
    """

    def __init__(
        self,
        runtime: Runtime,
        request: SandboxRequest,
        handle: Handle,
        root: RootFs,
        group: Group,
        supervisor_watched: supervising.Watched,
        *,
        node: Node,
        journal: Journal,
        limits: dict[str, str],
        notes: tuple[str, ...],
        release: Callable[[NodeSandbox], Awaitable[None]],
        started_at: float,
    ) -> None:
        self.id = str(journal.record["id"])
        self.node = node
        self.request = request
        self.handle = handle
        self.runtime = runtime
        self.root = root
        self.group = group
        self.journal = journal
        self.notes = notes
        self.started_at = started_at
        given = journal.record.get("deadline_at")  # another one than the policy's
        self.deadline = float(given or started_at + request.policy.door.limits.timeout)
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.supervisor = Supervisor(handle, group, supervisor_watched, before_kill=self._before_kill)
        self.supervisor.output = int(journal.record.get("output", 0))  # counted by the node before
        self._limits = limits
        self._release = release
        self._started = supervising.now() - max(0.0, time.time() - started_at)
        self._commands = 0
        self._kills_known = 0  # of a kernel of its own
        self._upper: int | None = None
        self._link: GuestLink | None = None
        self._linking = asyncio.Lock()
        self._watched: asyncio.Future[Exit] | None = None  # its driver's word of the end
        self._destroying: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._carried_cpu = 0.0  # seconds that walls before a reset took
        self._carried_peak = 0
        self.burying: asyncio.Task[None] | None = None  # of the wall before a reset
        self.standby: asyncio.Task[Wall] | None = None  # the wall of the next reset

    @property
    def limits(self) -> dict[str, str]:
        """How each limit is enforced here (see :class:`EffectiveBoundary`)."""
        return dict(self._limits)

    @property
    def paused(self) -> bool:
        """Whether it was paused, by whomever."""
        return bool(self.journal.record.get("paused"))

    @property
    def held_secrets(self) -> bool:
        """Whether secrets were ever bound into it: what is saved of it stays in its project."""
        return self.request.secrets or bool(self.journal.record.get("secrets"))

    def watch(self, *, limits: bool = True) -> None:
        """Begin to hold it to its limits; without ``limits`` only to wait for its end."""
        waiting = getattr(self.runtime, "waiting", None)
        if waiting is None:
            self._watched = asyncio.ensure_future(self.runtime.wait(self.handle))
        else:
            self._watched = waiting(self.handle)
        self._watched.add_done_callback(self._seen_end)
        if limits:
            self.supervisor.start()

    def mark(self, key: str, value: object) -> None:
        """Note in the journal what the next node has to know, should this one die."""
        self.journal.append({key: value})

    def check_alive(self) -> None:
        """It is there.

        Raises:
            WrongState: it has ended.
        """
        if self.ended.done():
            raise WrongState(
                f"sandbox {self.id} has ended: {self.ended.result().cause.value}", hint="start another one"
            )

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """While something is done to it as a whole: one after the other, and not after its end."""
        async with self._changing:
            self.check_alive()
            yield

    # -- the sandbox as a whole

    async def pause(self) -> None:
        """Stop everything inside until :meth:`resume`. Its deadline goes on. Idempotent.

        Raises:
            Unsupported: the runtime can't.
        """
        async with self.changing():
            if not self.paused:
                self._pausable()
                self.mark("paused", True)
                try:
                    await self.runtime.pause(self.handle)  # type: ignore[attr-defined]
                except BaseException:
                    from ringfence.node.saving import to_the_end

                    # Cancelled in the middle it may stand still already, and nobody would let it go.
                    with contextlib.suppress(RingfenceError, OSError):
                        await to_the_end(self.runtime.resume(self.handle))  # type: ignore[attr-defined]
                    self.mark("paused", None)
                    raise

    async def resume(self) -> None:
        """Let it go on. Idempotent."""
        async with self.changing():
            if self.paused:
                self._pausable()
                await self.runtime.resume(self.handle)  # type: ignore[attr-defined]
                self.mark("paused", None)

    def _pausable(self) -> None:
        from ringfence.runtimes.contract import Pausable

        if not (isinstance(self.runtime, Pausable) and self.runtime.capabilities().pause):
            raise Unsupported(
                f"runtime {self.runtime.name} can't pause here",
                hint="as root every runtime with cgroups can",
                capability="pause",
            )

    async def snapshot(
        self, name: str | None = None, *, kind: str | None = None, temporary: bool = False
    ) -> Snapshot:
        """Save it; see :func:`ringfence.node.saving.snapshot`."""
        from ringfence.node import saving

        return await saving.snapshot(self.node, self, name, kind=kind, temporary=temporary)

    async def fork(self, count: int = 1, *, kind: str | None = None, **changes: Any) -> list[NodeSandbox]:
        """Copies of it, each with an identity of its own; see :func:`ringfence.node.saving.fork`."""
        from ringfence.node import saving

        return await saving.fork(self.node, self, count, kind=kind, **changes)

    async def reset(self, *, standby: bool = True, hold: bool = False) -> None:
        """Begin anew from its template, under its id; see :func:`ringfence.node.resetting.reset`."""
        from ringfence.node import resetting

        await resetting.reset(self.node, self, standby=standby, hold=hold)

    async def bind_secrets(self, secrets: Mapping[str, bytes]) -> None:
        """Give its workload secrets, as files in ``/run/secrets``. From now on it has held secrets.

        Raises:
            GuestRefused: what can't be written, by name.
        """
        self.mark("secrets", True)  # before it has them
        await (await self.link()).bind(secrets=secrets)

    def rebind(self, request: SandboxRequest) -> None:
        """Another door, owner, labels, environment from now on; the wall is the same."""
        self.journal.append({"request": request_as_json(request)})
        self.request = request
        self.supervisor.change(output=request.policy.door.limits.output)

    def set_deadline(self, at: float) -> None:
        """Let it end at that time, in seconds since the epoch. Whoever sets the clock later moves nothing."""
        until = supervising.now() + at - time.time()
        self.journal.append({"deadline": until, "deadline_at": at})
        self.deadline = at
        self.supervisor.change(deadline=until, timeout=max(0.0, at - self.started_at))

    async def leave_wall(self) -> None:
        """Let go of its wall, which another one will follow. What it took counts on."""
        self._carried_cpu += self.supervisor.cpu_seconds() or 0.0
        self._carried_peak = max(self._carried_peak, self._usage().memory_peak or 0)
        await self._unwatch()

    def enter_wall(self, handle: Handle, root: RootFs, group: Group) -> None:
        """The wall that follows."""
        old = self.supervisor
        watched = old.watched
        if watched.cpu_time is not None:
            watched = dataclasses.replace(watched, cpu_time=max(0.0, watched.cpu_time - self._carried_cpu))
        self.handle, self.root, self.group = handle, root, group
        self.supervisor = Supervisor(handle, group, watched, before_kill=self._before_kill)
        self.supervisor.output = old.output
        self._commands = 0
        self.watch()

    # -- the wall

    async def boundary(self) -> EffectiveBoundary:
        """The effective boundary, measured on the living wall, with the node's limits and notes.

        Raises:
            WrongState: the wall has ended.
        """
        self.check_alive()
        measured = await self.runtime.measure(self.handle)
        limits = dict(self._limits)
        missing = self.group.outside(self.handle.pid)
        if missing:  # the driver did not put it where it should: say what is, not what should be
            limits.update({name: "none" for name in missing if name in limits})
        return dataclasses.replace(measured, limits=limits, notes=(*measured.notes, *self.notes))

    async def usage(self) -> Usage:
        """What it took so far, or had taken when it ended."""
        return self._usage()

    def _usage(self) -> Usage:
        peak = self.group.memory_peak()
        peak = peak if peak is not None else self.supervisor.memory_peak or None
        taken = self.supervisor.cpu_seconds()
        return Usage(
            cpu_seconds=None if taken is None else taken + self._carried_cpu,
            memory_peak=max(peak or 0, self._carried_peak) or None,
            output_bytes=self.supervisor.output,
            wall_seconds=supervising.now() - self._started,
        )

    async def changes(self) -> Changes:
        """Files that were added, modified and deleted. Also after the end, until :meth:`destroy`.

        Raises:
            WrongState: the wall has ended and its layer is gone with it.
        """
        self._keep_upper()
        # Its own: the sandbox may end meanwhile, and its descriptor be another sandbox's by then.
        upper = os.dup(self._upper) if self._upper is not None else -1
        work = asyncio.ensure_future(asyncio.to_thread(self._changes, upper))

        def done(_: object) -> None:
            if upper >= 0:
                os.close(upper)
            work.cancelled() or work.exception()  # of interest to nobody if the caller is gone

        work.add_done_callback(done)
        return await asyncio.shield(work)

    def _changes(self, upper: int) -> Changes:
        from ringfence.node import changes

        if isinstance(self.runtime, Layered) and self.runtime.capabilities().overlay:
            if upper < 0:
                raise WrongState(f"the files of {self.id} are gone with its wall")
            return changes.of_upper(upper, self.root.lowers)
        if self.runtime.boundary in (Boundary.HARDWARE, Boundary.EMULATED):
            raise Unsupported(
                f"{self.runtime.name} can't tell what changed: the disk is its guest's alone",
                hint="copy files out, or look at them inside",
                capability="overlay",
            )
        try:
            top = os.open(f"/proc/{self.handle.pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise WrongState(f"the files of {self.id} are gone with its wall") from error
        try:
            if not ProcessRef(self.handle.pid, self.handle.birth, self.handle.boot_id).alive():
                raise WrongState(f"the files of {self.id} are gone with its wall")
            return changes.of_folders(top, self.root.writable, self.root.lowers)
        finally:
            os.close(top)

    def _before_kill(self) -> None:
        self._keep_upper()
        if self.request.keep and self.supervisor.cause is not None:
            # Should we die now: the next node ends it, and knows why.
            self.mark("cause", [self.supervisor.cause.value, self.supervisor.detail])

    def _keep_upper(self) -> None:
        if self._upper is None and isinstance(self.runtime, Layered) and not self.ended.done():
            with contextlib.suppress(OSError, RingfenceError):
                self._upper = self.runtime.open_upper(self.handle)

    # -- commands

    async def link(self) -> GuestLink:
        """The node's own link to the guest agent; a lost one is dialled anew.

        Raises:
            LinkLost: the wall has ended, or the agent does not answer.
        """
        link = await self._dialled()
        await link.ready()
        return link

    async def _dialled(self) -> GuestLink:
        """The node's own link, on which the agent may not have said a word yet."""
        if self._link is not None and self._link.failure is None:
            return self._link
        async with self._linking:
            if self._link is None or self._link.failure is not None:
                self._link = await self.new_link("control", wait=False)
            return self._link

    async def new_link(self, role: str = "stream", *, wait: bool = True) -> GuestLink:
        """A link of the caller's own, who closes it. ``wait``: see :meth:`GuestLink.open`."""
        if self.ended.done():
            raise LinkLost(f"sandbox {self.id} has ended: {self.ended.result().cause.value}")
        return await GuestLink.open(await self.runtime.connect(self.handle), role, wait=wait)

    async def start(self, spec: ProcessSpec) -> NodeProcess:
        """Start a command and leave it to the caller. Its output counts.

        Raises:
            GuestRefused: the errno of the step that failed (no such program …).
            LinkLost: the wall has ended.
        """
        link = await self._dialled()  # HELLO and the first command go out together
        return NodeProcess(await link.start(spec), self.supervisor)

    async def run(
        self,
        spec: ProcessSpec,
        on_output: OnOutput | None = None,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        on_start: Callable[[NodeProcess], object] | None = None,
    ) -> RunResult:
        """Run a command to its end. A link that is lost meanwhile is dialled anew and goes on by offset.

        Args:
            spec: the command.
            on_output: called with each piece of output, and awaited if it is a coroutine function (it may
                be slow: the command waits).
            stdin: what to feed it; then its input is closed.
            on_start: called with the running command, for signals and terminal sizes.

        Raises:
            GuestRefused: it could not be started; the errno says why.
            LinkLost: the agent does not answer although the wall stands.
        """
        if stdin is not None and not spec.stdin and not spec.pty:
            spec = dataclasses.replace(spec, stdin=True)
        # Of a sandbox's first command every kill is its own; looking at counters costs.
        kills = self.supervisor.oom_kills() if self._commands else 0
        self._commands += 1
        try:
            process = await self.start(spec)
        except LinkLost:
            ended = await self._ended_soon()
            if ended is None:
                raise
            return RunResult(ended, self._usage())
        if on_start is not None:
            on_start(process)
        feeder = asyncio.ensure_future(_feed(process, stdin)) if stdin is not None else None
        try:
            end = await self._follow(process, on_output, kills)
        except BaseException:
            # Whoever waits no longer (Ctrl-C, a deadline of the caller's) does not want it to run on either.
            with contextlib.suppress(RingfenceError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(1.0):
                    await process.signal(signal.SIGKILL)
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
        return RunResult(end, self._usage())

    async def _follow(self, process: NodeProcess, on_output: OnOutput | None, kills: int) -> End:
        lost = 0
        while True:
            try:
                async for output in process:
                    if on_output is not None:
                        answer = on_output(output)
                        if inspect.isawaitable(answer):
                            await answer
                exited = await process.wait()
                break
            except LinkLost:
                ended = await self._ended_soon()
                if ended is not None:
                    return ended
                lost += 1
                if lost > REDIALS:
                    raise
                link = await self.link()
                process.guest = await link.attach(process.id, *process.offsets)
        if self.supervisor.cause is not None:
            return await self._verdict()
        said = await self.guest_kills(exited.status)
        return self._end_of(exited, process, kills, said)

    async def guest_kills(self, status: int) -> int:
        """Processes that the sandbox's own kernel says to have killed for memory since it was asked last."""
        driver = getattr(self.runtime, "driver", self.runtime)
        call = getattr(driver, "memory_kills", None)
        if call is None or status != 128 + signal.SIGKILL:
            return 0
        try:
            known, self._kills_known = self._kills_known, int(await call(self.handle))
        except (RingfenceError, ValueError):  # what the guest says need not be a number
            return 0
        return self._kills_known - known

    def _end_of(self, exited: ProcessExit, process: NodeProcess, kills: int, said: int = 0) -> End:
        if exited.status == 0:
            return End(Cause.EXITED, 0)
        killed = self.supervisor.oom_kills() - kills
        if (killed > 0 or said > 0) and exited.status == 128 + signal.SIGKILL:
            limit = format_size(self.request.policy.wall.resources.memory)
            detail = f"it needed more than {limit} of memory"
            return End(Cause.OUT_OF_MEMORY, 137, detail, reported=killed <= 0)
        detail = f"{killed} of its processes were killed for memory" if killed > 0 else ""
        if exited.signal is None:
            return End(Cause.EXITED, exited.status, detail)
        cause = Cause.KILLED if exited.signal in process.signals else Cause.SIGNALED
        return End(cause, exited.status, detail or _signal_name(exited.signal))

    # -- the end

    async def stop(self, grace: float = 5.0) -> End:
        """Ask everything inside to end, kill the wall after ``grace`` seconds. Idempotent."""
        if not self.ended.done():
            if self.supervisor.cause is None:
                self.supervisor.cause, self.supervisor.detail = Cause.KILLED, "stopped"
            self._keep_upper()
            await self.runtime.stop(self.handle, grace)
        return await self._verdict()

    async def destroy(self) -> None:
        """Kill it whatever its state, and remove every trace. Idempotent; finishes even if cancelled.

        Raises:
            HostLimit: something can't be removed; the next node that opens the state root tries again.
        """
        if self._destroying is None:
            self._destroying = asyncio.get_running_loop().create_task(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        async with self._changing:
            await self._take_down()

    async def _take_down(self) -> None:
        await self._without_others()
        if self.request.keep:  # nobody shall adopt it any more
            self.journal.append({"state": ENDING})
        supervisor = self.supervisor
        supervisor.stop()
        if supervisor.cause is None and not self.ended.done():
            supervisor.cause, supervisor.detail = Cause.KILLED, "destroyed"
        if self._upper is not None:
            os.close(self._upper)
            self._upper = None
        # Nobody cancels this task, so the driver's wrapper need not have one.
        await getattr(self.runtime, "destroy_here", self.runtime.destroy)(self.handle)
        if self._link is not None:
            self._link.abort()
        if self._watched is not None:
            if not self.ended.done():
                self.ended.set_result(supervisor.verdict(Exit()))
            self._unwatched()
        await self._release(self)

    async def detach(self) -> None:
        """Let go of a kept sandbox: it lives on, and the next node adopts it."""
        await self._without_others()
        await self._unwatch()
        self.journal.close()

    async def _without_others(self) -> None:
        """Walls that a reset has left behind, or made ready, are gone."""
        if self.standby is not None:
            from ringfence.node import resetting

            await resetting.end_standby(self.node, self)
        if self.burying is not None:
            await asyncio.gather(self.burying, return_exceptions=True)

    async def _unwatch(self) -> None:
        self.supervisor.stop()
        self._unwatched()
        if self._link is not None:
            await self._link.close()
            self._link = None
        if self._upper is not None:
            os.close(self._upper)
            self._upper = None

    def _unwatched(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.remove_done_callback(self._seen_end)
            if getattr(self.runtime, "waiting", None) is None:
                watched.cancel()  # it is ours alone

    def _seen_end(self, watched: asyncio.Future[Exit]) -> None:
        if watched.cancelled():
            return  # the event loop ends
        error = watched.exception()
        if error is not None and not isinstance(error, RingfenceError):
            raise error
        ended = Exit() if error is not None else watched.result()
        self.supervisor.stop()
        if not self.ended.done():
            self.ended.set_result(self.supervisor.verdict(ended))

    async def _verdict(self) -> End:
        """The end of a wall that was told to die."""
        done, _ = await asyncio.wait({self.ended}, timeout=KILL_TIME)
        if not done:
            # Killing was not enough (a runtime of many processes): the driver knows how.
            with contextlib.suppress(RingfenceError):
                await self.runtime.destroy(self.handle)
            if not self.ended.done():
                self.ended.set_result(self.supervisor.verdict(Exit()))
        return self.ended.result()

    async def _ended_soon(self) -> End | None:
        """The end, if the wall is gone: the link breaks a moment before its death is reported."""
        if self.supervisor.cause is not None:
            return await self._verdict()
        await supervising.ended_soon(self.ended, self.runtime, self.handle)
        return self.ended.result() if self.ended.done() else None


async def _feed(process: NodeProcess, stdin: bytes | AsyncIterable[bytes]) -> None:
    # A command need not read its input: that it closed it, or ended, is no error.
    with contextlib.suppress(GuestRefused, LinkLost, WrongState):
        if isinstance(stdin, bytes):
            await process.write(stdin)
        else:
            async for data in stdin:
                await process.write(data)
        await process.close_stdin()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
