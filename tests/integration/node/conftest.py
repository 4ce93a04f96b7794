"""A node of the test's own; afterwards nothing of it may be left anywhere."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from support.leaks import Leaks
from support.nodes import ask, groups_of


@pytest.fixture
async def node(no_leaks: Leaks) -> AsyncIterator[Node]:
    """An open node. After its close: no cgroup, lease or name of it is left either."""
    made = await Node.open()
    try:
        yield made
    finally:
        await made.close()
    assert groups_of(made) == set()
    assert os.listdir(made.state.ranges) == []
    assert os.listdir(made.state.nodes) == []


@pytest.fixture
async def one(node: Node) -> Callable[..., Awaitable[NodeSandbox]]:
    """Makes a sandbox from :func:`ask`'s words."""

    async def make(**words: Any) -> NodeSandbox:
        return await node.create(ask(**words))

    return make
