from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.control.service import Control
from support.services import NodeProcess, clear, control_on, node_process


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """A node for a module's tests; below a short path, as its socket needs."""
    home = Path(tempfile.mkdtemp(prefix="rf-ctl-"))
    try:
        with node_process(home) as running:
            yield running
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
async def control(node: NodeProcess, tmp_path: Path) -> AsyncIterator[Control]:
    """An orchestrator with an empty store; nothing is left of what it started."""
    async with control_on(node, str(tmp_path / "store.db")) as running:
        yield running
    await clear(node)
