"""Other users of the host at the layers that all sandboxes share, though they know where those lie."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.images.store import TemplateStore
from ringfence.runtimes.context import privileged

_STRANGER = 54321  # a user of the host whom nobody knows
pytestmark = pytest.mark.skipif(not privileged(), reason="becomes another user of the host: needs root")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody passes through, as the state root of a host is."""
    folder = Path(tempfile.mkdtemp(prefix="rf-store-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def _layer(store: TemplateStore) -> str:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, mode in (("open", 0o777), ("tmp", 0o1777)):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, mode
            tar.addfile(member)
        member = tarfile.TarInfo("program")
        member.mode, member.uid, member.gid = 0o755, _STRANGER, _STRANGER
        tar.addfile(member)
    out.seek(0)
    return store.add_layer_from(out).folder


def _as_stranger(script: str, folder: str) -> int:
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", folder],
        user=_STRANGER, group=_STRANGER, extra_groups=[], cwd="/", stderr=subprocess.DEVNULL,
    ).returncode  # fmt: skip


@pytest.mark.parametrize(
    "script",
    [
        'echo evil > "$1/open/new"',
        'echo evil > "$1/tmp/new"',
        'echo evil >> "$1/program"',
        'cat "$1/program"',
    ],
)
def test_who_knows_the_path_of_a_layer_still_does_not_reach_it(place: Path, script: str) -> None:
    with TemplateStore.open(place / "images") as store:
        layer = _layer(store)
        assert _as_stranger(script, layer) != 0
        store.private.chmod(0o711)  # the control, and how stores were made before
        assert _as_stranger(script, layer) == 0
        with TemplateStore.open(place / "images") as again:
            assert again.private == store.private
            assert _as_stranger(script, os.fspath(layer)) != 0
