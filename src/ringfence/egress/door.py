"""One sandbox's door: its rules, its connections, and whether something may pass.

A door knows its sandbox by the link that it was opened with. What the guest says about a connection (who made
it) goes into the log as ``reported`` and decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from ringfence.egress.bounded import Patterns
from ringfence.egress.inference import Guard
from ringfence.egress.log import Share
from ringfence.egress.meter import OverBudget
from ringfence.egress.names import Address, BadHost, Host, parse_host
from ringfence.egress.outward import Pool
from ringfence.egress.policy import Decision, Rule, Rules, Trust
from ringfence.egress.remembering import MOST_PATH, as_text, fits, rule_of
from ringfence.egress.secrets import PLACEHOLDER
from ringfence.egress.upstream import Unreachable
from ringfence.model import policies
from ringfence.model.ids import new_id
from ringfence.model.policy import Budget
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    from ringfence.egress.engine import Engine


@dataclass(frozen=True, slots=True)
class ProjectLimits:
    """What all sandboxes of a project share; ``None``: without limit.

    ``connections``: at once. ``bandwidth``: bits a second, each way. ``rate``: requests a second, where
    ``shared``: then doors of other processes have a part of all of these, and this one has what
    ``Doors.share_grant`` gives.
    """

    connections: int | None = None
    bandwidth: int | None = None
    rate: float | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class DoorSpec:
    """Whose door it is, and what may pass.

    ``network``: the network part of the policy, as in its file. ``lineage``: the sandboxes that this one was
    forked from, nearest first. ``bandwidth``: bits a second, each way. ``project_budget``: as a rule's
    budget, shared by all sandboxes of the project. ``revoked``: the sandboxes, of its lineage or itself,
    whose placeholders are worth nothing. ``answers``: what somebody has allowed for good when asked, as
    ``remembering.as_text`` writes it.
    """

    sandbox: str
    project: str = ""
    task: str = ""
    network: dict[str, Any] = field(default_factory=dict)
    trust: str | None = None
    lineage: tuple[str, ...] = ()
    bandwidth: int | None = None
    project_budget: dict[str, Any] | None = None
    revoked: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    limits: ProjectLimits = ProjectLimits()


class Refused(Exception):
    """Something may not pass. ``decision`` says why, ``status`` is the HTTP answer."""

    def __init__(self, decision: Decision, status: int = 403, retry: float | None = None) -> None:
        super().__init__(decision.reason)
        self.decision = decision
        self.status = status
        self.retry = retry


def refused(code: str, reason: str, status: int = 403, hint: str = "") -> Refused:
    """A refusal that no rule of the policy made."""
    return Refused(Decision(False, code, None, reason, hint), status)


@dataclass(frozen=True, slots=True)
class Grant:
    """What may pass: by which rule, and to which addresses; they are not asked for again."""

    host: Host
    port: int
    rule: Rule
    addresses: tuple[Address, ...]


class Flow:
    """One connection from inside, and what is known about it. ``kind``: http, connect, socks, caught."""

    def __init__(self, door: Door, kind: str, peer: Any = None) -> None:
        self.id = new_id("eg")
        self.door = door
        self.kind = kind
        self.peer = peer
        self.started = time.time()
        self.host: Host | None = None
        self.port = 0
        self.protocol = ""
        self.method = self.path = ""  # of the request under way
        self.rule: Rule | None = None
        self.address = ""
        self.sent = self.received = 0
        self.task: asyncio.Task[Any] | None = None
        self.inspected = False
        self.answered: list[Rule] = []  # what was allowed for this connection only
        self.cut: Decision | None = None  # why the policy's change ended it
        self.active = time.monotonic()

    def allows(self, host: Host, port: int, protocol: str | None, method: str, path: str) -> Rule | None:
        """The answer that somebody gave for this connection, if it is about this."""
        for rule in self.answered:
            if (
                rule.covers(host)
                and port in rule.ports
                and (rule.protocol == "tcp") == (protocol == "tcp")
                and (not rule.methods or method in rule.methods)
                and (not rule.exact or path in rule.exact)
            ):
                return rule
        return None

    def begin(self) -> None:
        """Another request on the same connection."""
        self.id = new_id("eg")
        self.started = time.time()
        self.sent = self.received = 0
        self.rule, self.address = None, ""

    def out(self, count: int) -> None:
        """Bytes go out.

        Raises:
            Refused: they are over a budget.
        """
        self.sent += count
        self.active = time.monotonic()
        self._count(count, 0)

    def back(self, count: int) -> None:
        """Bytes come back.

        Raises:
            Refused: they are over a budget.
        """
        self.received += count
        self.active = time.monotonic()
        self._count(0, count)

    def _count(self, sent: int, received: int) -> None:
        try:
            self.door.engine.meter.add(self.door, self.rule, sent, received)
        except OverBudget as error:
            raise Refused(error.decision, 429, error.retry) from None

    def record(self, decision: Decision, **more: Any) -> None:
        """Write one line of the connection log."""
        self.door.engine.record(self.door, self, decision, more)


class Door:
    """The door of one sandbox. Lives as long as the sandbox may use the network."""

    def __init__(self, engine: Engine, spec: DoorSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.answers: dict[str, Rule] = {}  # rules that somebody's answers have added
        self.network = policies.network_from_dict(spec.network)
        self.project_budget = _budget(spec.project_budget)
        self.patterns = Patterns(self.network.redact)
        self.guard = None if self.network.inference is None else Guard(self.network.inference)
        self.answers |= {text: rule_of(text, self._trust()) for text in spec.answers}
        self.rules = self._rules()
        self.pool = Pool(self)
        self.flows: set[Flow] = set()
        self.revoked = set(spec.revoked)  # of the family: their placeholders are worth nothing any more
        self.share = Share()
        self.closed = False

    def _trust(self) -> Trust:
        return self.spec.trust if self.spec.trust in ("untrusted", "controlled", "trusted") else None  # type: ignore[return-value]

    def _rules(self) -> Rules:
        return Rules(self.network, self._trust(), self.answers.values())

    def update(self, network: dict[str, Any]) -> int:
        """Other rules from now on, also for what is open; returns how many connections ended by it.

        Raises:
            PolicyError: the rules are wrong; the old ones stay.
        """
        self.network = policies.network_from_dict(network)
        self.patterns = Patterns(self.network.redact)
        self.guard = None if self.network.inference is None else Guard(self.network.inference)
        self.rules = self._rules()
        self.pool.drop()
        return self.judge_again()

    def limit(self, budget: dict[str, Any] | None, limits: ProjectLimits) -> None:
        """Other limits of the project from now on.

        Raises:
            PolicyError: it is no budget; the old ones stay.
        """
        self.project_budget = _budget(budget)
        self.spec = replace(self.spec, project_budget=budget, limits=limits)
        for flow in self.flows:  # also those from before there was a limit
            if limits.shared and limits.connections is not None:
                self.engine.shared(self.spec.project).flows.add(flow)
            else:
                self.engine.unshared(flow)

    def remember(self, answer: Mapping[str, Any]) -> Rule | None:
        """Somebody's answer is a rule from now on; ``None``: it is too long, or there are too many."""
        text = as_text(answer)
        if text not in self.answers:
            if len(answer["path"]) > MOST_PATH or not fits(self.answers, text):
                return None
            self.add_answers((text,))
        return self.answers[text]

    def add_answers(self, answers: Iterable[str]) -> None:
        """Answers that were given elsewhere hold here, too."""
        self.answers |= {text: rule_of(text, self._trust()) for text in answers if text not in self.answers}
        self.rules = self._rules()

    def family(self) -> list[str]:
        """The sandboxes whose placeholders this one may use: its own, and those that it inherited."""
        own = (self.spec.sandbox, *self.spec.lineage)
        return [one for one in own if one not in self.revoked]

    def judge_again(self) -> int:
        """End every connection that today's rules would not let through."""
        ended = 0
        for flow in list(self.flows):
            decision = self._still(flow)
            if decision is not None and flow.task is not None:
                flow.cut = decision
                flow.task.cancel()
                ended += 1
        return ended

    def _still(self, flow: Flow) -> Decision | None:
        """Why an open connection may not go on; ``None``: it may."""
        if flow.host is None or flow.rule is None:
            return None
        if flow.rule.origin == "inference":
            if self.guard is not None and self.guard.rule.key == flow.rule.key:
                return None
            return Decision(False, "no_rule", None, "the policy has another inference now, or none")
        if flow.method:
            scheme = "https" if flow.protocol == "tls" else "http"
            decision = self.rules.request(flow.host, flow.port, scheme, flow.method, flow.path)
        else:
            decision = self.rules.connect(flow.host, flow.port, flow.protocol or None)  # type: ignore[arg-type]
        if decision.unknown and not decision.allowed:
            wanted = (flow.host, flow.port, flow.protocol or None, flow.method, flow.path)
            if (rule := self._answered(flow, *wanted)) is not None:
                decision = Decision(True, "asked", rule)
        if not decision.allowed or decision.rule is None:
            return decision
        if (
            flow.protocol == "tls"
            and not flow.inspected
            and self.tls_mode(flow, flow.host, flow.port) == "inspect"
        ):
            return Decision(
                False, "inspect", decision.rule, "TLS to this host is inspected now", "connect again"
            )
        if flow.address:
            address = parse_host(flow.address).address
            if address is not None:
                decision = self.rules.address(decision.rule, flow.host, [address])[1]
                return None if decision.allowed else decision
        return None

    def knows(self, name: str) -> bool:
        """Whether a resolver inside has an address for this name."""
        if self.network.learn or self.network.on_unknown == "ask":
            return "." in name or self.rules.name_allowed(name)  # somebody may say yes yet
        return self.rules.name_allowed(name) or (self.guard is not None and name == "inference")

    # -- may it pass?

    def host(self, text: str) -> Host:
        """A host that a program named.

        Raises:
            Refused: it is none.
        """
        try:
            return parse_host(text)
        except BadHost as error:
            raise refused("bad_host", f"{text[:100]!r} is no host: {error}", 400) from None

    async def admit(
        self,
        flow: Flow,
        host: Host,
        port: int,
        protocol: str | None = None,
        method: str = "",
        path: str = "",
    ) -> Grant:
        """Let a connection (or, with method and path, a request) pass, with the addresses it may go to.

        Raises:
            Refused: the policy does not allow it.
            Unreachable: the name can't be resolved.
        """
        if PLACEHOLDER.search(host.name):
            self.engine.alarm(self, "a name", str(host)[:100])
            raise refused("placeholder", "a placeholder of a secret in the name of a host")
        while True:
            rules = self.rules
            decision = await self._decided(flow, host, port, protocol, method, path)
            if not decision.allowed or decision.rule is None:
                raise Refused(decision)
            rule = decision.rule
            if self.closed:
                raise refused("closed", "the door is closed")
            found = await self.engine.upstreams.resolve(host)
            if self.rules is rules:
                break  # else the rules have changed while a name was asked for: it is theirs to say
        good, decision = rules.address(rule, host, found)
        if not decision.allowed:
            raise Refused(decision)
        return Grant(host, port, rule, tuple(good))

    async def _decided(
        self, flow: Flow, host: Host, port: int, protocol: str | None, method: str, path: str
    ) -> Decision:
        """What the rules say, or somebody who is asked."""
        decision = self._judge(host, port, protocol, method, path)
        if decision.allowed or not decision.unknown:
            return decision
        rule = self._answered(flow, host, port, protocol, method, path)
        if rule is not None:
            return Decision(True, "asked", rule)
        decision = await self.engine.unknown(self, flow, host, port, protocol, method, path, decision)
        if decision.allowed and decision.rule is not None:
            flow.answered.append(decision.rule)
        return decision

    def _answered(
        self, flow: Flow, host: Host, port: int, protocol: str | None, method: str, path: str
    ) -> Rule | None:
        """The rule that lets this pass for this connection only, while the policy asks, or learns."""
        rule = flow.allows(host, port, protocol, method, path)
        if rule is None:
            return None
        still = self.network.learn if rule.origin == "learn" else self.network.on_unknown == "ask"
        return rule if still else None

    def _judge(self, host: Host, port: int, protocol: str | None, method: str, path: str) -> Decision:
        if method:
            return self.rules.request(host, port, "https" if protocol == "tls" else "http", method, path)
        return self.rules.connect(host, port, protocol)  # type: ignore[arg-type]

    def tls_mode(self, flow: Flow, host: Host, port: int) -> str:
        """Whether TLS of a connection is opened (``inspect``) or not (``pass``)."""
        if self.network.learn and not self.rules.about(host, port):
            return "inspect"  # the narrowest policy names methods and paths
        answered = any(rule.inspect for rule in flow.answered if rule.covers(host))
        return "inspect" if answered else self.rules.tls_mode(host, port)

    # -- connections

    async def serve(self, flow: Flow) -> None:
        """Register the current task as the connection's. Use with :meth:`done`."""
        flow.task = asyncio.current_task()
        self.flows.add(flow)
        self.engine.connections[self.spec.project] += 1

    async def crowded(self, flow: Flow) -> str:
        """Whose connections are too many now; empty: nobody's."""
        spec = self.spec
        if len(self.flows) > self.network.connections:
            return "this sandbox"
        most = spec.limits.connections
        if spec.limits.shared and most is not None:
            return "" if await self.engine.shared(spec.project).enter(flow) else "this project"
        if spec.project and most is not None and self.engine.connections[spec.project] > most:
            return "this project"
        return ""

    def done(self, flow: Flow) -> None:
        """The connection is over."""
        if flow in self.flows:
            self.flows.discard(flow)
            self.engine.disconnected(self.spec.project)
            self.engine.unshared(flow)

    async def close(self) -> None:
        """End all connections. Idempotent."""
        self.closed = True
        self.engine.questions.forget(self)
        tasks = [flow.task for flow in self.flows if flow.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        await self.pool.close()


def _budget(values: dict[str, Any] | None) -> Budget | None:
    """A project's budget. What it may spend is in the unit of its rules' prices: it needs none of its own."""
    if values is None:
        return None
    most = values.get("maxSpend")
    values = {key: value for key, value in values.items() if key != "maxSpend" or values.get("price")}
    budget = policies.network_from_dict({"mode": "egress", "budget": values}).budget
    return budget if budget is None or most is None else replace(budget, max_spend=float(most))


__all__ = ["Door", "DoorSpec", "Flow", "Grant", "Refused", "Unreachable", "refused"]
