"""What mmdebstrap has begun ends with who asked for it, and what is left of it is found."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.images import collecting, debian, importing
from ringfence.images.store import TemplateStore
from ringfence.model.errors import HostLimit
from support import images


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that mmdebstrap's own steps, which have other ids, can go to."""
    images.need("mmdebstrap")
    if os.geteuid() == 0:
        yield tmp_path  # whose rights root's mmdebstrap is not asked for
        return
    if debian._bound()[1] != "root":
        pytest.skip("needs subordinate ids and util-linux 2.38")
    made = Path(tempfile.mkdtemp(prefix="rf-debian-test-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        debian.remove(made)


def test_debian_that_is_left_in_the_middle_is_taken_down_at_once(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmdebstrap alone would first wait for what it has begun; killed, it would leave its mounts."""
    tmp_path = open_folder
    work = tmp_path / "work"
    work.mkdir(mode=0o755)
    monkeypatch.setenv("TMPDIR", str(work))
    began = tmp_path / "began"
    # A step of its own that takes for ever, in the middle of its work.
    hook = f"--setup-hook=touch {began}; exec sleep 7654"
    monkeypatch.setenv("PATH", _first(tmp_path, f'exec {shutil.which("mmdebstrap")} "{hook}" "$@"'))
    with debian.build("bookworm") as built:
        group = built._process.pid
        deadline = time.monotonic() + 60
        while not began.exists() and built._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert began.exists()
    assert built._process.returncode not in (0, -signal.SIGKILL)
    assert not any(f" {work}/" in line for line in Path("/proc/mounts").read_text().splitlines())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (_in_group(group) or list(work.iterdir())):
        time.sleep(0.05)
    assert not _in_group(group)
    assert list(work.iterdir()) == []


def test_debian_ends_with_who_is_making_it(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, we can't take it down; it goes all the same, with all it has begun and its mounts."""
    tmp_path = open_folder
    work = tmp_path / "work"
    work.mkdir(mode=0o755)
    began = tmp_path / "began"
    hook = f"--setup-hook=touch {began}; exec sleep 7655"
    path = _first(tmp_path, f'exec {shutil.which("mmdebstrap")} "{hook}" "$@"')
    code = (
        "from ringfence.images import debian\n"
        "with debian.build('bookworm') as built:\n"
        "    print(built._process.pid, flush=True)\n"
        "    built.read(1)\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env=os.environ | {"PATH": path, "TMPDIR": str(work)},
    )
    assert maker.stdout is not None
    try:
        group = int(maker.stdout.readline())
        deadline = time.monotonic() + 60
        while not began.exists() and maker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert began.exists()
        assert _in_group(group)
    finally:
        maker.kill()
        maker.wait()
        maker.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (_in_group(group) or _sleeps("7655")):
        time.sleep(0.05)
    assert not _in_group(group)
    assert not _sleeps("7655")
    assert not any(f" {work}/" in line for line in Path("/proc/mounts").read_text().splitlines())
    # What it had unpacked is found by the next collection; what somebody is making now is let alone.
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    assert [path.name[:17] for path in work.iterdir()] == ["ringfence-debian-"]
    assert any(path.name.startswith("mmdebstrap.") for path in work.glob("*/*"))
    with TemplateStore.open(tmp_path / "store") as store, debian._place() as living:
        (living / "a file").touch()
        told = [(kind, size > 0) for kind, _, size in collecting.collect(store, tuple, dry_run=True).removed]
        assert told == [("leftover", True)]
        assert len(list(work.iterdir())) == 2
        found = collecting.collect(store, tuple)
        assert (len(found.removed), found.failures) == (1, ())
        assert list(work.iterdir()) == [living]
    assert list(work.iterdir()) == []


def test_who_has_no_subordinate_ids_is_told_so(
    store: TemplateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.need("mmdebstrap")
    if os.geteuid():
        pytest.skip("root becomes a user without any")
    drop = "setpriv --reuid=54321 --regid=54321 --clear-groups"
    as_user = (
        'for word; do shift; [ "$word" = --mode=root ] && word=--mode=unshare; set -- "$@" "$word"; done'
    )
    line = f'{as_user}\nexec {drop} {shutil.which("mmdebstrap")} "$@"'
    monkeypatch.setenv("PATH", _first(tmp_path, line))
    with pytest.raises(HostLimit, match="/etc/subuid") as caught:
        importing.add(store, "debian:bookworm")
    assert "--add-subuids" in caught.value.hint
    assert "mirror" not in caught.value.hint


def test_what_others_have_in_tmp_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("root gives a folder to another user")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = tmp_path / "ringfence-debian-theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    (tmp_path / "ringfence-debian-link").symlink_to(theirs)
    (tmp_path / "ringfence-debian-file").touch()
    assert list(debian.abandoned()) == []
    os.chown(theirs, 0, 0)
    (found,) = debian.abandoned()
    assert found[0] == theirs
    os.close(found[1])


def test_what_is_mounted_in_a_leftover_is_let_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the host's own: a killed maker may have shown devices or /sys to what it was making."""
    if os.geteuid():
        pytest.skip("root mounts")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = tmp_path / "host"
    host.mkdir()
    (host / "a device").touch()
    shown = tmp_path / "ringfence-debian-killed" / "root" / "dev"
    shown.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(host), str(shown)], check=True)
    try:
        with TemplateStore.open(tmp_path / "store") as store:
            (failure,) = collecting.collect(store, tuple).failures
    finally:
        subprocess.run(["umount", str(shown)], check=True)
    assert "mounted" in failure
    assert (host / "a device").exists()
    with TemplateStore.open(tmp_path / "store") as store:
        assert collecting.collect(store, tuple).failures == ()
    assert not shown.exists()
    assert (host / "a device").exists()


def _first(folder: Path, script: str) -> str:
    """A PATH in which mmdebstrap is this shell script."""
    program = folder / "bin/mmdebstrap"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


def _sleeps(seconds: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\0" + seconds.encode() + b"\0":
                return True
        except OSError:
            continue
    return False


def _in_group(group: int) -> bool:
    """Whether anything of a process group still runs."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(found) == group and state not in "ZX":
            return True
    return False
