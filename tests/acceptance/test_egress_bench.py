"""``ringfence bench --egress``: a real jail, agent and proxy; that it measures, not what."""

from __future__ import annotations

import os
import shutil
from typing import Any

from support.commands import Ringfence

PROMISES = {
    "egress: what passing adds, p50": "ms",
    "egress: what inspection adds, p50": "ms",
    "egress: inspected, 10 at once": "1/s",
    "egress: bandwidth limit is off by": "%",
}


def test_the_door_is_measured_beside_socat_and_none(ringfence: Ringfence) -> None:
    found: Any = ringfence.json_any("bench", "--egress", "--quick", "--json")
    promises = {one["what"]: one for one in found["promises"]}
    for what, unit in PROMISES.items():
        assert promises[what]["unit"] == unit
    assert promises["egress: inspected, 10 at once"]["measured"] > 0
    figures = {one["name"]: one for one in found["figures"]}
    for name in ("HTTP request", "egress: the same, passed", "HTTPS request", "egress: the same, inspected"):
        assert figures[name]["n"] >= 100
        assert 0 < figures[name]["p50"] <= figures[name]["p95"] <= figures[name]["p99"]
    assert figures["egress: CPU of proxy and agent for 1 GiB"]["value"] > 0
    assert found["boundaries"][0]["runtime"] == "jail"
    if shutil.which("socat") is None:
        assert "socat" in found["absent"]
    else:
        assert figures["socat: CPU for 1 GiB"]["value"] > 0
        assert promises["egress: pass-through beside socat"]["measured"] > 0
    if os.geteuid() == 0:
        assert 0 < promises["egress: memory of the proxy with 20 idle doors"]["measured"] < 1000
