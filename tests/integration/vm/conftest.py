"""A node with the drivers of virtual machines, and the template that the conformance suites use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.conformance import templates
from ringfence.conformance.harness import Kit, opened
from ringfence.model.errors import RingfenceError
from ringfence.runtimes.vm import kernel


@pytest.fixture(scope="session")
def vm_state() -> Iterator[Path]:
    """A state root with the template, for all tests: its disk is made once."""
    if os.geteuid() != 0:
        pytest.skip("virtual machines need root")
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("QEMU is not installed")
    try:
        kernel.find()
    except RingfenceError as error:
        pytest.skip(f"no guest kernel: {error.message}")
    with tempfile.TemporaryDirectory(prefix="rf-vm-", ignore_cleanup_errors=True) as state:
        Path(state).chmod(0o711)
        templates.ensure(Path(state))
        yield Path(state)


@pytest.fixture
async def kit(vm_state: Path) -> AsyncIterator[Kit]:
    """Sandboxes on qemu-microvm; afterwards nothing of them is left."""
    async with opened(vm_state, "qemu-microvm") as made:
        yield made
