"""Every attack succeeds where nothing stops it; otherwise its denial would prove nothing."""

from __future__ import annotations

import os

import pytest

from ringfence.conformance.plugin import LISTED
from security.attacks import Control
from security.controls import run_control
from security.stage import Stage
from security.tables import ATTACKS


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attack_works_without_a_wall(name: str, stage: Stage) -> None:
    attack = ATTACKS[name]
    control = attack.control
    if not isinstance(control, Control):
        pytest.skip(f"{LISTED}{control.reason}")
    if control.root_only and os.geteuid() != 0:
        pytest.skip(f"{LISTED}{control.root_only}")
    if "{suid}" in (control.args or ()) and not stage.suid:
        pytest.skip(f"{LISTED}only root can make a set-user-ID program to try")
    outcome = run_control(attack, control, stage.things(), stage.folder)
    if control.absent and outcome == control.absent:
        pytest.skip(f"{LISTED}this kernel is built without it")
    assert outcome == control.outcome
    if "victim" in attack.judge and not control.namespaces:
        assert stage.victim_ends(), "the payload said that it killed the victim, which lives"
