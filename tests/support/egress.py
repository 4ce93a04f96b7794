"""Sandboxes with an open door into the made-up internet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.egress.client import Doors, DoorSpec
from ringfence.guest import doors as inside
from ringfence.model.policies import network_from_dict
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from support.internet import Internet


@contextlib.asynccontextmanager
async def doors_into(internet: Internet, folder: Path) -> AsyncIterator[Doors]:
    """A proxy process that sees the made-up internet and trusts its authority."""
    with internet.entered():
        doors = await Doors.start(folder, ca_file=str(internet.folder / "ca.pem"))
    try:
        yield doors
    finally:
        await doors.stop()


def with_network(request: SandboxRequest, network: dict[str, Any]) -> SandboxRequest:
    """The request with this network part."""
    return replace(request, policy=request.policy.with_door(network=network_from_dict(network)))


async def open_door(
    doors: Doors, sandbox: NodeSandbox, network: dict[str, Any], internet: Internet, **more: Any
) -> None:
    """Open a sandbox's door; programs inside trust the made-up internet's authority."""
    spec = DoorSpec(sandbox.id, network=network, **more)
    await doors.open(spec, lambda: sandbox.runtime.connect(sandbox.handle))
    own = await doors.ca(sandbox.id)  # of connections that are inspected
    await inside.place_bundle(await sandbox.link(), internet.ca + own)


@contextlib.asynccontextmanager
async def connected(
    node: Node,
    doors: Doors,
    internet: Internet,
    request: SandboxRequest,
    network: dict[str, Any],
    **more: Any,
) -> AsyncIterator[NodeSandbox]:
    """A sandbox with an open door."""
    sandbox = await node.create(with_network(request, network))
    try:
        await open_door(doors, sandbox, network, internet, **more)
        yield sandbox
    finally:
        await doors.close(sandbox.id)
        await sandbox.destroy()
