"""One service for each module, as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.postgres import postgres
from support.serving import Serving, serving

__all__ = ["postgres"]


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    """On SQLite."""
    with serving("--no-egress") as made:
        yield made


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def either(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """On SQLite, and on PostgreSQL."""
    store = "" if request.param == "sqlite" else request.getfixturevalue("postgres").fresh()
    with serving("--no-egress", store=store) as made:
        yield made


@pytest.fixture(scope="module")
def box(service: Serving) -> dict[str, Any]:
    """A sandbox of the module."""
    return service.sandbox()
