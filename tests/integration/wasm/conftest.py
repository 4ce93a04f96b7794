"""A node, and sandboxes of the runtime `wasm` on it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, opened


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-wasm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
async def kit(state: Path) -> AsyncIterator[Kit]:
    async with opened(state, "wasm") as made:
        yield made
