"""What a principal may ask of sandboxes: create, look, change, end. Every call is within one project."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.control import idempotency, volumes
from ringfence.control.core import Core, wrong_state
from ringfence.control.ending import Ending
from ringfence.control.links import Links
from ringfence.control.powers import READY, SNAPSHOT, Powers
from ringfence.control.records import KIND, VISIBLE, CreateSandbox, Sandbox
from ringfence.control.starting import Starting, Unstored
from ringfence.model.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    Unsupported,
    WrongState,
)
from ringfence.model.ids import new_id
from ringfence.model.levels import Cause
from ringfence.model.policies import from_dict
from ringfence.model.policy import Policy
from ringfence.model.policy_network import check_free, variables
from ringfence.model.states import FINAL, State
from ringfence.store.contract import Change, Event, Put, Row

if TYPE_CHECKING:
    from ringfence.control.claiming import Claims
    from ringfence.control.principals import Principal

MOST_FORKS = 64
List = list  # the class has a method of that name


def charge(policy: Policy) -> dict[str, Any]:
    """What a sandbox counts for, as its row has it until it ends."""
    size = policy.wall.resources
    return {"cpus": size.cpus, "memory": size.memory, "disk": size.disk}


def _same_mode(sandbox: Sandbox, policy: Policy | None) -> Policy:
    """The policy that holds after a change, whose network has the mode of the start.

    Raises:
        WrongState: it has another.
    """
    stands = from_dict(dict(sandbox.policy))
    if policy is None:
        return stands
    had, wanted = stands.door.network.mode, policy.door.network.mode
    if had != wanted:
        raise WrongState(
            f"sandbox {sandbox.id} was started with network mode {had}, which can't become {wanted}",
            hint="create another one with it"
            if had != "egress"
            else "leave the rules in allow empty, which lets nothing through",
            mode=had,
        )
    return policy


class Sandboxes:
    """Sandboxes of the service. Every call may raise StoreUnavailable, and NotFound for what is no
    sandbox of the principal's project.
    """

    def __init__(self, core: Core, links: Links, ending: Ending, starting: Starting, powers: Powers) -> None:
        self.core = core
        self.links = links
        self.ending = ending
        self.starting = starting
        self.powers = powers
        self.claims: Claims | None = None
        self.has_door: Callable[[], bool] = lambda: self.starting.doors is not None

    # -- create

    async def create(self, principal: Principal, request: CreateSandbox) -> Sandbox:
        """Make one: from a pool where one fits, else started on demand.

        With ``request.wait`` it runs when this returns; else it may be ``pending`` or ``starting``. A caller
        that is cancelled leaves it to be: it is the project's, and shows in the list.

        Raises:
            InvalidRequest, NotFound, Unsupported, RuntimeUnavailable: what ``Node.create`` says of it.
            StartFailed, HostLimit, NodeUnavailable, DeadlineExceeded: every attempt failed.
            QuotaExceeded: of the project, or the pool's queue is full or took too long.
            IdempotencyConflict: the key came with another request.
        """
        key = request.idempotency_key
        if key:
            # A key that is known is answered whatever else has changed since (quota, pool).
            known = await idempotency.replay(self.core, principal, key, request.digest)
            if known is not None:
                return await self._again(known, request)
        try:
            return await self._create(principal, request)
        except RingfenceError as error:
            if not key or "sandbox" in error.details:
                raise
            known = await idempotency.replay(self.core, principal, key, request.digest)
            if known is None:
                raise
        return await self._again(known, request)

    async def _again(self, id: str, request: CreateSandbox) -> Sandbox:
        """The answer to a request that was answered before, or is being answered."""
        sandbox = await self.core.get(id)
        if request.wait and sandbox.state in (State.PENDING, State.STARTING):
            states = set(VISIBLE) - {State.PENDING, State.STARTING}
            sandbox = await self.core.until(id, states, request.start_timeout + 30.0)
        if sandbox.error and sandbox.state in (State.FAILED, State.STOPPING):
            raise idempotency.failure(sandbox.error, id)
        return sandbox

    async def _create(self, principal: Principal, request: CreateSandbox) -> Sandbox:
        request = await self._completed(principal, request)
        if request.policy.door.network.mode == "egress" and not self.has_door():
            raise Unsupported(
                "this service has no door to the network",
                hint="start it without --no-egress and with the extra `egress`, or ask for network mode none",
                capability="egress",
            )
        check_free(variables(request.policy.door.network), request.env)
        if self.claims is not None:
            served = await self.claims.serve(principal, request)
            if served is not None:
                return served
        return await self.on_demand(principal, request)

    async def _completed(self, principal: Principal, request: CreateSandbox) -> CreateSandbox:
        """The request with the saved sandbox's own wall where it starts from one."""
        if not request.snapshot:
            return request
        row = await self.powers.find_snapshot(principal.project, request.snapshot)
        if row.state != READY:
            raise WrongState(f"snapshot {request.snapshot} is {row.state}", hint="wait until it is ready")
        saved = from_dict(row.document["policy"])
        policy = request.policy
        source = str(row.document["sandbox"])
        revoked = [*row.document.get("revoked", ())]
        with contextlib.suppress(NotFound):  # what was taken back since it was saved stays taken back
            revoked += Sandbox.from_row(await self.core.store.get(KIND, source)).revoked
        if policy.wall.digest() != saved.wall.digest():
            if policy.wall.digest() != Policy().wall.digest():
                raise InvalidRequest(
                    "a snapshot keeps the wall it was taken of", hint="leave isolation, process and size out"
                )
            policy = replace(policy, wall=saved.wall)
        return replace(
            request,
            snapshot=row.id,
            policy=policy,
            template=str(row.document["template"]),
            lineage=tuple(row.document.get("lineage") or (source,)),
            revoked=tuple(dict.fromkeys(revoked)),
        )

    async def on_demand(
        self,
        principal: Principal,
        request: CreateSandbox,
        *,
        pool: str = "",
        key: str = "",
        counters: Sequence[str] = (),
        changes: Sequence[Change] = (),
        committed: Callable[[], None] = lambda: None,
        event: Mapping[str, Any] | None = None,
    ) -> Sandbox:
        """Start one now, outside of any pool's members; ``pool`` and ``key`` say for which it counts, and
        ``counters`` what it gives back at its end.
        """
        core = self.core
        token = core.token()
        try:
            row, accepted = await self.accepted(
                principal, request, token, pool=pool, key=key, counters=counters, event=event
            )
            rows = await core.commit(*accepted, *changes)
        except QuotaExceeded as error:
            core.done(token)
            raise volumes.explained(error) from None
        except BaseException:
            core.done(token)
            raise
        committed()
        sandbox = Sandbox.from_row(next(each for each in rows if each.kind == KIND and each.id == row.id))
        unstored = Unstored(request.secrets, request.files) if request.secrets or request.files else None
        task = self.starting.begin(sandbox, token, unstored)
        if not request.wait:
            return sandbox
        return await core.result(task)

    async def accepted(
        self,
        principal: Principal,
        request: CreateSandbox,
        token: str,
        *,
        pool: str = "",
        key: str = "",
        counters: Sequence[str] = (),
        queued: str = "",
        wait: float = 0.0,
        event: Mapping[str, Any] | None = None,
    ) -> tuple[Row, list[Change]]:
        """The row of a new sandbox, and all that has to be written with it. ``queued``: the ticket with which
        it waits for its start, at most ``wait`` seconds.
        """
        core = self.core
        now = core.now()
        start_by = now + wait + request.start_timeout
        mounts, taken = await volumes.attached(core, principal.project, request.volumes)
        request = replace(request, volumes=mounts)
        document = self.document(principal, request) | {"actor": token, "start_by": start_by, "pool": pool}
        if counters:
            document["counters"] = list(counters)
        if queued:
            document["queued"] = queued
        row = Row(
            KIND,
            new_id("sb"),
            principal.project,
            (State.PENDING if queued else State.STARTING).value,
            key=key,
            due=start_by,
            created=now,
            labels=dict(request.labels),
            document=document,
        )
        changes: list[Change] = []
        if request.idempotency_key:
            made = idempotency.key_row(core, principal, request.idempotency_key, request.digest, row.id)
            changes.append(await self.key_put(made))
        changes += [Put(row), *taken]
        changes += await core.admission.admission(principal.project, request.policy)
        changes.append(core.event("created", row.id, row.project, state=row.state, **(event or {})))
        return row, changes

    async def key_put(self, made: Row) -> Put:
        """The put of a key; over the one that has led to no sandbox so far."""
        try:
            known = await self.core.store.get(made.kind, made.id)
        except NotFound:
            return Put(made)
        if known.document["sandbox"] or known.document["digest"] != made.document["digest"]:
            raise Conflict("this idempotency key is in use")
        return Put(replace(made, revision=known.revision))

    def document(self, principal: Principal, request: CreateSandbox) -> dict[str, Any]:
        """What a request says, as the row has it."""
        limits = request.policy.door.limits
        document: dict[str, Any] = {
            "organisation": principal.organisation,
            "user": principal.user,
            "template": request.template,
            "policy": request.policy.to_dict(),
            "timeout": limits.timeout,
            "idle": limits.idle,
            "on_idle": limits.on_idle,
            "charged": charge(request.policy),
        }
        for name in ("agent", "parent_agent", "agent_class", "task"):
            if (value := getattr(request, name)) is not None:
                document[name] = value
        if request.env:
            document["env"] = dict(request.env)
        if request.volumes:
            document["volumes"] = [[each.volume, each.path, each.read_only] for each in request.volumes]
        if request.snapshot:
            document["snapshot"] = request.snapshot
        if request.lineage:
            document |= {"lineage": list(request.lineage), "revoked": list(request.revoked)}
        if request.secrets or request.files:
            document["unstored"] = True
        return document

    # -- look

    async def get(self, principal: Principal, id: str) -> Sandbox:
        """One of the project's."""
        return await self.core.get(id, principal.project)

    async def list(
        self,
        principal: Principal,
        *,
        states: Sequence[State] = (),
        labels: Mapping[str, str] | None = None,
        after: str = "",
        limit: int = 100,
        newest_first: bool = False,
    ) -> List[Sandbox]:
        """The project's, by id; ``states``: these only. Pass the last id as ``after`` for the next page."""
        rows = await self.core.store.find(
            KIND,
            project=principal.project,
            states=[state.value for state in (states or VISIBLE)],
            labels=labels,
            after=after,
            limit=limit,
            newest_first=newest_first,
        )
        return [Sandbox.from_row(row) for row in rows]

    async def wait_for(
        self,
        principal: Principal,
        id: str,
        states: Iterable[State],
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Sandbox:
        """The sandbox once it is in one of these states, or has ended.

        Raises:
            DeadlineExceeded: not within so many seconds.
        """
        await self.get(principal, id)
        return await self.core.until(id, states, timeout)

    async def events(self, principal: Principal, id: str, after: int = 0, limit: int = 100) -> List[Event]:
        """What happened to it, oldest first."""
        await self.get(principal, id)
        return await self.core.store.events(subject=id, after=after, limit=limit)

    # -- change

    async def update(
        self,
        principal: Principal,
        id: str,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        policy: Policy | None = None,
        secrets: Mapping[str, bytes] | None = None,
    ) -> Sandbox:
        """Change labels and door. ``labels`` replace those there are; ``policy`` must have the same wall.

        Raises:
            InvalidRequest: the policy has another wall. WrongState: it has ended, or does not run yet.
            WrongState: the policy has another network mode than the sandbox was started with.
        """
        sandbox = await self.get(principal, id)
        if labels is not None and env is None and policy is None and secrets is None:
            if sandbox.final:
                raise wrong_state(sandbox)
            expect = set(VISIBLE) - FINAL
            return await self.core.change(sandbox, expect=expect, labels=labels, event="updated")
        if policy is not None and policy.wall.digest() != from_dict(dict(sandbox.policy)).wall.digest():
            raise InvalidRequest(
                "the wall of a sandbox that runs can't change", hint="change limits, network or audit only"
            )
        expect = {State.RUNNING, State.PAUSED}
        if sandbox.state not in expect:
            raise wrong_state(sandbox)
        door = _same_mode(sandbox, policy).door
        names = variables(door.network)
        check_free(names, sandbox.env if env is None else env)
        changes: dict[str, Any] = {}
        if env is not None:
            changes["env"] = dict(env)
        if policy is not None:
            limits = policy.door.limits
            changes |= {"policy": policy.to_dict(), "idle": limits.idle, "on_idle": limits.on_idle}
            if limits.timeout != sandbox.document["timeout"]:
                changes |= {"timeout": limits.timeout, "deadline": sandbox.started + limits.timeout}
        changed = await self.core.change(
            sandbox,
            expect=expect,
            labels=labels,
            event="updated",
            data={"fields": sorted(changes)},
            **changes,
        )
        if env is not None or (policy is not None and names):
            # What is bound replaces what was: the placeholders of the policy, too.
            env = {**changed.env, **await self.starting.variables(changed)}
        await self.core.placement.bind(
            id,
            env=env,
            secrets=secrets,
            labels=labels,
            policy=changes.get("policy"),
            deadline=changes.get("deadline"),
        )
        if policy is not None and self.starting.doors is not None:
            await self.starting.doors.refresh(changed)
        self.links.saw(changed)
        return changed

    async def revoke(self, principal: Principal, id: str, sandboxes: Iterable[str] | None = None) -> Sandbox:
        """Placeholders of these sandboxes are worth nothing in this one any more, nor in copies of it that
        are made from now on: by default all that it inherited; its own if it is named. For good.

        Raises:
            InvalidRequest: one is neither this sandbox nor of its lineage. WrongState: it has ended.
        """
        sandbox = await self.get(principal, id)
        if sandbox.final:
            raise wrong_state(sandbox)
        named = list(sandbox.lineage if sandboxes is None else sandboxes)
        for each in named:
            if each not in (id, *sandbox.lineage):
                raise InvalidRequest(
                    f"sandbox {id} has no placeholders of {each[:60]}",
                    hint="name it or one that it is a copy of; without names all that it inherited",
                )
        changed = await self.core.change(
            sandbox,
            expect=set(VISIBLE) - FINAL,
            event="revoked",
            data={"placeholders_of": named},
            more={"revoked": named},
        )
        if self.starting.doors is not None:
            await self.starting.doors.refresh(changed)
        return changed

    async def pause(self, principal: Principal, id: str) -> Sandbox:
        """Stop everything inside until it is resumed. Its deadline goes on. Idempotent.

        Raises:
            WrongState, Unsupported.
        """
        return await self.core.whole(self.powers.pause(await self.get(principal, id)))

    async def resume(self, principal: Principal, id: str) -> Sandbox:
        """Let it go on. Idempotent."""
        return await self.core.whole(self.powers.resume(await self.get(principal, id)))

    async def extend(self, principal: Principal, id: str, seconds: float) -> Sandbox:
        """Its deadline is so many seconds from now."""
        return await self.powers.extend(await self.get(principal, id), seconds)

    async def reset(self, principal: Principal, id: str) -> Sandbox:
        """Begin anew from its template, under its id."""
        return await self.core.whole(self.powers.reset(await self.get(principal, id)))

    async def snapshot(self, principal: Principal, id: str, name: str = "", kind: str | None = None) -> Row:
        """Save it; see :meth:`Powers.snapshot`."""
        return await self.core.whole(self.powers.snapshot(await self.get(principal, id), name, kind))

    async def fork(
        self, principal: Principal, id: str, count: int = 1, *, kind: str | None = None
    ) -> List[Sandbox]:
        """As many copies, each with an identity of its own and a deadline of its own. None if one fails.

        Raises:
            What snapshot and create raise.
        """
        if not 1 <= count <= MOST_FORKS:
            raise InvalidRequest(f"{count} copies are not 1 to {MOST_FORKS}", hint=f"at most {MOST_FORKS}")
        return await self.core.whole(self._fork(principal, await self.get(principal, id), count, kind))

    async def _fork(
        self, principal: Principal, sandbox: Sandbox, count: int, kind: str | None
    ) -> List[Sandbox]:
        saved = await self.powers.snapshot(sandbox, kind=kind, temporary=True)
        with contextlib.suppress(NotFound):  # placeholders may have been taken back while it was saved
            sandbox = await self.get(principal, sandbox.id)
        request = CreateSandbox(
            policy=from_dict(dict(sandbox.policy)),
            template=sandbox.template,
            snapshot=saved.id,
            env=sandbox.env,
            labels=sandbox.labels,
            agent=sandbox.agent,
            parent_agent=sandbox.parent_agent,
            agent_class=sandbox.agent_class,
            task=sandbox.task,
            lineage=sandbox.family,
            revoked=sandbox.revoked,
        )
        event = {"fork_of": sandbox.id}
        try:
            made = await asyncio.gather(
                *(self.on_demand(principal, request, event=event) for _ in range(count)),
                return_exceptions=True,
            )
            failed = [each for each in made if isinstance(each, BaseException)]
            if failed:
                for each in made:
                    if isinstance(each, Sandbox):
                        await self.ending.end(each, Cause.KILLED, detail="another copy failed")
                raise failed[0]
            return [each for each in made if isinstance(each, Sandbox)]
        finally:
            with contextlib.suppress(RingfenceError):
                await self.powers.remove_snapshot(await self.core.store.get(SNAPSHOT, saved.id))

    # -- end

    async def delete(self, principal: Principal, id: str, *, grace: float = 0.0) -> Sandbox:
        """End it, from whatever state, and remove all that is its own. Idempotent.

        Returns it as it is then: ``stopped`` or ``failed``; ``stopping`` while its placement does not answer.
        """
        sandbox = await self.get(principal, id)
        if sandbox.final:
            return sandbox
        by = f"{principal.user or principal.project}"
        if sandbox.state is not State.STOPPING:
            sandbox = await self.ending.end(
                sandbox, Cause.KILLED, detail="deleted", killed_by=by, grace=grace
            )
        else:  # somebody is at it, maybe in another process
            with contextlib.suppress(DeadlineExceeded):
                sandbox = await self.core.until(id, FINAL, 10.0)
        return sandbox
