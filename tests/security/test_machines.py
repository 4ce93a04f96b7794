"""Attacks behind a virtual machine's wall, one after the other in one machine.

A whole system (``qemu``) boots for minutes: ``--ringfence-runtime=qemu`` runs them there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ringfence.conformance import templates
from ringfence.conformance.harness import request_for
from ringfence.model.errors import RingfenceError
from ringfence.node.service import Node
from ringfence.runtimes.vm import kernel
from security.stage import Stage
from security.tables import ATTACKS
from security.tables.machines import MACHINES
from security.walls import attack_inside


@pytest.fixture(scope="module")
def machine_state(attack_state: Path) -> Path:
    """The state root of the attacks, with a template."""
    if os.geteuid() != 0 or shutil.which("qemu-system-x86_64") is None:
        pytest.skip("virtual machines need root and QEMU")
    try:
        kernel.find()
    except RingfenceError as error:
        pytest.skip(error.message)
    templates.ensure(attack_state)
    return attack_state


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``machine``: the runtimes under attack."""
    if "machine" in metafunc.fixturenames:
        names = metafunc.config.getoption("--ringfence-runtime") or ["qemu-microvm"]
        metafunc.parametrize("machine", [name for name in ("qemu-microvm", "qemu") if name in names])


@pytest.mark.timeout(1800)
async def test_attacks_in_one_machine(machine: str, machine_state: Path, stage: Stage) -> None:
    async with await Node.open(machine_state) as node:
        sandbox = await node.create(request_for(machine))
        outcomes = {}
        for name in MACHINES:
            outcomes[name], good = await attack_inside(sandbox, ATTACKS[name], stage)
            assert good, f"{name} ended the machine: {outcomes[name]}"
        await sandbox.destroy()
    assert outcomes == {name: outcome for name, (outcome, _) in MACHINES.items()}


def test_every_attack_has_its_control() -> None:
    assert set(MACHINES) <= set(ATTACKS)  # whose controls run in test_controls
