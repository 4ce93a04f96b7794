"""The attacks behind an engine's wall. A container takes a second to come and go, so those that leave the
sandbox as it was share one, one after the other; the others have their own, as everywhere.
"""

from __future__ import annotations

import pytest

from ringfence.conformance.harness import request_for
from ringfence.conformance.plugin import LISTED
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from security.attacks import Attack
from security.stage import Stage
from security.tables import ATTACKS
from security.walls import attack_inside, caller, run_attack
from support.engines import NAMES

# Podman's container is the same, made by another program: what is left to show is that it has been made so.
# All are tried when it is chosen by name.
WITH_PODMAN = (
    "own-program-runs", "read-shadow", "write-usr", "masked-proc", "capabilities", "devices", "fork-bomb",
    "memory-bomb-anonymous", "disk-bomb", "agent-kill", "metadata-address", "namespace-unshare",
)  # fmt: skip


def alone(attack: Attack) -> bool:
    """Whether it needs limits or mounts of its own, or may end the agent."""
    return bool(attack.limits or attack.mounts or "agent" in attack.judge)


def tried(engine: str, attack: Attack, config: pytest.Config) -> bool:
    """Whether this attack is tried behind this engine's wall."""
    named = engine in config.getoption("--ringfence-runtime")
    return named or engine == "docker" or attack.name in WITH_PODMAN


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``engine`` and ``name``: the attacks that have a sandbox of their own."""
    if {"engine", "name"} <= set(metafunc.fixturenames):
        pairs = [
            (engine, name)
            for engine in NAMES
            for name, attack in ATTACKS.items()
            if alone(attack) and tried(engine, attack, metafunc.config)
        ]
        metafunc.parametrize(("engine", "name"), pairs)


def chosen(request: pytest.FixtureRequest, engine: str) -> None:
    """Skip what --ringfence-runtime leaves out."""
    names = request.config.getoption("--ringfence-runtime")
    if names and engine not in names:
        pytest.skip(f"{LISTED}another runtime was chosen")


pytestmark = pytest.mark.skipif(caller() != "root", reason="the engines of these tests are root's")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", NAMES)
async def test_attacks_in_one_sandbox(
    engine: str, node: Node, stage: Stage, request: pytest.FixtureRequest
) -> None:
    chosen(request, engine)
    request.getfixturevalue(f"{engine}_engine")
    wrong: list[str] = []
    sandbox: NodeSandbox | None = None
    try:
        for attack in ATTACKS.values():
            if alone(attack) or not tried(engine, attack, request.config):
                continue
            if sandbox is None:
                sandbox = await node.create(request_for(engine))
            outcome, intact = await attack_inside(sandbox, attack, stage)
            if outcome != attack.expect[f"{engine}/root"]:
                wrong.append(f"{attack.name}: {outcome}, not {attack.expect[f'{engine}/root']}")
            if not intact:
                await sandbox.destroy()
                sandbox = None
    finally:
        if sandbox is not None:
            await sandbox.destroy()
    assert not wrong, "\n".join(wrong)


async def test_attack_with_a_sandbox_of_its_own(
    engine: str, name: str, node: Node, stage: Stage, request: pytest.FixtureRequest
) -> None:
    attack = ATTACKS[name]
    chosen(request, engine)
    if any("{suid" in word for pair in attack.mounts for word in pair) and not stage.suid:
        pytest.skip(f"{LISTED}only root can make a set-user-ID program to try")
    request.getfixturevalue(f"{engine}_engine")
    assert await run_attack(node, engine, attack, stage) == attack.expect[f"{engine}/root"]
