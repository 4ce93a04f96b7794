"""The stage, a state root and the walls under attack."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.node.service import Node
from security.attacks import WALLS
from security.stage import Stage
from security.walls import caller

RUNTIMES = ("jail", "bubblewrap", "nsjail", "runc", "crun", "gvisor")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``wall``: the runtimes under attack, or those chosen with --ringfence-runtime."""
    if "wall" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--ringfence-runtime")
        walls = [name for name in RUNTIMES if f"{name}/{caller()}" in WALLS]
        metafunc.parametrize("wall", [name for name in walls if not chosen or name in chosen])


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Decoys, victim, listeners."""
    with Stage() as made:
        yield made


@pytest.fixture(scope="session")
def attack_state() -> Iterator[Path]:
    """A state root where a workload's host user can pass through but not list."""
    with tempfile.TemporaryDirectory(prefix="rf-attack-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
async def node(attack_state: Path) -> AsyncIterator[Node]:
    """A node of the test's own."""
    made = await Node.open(attack_state)
    try:
        yield made
    finally:
        await made.close()
