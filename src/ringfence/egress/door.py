"""One sandbox's door: its rules, its connections, and whether something may pass.

A door knows its sandbox by the link that it was opened with. What the guest says about a connection (who made
it) goes into the log as ``reported`` and decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ringfence.egress.names import Address, BadHost, Host, parse_host
from ringfence.egress.policy import Decision, Rule, Rules, Trust
from ringfence.egress.upstream import Unreachable
from ringfence.model import policies
from ringfence.model.ids import new_id
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    from ringfence.egress.engine import Engine


@dataclass(frozen=True, slots=True)
class DoorSpec:
    """Whose door it is, and what may pass.

    ``network``: the network part of the policy, as in its file. ``lineage``: the sandboxes that this one was
    forked from, nearest first. ``bandwidth``: bits a second, each way. ``project_budget``: as a rule's
    budget, shared by all sandboxes of the project.
    """

    sandbox: str
    project: str = ""
    task: str = ""
    network: dict[str, Any] = field(default_factory=dict)
    trust: str | None = None
    lineage: tuple[str, ...] = ()
    bandwidth: int | None = None
    project_budget: dict[str, Any] | None = None


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
        self.task: asyncio.Task[None] | None = None
        self.cut: Decision | None = None  # why the policy's change ended it
        self.active = time.monotonic()

    def out(self, count: int) -> None:
        """Bytes have gone out."""
        self.sent += count
        self.active = time.monotonic()
        self.door.engine.meter.add(self.door, self.rule, sent=count)

    def back(self, count: int) -> None:
        """Bytes have come back."""
        self.received += count
        self.active = time.monotonic()
        self.door.engine.meter.add(self.door, self.rule, received=count)

    def record(self, decision: Decision, **more: Any) -> None:
        """Write one line of the connection log."""
        self.door.engine.record(self.door, self, decision, more)


class Door:
    """The door of one sandbox. Lives as long as the sandbox may use the network."""

    def __init__(self, engine: Engine, spec: DoorSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.answers: list[Rule] = []  # rules that somebody's answers have added
        self.network = policies.network_from_dict(spec.network)
        self.rules = self._rules()
        self.flows: set[Flow] = set()
        self.closed = False

    def _rules(self) -> Rules:
        trust: Trust = self.spec.trust if self.spec.trust in ("untrusted", "controlled", "trusted") else None  # type: ignore[assignment]
        return Rules(self.network, trust, self.answers)

    def update(self, network: dict[str, Any]) -> int:
        """Other rules from now on, also for what is open; returns how many connections ended by it.

        Raises:
            PolicyError: the rules are wrong; the old ones stay.
        """
        self.network = policies.network_from_dict(network)
        self.rules = self._rules()
        return self.judge_again()

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
        if flow.host is None or flow.rule is None or flow.rule.origin == "inference":
            return None
        if flow.method:
            scheme = "https" if flow.protocol == "tls" else "http"
            decision = self.rules.request(flow.host, flow.port, scheme, flow.method, flow.path)
        else:
            decision = self.rules.connect(flow.host, flow.port, flow.protocol or None)  # type: ignore[arg-type]
        if not decision.allowed or decision.rule is None:
            return decision
        if (
            flow.protocol == "tls"
            and not flow.method
            and self.rules.tls_mode(flow.host, flow.port) == "inspect"
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
        decision = self._judge(host, port, protocol, method, path)
        if not decision.allowed and decision.unknown:
            decision = await self.engine.unknown(self, flow, host, port, protocol, method, path, decision)
        if not decision.allowed or decision.rule is None:
            raise Refused(decision)
        rule = decision.rule
        if self.closed:
            raise refused("closed", "the door is closed")
        found = await self.engine.upstreams.resolve(host)
        good, decision = self.rules.address(rule, host, found)
        if not decision.allowed:
            raise Refused(decision)
        return Grant(host, port, rule, tuple(good))

    def _judge(self, host: Host, port: int, protocol: str | None, method: str, path: str) -> Decision:
        if method:
            return self.rules.request(host, port, "https" if protocol == "tls" else "http", method, path)
        return self.rules.connect(host, port, protocol)  # type: ignore[arg-type]

    # -- connections

    async def serve(self, flow: Flow) -> None:
        """Register the current task as the connection's. Use with :meth:`done`."""
        flow.task = asyncio.current_task()
        self.flows.add(flow)

    def done(self, flow: Flow) -> None:
        """The connection is over."""
        self.flows.discard(flow)

    async def close(self) -> None:
        """End all connections. Idempotent."""
        self.closed = True
        tasks = [flow.task for flow in self.flows if flow.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)


__all__ = ["Door", "DoorSpec", "Flow", "Grant", "Refused", "Unreachable", "refused"]
