"""The state root: who may use it, who is alive, folders that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence
from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.node.state import StateRoot, default_root

SOURCE = str(Path(ringfence.__file__).parents[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_folders_have_the_modes_they_need(root: Path) -> None:
    old = os.umask(0o077)
    try:
        StateRoot.open(root).close()
    finally:
        os.umask(old)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (root, *root.iterdir())}
    assert modes == {
        "state": 0o711,
        "templates": 0o700,
        "disks": 0o700,
        "ranges": 0o700,
        "nodes": 0o700,
        "sandboxes": 0o711,
        "snapshots": 0o711,
        "spare": 0o700,
    }


def test_folders_of_sandboxes_are_spread_over_the_disk(root: Path, tmp_path: Path) -> None:
    known = subprocess.run(["chattr", "+T", str(tmp_path)], capture_output=True, text=True)
    if known.returncode != 0:
        pytest.skip(f"the file system of {tmp_path} has no such hint: {known.stderr.strip()}")
    for _ in range(2):  # made, and found as it was
        StateRoot.open(root).close()
        shown = subprocess.run(["lsattr", "-d", str(root / "sandboxes")], capture_output=True, text=True)
        assert "T" in shown.stdout.split()[0], shown


def test_a_root_that_others_can_write_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(HostLimit, match="can be written by other users") as caught:
        StateRoot.open(root)
    assert "chmod go-w" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_root_of_somebody_else_is_refused(root: Path) -> None:
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(HostLimit, match="belongs to user 12345"):
        StateRoot.open(root)


def test_a_file_is_no_root(root: Path) -> None:
    root.write_text("x")
    with pytest.raises(HostLimit, match="not a folder"):
        StateRoot.open(root)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostLimit, match="use the state folder /proc/nothing"):
        StateRoot.open("/proc/nothing")


def test_the_environment_names_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RINGFENCE_HOME", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("RINGFENCE_HOME")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_root() == Path("/var/lib/ringfence")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_root() == Path("/x/ringfence")


def test_two_nodes_in_one_process_are_two(root: Path) -> None:
    one, two = StateRoot.open(root), StateRoot.open(root)
    assert one.owner != two.owner
    assert one.dead_nodes() == two.dead_nodes() == {}
    two.close()
    one.close()
    assert list((root / "nodes").iterdir()) == []


def test_closing_twice_is_harmless(root: Path) -> None:
    one = StateRoot.open(root)
    one.close()
    one.close()


def test_a_killed_node_is_dead_and_a_living_one_is_not(root: Path) -> None:
    code = "import sys; from ringfence.node.state import StateRoot; s = StateRoot.open(sys.argv[1])\n"
    code += "print(s.owner, flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin, child.stdout:
        name = child.stdout.readline().strip()
        ours = StateRoot.open(root)
        assert ours.dead_nodes() == {}
        assert ours.knows(name)
        child.send_signal(signal.SIGKILL)
        child.wait()
        dead = ours.dead_nodes()
        assert list(dead) == [name]
        other = StateRoot.open(root)
        assert other.dead_nodes() == {}  # we hold its lock: nobody else sweeps it at the same time
        ours.bury(name, dead[name])
        assert not ours.knows(name)
        other.close()
        ours.close()


def test_left_on_purpose_is_dead_for_the_next(root: Path) -> None:
    first = StateRoot.open(root)
    first.close(leave=True)
    second = StateRoot.open(root)
    assert list(second.dead_nodes()) == [first.owner]
    second.close()


def test_orphans_are_seen_by_the_only_node(root: Path) -> None:
    one = StateRoot.open(root)
    assert not one.has_orphans()
    (root / "sandboxes" / "sb-x").mkdir()
    assert one.has_orphans()
    two = StateRoot.open(root)
    assert not two.has_orphans()  # perhaps the other node's
    two.close()
    one.close()


def test_folders_are_used_again_but_never_with_anything_in_them(root: Path) -> None:
    state = StateRoot.open(root)
    first = state.take_folder("sb-1")
    (first / "journal").write_text("secret")
    (first / "points" / "deep").mkdir(parents=True)
    (first / "points" / "deep" / "file").write_text("x")
    inode = first.stat().st_ino
    state.give_folder(first)
    assert not first.exists()
    second = state.take_folder("sb-2")
    assert second.stat().st_ino == inode
    assert [p.name for p in second.iterdir()] == ["journal"]
    assert (second / "journal").read_bytes() == b""
    assert second.stat().st_mode & 0o777 == 0o711
    (second / "journal").unlink()
    (first / "elsewhere").mkdir(parents=True)
    (second / "journal").symlink_to(first / "elsewhere")  # whatever lies there: only a file is kept
    state.give_folder(second)
    assert list(state.take_folder("sb-3").iterdir()) == []
    assert (first / "elsewhere").is_dir()
    state.close()


def test_a_journal_that_is_still_open_is_emptied_by_its_descriptor(root: Path) -> None:
    state = StateRoot.open(root)
    folder = state.take_folder("sb-1")
    with (folder / "journal").open("ab") as journal:
        journal.write(b"secret")
        journal.flush()
        state.give_folder(folder, journal.fileno())
        assert os.fstat(journal.fileno()).st_size == 0
    assert (state.take_folder("sb-2") / "journal").read_bytes() == b""
    state.close()


def test_another_file_in_the_place_of_an_open_journal_is_emptied_too(root: Path) -> None:
    state = StateRoot.open(root)
    folder = state.take_folder("sb-1")
    with (folder / "journal").open("ab") as journal:
        (folder / "journal").unlink()
        (folder / "journal").write_text("secret")
        state.give_folder(folder, journal.fileno())
    assert (state.take_folder("sb-2") / "journal").read_bytes() == b""
    state.close()


def test_beyond_some_spare_folders_none_is_kept(root: Path) -> None:
    state = StateRoot.open(root)
    made = [state.take_folder(f"sb-{n}") for n in range(70)]
    for folder in made:
        (folder / "journal").write_text("x")
    for folder in made:
        state.give_folder(folder)
    assert not any(folder.exists() for folder in made)
    assert len(list((root / "spare").iterdir())) == 64
    state.close()


def test_a_spare_that_another_node_took_is_no_trouble(root: Path) -> None:
    state = StateRoot.open(root)
    state.give_folder(state.take_folder("sb-1"))
    for spare in (root / "spare").iterdir():
        spare.rmdir()
    assert state.take_folder("sb-2").is_dir()
    state.close()


@pytest.mark.parametrize("spares", [0, 1])
def test_an_id_can_be_had_once(root: Path, spares: int) -> None:
    state = StateRoot.open(root)
    made = [state.take_folder(f"sb-{n}") for n in range(spares + 1)]
    for folder in made[1:]:
        state.give_folder(folder)
    with pytest.raises(InvalidRequest, match="already"):
        state.take_folder("sb-0")
    state.close()
