"""A node, and sandboxes of the runtime `wasm` on it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, nothing_left
from ringfence.node.service import Node


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-wasm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
async def kit(state: Path) -> AsyncIterator[Kit]:
    node = await Node.open(state)
    try:
        made = Kit(state, node, await node.runtime("wasm"))
        await made.runtime.driver.prepare(str(state / "sandboxes" / "none"))  # type: ignore[attr-defined]
        try:
            yield made
        finally:
            await made.close()
    finally:
        await node.close()
    await nothing_left(state, made.ids)
