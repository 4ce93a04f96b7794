"""A node as its own process, once for a module, and clients of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.service_nodes import NodeProcess


@pytest.fixture(scope="module")
def node_home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rf-placement-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def node(node_home: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(node_home)
    made.start()
    yield made
    made.destroy_all()
