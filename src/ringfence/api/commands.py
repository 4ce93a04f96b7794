"""Commands in a sandbox: starting, following over lost links, counting output, saying why they ended.

Output is counted towards the sandbox's limit before a client gets it. The cause of an end comes from the
placement, which measures it; only an exit code of 0 is believed without asking, because it excuses nobody.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal as _signal
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.guest.processes import STDOUT, GuestProcess, Output, ProcessSpec
from ringfence.model.errors import (
    Conflict,
    DeadlineExceeded,
    GuestError,
    GuestRefused,
    InvalidRequest,
    LinkLost,
    NodeUnavailable,
    NotFound,
    RingfenceError,
    StoreUnavailable,
    WrongState,
)
from ringfence.model.states import FINAL
from ringfence.store.contract import Put, Remove, Row

if TYPE_CHECKING:
    from ringfence.api.app import Service
    from ringfence.control.tenancy import Principal
    from ringfence.guest.link import GuestLink

KIND = "command"  # rows: something is due for a command (kill it, forget it)
_FLUSH = 256 * 1024  # bytes of output that may be uncounted at the placement
_MOST_SIGNALLED = 10_000
_REDIALS = 5
_AGAIN = 5.0  # seconds after which any process does it, if whoever began to has ended
_PATIENCE = 20.0  # seconds that a sandbox has for it
_EVICTION = 10.0  # seconds that clients of a command get to go


class Meter:
    """Output of one sandbox, counted here and told to the placement in larger portions."""

    def __init__(self, service: Service, sandbox: str) -> None:
        self._service = service
        self._sandbox = sandbox
        self._left = 0  # what the placement allowed last, less what was taken since
        self._untold = 0
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def take(self, size: int) -> int:
        """How many of ``size`` bytes may go out."""
        if size > self._left or self._untold >= _FLUSH:
            async with self._lock:
                await self._tell()
                if size > self._left:
                    # The node is told of all of it: it ends the sandbox, and says why.
                    kept, self._untold = max(0, self._left), self._untold + size
                    await self._tell()
                    self._service.metrics.output(kept)
                    return kept
        self._left -= size
        self._untold += size
        self._service.metrics.output(size)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._later())
            self._service.commands.keep(self._task)
        return size

    async def _tell(self) -> None:
        untold, self._untold = self._untold, 0
        try:
            self._left = await self._service.control.placement.spent(self._sandbox, untold)
        except NotFound:
            self._left = 0
        except NodeUnavailable:
            self._untold += untold
            raise

    async def _later(self) -> None:
        await asyncio.sleep(0.2)
        self._task = None
        async with self._lock:
            if self._untold:
                with contextlib.suppress(RingfenceError):
                    await self._tell()


class Commands:
    """What the routes of processes share; one for each service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._meters: OrderedDict[str, Meter] = OrderedDict()
        self._signalled: OrderedDict[tuple[str, str], set[int]] = OrderedDict()
        self._clients: dict[tuple[str, str], set[Any]] = {}
        self._due: dict[str, dict[str, Row]] = {}  # by sandbox, what its task has to do; the newest of each
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task until it is done; :meth:`close` ends it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what runs in the background."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def meter(self, sandbox: str) -> Meter:
        """The meter of a sandbox."""
        meter = self._meters.get(sandbox)
        if meter is None:
            meter = self._meters[sandbox] = Meter(self._service, sandbox)
            if len(self._meters) > _MOST_SIGNALLED:
                self._meters.popitem(last=False)
        return meter

    # -- ends

    def signalled(self, sandbox: str, number: str, signal: int) -> None:
        """Somebody sent a signal through us: an end by it has the cause ``killed``."""
        self._signalled.setdefault((sandbox, number), set()).add(signal)
        if len(self._signalled) > _MOST_SIGNALLED:
            self._signalled.popitem(last=False)

    async def end(self, principal: Principal, sandbox: str, process: GuestProcess) -> dict[str, Any]:
        """How a command ended that has ended: exit code, signal, cause, detail."""
        exit = process.exit
        assert exit is not None
        if exit.status == 0:
            return {"exit_code": 0, "signal": None, "cause": "exited", "detail": ""}
        try:
            sent = exit.signal in self._signalled.get((sandbox, process.id), ())
            found = dict(await self._service.control.placement.judge(sandbox, exit.status, sent=sent))
        except NotFound:
            return await self.lost(principal, sandbox)
        return {
            "exit_code": exit.status,
            "signal": exit.signal,
            "cause": str(found["cause"]),
            "detail": str(found.get("detail") or ""),
        }

    async def lost(self, principal: Principal, sandbox: str) -> dict[str, Any]:
        """The end of a command whose sandbox is gone: the sandbox's own.

        Raises:
            LinkLost: the sandbox is not known to have ended.
        """
        try:
            record = await self._service.control.sandboxes.wait_for(principal, sandbox, FINAL, timeout=20.0)
        except NotFound:
            return {"exit_code": None, "signal": None, "cause": "killed", "detail": "the sandbox is gone"}
        except RingfenceError as error:
            raise LinkLost(
                "the link to the sandbox was lost, and it is not known to have ended",
                hint="attach again by offset",
            ) from error
        return {
            "exit_code": record.exit_code,
            "signal": None,
            "cause": record.cause or "killed",
            "detail": record.detail,
        }

    # -- following

    async def follow(
        self, principal: Principal, sandbox: str, process: GuestProcess
    ) -> AsyncIterator[Output | dict[str, Any]]:
        """Output as far as it may go out, then the end as one mapping; over links that get lost.

        Raises:
            LinkLost: the link was lost for good, but the sandbox lives.
        """
        meter = self.meter(sandbox)
        redials = 0
        offsets = process.offsets
        while True:
            try:
                async for piece in process:
                    kept = await meter.take(len(piece.data))
                    if kept < len(piece.data):
                        if kept:
                            yield piece._replace(data=piece.data[:kept])
                        yield await self.lost(principal, sandbox)
                        return
                    yield piece
                await process.wait()
                yield await self.end(principal, sandbox, process)
                return
            except LinkLost:
                seen = process.offsets
                offsets = max(offsets[0], seen[0]), max(offsets[1], seen[1])
                redials += 1
                try:
                    if redials > _REDIALS:
                        raise
                    link = await self._service.control.link(principal, sandbox)
                    process = await link.attach(process.id, *offsets)
                except (WrongState, NotFound):
                    yield await self.lost(principal, sandbox)
                    return
                except GuestError:
                    if redials > _REDIALS:
                        yield await self.lost(principal, sandbox)
                        return
                    await asyncio.sleep(0.05 * 2**redials)

    # -- what is due later

    async def due(self, sandbox: str, number: str, what: str, seconds: float, project: str) -> None:
        """Have a command killed (``kill``, ``deadline``) or forgotten (``forget``) later, by any process."""
        # Being without clients takes nothing away from a deadline.
        id = _idle(sandbox, number) if what == "kill" else f"{sandbox}.{number}"
        over = (Remove(KIND, _idle(sandbox, number)),) if what == "forget" else ()
        now = time.time()
        for _ in range(5):
            try:
                revision = (await self._service.control.store.get(KIND, id)).revision
            except NotFound:
                revision = 0
            row = Row(
                KIND,
                id,
                project,
                what,
                due=now + seconds,
                created=now,
                revision=revision,
                document={"sandbox": sandbox, "command": number},
            )
            with contextlib.suppress(Conflict):
                await self._service.control.store.commit(Put(row), *over)
                return

    async def undue(self, sandbox: str, number: str) -> None:
        """Nothing is due for this command any more."""
        found = (f"{sandbox}.{number}", _idle(sandbox, number))
        await self._service.control.store.commit(*(Remove(KIND, id) for id in found))

    async def undue_idle(self, sandbox: str, number: str) -> None:
        """Somebody follows it again: it is not killed for having no clients."""
        await self._service.control.store.commit(Remove(KIND, _idle(sandbox, number)))

    async def sweep(self) -> None:
        """Do what is due. Any process may; doing it twice does no harm.

        Every sandbox has a task of its own, so that one whose agent does not answer holds up no other.
        """
        store = self._service.control.store
        now = time.time()
        for row in await store.due(KIND, now, limit=100):
            # Behind all others, until it is done: what can't be done now does not stand in their way.
            with contextlib.suppress(Conflict):
                (mine,) = await store.commit(Put(replace(row, due=now + _AGAIN)))
                sandbox = str(row.document["sandbox"])
                if sandbox in self._due:
                    self._due[sandbox][row.id] = mine
                else:
                    self._due[sandbox] = {row.id: mine}
                    self.keep(asyncio.get_running_loop().create_task(self._sweep(sandbox)))

    async def _sweep(self, sandbox: str) -> None:
        waiting = self._due[sandbox]
        try:
            while waiting:
                id, row = next(iter(waiting.items()))
                with contextlib.suppress(Conflict, StoreUnavailable):
                    if await self._is_done(sandbox, row):
                        # It may have come up again meanwhile.
                        await self._service.control.store.commit(Remove(KIND, id, waiting[id].revision))
                del waiting[id]
        finally:
            del self._due[sandbox]

    async def _is_done(self, sandbox: str, row: Row) -> bool:
        """Do what is due; False: it has to be tried again."""
        number = str(row.document["command"])
        try:
            async with asyncio.timeout(_PATIENCE):
                link = await self._service.control.links.link(sandbox)
                if row.state == "forget":
                    await link.remove(number)
                else:
                    self.signalled(sandbox, number, _signal.SIGKILL)
                    await kill_tree(link, number)
        except (GuestRefused, NotFound):
            return True
        except WrongState as error:
            return error.details.get("state") in FINAL
        except (RingfenceError, TimeoutError):
            return False
        return True

    # -- clients of one command

    def joined(self, sandbox: str, number: str, client: Any) -> None:
        """One more client follows it; it has an event ``evicted``."""
        self._clients.setdefault((sandbox, number), set()).add(client)

    def left(self, sandbox: str, number: str, client: Any) -> bool:
        """One less; whether it was the last one here."""
        key = (sandbox, number)
        clients = self._clients.get(key, set())
        clients.discard(client)
        if clients:
            return False
        self._clients.pop(key, None)
        return True

    async def evict(self, sandbox: str, number: str) -> None:
        """End the clients of a command that this process has; return when none of them can write any more.

        Raises:
            DeadlineExceeded: one does not go.
        """
        clients = self._clients.get((sandbox, number), set())
        for client in list(clients):
            client.evicted.set()
        end = asyncio.get_running_loop().time() + _EVICTION
        while self._clients.get((sandbox, number)):
            if asyncio.get_running_loop().time() > end:
                raise DeadlineExceeded("another client of the command does not go", hint="try again")
            await asyncio.sleep(0.005)


