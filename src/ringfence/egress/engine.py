"""What all doors of one proxy process share: the way out, the log, the counters, the questions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ringfence.egress.asking import Questions
from ringfence.egress.authority import Authorities
from ringfence.egress.door import Door, Flow, Refused
from ringfence.egress.keys import MasterKey
from ringfence.egress.log import ConnectionLog
from ringfence.egress.meter import Meter, OverBudget
from ringfence.egress.names import Host
from ringfence.egress.policy import Decision, Rule
from ringfence.egress.recording import Records, Taking
from ringfence.egress.redaction import Redactors
from ringfence.egress.remembering import answer_rule
from ringfence.egress.resolver import CachingResolver, DnsResolver, Resolver, SystemResolver
from ringfence.egress.secrets import SecretStore
from ringfence.egress.sharing import Shared
from ringfence.egress.throttle import Bucket, Buckets, Takes
from ringfence.egress.upstream import Upstreams
from ringfence.model.values import dataclass

T = TypeVar("T")
_LIGHT = 64 * 1024  # bytes that may be looked through at once
_MOST_PATH = 2000  # letters of a path in the log
_UNSHARE = 5.0  # seconds for connections to end whose share is given up


@dataclass(frozen=True, slots=True)
class Settings:
    """How the process is set up.

    ``dns``: a server to ask (``address`` or ``address:port``) in place of the system's resolver. ``ca_file``:
    authorities that upstream certificates are verified with, in place of the system's. ``key_command``:
    prints the key of the secrets (32 bytes in base64), in place of a file.
    """

    dns: str | None = None
    ca_file: str | None = None
    key_command: tuple[str, ...] = ()


class Engine:
    """Made once in a process."""

    def __init__(
        self,
        folder: Path,
        settings: Settings | None = None,
        emit: Callable[[dict[str, Any]], None] | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        settings = settings or Settings()
        if resolver is None:
            resolver = _dns(settings.dns) if settings.dns else SystemResolver()
        self.folder = folder
        self.upstreams = Upstreams(CachingResolver(resolver), settings.ca_file)
        self.key = MasterKey(folder, settings.key_command)
        self.authorities = Authorities(folder, self.key)
        self.meter = Meter(folder / "usage")
        self.secrets = SecretStore(folder, self.key)
        self.redactors = Redactors()
        self.records = Records(folder, self.redactors)
        self.questions = Questions(self._emit)
        self.meter.emit = self._emit
        self.log = ConnectionLog(folder / "connections.jsonl")
        self.emit: Callable[[dict[str, Any]], None] = emit or (lambda event: None)
        self.meter.start()
        self._heavy = asyncio.Lock()
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self.connections: Counter[str] = Counter()  # open ones, by project
        self._shared: dict[str, Shared] = {}  # shares of limits that are other processes' too, by project

    def _emit(self, event: dict[str, Any]) -> None:
        self.emit(self.redactors.of(str(event.get("project", ""))).values(event))

    async def close(self) -> None:
        """Let go of the files."""
        for shared in self._shared.values():
            shared.close()
        self.meter.close()
        self.records.close()
        self.log.close()

    def alarm(self, door: Door, where: str, host: str) -> None:
        """A placeholder was on its way to where it does not belong: somebody is trying."""
        spec = door.spec
        event = {"event": "egress.alarm", "alarm": "placeholder", "sandbox": spec.sandbox, "where": where}
        self._emit(event | {"project": spec.project, "task": spec.task, "host": host})

    def begin(self, door: Door, rule: Rule) -> None:
        """Count a request, if there is budget for it.

        Raises:
            Refused: there is not.
        """
        try:
            self.meter.begin(door, rule)
        except OverBudget as error:
            raise Refused(error.decision, 429, error.retry) from None

    async def heavy(self, size: int, work: Callable[[], T]) -> T:
        """The result of ``work`` on so many bytes. Long ones come one after the other, and leave as much time
        as they took to everybody else: a loop that serves many must not be one sandbox's.
        """
        if size <= _LIGHT:
            return work()
        async with self._heavy:
            began = time.process_time()
            try:
                return work()
            finally:
                await asyncio.sleep(min(time.process_time() - began, 1.0))

    def shared(self, project: str) -> Shared:
        """This process's share of a project's limits; there is nothing in it until somebody gives some."""
        found = self._shared.get(project)
        if found is None:
            found = self._shared[project] = Shared()
        return found

    def shares(self) -> dict[str, Shared]:
        """All of them, by project."""
        return dict(self._shared)

    def unshared(self, flow: Flow) -> None:
        """A connection does not count towards its project's share any more."""
        if (found := self._shared.get(flow.door.spec.project)) is not None:
            found.leave(flow)

    async def unshare(self, project: str, *, cut: bool) -> dict[str, Any]:
        """Give a share up. ``cut``: what counts ends with it; else there is no limit any more.

        Returns the connections that have not ended (``open``), and the requests that were left (``level``).
        """
        found = self._shared.get(project)
        if found is None:
            return {"open": 0, "level": 0.0}
        told = found.shrink({})
        if not cut:
            found.flows.clear()
        found.cut()
        await found.emptied(_UNSHARE)
        if not found.flows and self._shared.get(project) is found:
            del self._shared[project]
            found.close()
        return {"open": len(found.flows), "level": told["back"]}

    def disconnected(self, project: str) -> None:
        """A connection of one of its sandboxes is over."""
        self.connections[project] -= 1
        if self.connections[project] <= 0:
            del self.connections[project]

    def bucket_out(self, door: Door) -> Takes | None:
        """What holds back bytes that leave."""
        return self._bucket(door, "out")

    def bucket_in(self, door: Door) -> Takes | None:
        """What holds back bytes that come."""
        return self._bucket(door, "in")

    def _bucket(self, door: Door, way: str) -> Takes | None:
        spec = door.spec
        if spec.bandwidth is None and spec.limits.bandwidth is None:
            return None
        found: list[Takes] = []
        for owner, bandwidth in ((f"sandbox/{spec.sandbox}", spec.bandwidth),
                                 (f"project/{spec.project}", spec.limits.bandwidth)):  # fmt: skip
            if bandwidth is None:
                continue
            if spec.limits.shared and owner.startswith("project/"):
                found.append(self.shared(spec.project).ways[way])
                continue
            bucket = self._buckets.get((owner, way))
            if bucket is None:
                bucket = self._buckets[owner, way] = Bucket(bandwidth / 8)
            elif bucket.rate != bandwidth / 8:
                bucket.change(bandwidth / 8)
            found.append(bucket)
        return found[0] if len(found) == 1 else Buckets(found)

    def closed(self, door: Door, *, forget: bool) -> None:
        """A door has closed; ``forget``: its sandbox is no more."""
        if left := door.share.left_out():
            spec = door.spec
            line = {"at": round(time.time(), 3), "sandbox": spec.sandbox, "project": spec.project}
            self.log.write(line | {"task": spec.task, "decision": "allowed", "code": "left_out"} | left)
        if forget:
            self.meter.forget(door.spec.sandbox)
        self.records.forget(door.spec.sandbox)
        for way in ("out", "in"):
            self._buckets.pop((f"sandbox/{door.spec.sandbox}", way), None)

    async def unknown(
        self,
        door: Door,
        flow: Flow,
        host: Host,
        port: int,
        protocol: str | None,
        method: str,
        path: str,
        decision: Decision,
    ) -> Decision:
        """What no rule allows: denied, asked about, or (while learning) allowed and written down."""
        if door.network.learn:
            rule = answer_rule(host, port, protocol, method, path, door.rules.trust, "learn")
            return Decision(True, "learn", rule)
        if door.network.on_unknown == "ask":
            return await self.questions.ask(door, host, port, protocol, method, path, decision)
        return decision

    def record(self, door: Door, flow: Flow, decision: Decision, more: dict[str, Any]) -> None:
        """One line of the connection log, and an event if something was denied."""
        if not decision.allowed and door.share.refusal():
            return
        line: dict[str, Any] = {
            "at": round(time.time(), 3),
            "id": flow.id,
            "sandbox": door.spec.sandbox,
            "project": door.spec.project,
            "task": door.spec.task,
            "via": flow.kind,
            "host": None if flow.host is None else str(flow.host),
            "port": flow.port or None,
            "address": flow.address or None,
            "protocol": flow.protocol or None,
            "decision": "allowed" if decision.allowed else "denied",
            "sent": flow.sent,
            "received": flow.received,
            "seconds": round(time.time() - flow.started, 4),
            "reported": None if flow.peer is None else flow.peer.told(),
        }
        line |= decision.as_dict() | more
        if decision.allowed and door.network.record == "none":
            return
        path = line.get("path")
        if isinstance(path, str) and len(path) > _MOST_PATH:
            line |= {"path": path[:_MOST_PATH], "path_cut": len(path)}
        line = {key: value for key, value in line.items() if value is not None and value != ""}
        # In most lines there is nothing to find; what JSON would have escaped is looked for in each value.
        redactor = self.redactors.of(door.spec.project)
        if door.patterns or redactor.finds("\0".join(map(str, line.values()))):
            line = redactor.values(line, door.patterns)
        if decision.allowed and door.share.passed((flow.host, flow.port), line):
            return
        self.log.write(line | door.share.left_out())
        if not decision.allowed:
            self.emit({"event": "egress.denied", **line})

    def keep(self, door: Door, flow: Flow, taking: Taking, decision: Decision) -> None:
        """Keep what was said."""
        about = {
            "at": round(flow.started, 3), "seconds": round(time.time() - flow.started, 4), "id": flow.id,
            "sandbox": door.spec.sandbox, "project": door.spec.project, "task": door.spec.task,
            "rule": None if decision.rule is None else decision.rule.label,
            "reported": None if flow.peer is None else flow.peer.told(),
        }  # fmt: skip
        self.records.write(door.spec.sandbox, about, taking, door.patterns)


def _dns(text: str) -> DnsResolver:
    if text.startswith("["):
        address, _, port = text[1:].partition("]:")
        return DnsResolver(address.rstrip("]"), int(port or 53))
    address, colon, port = text.partition(":")
    return DnsResolver(address, int(port)) if colon and ":" not in port else DnsResolver(text)
