"""A node and the gvisor driver, for tests of what only that runtime has."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, opened


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    """Sandboxes on gvisor; afterwards nothing of them is left."""
    if os.geteuid() != 0:
        pytest.skip("walls of gVisor need root")
    with tempfile.TemporaryDirectory(prefix="rf-gvisor-", ignore_cleanup_errors=True) as folder:
        state = Path(folder)
        state.chmod(0o711)
        async with opened(state, "gvisor") as made:
            if made.runtime.driver.program is None:  # type: ignore[attr-defined]
                pytest.skip("runsc is not installed")
            yield made
