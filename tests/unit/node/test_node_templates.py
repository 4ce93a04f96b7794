"""The host template: programs of the host, secrets of nobody."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.model.errors import InvalidRequest
from ringfence.model.policy import Filesystem, Mount
from ringfence.node import templates
from ringfence.node.state import StateRoot
from ringfence.node.templates import HostTemplate, digest, system_binds
from ringfence.runtimes.contract import Disk

DISK = Disk("tmpfs", 1 << 20, 1024)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateRoot]:
    made = StateRoot.open(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "sandbox"
    made.mkdir()
    return made


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of the host that others may read and write."""
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o777)
    return made


def root(state: StateRoot, folder: Path, **files: object) -> templates.RootFs:
    return HostTemplate(state).root(Filesystem(**files), 1000, DISK, folder)  # type: ignore[arg-type]


def test_no_secret_and_no_user_of_the_host_is_in_it(state: StateRoot) -> None:
    skeleton = Path(HostTemplate(state).skeleton(1000))
    names = {str(p.relative_to(skeleton)) for p in skeleton.rglob("*")}
    for private in (
        "etc/shadow", "etc/gshadow", "etc/sudoers", "etc/ssh", "etc/ssl/private", "etc/NetworkManager",
        "etc/pip.conf", "etc/npmrc", "etc/gitconfig", "etc/environment", "etc/subuid", "etc/krb5.keytab",
    ):  # fmt: skip
        assert private not in names
    users = {line.split(":")[0] for line in (skeleton / "etc/passwd").read_text().splitlines()}
    assert users == {"root", "agent", "ringfence", "nobody"}
    assert "127.0.0.1" in (skeleton / "etc/hosts").read_text()
    assert "nameserver" not in (skeleton / "etc/resolv.conf").read_text()
    assert (skeleton / "etc/machine-id").read_text() == ""
    assert list((skeleton / "home").iterdir()) == [skeleton / "home/agent"]
    assert list((skeleton / "root").iterdir()) == []


def test_modes_and_owners(state: StateRoot) -> None:
    skeleton = Path(HostTemplate(state).skeleton(1000))
    modes = {
        n: (skeleton / n).stat().st_mode & 0o7777 for n in ("tmp", "var/tmp", "root", "etc", "workspace")
    }
    assert modes == {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "etc": 0o755, "workspace": 0o755}
    for path in skeleton.rglob("*"):
        info = path.lstat()
        assert not info.st_mode & (stat.S_ISUID | stat.S_ISGID)
        assert stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)
        if os.geteuid() == 0:
            mine = str(path.relative_to(skeleton)) in ("home/agent", "workspace")
            assert info.st_uid == (1000 if mine else 0)


def test_unreadable_files_of_the_host_are_not_copied(tmp_path: Path) -> None:
    for name, mode in (("open", 0o644), ("closed", 0o640)):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(mode)
        templates._copy(str(tmp_path / name), tmp_path / "to" / name)
    assert os.listdir(tmp_path / "to") == ["open"]
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/key").write_text("x")
    (tmp_path / "dir").chmod(0o750)
    templates._copy(str(tmp_path / "dir"), tmp_path / "to/dir")
    assert not (tmp_path / "to/dir").exists()


def test_symlinks_are_copied_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/shadow")
    templates._copy(str(tmp_path / "link"), tmp_path / "to/link")
    assert os.readlink(tmp_path / "to/link") == "/etc/shadow"


