"""The stage, a state root and the walls under attack."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.node.service import Node
from security.attacks import WALLS
from security.stage import Stage
from security.tables import ATTACKS
from security.walls import SHARED, caller, shares

RUNTIMES = ("jail", "bubblewrap", "nsjail", "runc", "crun", "gvisor")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``wall``: the runtimes under attack, or those chosen with --ringfence-runtime."""
    if "wall" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--ringfence-runtime")
        walls = [name for name in RUNTIMES if f"{name}/{caller()}" in WALLS]
        walls = [name for name in walls if not chosen or name in chosen]
        if metafunc.definition.originalname == "test_attack":
            pairs = [(wall, name) for wall in walls for name in ATTACKS if not shares(wall, ATTACKS[name])]
            metafunc.parametrize(("wall", "name"), pairs)
            return
        if metafunc.definition.originalname == "test_attacks_in_one_sandbox":
            walls = [name for name in walls if f"{name}/{caller()}" in SHARED]
        metafunc.parametrize("wall", walls)


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
