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
_NAMESAKE = 1000  # the workload's number inside, and on many hosts somebody's
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


def _as_stranger(script: str, folder: str, user: int = _STRANGER) -> int:
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", folder],
        user=user, group=user, extra_groups=[], cwd="/", stderr=subprocess.DEVNULL,
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


@pytest.mark.parametrize(
    ("script", "user"),
    [
        ('echo evil > "$1/tmp/planted"', _STRANGER),
        ('echo evil > "$1/var/tmp/planted"', _STRANGER),
        ('echo "echo evil" > "$1/home/agent/.profile"', _NAMESAKE),
        ('echo evil > "$1/workspace/planted"', _NAMESAKE),
    ],
)
def test_nobody_puts_files_into_the_sandboxes_of_the_hosts_template(
    place: Path, script: str, user: int
) -> None:
    from ringfence.node.state import StateRoot
    from ringfence.node.templates import HostTemplate

    state = StateRoot.open(place / "state")
    try:
        skeleton = HostTemplate(state).skeleton(_NAMESAKE)
        assert _as_stranger(script, skeleton, user) != 0
        state.templates.chmod(0o755)  # the control, and how it was before
        assert _as_stranger(script, skeleton, user) == 0
    finally:
        state.close()
    again = StateRoot.open(place / "state")
    try:
        assert _as_stranger(script, skeleton, user) != 0
    finally:
        again.close()


def test_nobody_reaches_the_folders_that_one_sandbox_alone_has(place: Path) -> None:
    from ringfence.model.policy import Filesystem
    from ringfence.node.state import StateRoot
    from ringfence.node.templates import HostTemplate
    from ringfence.runtimes.contract import Disk

    state = StateRoot.open(place / "state")
    try:
        folder = state.take_folder("sb-unit")
        files = Filesystem(read_write=("/data",))
        layer = HostTemplate(state).root(files, _NAMESAKE, Disk("tmpfs", 1 << 20, 128), folder).lowers[0]
        assert layer.startswith(f"{folder}/")
        script = 'echo evil > "$1/data/planted"'
        assert _as_stranger(script, layer, _NAMESAKE) != 0
        (folder / "points").chmod(0o711)  # the control
        assert _as_stranger(script, layer, _NAMESAKE) == 0
    finally:
        state.close()


def test_nobody_reaches_the_disks_of_machines(place: Path) -> None:
    from ringfence.runtimes.vm import disks

    (place / "sandboxes" / "sb-unit").mkdir(parents=True)
    for folder in (place / "sandboxes", place / "sandboxes" / "sb-unit"):
        folder.chmod(0o711)
    store = disks.store(str(place / "sandboxes" / "sb-unit"))
    image = Path(store, "template-unit.erofs")
    image.write_text("of a template")
    image.chmod(0o444)
    assert _as_stranger('cat "$1"', str(image)) != 0
    os.chmod(store, 0o711)  # the control, and how it was made before
    assert _as_stranger('cat "$1"', str(image)) == 0
    assert disks.store(str(place / "sandboxes" / "sb-unit")) == store
    assert _as_stranger('cat "$1"', str(image)) != 0
