"""The egress doors of a service: each sandbox with ``network.mode: egress`` has one, held by one API process.

A lease in the store says which. A process that dies lets its leases run out, and another one (or itself,
started anew) opens the doors again: until then they are closed, which is the safe side.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringfence.control.quotas import Quota
from ringfence.control.records import KIND, VISIBLE, Sandbox
from ringfence.guest.link import GuestLink
from ringfence.model import policies
from ringfence.model.errors import GuestRefused, NotFound, RingfenceError, WrongState
from ringfence.model.policy_network import variables
from ringfence.model.states import FINAL, State
from ringfence.serving.door_events import DoorEvents
from ringfence.serving.sharing import Shares

if TYPE_CHECKING:
    from ringfence.control.service import Control
    from ringfence.egress.client import Doors, ProjectLimits

QuotaOf = Callable[[str], Awaitable[Quota]]
_log = logging.getLogger("ringfence.serving")
LEASE = 15.0  # seconds that a door belongs to a process that is not heard of
EVERY = 4.0  # seconds between two looks
TAKING = 60.0  # seconds that a sandbox has to let its door be opened again
_PAGE = 500


class _Held(NamedTuple):
    project: str
    network: Mapping[str, Any]
    revoked: tuple[str, ...]
    quota: Quota
    answers: tuple[str, ...]
    revision: int  # of the row that it was last made to follow
    lock: asyncio.Lock


class ServiceDoors:
    """Opens, keeps and closes them; what the orchestrator calls at starts and ends."""

    def __init__(
        self, doors: Doors, control: Control, owner: str, folder: Path, quota: QuotaOf | None = None
    ) -> None:
        self._quota = quota
        self.doors = doors
        self._folder = folder
        self._control = control
        self._owner = f"{owner}/doors"
        self._open: dict[str, _Held] = {}  # what is in force, by sandbox
        self._taking: dict[str, asyncio.Task[None]] = {}  # doors that are being opened again
        self._beginning: dict[str, str] = {}  # projects of doors that are being opened, by sandbox
        self.shares = Shares(doors, control.store, owner)
        self._unkept: set[tuple[str, str]] = set()  # answers that the store could not take yet

    @staticmethod
    def wanted(sandbox: Sandbox) -> bool:
        """Whether its policy has a door."""
        return _network(sandbox) is not None

    async def open(self, sandbox: Sandbox) -> None:
        """Open a sandbox's door, if its policy has one.

        Raises:
            What keeps it from being opened: a sandbox that asked for a door does not start without.
        """
        network = _network(sandbox)
        if network is None:
            return
        await self._control.store.lease(_lease(sandbox.id), self._owner, LEASE)
        await self._begin(sandbox, network)

    async def variables(self, sandbox: Sandbox) -> dict[str, str]:
        """The placeholders that its policy gives to programs, by variable."""
        if _network(sandbox) is None:
            return {}
        wanted = variables(policies.from_dict(dict(sandbox.policy)).door.network)
        if not wanted:
            return {}
        found = await self.doors.placeholders(sandbox.id, sorted(set(wanted.values())))
        return {name: found[secret] for name, secret in wanted.items()}

    async def _begin(self, sandbox: Sandbox, network: Mapping[str, Any]) -> None:
        self._beginning[sandbox.id] = sandbox.project
        try:
            await self._begin_it(sandbox, network)
        finally:
            self._beginning.pop(sandbox.id, None)

    def projects(self) -> set[str]:
        """Those that have a door here."""
        return {held.project for held in self._open.values()} | set(self._beginning.values())

    async def _begin_it(self, sandbox: Sandbox, network: Mapping[str, Any]) -> None:
        from ringfence.egress.client import DoorSpec
        from ringfence.guest.doors import place_bundle

        policy = policies.from_dict(dict(sandbox.policy))
        quota = await self._quota_of(sandbox.project)
        await self.shares.cover(sandbox.project, quota)
        spec = DoorSpec(
            sandbox.id,
            project=sandbox.project,
            task=sandbox.task or "",
            network=dict(network),
            trust=policy.trust,
            bandwidth=policy.wall.resources.bandwidth,
            lineage=sandbox.lineage,
            revoked=sandbox.revoked,
            answers=sandbox.answers,
            project_budget=_budget(quota),
            limits=_limits(quota),
        )
        placement = self._control.placement
        await self.doors.open(spec, lambda: placement.connect(sandbox.id))
        self._open[sandbox.id] = _Held(
            sandbox.project,
            network,
            sandbox.revoked,
            quota,
            sandbox.answers,
            sandbox.revision,
            asyncio.Lock(),
        )
        try:
            own = await self.doors.ca(sandbox.id)  # for connections that are inspected
            link = await GuestLink.open(await placement.connect(sandbox.id))
            async with link:
                await place_bundle(link, _authorities() + own)
        except BaseException:
            await self.close(sandbox.id)
            raise

    async def close(self, id: str) -> None:
        """Close a door. Idempotent."""
        if self._open.pop(id, None) is None:
            return
        with contextlib.suppress(RingfenceError):
            await self.doors.close(id)
        await self._control.store.release(_lease(id), self._owner)

    async def refresh(self, sandbox: Sandbox) -> None:
        """Its rules may have changed. A row that is older than what the door follows is old news."""
        network = _network(sandbox)
        had = self._open.get(sandbox.id)
        if had is None or network is None:
            return
        async with had.lock:
            had = self._open.get(sandbox.id)
            if had is not None and sandbox.revision >= had.revision:
                await self._follow(sandbox, network, had)

    async def _follow(self, sandbox: Sandbox, network: Mapping[str, Any], had: _Held) -> None:
        def note(**changes: Any) -> None:
            nonlocal had
            new = had._replace(**changes)
            if self._open.get(sandbox.id) is had:  # else it was closed meanwhile
                self._open[sandbox.id] = new
            had = new

        if had.revoked != sandbox.revoked:  # first what takes something away
            await self.doors.revoke(sandbox.id, sandbox.revoked)
            note(revoked=sandbox.revoked)
        if had.answers != sandbox.answers:  # given while the door was being taken over
            await self.doors.remember(sandbox.id, sandbox.answers)
            note(answers=sandbox.answers)
        quota = await self._quota_of(sandbox.project)
        if had.quota != quota:
            await self.shares.cover(sandbox.project, quota)
            await self.doors.limit(sandbox.id, _budget(quota), _limits(quota))
            note(quota=quota)
        if had.network != network:
            await self.doors.update(sandbox.id, dict(network))
        note(network=network, revision=sandbox.revision)

    async def _quota_of(self, project: str) -> Quota:
        return Quota() if self._quota is None else await self._quota(project)

    def connections(self, sandbox: str, limit: int) -> list[dict[str, Any]]:
        """The newest lines of the log about one sandbox, oldest first. Reads files."""
        from ringfence.egress.log import ConnectionLog

        return ConnectionLog(self._folder / "connections.jsonl").newest(sandbox, limit)

    async def records(self, sandbox: str, newest: int) -> AsyncIterator[bytes]:
        """What was recorded of one sandbox, as a HAR document in pieces. Files are read in a thread."""
        from ringfence import __version__
        from ringfence.egress.recording import Records, har_pieces
        from ringfence.egress.redaction import Redactors

        pieces = har_pieces(Records(self._folder, Redactors()).log(sandbox), newest, __version__)
        try:
            while piece := await asyncio.to_thread(next, pieces, b""):
                yield piece
        finally:
            with contextlib.suppress(ValueError):  # a thread that nobody waits for is still in it
                pieces.close()

    async def questions(self) -> list[dict[str, Any]]:
        """All that are open, at the doors of other API processes of this machine, too."""
        found = {each["id"]: each for each in await self.doors.pending()}
        for each in await asyncio.to_thread(self._visited, "pending"):
            found.update({one["id"]: one for one in each})
        return list(found.values())

    async def answer(self, question: str, allow: bool, *, remember: bool) -> dict[str, Any]:
        """Answer one, wherever it is held. One that is remembered is in the store when this returns.

        Raises:
            NotFound: none such is open (any more).
        """
        try:
            result = await self.doors.answer(question, allow, remember=remember)
        except NotFound:
            values = {"id": question, "allow": allow, "remember": remember}
            answered = await asyncio.to_thread(self._visited, "answer", **values)
            if not answered:
                raise
            result = dict(answered[0])
        await self.keep(result)
        return result

    async def keep(self, answered: Mapping[str, Any]) -> None:
        """Write down an answer that holds from now on: whichever process opens the door next has it. What
        can't be written now is tried again at every look.
        """
        if "remembered" not in answered:
            return
        from ringfence.egress.remembering import as_text

        sandbox, text = str(answered["sandbox"]), as_text(answered["remembered"])
        self._unkept.add((sandbox, text))
        await self._keep(sandbox, text)

    async def _keep(self, id: str, text: str) -> None:
        core = self._control.core
        try:
            sandbox = await core.get(id)
            if text not in sandbox.answers:
                await core.change(sandbox, expect=set(VISIBLE) - FINAL, more={"egress_answers": [text]})
        except (NotFound, WrongState):
            pass  # it has ended, and its answers with it
        self._unkept.discard((id, text))

    def _visited(self, command: str, **values: Any) -> list[Any]:
        """What the proxies of all API processes say to a command; those that refuse it say nothing."""
        from ringfence.egress.visiting import visits

        found = []
        for visit in visits(self._folder):
            with contextlib.suppress(RingfenceError):
                found.append(visit.call(command, **values))
        return found

    async def look(self) -> None:
        """Keep what is ours, take over what is nobody's, let go of what has ended."""
        store = self._control.store
        for id, text in list(self._unkept):
            with contextlib.suppress(RingfenceError):
                await self._keep(id, text)
        there: set[str] = set()
        after = ""
        while True:
            rows = await store.find(KIND, states=[State.RUNNING.value], after=after, limit=_PAGE)
            for row in rows:
                sandbox = Sandbox.from_row(row)
                network = _network(sandbox)
                if network is None:
                    continue
                there.add(row.id)
                try:
                    if not await store.lease(_lease(row.id), self._owner, LEASE):
                        await self._lose(row.id)
                    elif row.id in self._open:
                        await self.refresh(sandbox)
                    elif row.id not in self._taking:
                        take = self._take_over(sandbox, network)
                        self._taking[row.id] = asyncio.get_running_loop().create_task(take)
                except RingfenceError as error:
                    _log.warning("the door of %s: %s", row.id, error.message)
            if len(rows) < _PAGE:
                break
            after = rows[-1].id
        for id in [id for id in self._open if id not in there]:
            # Paused ones keep theirs: nothing in them asks for it meanwhile.
            try:
                ended = Sandbox.from_row(await store.get(KIND, id)).final
            except NotFound:
                ended = True
            if ended:
                await self.close(id)
            else:
                await store.lease(_lease(id), self._owner, LEASE)

    async def _take_over(self, sandbox: Sandbox, network: Mapping[str, Any]) -> None:
        """Open a door that nobody holds. What is inside may answer slowly, or never: others don't wait."""
        try:
            async with asyncio.timeout(TAKING):
                await self._begin(sandbox, network)
            await self.refresh(await self._control.core.get(sandbox.id))  # read before it was opened
            # Whoever had it may have died between a reset and what the template starts.
            await self._control.placement.bring_up(sandbox.id)
        except GuestRefused as error:
            if error.errno != errno.EADDRINUSE:  # who had it has not let go yet
                _log.warning("the door of %s: %s", sandbox.id, error.message)
        except RingfenceError as error:
            _log.warning("the door of %s: %s", sandbox.id, error.message)
        except TimeoutError:
            _log.warning("the door of %s: it does not answer", sandbox.id)
        finally:
            del self._taking[sandbox.id]

    async def _lose(self, id: str) -> None:
        if self._open.pop(id, None) is not None:
            with contextlib.suppress(RingfenceError):
                await self.doors.close(id, keep=True)

    async def run(self) -> None:
        """Look, for ever."""
        try:
            while True:
                try:
                    await self.look()
                except RingfenceError as error:
                    _log.warning("doors: %s", error.message)
                await asyncio.sleep(EVERY)
        finally:
            tasks = list(self._taking.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def watching(
    control: Control, doors: Doors, owner: str, folder: Path, quota: QuotaOf | None = None
) -> AsyncIterator[ServiceDoors]:
    """The doors of a service while the block runs; ``folder``: where the proxy keeps its log; ``quota``: the
    limits of a project.
    """
    made = ServiceDoors(doors, control, owner, folder, quota)
    control.egress = control.starting.doors = control.ending.doors = control.powers.doors = made
    loop = asyncio.get_running_loop()
    sharing = loop.create_task(made.shares.run(made.projects))
    tasks = [
        sharing,
        loop.create_task(made.run()),
        loop.create_task(DoorEvents(doors, control, made.keep).run()),
    ]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await made.shares.close()
        control.egress = control.starting.doors = control.ending.doors = control.powers.doors = None


def _network(sandbox: Sandbox) -> Mapping[str, Any] | None:
    network = sandbox.policy.get("network")
    if isinstance(network, Mapping) and network.get("mode") == "egress":
        return network
    return None


def _budget(quota: Quota) -> dict[str, Any] | None:
    """A project's part of its quota that the doors keep, as a policy says it; its rate is shared."""
    found = {
        "maxRequests": quota.egress_requests,
        "maxBytes": quota.egress_bytes,
        "maxSpend": quota.egress_spend,
    }
    return {key: value for key, value in found.items() if value is not None} or None


def _limits(quota: Quota) -> ProjectLimits:
    from ringfence.egress.client import ProjectLimits

    return ProjectLimits(quota.connections, quota.bandwidth, quota.egress_rate, shared=True)


def _lease(id: str) -> str:
    return f"door/{id}"


def _authorities() -> bytes:
    """Those that the proxy was told to trust in place of the system's: programs inside need them too."""
    path = os.environ.get("SSL_CERT_FILE")
    try:
        return Path(path).read_bytes()[: 512 * 1024] if path else b""
    except OSError:
        return b""
