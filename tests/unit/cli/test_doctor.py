"""The doctor's verdict and its tables, with findings made up."""

from __future__ import annotations

import json

import pytest

from ringfence.cli import doctor
from ringfence.cli.main import main
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.contract import Capabilities, Probe


def found(**changes):
    runtime = doctor._runtime(
        Probe(
            "jail",
            "degraded",
            Level.L2,
            Boundary.NAMESPACES,
            reason="no\x1b[2J cgroup",
            remedy="mount one",
            vulnerabilities=("CVE-1",),
        ),
        Capabilities(),
    )
    check = {"name": "landlock", "state": "degraded", "value": "absent", "meaning": "less", "remedy": "boot"}
    return {
        "ok": True,
        "version": "0",
        "python": "3",
        "user": 1000,
        "root": False,
        "state": "/s",
        "leftovers": "",
        "runtimes": [runtime],
        "programs": [],
        "rootless_losses": ["limits are polled"],
        "host": [check],
    } | changes


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_anything_works(ok, code, monkeypatch, capsys):
    async def examine():
        return found(ok=ok)

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert ("will refuse to run anything" in shown) == (not ok)
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is ok


def test_reasons_remedies_and_holes_are_shown_and_made_harmless(monkeypatch, capsys):
    doctor._print(found(leftovers="a folder"))
    shown = capsys.readouterr().out
    for text in ("degraded", "CVE-1", "jail: mount one", "landlock: boot", "limits are polled", "a folder"):
        assert text in shown
    assert "\x1b" not in shown


def test_a_runtime_works_if_it_is_healthy_or_degraded():
    for health, works in (("healthy", True), ("degraded", True), ("unavailable", False)):
        probe = Probe("x", health, Level.L2, Boundary.NAMESPACES)
        assert doctor._runtime(probe, None)["works"] is works
