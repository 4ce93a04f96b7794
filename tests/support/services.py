"""A node process of a test's own, and orchestrators on it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from ringfence.control.core import Settings
from ringfence.control.principals import Principal
from ringfence.control.records import CreateSandbox
from ringfence.control.service import Control
from ringfence.model.policy import MIB, Isolation, Limits, Policy, Process, Resources
from ringfence.placement.local import LocalPlacement
from ringfence.store.opening import open_store

READY_TIME = 60.0
# Short, so that tests wait for little; long enough for a loaded machine.
QUICK = Settings(
    heartbeat=0.3, process_time=3.0, reconcile=0.3, due=0.1, lost_grace=1.0, retry_first=0.02, retry_most=0.5
)


SCOPES = ("read", "run", "admin")
ALICE = Principal("local", "default", "alice", "key-1", SCOPES)
MALLORY = Principal("local", "other", "mallory", "key-2", SCOPES)


class NodeProcess:
    """``ringfence node`` with a state root and a socket of its own."""

    def __init__(self, home: Path, service: str = "test") -> None:
        self.home = home
        self.service = service
        self.socket = home / "n.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "ringfence", "node", "--service", self.service]
        command += ["--socket", str(self.socket), "--state", str(self.home), "--ready-fd", str(writer)]
        log = open(self.home / "node.log", "ab")  # noqa: SIM115 - closed below
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[writer],
                env=os.environ | {"RINGFENCE_HOME": str(self.home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(writer)
            log.close()
        try:
            ready, _, _ = select.select([reader], [], [], READY_TIME)
            said = os.read(reader, 16) if ready else b""
        finally:
            os.close(reader)
        if said != b"ready\n":
            self.kill()
            raise RuntimeError(f"the node did not start: {(self.home / 'node.log').read_text()[-2000:]}")

    def kill(self) -> None:
        """As a crash: SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """As an administrator: SIGTERM. Sandboxes live on."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(READY_TIME)
            self.process = None


@contextmanager
def node_process(home: Path) -> Iterator[NodeProcess]:
    """One that ends with the test; what its sandboxes left has to be removed by the test."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    node = NodeProcess(home)
    node.start()
    try:
        yield node
    finally:
        node.stop()


@asynccontextmanager
async def control_on(
    node: NodeProcess, store_url: str, *, owner: str = "api-1", settings: Settings = QUICK, **options: Any
) -> AsyncIterator[Control]:
    """An orchestrator in this process. Sandboxes live on when it is closed."""
    store = await open_store(store_url)
    placement = LocalPlacement(node.socket)
    try:
        async with Control(store, placement, owner_id=owner, settings=settings, **options) as control:
            yield control
    finally:
        await placement.close()
        await store.close()


async def clear(node: NodeProcess) -> None:
    """Destroy whatever sandboxes there are."""
    placement = LocalPlacement(node.socket)
    try:
        for placed in await placement.list():
            await placement.destroy(placed.id)
    finally:
        await placement.close()


def small(
    *, runtime: str = "jail", timeout: float = 600, idle: float | None = None, on_idle: str = "pause"
) -> Policy:
    """A policy of a small sandbox."""
    return (
        Policy()
        .with_wall(
            isolation=Isolation(runtime=runtime),
            process=Process(max_processes=64),
            resources=Resources(cpus=1, memory=128 * MIB, disk=32 * MIB),
        )
        .with_door(limits=Limits(timeout=timeout, idle=idle, on_idle=on_idle))
    )  # type: ignore[arg-type]


def asked(**changes: Any) -> CreateSandbox:
    """A request by what differs from a small jail."""
    policy = {key: changes.pop(key) for key in ("runtime", "timeout", "idle", "on_idle") if key in changes}
    return CreateSandbox(policy=changes.pop("policy", None) or small(**policy), **changes)
