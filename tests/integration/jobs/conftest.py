"""A service for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.serving import Serving, serving


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    """As a user starts it."""
    with serving("--no-egress") as made:
        yield made
