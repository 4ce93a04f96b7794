"""Every attack of the table, behind every wall, against the committed outcome."""

from __future__ import annotations

import pytest

from ringfence.conformance.plugin import LISTED
from ringfence.node.service import Node
from security.attacks import WALLS
from security.stage import Stage
from security.tables import ATTACKS, zero
from security.walls import caller, in_one_sandbox, run_attack, shares


async def test_attack(name: str, wall: str, node: Node, stage: Stage, request: pytest.FixtureRequest) -> None:
    attack = ATTACKS[name]
    reason = attack.deviation(f"{wall}/{caller()}")
    if reason and node.cgroups.enforced()["memory"] == "polled":  # where a cgroup was delegated it must hold
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason))
    if any("{suid" in word for pair in attack.mounts for word in pair) and not stage.suid:
        pytest.skip(f"{LISTED}only root can make a set-user-ID program to try")
    outcome = await run_attack(node, wall, attack, stage)
    assert outcome == attack.expect[f"{wall}/{caller()}"]


@pytest.mark.timeout(600)
async def test_attacks_in_one_sandbox(wall: str, node: Node, stage: Stage) -> None:
    attacks = [attack for attack in ATTACKS.values() if shares(wall, attack)]
    wrong = await in_one_sandbox(node, wall, stage, attacks)
    assert not wrong, "\n".join(wrong)
    assert len(attacks) > 100


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if zero.by_root(attack)])
async def test_attack_by_root_of_the_sandbox(name: str, node: Node, stage: Stage) -> None:
    outcome = await run_attack(node, "jail", ATTACKS[name], stage, zero=True)
    assert outcome == zero.outcome(ATTACKS[name], f"jail/{caller()}")


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.fake])
async def test_control_behind_the_fake_wall(name: str, node: Node, stage: Stage) -> None:
    """The same path, and a wall that hides nothing: the attack must succeed."""
    assert await run_attack(node, "fake", ATTACKS[name], stage) == ATTACKS[name].fake


def test_the_table_is_complete() -> None:
    for attack in ATTACKS.values():
        assert set(attack.expect) == set(WALLS), attack.name
        if "succeeded" in attack.expect.values():
            assert attack.note, f"{attack.name}: a success needs a note that says why it is no hole"
