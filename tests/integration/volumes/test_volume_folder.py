"""The folder of a node's volumes, which is a mount of its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_one_that_somebody_looks_at_for_a_moment_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.node.volumes._BUSY", 60.0)  # the moment is longer on a busy machine
    volumes = Volumes(tmp_path / "volumes", root=True)
    volumes.prepare()
    volumes.share()
    try:
        try:
            volumes.make("data", 16 << 20)
            looking = os.open(volumes.mounted("data"), os.O_RDONLY | os.O_DIRECTORY)
        except HostLimit as error:
            pytest.skip(f"no loop devices here: {error}")
        timer = threading.Timer(0.3, os.close, (looking,))
        timer.start()
        try:
            volumes.remove("data")
        finally:
            timer.join()
        assert volumes.names() == []
    finally:
        volumes.close()
