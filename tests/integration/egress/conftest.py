"""One made-up internet for all, and a state root that a workload's host user can pass through."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.node.service import Node
from support.internet import Internet


@pytest.fixture(scope="session")
def internet() -> Iterator[Internet]:
    """The made-up internet."""
    if os.geteuid() != 0:
        pytest.skip("the made-up internet needs root")
    made = Internet()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def state() -> Iterator[Path]:
    """A state root."""
    with tempfile.TemporaryDirectory(prefix="rf-egress-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
async def node(state: Path) -> AsyncIterator[Node]:
    """A node of the test's own."""
    made = await Node.open(state)
    try:
        yield made
    finally:
        await made.close()
