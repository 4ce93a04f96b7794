"""The committed table: attack x wall x expected outcome, each with its positive control.

Another outcome, a better one too, fails the suite until the table is changed on purpose. ``succeeded`` may be
expected only with a note that says why it is no hole.
"""

from __future__ import annotations

from dataclasses import replace

from security.attacks import Attack
from security.tables.bombs import BOMBS
from security.tables.files import FILES
from security.tables.gvisor import GVISOR
from security.tables.kernel import KERNEL
from security.tables.networks import NETWORKS
from security.tables.processes import PROCESSES

ATTACKS: dict[str, Attack] = {}
for _attack in [*FILES, *PROCESSES, *KERNEL, *NETWORKS, *BOMBS]:
    assert _attack.name not in ATTACKS, _attack.name
    ATTACKS[_attack.name] = _attack
for _name, (_outcome, _note) in GVISOR.items():
    _attack = ATTACKS[_name]
    _notes = "; ".join(part for part in (_attack.note, f"gvisor: {_note}" if _note else "") if part)
    ATTACKS[_name] = replace(_attack, expect={**_attack.expect, "gvisor/root": _outcome}, note=_notes)
