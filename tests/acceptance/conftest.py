"""Fixtures of the acceptance tests: the real command line, and nothing left behind by any test."""

from __future__ import annotations

import pytest

from support.commands import Ringfence
from support.leaks import Leaks


@pytest.fixture
def ringfence(no_leaks: Leaks) -> Ringfence:
    """``ringfence(...)``; when the test ends, everything is looked at for what was left."""
    return Ringfence(no_leaks.env)
