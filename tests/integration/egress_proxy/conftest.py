"""Servers of the made-up internet on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.doors import Names, Origin, TestAuthority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
async def plain() -> AsyncIterator[Origin]:
    """An HTTP server."""
    origin = await Origin().start()
    yield origin
    await origin.stop()


@pytest.fixture
async def secure(authority: TestAuthority) -> AsyncIterator[Origin]:
    """An HTTPS server for api.example.test and alt.example.test."""
    origin = await Origin().start(authority.server("api.example.test", "alt.example.test"))
    yield origin
    await origin.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "egress"
    made.mkdir()
    return made
