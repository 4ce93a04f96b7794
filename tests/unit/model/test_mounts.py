"""Mounts: what would hand over the host is refused under each of its names."""

# ruff: noqa: E501 (tables of cases)

from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

import pytest

from ringfence.model.errors import DangerousMount, InvalidRequest
from ringfence.model.mounts import check_mounts, parse_mount, target_problem
from ringfence.model.policy import Mount


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of our own below tmp_path: two users with homes, a state folder, a project."""
    users = [
        pwd.struct_passwd(("root", "x", 0, 0, "", "/root", "/bin/sh")),
        pwd.struct_passwd(("ann", "x", 1000, 1000, "", str(tmp_path / "homes/ann"), "/bin/sh")),
        pwd.struct_passwd(("bob", "x", 1001, 1001, "", str(tmp_path / "homes/bob"), "/bin/sh")),
        pwd.struct_passwd(("daemon", "x", 1, 1, "", str(tmp_path / "project"), "/usr/sbin/nologin")),
        pwd.struct_passwd(("nobody", "x", 65534, 65534, "", str(tmp_path / "project"), "/bin/false")),
    ]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setenv("HOME", str(tmp_path / "homes/ann"))
    monkeypatch.setenv("RINGFENCE_HOME", str(tmp_path / "state"))
    for folder in (
        "homes/ann/work",
        "homes/ann/.ssh",
        "homes/bob/data",
        "state/sandboxes",
        "project/src",
        "other",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "homes/bob/.ssh").symlink_to(tmp_path / "homes/ann/.ssh")
    (tmp_path / "project/data.csv").write_text("a,b\n")
    return tmp_path


def judge(source: str | Path, read_only: bool = True, allow: tuple[str, ...] = ()) -> Mount:
    [found] = check_mounts([Mount(str(source), "/data", read_only)], allow)
    return found


@pytest.mark.parametrize(
    "name", ["project", "project/src", "project/data.csv", "homes/ann/work", "homes/bob/data"]
)
@pytest.mark.parametrize("read_only", [True, False])
def test_harmless(host: Path, name: str, read_only: bool) -> None:
    assert judge(host / name, read_only) == Mount(str(host / name), "/data", read_only)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("homes", "holds the home folder of"),
        ("homes/ann", "home folder of ann"),
        ("homes/bob", "home folder of bob"),
        (".", "holds"),
        ("state", "Ringfence's own state"),
        ("state/sandboxes", "Ringfence's own state"),
        ("homes/ann/.ssh", "ssh keys"),
    ],
)
def test_folders_of_this_host(host: Path, name: str, reason: str) -> None:
    source = os.path.normpath(host / name)
    with pytest.raises(DangerousMount, match=reason) as caught:
        judge(source)
    assert source in caught.value.message
    assert f"--allow-dangerous-mount {source}" in caught.value.hint
    assert judge(source, allow=(source,)).source == source  # the control: named, it is allowed


@pytest.mark.parametrize(
    "path",
    ["/", "/etc", "/proc", "/proc/self", "/proc/sys", "/sys", "/sys/fs/cgroup", "/dev", "/dev/null", "/dev/shm",
     "/run", "/var/run", "/var", "/var/lib", "/boot", "/root", "/home", "/etc/shadow", "/tmp", "/etc/ssl/private"],
)  # fmt: skip
def test_places_of_every_host(path: str) -> None:
    if not os.path.exists(path):
        pytest.skip(f"this machine has no {path}")
    with pytest.raises(DangerousMount) as caught:
        judge(path)
    assert caught.value.details["reason"]
    # Written otherwise, it is the same place.
    for spelling in (path.rstrip("/") + "/", f"{path.rstrip('/')}/.", "/usr/.." + path):
        with pytest.raises(DangerousMount):
            judge(spelling)


@pytest.mark.parametrize("path", ["/etc", "/var", "/var/lib", "/var/spool"])
def test_parents_say_what_they_hold(path: str) -> None:
    with pytest.raises(DangerousMount, match=f"it holds {path}/"):
        judge(path)


@pytest.mark.parametrize("path", ["/usr", "/usr/share", "/bin", "/etc/hosts", "/opt"])
def test_programs_and_settings_are_read_only(path: str) -> None:
    if not os.path.exists(path):
        pytest.skip(f"this machine has no {path}")
    assert judge(path).read_only
    with pytest.raises(DangerousMount, match="read-only is fine"):
        judge(path, read_only=False)


@pytest.mark.parametrize(
    "name",
    [".ssh", ".ssh/id_ed25519", ".aws", ".aws/credentials", ".azure", ".config/gcloud", ".config/gcloud/x", ".kube",
     ".kube/config", ".gnupg", ".docker", ".docker/config.json", ".npmrc", ".pypirc", ".git-credentials",
     ".config/git/credentials", ".netrc", ".config/gh/hosts.yml", ".cargo/credentials.toml", "id_rsa"],
)  # fmt: skip
def test_credentials_anywhere(host: Path, name: str) -> None:
    path = host / "other/deep" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("secret")
    with pytest.raises(DangerousMount):
        judge(path)
    link = host / "project/harmless"
    link.symlink_to(path)
    with pytest.raises(DangerousMount) as caught:
        judge(link)
    assert f"it is {path}" in caught.value.message
    assert caught.value.details["resolved"] == str(path)


def test_a_dangerous_name_is_judged_even_if_it_leads_somewhere_harmless(host: Path) -> None:
    (host / "other/.aws").symlink_to(host / "project")
    with pytest.raises(DangerousMount, match="AWS"):
        judge(host / "other/.aws")


@pytest.mark.parametrize("name", [".ssh", ".aws", ".kube", ".gnupg", ".git-credentials", ".netrc"])
def test_a_copy_of_a_home_is_recognised(host: Path, name: str) -> None:
    (host / "project" / name).mkdir()
    with pytest.raises(DangerousMount, match=f"holds {name}"):
        judge(host / "project")


def test_a_folder_half_way_to_credentials(host: Path) -> None:
    (host / "other/.config/gcloud").mkdir(parents=True)
    with pytest.raises(DangerousMount, match="Google Cloud"):
        judge(host / "other/.config")
    (host / "project/.config").mkdir()
    assert judge(host / "project/.config")


def test_links_on_the_way_are_resolved(host: Path) -> None:
    (host / "project/up").symlink_to("../homes")
    with pytest.raises(DangerousMount, match="home folder of bob"):
        judge(host / "project/up/bob")
    # `link/..` is the parent of where the link leads, not the folder the link lies in.
    (host / "project/inside").symlink_to(host / "homes/ann/work")
    with pytest.raises(DangerousMount, match="home folder of ann"):
        judge(f"{host}/project/inside/..")
    (host / "project/fine").symlink_to(host / "homes/ann/work")
    assert judge(host / "project/fine").source == str(host / "homes/ann/work")


def test_a_home_under_a_linked_name(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "export").symlink_to(host / "other")
    monkeypatch.setenv("HOME", str(host / "export"))
    with pytest.raises(DangerousMount, match="home folder of this user"):
        judge(host / "other")


def test_sockets_devices_and_pipes(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(host / "project")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("engine.sock")
        with pytest.raises(DangerousMount, match="is a socket"):
            judge(host / "project/engine.sock")
    (host / "project/podman.sock").write_text("")
    with pytest.raises(DangerousMount, match="container engine"):
        judge(host / "project/podman.sock")
    os.mkfifo(host / "project/pipe")
    with pytest.raises(DangerousMount, match="neither a folder nor a file"):
        judge(host / "project/pipe")
    with pytest.raises(DangerousMount, match="device"):
        judge("/dev/null")


def test_a_bind_mount_of_a_dangerous_folder_is_recognised(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two names for one inode without a symlink: what a bind mount looks like to stat.
    real = os.path.samestat
    state, disguise = os.stat(host / "state"), os.stat(host / "other")
    monkeypatch.setattr(
        os.path,
        "samestat",
        lambda one, two: real(one, two) or {one.st_ino, two.st_ino} == {state.st_ino, disguise.st_ino},
    )
    with pytest.raises(DangerousMount, match="state under another name"):
        judge(host / "other")
    assert judge(host / "project")


def test_permission_for_one_source_is_not_for_another(host: Path) -> None:
    mounts = [Mount(str(host / "homes/ann"), "/a"), Mount(str(host / "homes/bob"), "/b")]
    with pytest.raises(DangerousMount, match="bob"):
        check_mounts(mounts, [str(host / "homes/ann")])
    with pytest.raises(DangerousMount, match="ann"):
        check_mounts(mounts, [str(host / "homes")])  # the parent doesn't name its children
    with pytest.raises(DangerousMount):
        check_mounts(mounts, ["/"])
    assert len(check_mounts(mounts, [str(host / "homes/ann/"), str(host / "homes/./bob")])) == 2


def test_permission_by_the_resolved_name(host: Path) -> None:
    (host / "project/link").symlink_to(host / "homes/bob")
    assert judge(host / "project/link", allow=(str(host / "homes/bob"),)).source == str(host / "homes/bob")
    assert judge(host / "project/link", allow=(str(host / "project/link"),)).source == str(host / "homes/bob")


def test_sources_that_cannot_be_mounted(host: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        judge(host / "missing")
    (host / "project/dangling").symlink_to(host / "missing")
    with pytest.raises(InvalidRequest, match="does not exist"):
        judge(host / "project/dangling")
    (host / "project/loop").symlink_to(host / "project/loop")
    with pytest.raises(InvalidRequest, match="can't be reached"):
        judge(host / "project/loop")
    with pytest.raises(InvalidRequest, match="can't be reached"):
        judge(host / "project/data.csv/x")
    with pytest.raises(InvalidRequest, match="is not absolute"):
        judge("project")
    for name in ("/a\0b", "/a\nb"):
        with pytest.raises(InvalidRequest, match="control character"):
            judge(name)


def test_an_unreadable_source(host: Path) -> None:
    closed = host / "project/closed"
    closed.mkdir(mode=0)
    child = os.fork()
    if child == 0:  # as somebody who is not root, to whom permissions apply
        code = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.chmod(host, 0o755)
                os.setresuid(12345, 12345, 12345)
            judge(closed)
        except InvalidRequest as error:
            code = (
                0
                if "can't be read by this user" in error.message or "can't be reached" in error.message
                else 2
            )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    closed.chmod(0o755)
    assert judge(closed)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/", "whole root"), ("/proc", "in /proc"), ("/proc/sys", "in /proc"), ("/sys/x", "in /sys"), ("/dev", "in /dev"),
        ("/.ringfence", "in /.ringfence"), ("/usr", "in /usr"), ("/usr/local/x", "in /usr"), ("/etc/passwd", "in /etc"),
        ("/run/x", "in /run"), ("/lib64", "in /lib64"), ("data", "not absolute"), ("/a/../etc", "'..'"), ("/a/", "shortest"),
        ("//a", "shortest"), ("/a/./b", "shortest"), ("/a\nb", "control"), ("/" + "a" * 5000, "longer"), ("", "not absolute"),
    ],
)  # fmt: skip
def test_targets(host: Path, target: str, words: str) -> None:
    assert words in (target_problem(target) or "")
    with pytest.raises(InvalidRequest):
        check_mounts([Mount(str(host / "project"), target)], ["/", str(host / "project")])


def test_good_targets() -> None:
    for target in ("/data", "/workspace/data", "/home/agent/x", "/tmp/x", "/srv", "/procedure", "/users"):
        assert target_problem(target) is None


def test_one_target_for_two(host: Path) -> None:
    with pytest.raises(InvalidRequest, match="two mounts have the target /data"):
        check_mounts([Mount(str(host / "project"), "/data"), Mount(str(host / "other"), "/data")])


def test_parse_mount(monkeypatch: pytest.MonkeyPatch, host: Path) -> None:
    monkeypatch.chdir(host)
    assert parse_mount("/a:/b") == Mount("/a", "/b", True)
    assert parse_mount("/a:/b:ro") == Mount("/a", "/b", True)
    assert parse_mount("/a:/b:rw") == Mount("/a", "/b", False)
    assert parse_mount("project:/b") == Mount(str(host / "project"), "/b", True)
    assert parse_mount("/with:colon:/b") == Mount("/with:colon", "/b", True)
    for text in ("/a", "", ":", "/a:", ":/b", "/a:b", "/a:/b:rx", "/a:/usr", "/a:/b/../c"):
        with pytest.raises(InvalidRequest) as caught:
            parse_mount(text)
        assert caught.value.hint
