"""The folder of a node's volumes, which is a mount of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.node.volumes import Volumes, _mounts


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_it_is_unmounted_also_while_somebody_looks_at_it(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path / "volumes", root=True)
    volumes.prepare()
    assert volumes.share()
    assert str(volumes.folder) in _mounts()
    looking = os.open(volumes.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        volumes.close()
        assert str(volumes.folder) not in _mounts()
    finally:
        os.close(looking)
