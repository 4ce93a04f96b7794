"""The door of a sandbox whose command we run: a proxy process of our own, for as long as we are there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.cli.output import note, printable
from ringfence.model.errors import GuestRefused, NodeUnavailable, RuntimeUnavailable
from ringfence.model.policy_network import check_free, variables

if TYPE_CHECKING:
    from ringfence.egress.client import Doors
    from ringfence.model.sandbox import SandboxRequest

_NEEDED = ("h2", "cryptography", "idna")  # of the extra `egress`
_MOST_AUTHORITIES = 512 * 1024  # bytes
_MOST_TOLD = 20  # refusals that are printed; the log has them all


def check() -> None:
    """The proxy can be started here.

    Raises:
        RuntimeUnavailable: the extra packages are missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeUnavailable(
            f"network mode egress needs Python packages that are not installed: {', '.join(missing)}",
            hint="pip install 'ringfence[egress]'",
        )


def _authorities() -> bytes:
    """Those that the proxy was told to trust in place of the system's: programs inside need them too."""
    path = os.environ.get("SSL_CERT_FILE")
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_AUTHORITIES)
    except OSError:
        return b""


async def with_placeholders(node: Any, request: SandboxRequest) -> SandboxRequest:
    """The request with the placeholders that its rules give to programs, in their variables.

    Raises:
        InvalidRequest: the caller sets such a variable, too: what it holds might be the secret itself.
    """
    wanted = variables(request.policy.door.network)
    if not wanted:
        return request
    from ringfence.egress.client import prepare
    from ringfence.egress.keys import MasterKey
    from ringfence.egress.secrets import SecretStore
    from ringfence.model.ids import new_id

    check_free(wanted, request.env)
    folder = node.state.path / "egress"
    await asyncio.to_thread(prepare, folder)
    store, name = SecretStore(folder, MasterKey(folder)), request.id or new_id("sb")
    found = {variable: await store.placeholder(name, secret) for variable, secret in wanted.items()}
    return replace(request, id=name, env={**request.env, **found})


class RunDoor:
    """An open door. Whoever opened it closes it, before the sandbox goes."""

    def __init__(self, doors: Doors, sandbox: str, *, quiet: bool) -> None:
        self._doors = doors
        self._sandbox = sandbox
        self._told: set[str] = set()
        self._telling = None if quiet else asyncio.ensure_future(self._tell())

    @classmethod
    async def open(cls, node: Any, sandbox: Any, *, quiet: bool) -> RunDoor | None:
        """Open it, and write the bundle of authorities inside. ``None``: another process has the door.

        Raises:
            RuntimeUnavailable: see :func:`check`.
            NodeUnavailable: the proxy does not start.
            PolicyError: the proxy does not understand the rules.
            GuestRefused, LinkLost: the sandbox's agent can't serve the door.
        """
        check()
        from ringfence.egress.client import Doors, DoorSpec
        from ringfence.guest import doors as inside
        from ringfence.model.policies import network_to_dict

        request = sandbox.request
        doors = await Doors.start(node.state.path / "egress")
        try:
            spec = DoorSpec(
                sandbox.id,
                task=request.owner.task or "",
                network=network_to_dict(request.policy.door.network),
                trust=request.policy.trust,
            )
            await doors.open(spec, lambda: sandbox.runtime.connect(sandbox.handle))
            own = await doors.ca(sandbox.id)  # for connections that are inspected
            await inside.place_bundle(await sandbox.link(), _authorities() + own)
        except GuestRefused as error:
            await doors.stop()
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        except BaseException:
            await doors.stop()
            raise
        return cls(doors, sandbox.id, quiet=quiet)

    async def _tell(self) -> None:
        """Say what was refused, once each: whoever runs a command wonders why it fails."""
        async for event in self._doors.events():
            if event.get("event") != "egress.denied" or len(self._told) >= _MOST_TOLD:
                continue
            where = f"{event.get('host', '?')}:{event.get('port', '?')}"
            line = f"network: {where} refused: {event.get('reason', '')}"
            if line not in self._told:
                self._told.add(line)
                note(printable(line))

    async def close(self, *, keep: bool = False) -> None:
        """Close it, and end the proxy. Idempotent. ``keep``: the sandbox lives on; what it used counts."""
        with contextlib.suppress(NodeUnavailable):
            await self._doors.close(self._sandbox, keep=keep)
        await self._doors.stop()
        if self._telling is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._telling
