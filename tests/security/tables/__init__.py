"""The committed table: attack x wall x expected outcome, each with its positive control.

Another outcome, a better one too, fails the suite until the table is changed on purpose. ``succeeded`` may be
expected only with a note that says why it is no hole.
"""

from __future__ import annotations

from dataclasses import replace

from security.attacks import Attack
from security.tables.bombs import BOMBS
from security.tables.engines import ENGINES
from security.tables.files import FILES
from security.tables.gvisor import GVISOR
from security.tables.kernel import KERNEL
from security.tables.networks import NETWORKS
from security.tables.processes import PROCESSES

ATTACKS: dict[str, Attack] = {}
for _attack in [*FILES, *PROCESSES, *KERNEL, *NETWORKS, *BOMBS]:
    assert _attack.name not in ATTACKS, _attack.name
    ATTACKS[_attack.name] = _attack
for _walls, _table in (("gvisor",), GVISOR), (("docker", "podman"), ENGINES):
    for _name, (_outcome, _note) in _table.items():
        _attack = ATTACKS[_name]
        _said = f"{' and '.join(_walls)}: {_note}" if _note else ""
        _notes = "; ".join(part for part in (_attack.note, _said) if part)
        _answers = dict.fromkeys((f"{wall}/root" for wall in _walls), _outcome)
        ATTACKS[_name] = replace(_attack, expect={**_attack.expect, **_answers}, note=_notes)
