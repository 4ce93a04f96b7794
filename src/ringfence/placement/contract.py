"""The placement contract: start, find, reach and end sandboxes wherever they run.

Everything is idempotent by the sandbox's id, because whoever asks may be killed at any moment and ask again:
starting an id that runs returns it, ending one that is gone succeeds. What *exists* is the placement's to say
(:meth:`Placement.list`), who owns it is the store's. Nothing here says how many machines there are.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from ringfence.model.values import dataclass


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A volume (by its id) attached at a path inside, as part of the wall."""

    volume: str
    path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class PlacedSpec:
    """One sandbox, please. All plain, JSON-able values.

    ``policy`` is ``Policy.to_dict()``; ``owner`` the fields of ``model.sandbox.Owner``. ``snapshot``: start
    from this saved sandbox instead of the template. ``deadline``: seconds since the epoch. ``hold``: what the
    template starts waits for :meth:`Placement.bring_up`, so that a door is open before.
    """

    id: str
    policy: Mapping[str, Any]
    template: str = "host"
    owner: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[VolumeMount, ...] = ()
    snapshot: str = ""
    secrets: bool = False
    deadline: float | None = None
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """A sandbox that exists. ``state``: running, paused or ended; ``address`` is opaque, of the placement.

    ``end``: when it ended, ``{"cause", "exit_code", "detail", "reported"}``. ``boundary``: as measured.
    ``held``: what its template starts waits for :meth:`Placement.bring_up`.
    """

    id: str
    state: str
    runtime: str
    node: str
    started_at: float
    deadline: float
    template: str = "host"  # digest
    address: str = ""
    end: Mapping[str, Any] | None = None
    boundary: Mapping[str, Any] | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    held: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """What all machines have, and what runs: CPUs, bytes, sandboxes."""

    cpus: float
    memory: int
    disk: int
    sandboxes: int


@dataclass(frozen=True, slots=True)
class Happened:
    """Something that the placement saw by itself. ``name``: ended (``data["end"]``), paused, resumed; of a
    node, with an empty ``id``: lost, back (first when listening begins: look at everything from then on).
    """

    name: str
    id: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Placement(Protocol):
    """Every call may raise, besides what it names: NodeUnavailable (try again), NotFound (no such id)."""

    name: str

    async def close(self) -> None:
        """Let go; sandboxes live on. Idempotent."""

    async def capacity(self) -> Capacity:
        """What there is."""

    async def runtimes(self) -> Sequence[Mapping[str, Any]]:
        """Every runtime: name, level, boundary, health, version, reason, remedy, capabilities."""

    async def start(self, spec: PlacedSpec) -> Placed:
        """Start a sandbox and return when it runs; the same id again returns what runs, or how it ended.

        Raises:
            What ``Node.create`` raises, with the same codes. Nothing is left behind then.
        """

    async def list(self) -> Sequence[Placed]:
        """Everything that exists here and belongs to this service, ended ones until destroyed."""

    async def get(self, id: str) -> Placed:
        """One of them. Raises NotFound."""

    async def measure(self, id: str) -> Mapping[str, Any]:
        """The effective boundary, measured now (``EffectiveBoundary.as_dict()``)."""

    async def usage(self, id: str) -> Mapping[str, Any]:
        """``Usage`` as a mapping, and ``processes``, ``memory``, ``disk`` where the host can measure them."""

    async def connect(self, id: str) -> socket.socket:
        """A new, independent, non-blocking byte stream to the guest agent; the caller's own from now on.

        This hands out the right to talk to this one sandbox: whoever calls needs no other privilege. Streams
        are then spoken end to end by ``guest.GuestLink.open``; nothing in between copies bytes.
        """

    async def spent(self, id: str, output: int) -> int:
        """Tell that this many bytes of output went out; returns how many may follow before the end."""

    async def judge(self, id: str, exit_code: int, *, sent: bool = False) -> Mapping[str, Any]:
        """Why a command that the guest says ended with this code (128 + signal, as a shell shows it) did:
        ``End`` as a mapping, measured by the host. ``sent``: the caller has sent it that signal.
        """

    async def bind(
        self,
        id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes] | None = None,
        owner: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        policy: Mapping[str, Any] | None = None,
        deadline: float | None = None,
    ) -> Placed:
        """Bind or change the door: what is ``None`` stays as it is.

        ``env``: of later commands, over what the start gave (a second one replaces the first). ``labels``,
        ``owner``: all of them. ``policy`` must have the wall and the network mode that stand
        (InvalidRequest); its timeout changes no deadline: say ``deadline``.
        """

    async def pause(self, id: str) -> None:
        """Stop everything inside. Idempotent. Raises Unsupported."""

    async def resume(self, id: str) -> None:
        """Let it go on. Idempotent."""

    async def snapshot(self, id: str, name: str, kind: str | None = None) -> Mapping[str, Any]:
        """Save it as ``name``; returns the snapshot's facts. Idempotent by name."""

    async def remove_snapshot(self, name: str) -> None:
        """Remove a saved sandbox. Idempotent. One that is being made meanwhile is gone afterwards, too."""

    async def reset(self, id: str, *, hold: bool = False) -> Placed:
        """Begin anew from its template, under its id. ``hold``: as in :class:`PlacedSpec`."""

    async def bring_up(self, id: str) -> Placed:
        """Start what waits in a sandbox that is ``held``. Idempotent. Raises StartFailed."""

    async def changes(self, id: str) -> Sequence[Mapping[str, Any]]:
        """Files added, modified, deleted (``FileChange`` as mappings). Raises Unsupported."""

    async def destroy(self, id: str, *, grace: float = 0.0) -> Mapping[str, Any]:
        """End it and remove all that is its own; returns the end as known. Succeeds if there is none."""

    def happened(self) -> AsyncIterator[Happened]:
        """What happens from now on, until the caller stops. May miss some: :meth:`list` is the truth."""
        ...

    # -- templates and volumes, where sandboxes can reach them

    async def templates(self) -> Sequence[Mapping[str, Any]]:
        """Every template: name, digest, size, source, made_at."""

    async def add_template(self, source: str, name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Import or build one (sources of ``ringfence template add|build``); returns its facts."""

    async def remove_template(self, name: str) -> None:
        """Forget a name. Idempotent."""

    async def make_volume(self, id: str, quota: int) -> None:
        """Make a volume of at most this many bytes. Idempotent."""

    async def remove_volume(self, id: str) -> None:
        """Remove one. Idempotent. Raises WrongState: a sandbox has it, or its files are on their way."""

    async def volume_size(self, id: str) -> int:
        """Bytes that it takes."""

    def export_volume(self, id: str) -> AsyncIterator[bytes]:
        """Its files as a tar stream."""
        ...

    async def import_volume(self, id: str, tar: AsyncIterator[bytes] | Path) -> None:
        """Unpack a hostile tar stream into it; all or nothing is not promised, escape is refused.

        Raises:
            GuestRefused: ENOSPC, it does not fit. InvalidRequest, ProtocolViolation: no tar to be taken.
        """
