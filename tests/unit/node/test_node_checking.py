"""The host's checks: every known obstacle is recognised and has a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.node import checking
from ringfence.node.checking import DEGRADED, GOOD, MISSING, vulnerabilities

STATES = {GOOD, DEGRADED, MISSING}


def test_this_host() -> None:
    checks = checking.host()
    names = [check.name for check in checks]
    assert len(set(names)) == len(names) == 11
    for check in checks:
        assert check.state in STATES
        assert check.value
        if check.state == MISSING:
            assert check.meaning
            assert check.remedy


@pytest.mark.parametrize(
    ("program", "version", "expected"),
    [
        ("runc", "1.1.5+ds1", 6),
        ("runc", "1.1.11", 6),
        ("runc", "1.1.12", 5),
        ("runc", "1.2.7", 4),
        ("runc", "1.2.8", 1),
        ("runc", "1.3.2", 4),
        ("runc", "1.3.3", 1),
        ("runc", "1.3.6", 0),
        ("runc", "1.4.2", 1),
        ("runc", "1.4.3", 0),
        ("runc", "2.0", 0),
        ("firecracker", "1.12.1", 0),
        ("firecracker", "1.13.0", 1),
        ("firecracker", "1.14.3", 1),
        ("firecracker", "1.14.4", 0),
        ("firecracker", "1.15.0", 1),
        ("firecracker", "1.15.1", 0),
        ("jailer", "1.13.1", 1),
        ("jailer", "1.13.2", 0),
        ("jailer", "1.14.0", 1),
        ("jailer", "1.14.1", 0),
        ("bwrap", "0.8.0", 0),
        ("runc", "", 0),
        ("runc", "unknown", 0),
    ],
)
def test_known_holes(program: str, version: str, expected: int) -> None:
    assert len(vulnerabilities(program, version)) == expected


@pytest.mark.parametrize(
    ("switches", "state", "words"),
    [
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, MISSING, "AppArmor"),
        ({"kernel/unprivileged_userns_clone": "0"}, MISSING, "unprivileged_userns_clone"),
        ({"user/max_user_namespaces": "0"}, MISSING, "max_user_namespaces"),
    ],
)
def test_closed_user_namespaces_are_explained(
    monkeypatch: pytest.MonkeyPatch, switches: dict[str, str], state: str, words: str
) -> None:
    monkeypatch.setattr(checking, "_sysctl", switches.get)
    monkeypatch.setattr(checking, "_try_in_child", lambda _: 1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check = checking.user_namespaces()
    assert check.state == state
    assert words in check.meaning
    assert "sysctl -w" in check.remedy


def test_user_namespaces_that_just_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_sysctl", lambda _: None)
    monkeypatch.setattr(checking, "_try_in_child", lambda _: 1)
    check = checking.user_namespaces()
    assert (check.state, check.value) == (MISSING, "EPERM")


def test_an_old_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, state in (
        ("5.4.0-42", MISSING),
        ("5.15.1", MISSING),
        ("5.19.0", GOOD),
        ("6.1.0-9-amd64", GOOD),
    ):
        monkeypatch.setattr(checking.platform, "release", lambda release=release: release)
        assert checking.kernel().state == state


def test_versions_are_read_from_programs(tmp_path: Path) -> None:
    program = tmp_path / "x"
    program.write_text("#!/bin/sh\necho 'runc version 1.1.5+ds1'; echo 'spec: 1.0.2-dev'\n")
    program.chmod(0o755)
    assert checking.version_of(str(program)) == "1.1.5+ds1"
    assert checking.version_of("/nowhere") == ""


def test_programs_of_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "runc"
    program.write_text("#!/bin/sh\necho 'runc version 1.1.5'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = {p.name: p for p in checking.programs()}
    assert found["runc"].path == str(program)
    assert "CVE-2024-21626" in found["runc"].vulnerabilities


def test_rootless_losses_are_sentences() -> None:
    assert all(" " in loss for loss in checking.rootless_losses())