def text_of(data: bytes) -> dict[str, str]:
    """Bytes in JSON: text where they are UTF-8, else base64 and ``encoding`` says so."""
    try:
        return {"data": data.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(data).decode(), "encoding": "base64"}


def bytes_of(data: str, encoding: str) -> bytes:
    """The bytes again.

    Raises:
        InvalidRequest: not base64.
    """
    if encoding == "utf-8":
        return data.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidRequest(
            "data that is not base64", hint='encode it, or say "encoding": "utf-8"'
        ) from None


def stream_name(stream: int) -> str:
    """``stdout`` or ``stderr``."""
    return "stdout" if stream == STDOUT else "stderr"


def signal_of(given: int | str) -> int:
    """A signal by number or name.

    Raises:
        InvalidRequest: there is none.
    """
    if isinstance(given, int):
        if 1 <= given <= 64:
            return given
    else:
        name = given.upper().removeprefix("SIG")
        if name in _SIGNALS:
            return _SIGNALS[name]
    raise InvalidRequest(f"no signal {str(given)[:40]!r}", hint="a number, or a name as TERM, KILL, INT")


_SIGNALS = {found.name.removeprefix("SIG"): int(found) for found in _signal.Signals}


async def get_or_start(
    link: GuestLink, spec: ProcessSpec, offsets: tuple[int | None, int | None]
) -> tuple[GuestProcess, bool]:
    """Start a command, or attach to the one that has its id already; and whether it was started.

    Raises:
        What ``GuestLink.start`` raises but EEXIST.
    """
    if spec.id is not None and any(offsets):
        with contextlib.suppress(GuestRefused):
            return await link.attach(spec.id, *offsets), False
    try:
        return await link.start(spec), True
    except GuestRefused as error:
        if error.details.get("errno") != "EEXIST" or spec.id is None:
            raise
        return await link.attach(spec.id, *offsets), False


