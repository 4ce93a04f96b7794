"""Every attack of the table for WebAssembly against its committed outcome, and its positive control."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ringfence.conformance.plugin import LISTED
from ringfence.node.service import Node
from security.attacks import Control, NoControl
from security.controls import run_control
from security.stage import Stage
from security.tables.wasm import ATTACKS, Granted
from security.wasm_walls import Shared, run_wasm_attack

_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(attack_state: Path) -> AsyncIterator[Shared]:
    """A node whose interpreters are compiled, for all attacks: none may harm it."""
    async with await Node.open(attack_state) as node:
        runtime = await node.runtime("wasm")
        await runtime.driver.prepare(str(attack_state / "sandboxes" / "none"))  # type: ignore[attr-defined]
        made = Shared(node)
        try:
            yield made
        finally:
            await made.close()


@pytest.mark.parametrize("name", ATTACKS)
@_module_loop
async def test_attack(name: str, shared: Shared, stage: Stage) -> None:
    attack = ATTACKS[name]
    if attack.counted and shared.node.cgroups.enforced()["memory"] == "polled":
        pytest.skip(f"{LISTED}no cgroup counts its memory")
    outcome, serves = await run_wasm_attack(shared, attack, stage)
    assert outcome == attack.expect
    assert serves is not attack.ends, "the worker" + (" lives on" if serves else " is gone")


@pytest.mark.parametrize("name", [name for name in ATTACKS if not isinstance(ATTACKS[name].control, Granted)])
def test_control(name: str, stage: Stage) -> None:
    """The same program outside of WebAssembly."""
    attack = ATTACKS[name]
    control = attack.control
    if isinstance(control, NoControl):
        pytest.skip(f"{LISTED}{control.reason}")
    assert isinstance(control, Control)
    if control.root_only and os.geteuid() != 0:
        pytest.skip(f"{LISTED}{control.root_only}")
    outcome = run_control(attack.as_attack(), control, stage.things(), stage.folder)
    assert outcome == control.outcome


@pytest.mark.parametrize("name", [name for name in ATTACKS if isinstance(ATTACKS[name].control, Granted)])
@_module_loop
async def test_control_with_a_grant(name: str, shared: Shared, stage: Stage) -> None:
    """The same payload in WebAssembly, with what it lacked."""
    attack = ATTACKS[name]
    assert isinstance(attack.control, Granted)
    outcome, serves = await run_wasm_attack(shared, attack, stage, attack.control)
    assert outcome == attack.control.outcome
    assert serves


def test_the_table_is_complete() -> None:
    for attack in ATTACKS.values():
        assert attack.expect, attack.name
        assert attack.expect != "succeeded" or attack.note, attack.name
