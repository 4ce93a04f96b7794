"""Known holes by version."""

from __future__ import annotations

import pytest

from ringfence.runtimes.vulnerabilities import numbers_of, vulnerabilities

MASKED_PATHS = "CVE-2025-31133"


@pytest.mark.parametrize(
    ("version", "bad"),
    [
        ("1.1.5+ds1", True), ("1.2.7", True), ("1.2.8", False),
        ("1.3.2", True), ("1.3.3", False), ("1.4.0", False), ("1.4.0-rc.2", True), ("1.4.1-rc.1", False),
    ],
)  # fmt: skip
def test_each_line_of_releases_has_its_own_repair(version: str, bad: bool) -> None:
    assert (MASKED_PATHS in vulnerabilities("runc", version)) is bad


def test_of_programs_and_versions_unknown_nothing_is_said() -> None:
    assert vulnerabilities("something", "1.0") == ()
    assert vulnerabilities("runc", "") == ()
    assert numbers_of("no digits") == ()
    assert numbers_of("1.8") == (1, 8, 0)


def test_crun() -> None:
    assert vulnerabilities("crun", "1.4.3") == ("CVE-2022-27650", "CVE-2025-24965")
    assert vulnerabilities("crun", "1.20") == ()


@pytest.mark.parametrize(
    ("version", "bad"),
    [
        ("1.12.1", False), ("1.13.0", True), ("1.13.9", True), ("1.14.3", True), ("1.14.4", False),
        ("1.15.0", True), ("1.15.1", False), ("1.16.0", False), ("v1.15.1-dev", True),
    ],
)  # fmt: skip
def test_firecracker(version: str, bad: bool) -> None:
    assert ("CVE-2026-5747" in vulnerabilities("firecracker", version)) is bad


@pytest.mark.parametrize(
    ("version", "bad"),
    [
        ("1.8.0", True),
        ("1.13.1", True),
        ("1.13.2", False),
        ("1.14.0", True),
        ("1.14.1", False),
        ("1.15.0", False),
    ],
)
def test_its_jailer(version: str, bad: bool) -> None:
    assert ("CVE-2026-1386" in vulnerabilities("jailer", version)) is bad
