"""Sockets, process references, freezing, and bubblewrap's arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.model.errors import InvalidRequest, Unsupported
from ringfence.runtimes import bubblewrap, measuring
from ringfence.runtimes.contract import Bind, Disk, RootFs
from ringfence.runtimes.launching import foreign, freezing, sockets
from ringfence.runtimes.launching.processes import ProcessRef, birth_of, boot_id
from ringfence.runtimes.launching.steps import writable_folders


def test_a_socket_path_may_be_longer_than_a_sockaddr(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120) / ("y" * 120)
    folder.mkdir(parents=True)
    with sockets.listener(str(folder)) as listening:
        assert (folder / sockets.NAME).stat().st_mode & 0o777 == 0o600
        with sockets.dial(str(folder)) as dialled, listening.accept()[0] as accepted:
            assert not dialled.getblocking()
            accepted.send(b"x")
    with pytest.raises(ConnectionRefusedError):
        sockets.dial(str(folder))


def test_a_reference_means_one_process_only() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ref = ProcessRef.of(child.pid)
    assert ref.alive()
    assert not ref._replace(birth=ref.birth + 1).alive()
    assert not ref._replace(boot_id="another").alive()
    child.communicate(b"\n")
    assert not ref.alive()
    assert ref.pidfd() is None


async def test_waiting_ends_with_the_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ref = ProcessRef.of(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    await ref.wait()
    assert not ref.alive()  # a corpse is not alive
    assert birth_of(child.pid) is None
    assert birth_of(child.pid, corpse=True) == ref.birth
    child.wait()
    assert birth_of(child.pid, corpse=True) is None


def test_this_boot_has_an_id() -> None:
    assert len(boot_id()) == 36


@pytest.mark.parametrize("version", [1, 2])
async def test_freezing_writes_to_the_cgroup_that_holds_both(tmp_path: Path, version: int) -> None:
    if version == 1:
        (tmp_path / "freezer.state").write_text("THAWED")
        procs, file = tmp_path / "cgroup.procs", tmp_path / "freezer.state"
        await freezing.freeze([str(procs)], frozen=True)
        assert file.read_text() == "FROZEN"
        freezing.thaw([str(procs)])
        assert file.read_text() == "THAWED"
    else:
        (tmp_path / "agent").mkdir()
        (tmp_path / "cgroup.freeze").write_text("0")
        (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 1\n")
        await freezing.freeze([str(tmp_path / "agent/cgroup.procs")], frozen=True)
        assert (tmp_path / "cgroup.freeze").read_text() == "1"


async def test_a_process_that_missed_the_word_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "freezer.state").write_text("THAWED")
    told: list[str] = []
    monkeypatch.setattr(freezing, "_write", lambda path, word: told.append(word))
    monkeypatch.setattr(freezing, "_reached", lambda path, frozen: len(told) == 3)
    await freezing.freeze([str(tmp_path / "cgroup.procs")], frozen=True)
    assert told == ["FROZEN"] * 3


async def test_without_a_freezer_pausing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        await freezing.freeze([str(tmp_path / "cgroup.procs")], frozen=True)
    assert caught.value.details["capability"] == "pause"
    freezing.thaw([str(tmp_path / "cgroup.procs")])


def files(**changes: object) -> RootFs:
    values: dict[str, object] = {"lowers": (), "binds": (), "disk": Disk("tmpfs", 64 << 20, 100)}
    return RootFs(**(values | changes))  # type: ignore[arg-type]


def test_writable_folders_share_the_disk() -> None:
    shares = writable_folders(files())
    assert {path for path, _, _ in shares} == {"/workspace", "/tmp", "/var/tmp", "/home/agent"}
    assert shares[0][:2] == ("/workspace", 32 << 20)
    assert sum(size for _, size, _ in shares) <= 64 << 20


def test_a_read_only_root_has_only_what_the_policy_lets_be_written() -> None:
    assert writable_folders(files(readonly=True)) == []
    assert writable_folders(files(readonly=True, read_write=("/data", "/data/sub"))) == [
        ("/data", 64 << 20, "0755")
    ]


def test_a_folder_of_the_host_is_not_covered_by_a_tmpfs() -> None:
    shares = writable_folders(files(binds=(Bind("/host", "/workspace", read_only=False),)))
    assert "/workspace" not in {path for path, _, _ in shares}


def test_no_value_becomes_several_arguments_of_bwrap() -> None:
    assert bubblewrap._packed(["--setenv", "A", "\udcff"]) == b"--setenv\0A\0\xff\0"
    with pytest.raises(InvalidRequest):
        bubblewrap._packed(["--setenv", "A", "x\0--bind\0/\0/mnt"])


def test_what_the_sandbox_s_user_could_open_is_covered() -> None:
    """Root of a container without root's rights maps itself: nothing is another's then."""
    here = {path for path in bubblewrap.MASKED if os.path.lexists(path)}
    assert set(bubblewrap._covered(os.stat("/proc/kmsg").st_uid)) == here
    others = set(bubblewrap._covered(1_900_000_000))
    assert "/proc/kmsg" not in others
    assert "/proc/keys" in others


def test_layers_are_merged_the_topmost_first(tmp_path: Path) -> None:
    top, bottom = tmp_path / "top", tmp_path / "bottom"
    for folder in (top / "etc/new", bottom / "etc/old", bottom / "srv", bottom / "proc"):
        folder.mkdir(parents=True)
    (top / "etc/file").write_text("top")
    (bottom / "etc/file").write_text("bottom")
    os.symlink("usr/bin", bottom / "bin")
    words = list(bubblewrap._entries((str(top), str(bottom)), ""))
    text = " ".join(words)
    assert f"--ro-bind {top}/etc/file /etc/file" in text
    assert f"{bottom}/etc/file" not in text
    assert f"--ro-bind {top}/etc/new /etc/new" in text
    assert f"--ro-bind {bottom}/etc/old /etc/old" in text
    assert f"--ro-bind {bottom}/srv /srv" in text
    assert "--symlink usr/bin /bin" in text
    assert "--dir /proc" in text


def test_capabilities_have_names() -> None:
    assert measuring.capability_names(0) == ()
    assert measuring.capability_names(1 | 1 << 21 | 1 << 63) == ("CAP_CHOWN", "CAP_SYS_ADMIN", "CAP_63")


def test_a_process_tree_has_the_descendants() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = measuring.tree(child.pid)
        assert found[0] == child.pid
        assert len(found) == 2
        assert measuring.stats(child.pid).processes == 2
    finally:
        for pid in measuring.tree(child.pid):
            os.kill(pid, 9)
        child.communicate()


async def test_a_program_that_hangs_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, pid = tmp_path / "program", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    program.chmod(0o755)
    for seconds in (2.0, 60.0):  # the second time where it took long to begin
        monkeypatch.setattr(foreign, "_VERSION_TIMEOUT", seconds)
        assert await foreign.version_of(str(program)) == ""
        if pid.exists() and pid.read_text():
            break
    monkeypatch.undo()
    assert not Path(f"/proc/{int(pid.read_text())}").exists()
    program.write_text("#!/bin/sh\necho program 1.2.3\n")
    assert await foreign.version_of(str(program)) == "program 1.2.3\n"