def test_a_changed_host_is_another_template(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    (etc / "ssl").mkdir(parents=True)
    (etc / "ld.so.cache").write_text("one")
    first = digest(1000, str(etc))
    assert digest(1000, str(etc)) == first
    assert digest(1001, str(etc)) != first
    (etc / "ld.so.cache").write_text("two!")
    assert digest(1000, str(etc)) != first


def test_it_is_made_once_and_by_one(state: StateRoot) -> None:
    one, two = HostTemplate(state).skeleton(1000), HostTemplate(state).skeleton(1000)
    assert one == two
    assert [p.name for p in state.templates.iterdir()] == [Path(one).name]
    HostTemplate(state)._build(Path(one), 1000)  # somebody was faster: no harm
    assert [p.name for p in state.templates.iterdir()] == [Path(one).name]


def test_binds_are_read_only_programs() -> None:
    binds = system_binds()
    assert "/usr" in [b.source for b in binds]
    assert all(b.read_only and b.source == b.target and not b.idmapped for b in binds)
    allowed = ("/usr", "/opt", "/lib", "/bin", "/sbin")
    assert all(b.source.startswith(allowed) for b in binds)


def test_the_policy_comes_through(state: StateRoot, folder: Path) -> None:
    made = root(state, folder, root="readonly", read_only=("/etc",), read_write=("/workspace", "/data"))
    assert made.readonly
    assert made.read_only == ("/etc",)
    assert made.read_write == ("/workspace", "/data")
    assert "/data" in made.writable
    data = folder / "points/fs/data"
    assert data.is_dir()
    if os.geteuid() == 0:
        assert data.stat().st_uid == 1000
    assert made.lowers == (str(folder / "points/fs"), HostTemplate(state).skeleton(1000))


def test_without_wishes_there_is_one_layer(state: StateRoot, folder: Path) -> None:
    made = root(state, folder)
    assert len(made.lowers) == 1
    assert list(folder.iterdir()) == []


def test_mount_points_are_made_and_parents_keep_their_owner(
    state: StateRoot, folder: Path, shared: Path
) -> None:
    (shared / "file").write_text("x")
    made = root(
        state,
        folder,
        mounts=(
            Mount(str(shared), "/home/agent/in/here", read_only=False),
            Mount(str(shared / "file"), "/data/file"),
        ),
    )
    assert (folder / "points/fs/data/file").is_file()
    assert (folder / "points/fs/home/agent/in/here").is_dir()
    home = (folder / "points/fs/home/agent").stat()
    assert home.st_mode & 0o777 == 0o755
    if os.geteuid() == 0:
        assert home.st_uid == 1000  # else the workload could not write its home any more
    assert [(b.target, b.read_only) for b in made.binds[-2:]] == [
        ("/home/agent/in/here", False),
        ("/data/file", True),
    ]


@pytest.mark.parametrize(
    "target",
    [
        "/", "data", "/a/../b", "/a/", "//a", "/proc/x", "/proc", "/sys", "/dev/shm", "/.ringfence",
        "/.ringfence/upper", "/run/secrets/x", "/etc/passwd", "/a\0b",
    ],
)  # fmt: skip
def test_targets_that_can_not_be(state: StateRoot, folder: Path, shared: Path, target: str) -> None:
    with pytest.raises(InvalidRequest):
        root(state, folder, mounts=(Mount(str(shared), target),))


def test_a_missing_source(state: StateRoot, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        root(state, folder, mounts=(Mount("/does/not/exist", "/data"),))


@pytest.mark.parametrize("how", ["closed", "gone", "turned"])
def test_a_mount_that_was_had_is_judged_again(state: StateRoot, folder: Path, shared: Path, how: str) -> None:
    template = HostTemplate(state)
    files = Filesystem(mounts=(Mount(str(shared), "/mnt"),))
    made = template.root(files, 1000, DISK, folder)
    assert template.root(files, 1000, DISK, folder) is made  # control: it is known by now
    if how == "closed" and os.geteuid() == 0:
        shared.chmod(0o700)
    else:
        shared.rename(shared.with_name("elsewhere"))
    if how == "turned":
        shared.symlink_to("elsewhere")
    with pytest.raises(InvalidRequest, match=r"can't (mount|read)"):
        template.root(files, 1000, DISK, folder)


def test_devices_and_sockets_stay_outside(state: StateRoot, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="neither a file nor a folder"):
        root(state, folder, mounts=(Mount("/dev/null", "/data"),))


@pytest.mark.parametrize(("mode", "read_only"), [(0o700, True), (0o755, False), (0o750, True)])
@pytest.mark.skipif(os.geteuid() != 0, reason="as a normal user the workload is the caller")
def test_an_unreadable_source_is_said(
    state: StateRoot, folder: Path, shared: Path, mode: int, read_only: bool
) -> None:
    shared.chmod(mode)
    with pytest.raises(InvalidRequest, match=r"can't (read|write)") as caught:
        root(state, folder, mounts=(Mount(str(shared), "/data", read_only),))
    assert "chmod o+" in caught.value.hint


def test_a_target_inside_the_hosts_programs_must_exist(state: StateRoot, folder: Path, shared: Path) -> None:
    with pytest.raises(InvalidRequest, match="to mount on") as caught:
        root(state, folder, mounts=(Mount(str(shared), "/usr/no-such-folder"),))
    assert "outside /usr" in caught.value.hint
    assert root(state, folder, mounts=(Mount(str(shared), "/usr/local"),)).binds[-1].target == "/usr/local"


def test_a_target_through_a_symlink_is_refused(state: StateRoot, folder: Path, shared: Path) -> None:
    with pytest.raises(InvalidRequest, match="symlink"):
        root(state, folder, mounts=(Mount(str(shared), "/var/run/x"),))


def test_a_mount_inside_a_mount(state: StateRoot, folder: Path, shared: Path) -> None:
    (shared / "sub").mkdir()
    made = root(state, folder, mounts=(Mount(str(shared), "/data"), Mount("/usr/share", "/data/sub")))
    assert [b.target for b in made.binds[-2:]] == ["/data", "/data/sub"]
    with pytest.raises(InvalidRequest, match="to mount on"):
        root(state, folder, mounts=(Mount(str(shared), "/data"), Mount("/usr/share", "/data/none")))
