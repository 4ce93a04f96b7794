"""What all doors of one proxy process share: the way out, the log, the counters, the questions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.egress.authority import Authorities
from ringfence.egress.keys import MasterKey
from ringfence.egress.log import ConnectionLog
from ringfence.egress.meter import Meter
from ringfence.egress.names import Host
from ringfence.egress.policy import Decision
from ringfence.egress.resolver import CachingResolver, DnsResolver, Resolver, SystemResolver
from ringfence.egress.throttle import Bucket
from ringfence.egress.upstream import Upstreams
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    from ringfence.egress.door import Door, Flow


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
        self.meter = Meter()
        self.log = ConnectionLog(folder / "connections.jsonl")
        self.emit: Callable[[dict[str, Any]], None] = emit or (lambda event: None)
        self._buckets: dict[tuple[str, str], Bucket] = {}

    async def close(self) -> None:
        """Let go of the files."""
        self.log.close()

    def bucket_out(self, door: Door) -> Bucket | None:
        """What holds back bytes that leave."""
        return self._bucket(door, "out")

    def bucket_in(self, door: Door) -> Bucket | None:
        """What holds back bytes that come."""
        return self._bucket(door, "in")

    def _bucket(self, door: Door, way: str) -> Bucket | None:
        if door.spec.bandwidth is None:
            return None
        key = (door.spec.sandbox, way)
        found = self._buckets.get(key)
        if found is None or found.rate != door.spec.bandwidth / 8:
            found = self._buckets[key] = Bucket(door.spec.bandwidth / 8)
        return found

    def forget(self, door: Door) -> None:
        """A door has closed."""
        for way in ("out", "in"):
            self._buckets.pop((door.spec.sandbox, way), None)

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
        """What no rule allows: denied, or asked about."""
        return decision

    def record(self, door: Door, flow: Flow, decision: Decision, more: dict[str, Any]) -> None:
        """One line of the connection log, and an event if something was denied."""
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
            "reported": None if flow.peer is None else {"port": flow.peer.port, "uid": flow.peer.uid},
        }
        line |= decision.as_dict() | more
        line = {key: value for key, value in line.items() if value is not None and value != ""}
        self.log.write(line)
        if not decision.allowed:
            self.emit({"event": "egress.denied", **line})


def _dns(text: str) -> DnsResolver:
    if text.startswith("["):
        address, _, port = text[1:].partition("]:")
        return DnsResolver(address.rstrip("]"), int(port or 53))
    address, colon, port = text.partition(":")
    return DnsResolver(address, int(port)) if colon and ":" not in port else DnsResolver(text)