async def kill_tree(link: GuestLink, number: str) -> None:
    """Kill a command, its process group, and its descendants that have left the group.

    Descendants whose parent died belong to nobody any more: only the sandbox's end takes them.

    Raises:
        GuestRefused: ESRCH, it has ended.
    """
    pids: list[int] = []
    with contextlib.suppress(GuestError):
        found = next((p for p in await link.processes() if p.id == number), None)
        if found is not None and found.state == "running":
            pids = await _descendants(link, found.pid)
    await link.signal(number, _signal.SIGKILL, "group")
    if pids:
        words = " ".join(str(pid) for pid in pids)
        with contextlib.suppress(RingfenceError):
            process = await link.start(ProcessSpec(("sh", "-c", f"kill -9 {words} 2>/dev/null; :")))
            async with asyncio.timeout(5):
                await process.wait()
            await process.close()
            await link.remove(process.id)


async def _descendants(link: GuestLink, root: int) -> list[int]:
    """Processes below one that are not in its group, as /proc inside says (reported)."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in await link.files.list("/proc", depth=1, limit=100_000):
        if not entry.path.isascii() or not entry.path.isdigit() or len(parents) >= 4096:
            continue
        with contextlib.suppress(GuestRefused, ValueError, IndexError):
            raw = await link.files.read_bytes(f"/proc/{entry.path}/stat", limit=4096)
            words = raw.rpartition(b")")[2].split()
            parents[int(entry.path)] = (int(words[1]), int(words[2]))
    below = {root}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in below} - below
        grown = bool(more)
        below |= more
    return [pid for pid in below - {root} if parents[pid][1] != root]


def _idle(sandbox: str, number: str) -> str:
    return f"idle.{sandbox}.{number}"
