"""A normal user's node has no volumes, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.model.errors import NotFound, Unsupported
from ringfence.node.volumes import Volumes


def test_no_volumes_without_root(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path / "volumes", root=False)
    volumes.prepare()
    with pytest.raises(Unsupported) as caught:
        volumes.make("vo-x", 32 << 20)
    assert caught.value.details["capability"] == "volumes"
    assert volumes.names() == []
    with pytest.raises(NotFound):
        volumes.size("vo-x")
    volumes.remove("vo-x")
    volumes.close()
