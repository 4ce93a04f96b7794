"""A node of the test's own; afterwards nothing of it may be left anywhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.node.state import StateRoot
from ringfence.node.templates import HostTemplate
from support.leaks import Leaks
from support.nodes import ask, groups_of


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host template, made once: it takes a second."""
    state = StateRoot.open(tmp_path_factory.mktemp("template") / "state")
    for user in (1000, 0):
        HostTemplate(state).skeleton(user)
    state.close()
    return state.templates


@pytest.fixture(autouse=True)
def seeded(no_leaks: Leaks, template: Path) -> None:
    """Every test's state root begins with the template."""
    subprocess.run(["cp", "-al", str(template), f"{no_leaks.home}/templates"], check=True)


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
