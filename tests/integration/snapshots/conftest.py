"""A node of the test's own; afterwards no snapshot is half made, and nothing of it is left anywhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.node.service import Node
from ringfence.node.state import StateRoot
from ringfence.node.templates import HostTemplate
from support.leaks import Leaks


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
    """An open node."""
    made = await Node.open()
    try:
        yield made
    finally:
        await made.close()
    half_made = [name for name in os.listdir(made.state.snapshots) if name.startswith(".")]
    assert half_made in ([], [".lock"])
