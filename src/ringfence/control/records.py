"""What a sandbox is to the service: one row of the store, and one request for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ringfence.model.policy import Policy
from ringfence.model.states import FINAL, State
from ringfence.model.values import dataclass
from ringfence.placement.contract import VolumeMount
from ringfence.store.contract import Row

KIND = "sandbox"
MOST_LINEAGE = 64  # ancestors whose placeholders a copy may use
# In the order of a life. Members of pools (WARMING, WARM) are nobody's and shown to nobody.
ALIVE = (
    State.PENDING,
    State.STARTING,
    State.RUNNING,
    State.PAUSING,
    State.PAUSED,
    State.RESUMING,
    State.STOPPING,
)
VISIBLE = (*ALIVE, State.STOPPED, State.FAILED)
MEMBERS = (State.WARMING, State.WARM)
# States in which somebody is doing something; the row's ``actor`` is who.
MOVING = frozenset(
    {State.STARTING, State.PAUSING, State.RESUMING, State.STOPPING, State.PENDING, State.WARMING}
)


@dataclass(frozen=True, slots=True)
class CreateSandbox:
    """One sandbox of the service, please.

    ``snapshot``: id of a saved sandbox to start from. ``pool``: name of the pool to take it from; without
    one, a pool that fits exactly is used if there is one. ``wait``: return when it runs; else as soon as it
    is accepted. ``secrets`` (files in ``/run/secrets``) and ``files`` (path to content) are bound before it
    counts as running and are never in the store. ``start_timeout``: seconds for waiting in a queue and for
    the start, all attempts. ``idempotency_key`` with ``digest``, of the whole request: the same key again
    gives the same sandbox. ``lineage``: the sandboxes that it is a copy of, nearest first, whose placeholders
    it may use; ``revoked``: those that it may not any more.
    """

    policy: Policy = field(default_factory=Policy)
    template: str = "host"
    snapshot: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    volumes: tuple[VolumeMount, ...] = ()
    pool: str = ""
    wait: bool = True
    start_timeout: float = 60.0
    idempotency_key: str = ""
    digest: str = ""
    agent: str | None = None
    parent_agent: str | None = None
    agent_class: str | None = None
    task: str | None = None
    lineage: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox as the store knows it. Times are seconds since the epoch, 0 for not yet.

    ``boundary`` is the wall as it was measured; ``capabilities`` those of its runtime; ``cause`` …
    ``reported`` tell of its end (``model.sandbox.End``), ``error`` of a start that failed (code, message,
    hint, details); ``killed_by`` names who asked for the end. ``pool`` is the id of the pool it came from.
    """

    id: str
    project: str
    state: State
    row: Row
    created: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    organisation: str = ""
    user: str = ""
    agent: str | None = None
    parent_agent: str | None = None
    agent_class: str | None = None
    task: str | None = None
    template: str = "host"
    digest: str = ""
    snapshot: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[VolumeMount, ...] = ()
    pool: str = ""
    placement: str = ""
    node: str = ""
    runtime: str = ""
    boundary: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    started: float = 0.0
    deadline: float = 0.0
    idle: float | None = None
    on_idle: str = "pause"
    active: float = 0.0
    attempts: int = 0
    ended: float = 0.0
    cause: str = ""
    exit_code: int | None = None
    detail: str = ""
    reported: bool = False
    killed_by: str = ""
    error: Mapping[str, Any] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        """Whether it has ended for good."""
        return self.state in FINAL

    @property
    def revision(self) -> int:
        """Of its row: grows with every change."""
        return self.row.revision

    @property
    def lineage(self) -> tuple[str, ...]:
        """The sandboxes that it is a copy of, nearest first."""
        return tuple(self.row.document.get("lineage", ()))

    @property
    def revoked(self) -> tuple[str, ...]:
        """The sandboxes, of its lineage or itself, whose placeholders are worth nothing in it."""
        return tuple(self.row.document.get("revoked", ()))

    @property
    def answers(self) -> tuple[str, ...]:
        """What somebody has allowed for good when its door asked (``egress.remembering``)."""
        return tuple(self.row.document.get("egress_answers", ()))

    @property
    def family(self) -> tuple[str, ...]:
        """What a copy of it descends from: itself and its lineage."""
        return (self.id, *self.lineage)[:MOST_LINEAGE]

    @property
    def document(self) -> Mapping[str, Any]:
        """Everything that the row holds besides its columns."""
        return self.row.document

    @classmethod
    def from_row(cls, row: Row) -> Sandbox:
        """The value of a row."""
        document = row.document
        return cls(
            id=row.id,
            project=row.project,
            state=State(row.state),
            row=row,
            created=row.created,
            labels=row.labels,
            volumes=tuple(VolumeMount(*each) for each in document.get("volumes", ())),
            **{name: document[name] for name in _PLAIN if name in document},
        )

    def as_dict(self) -> dict[str, Any]:
        """What its owner may see; JSON-able."""
        shown = {name: getattr(self, name) for name in _PLAIN}
        shown |= {name: dict(shown[name]) for name in _MAPPINGS}
        shown["volumes"] = [
            {"volume": each.volume, "path": each.path, "read_only": each.read_only} for each in self.volumes
        ]
        return {
            "id": self.id,
            "project": self.project,
            "state": self.state.value,
            "created": self.created,
            "labels": dict(self.labels),
            **shown,
        }


_PLAIN = (
    "organisation", "user", "agent", "parent_agent", "agent_class", "task", "template", "digest",
    "snapshot", "policy", "env", "pool", "placement", "node", "runtime", "boundary", "capabilities",
    "started", "deadline", "idle", "on_idle", "active", "attempts", "ended", "cause", "exit_code",
    "detail", "reported", "killed_by", "error",
)  # fmt: skip
_MAPPINGS = ("policy", "env", "boundary", "capabilities", "error")
