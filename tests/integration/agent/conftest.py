"""A wall and a link for every test, and nothing left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wall import Client, Wall, agent_path, wall


@pytest.fixture
def walled() -> Iterator[Wall]:
    """A running agent."""
    if not agent_path().exists():
        pytest.fail("the agent is not built: run make -C native")
    with wall() as made:
        yield made
        assert made.alive(), "the agent has ended"


@pytest.fixture
def client(walled: Wall) -> Client:
    """A link to it."""
    return walled.client()
