"""AppArmor and SELinux on made-up hosts: what is found, what a wall gets, what goes wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit
from ringfence.runtimes import lsm
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.launching.probing import specimen
from ringfence.runtimes.lsm import apparmor, selinux
from ringfence.runtimes.lsm.applying import Confining


def host(root: Path, modules: str, **files: str) -> str:
    """A made-up ``/sys/kernel/security`` below ``root``."""
    security = root / "sys/kernel/security"
    security.mkdir(parents=True)
    (security / "lsm").write_text(modules)
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return str(root)


@pytest.fixture
def spec(tmp_path: Path) -> StartSpec:
    return specimen(str(tmp_path / "sandbox"), True)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def program(folder: Path, script: str, name: str = "apparmor_parser") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


class TestDetecting:
    """What there is."""

    def test_nothing(self, tmp_path: Path) -> None:
        found = lsm.detect(root=host(tmp_path, "capability,landlock,bpf"))
        assert (found.module, found.usable) == ("", False)
        assert "neither" in found.reason

    def test_no_securityfs_at_all(self, tmp_path: Path) -> None:
        assert lsm.detect(root=str(tmp_path)).module == ""

    def test_apparmor(self, tmp_path: Path, programs: Path) -> None:
        root = host(tmp_path, "capability,apparmor,bpf", **{f"{apparmor.SECURITYFS}/profiles": ""})
        program(programs, "exit 0")
        assert lsm.detect(root=root, privileged=True) == lsm.Found("apparmor", True, "enabled")

    def test_a_name_that_only_contains_it(self, tmp_path: Path) -> None:
        assert lsm.detect(root=host(tmp_path, "notapparmor"), privileged=True).module == ""

    def test_apparmor_as_a_normal_user(self, tmp_path: Path) -> None:
        root = host(tmp_path, "apparmor", **{f"{apparmor.SECURITYFS}/profiles": ""})
        found = lsm.detect(root=root, privileged=False)
        assert (found.usable, "only root" in found.reason) == (False, True)

    def test_apparmor_without_its_files(self, tmp_path: Path) -> None:
        found = lsm.detect(root=host(tmp_path, "apparmor"), privileged=True)
        assert not found.usable
        assert "securityfs" in found.remedy

    def test_apparmor_without_its_parser(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = host(tmp_path, "apparmor", **{f"{apparmor.SECURITYFS}/profiles": ""})
        monkeypatch.setattr(apparmor, "parser", lambda: None)
        found = lsm.detect(root=root, privileged=True)
        assert (found.usable, found.remedy) == (False, "apt-get install apparmor")

    @pytest.mark.parametrize(("enforce", "usable"), [("1", True), ("0", False), (None, False)])
    def test_selinux(self, tmp_path: Path, enforce: str | None, usable: bool) -> None:
        files = {} if enforce is None else {"sys/fs/selinux/enforce": enforce}
        found = lsm.detect(root=host(tmp_path, "capability,selinux", **files))
        assert (found.module, found.usable) == ("selinux", usable)
        assert bool(found.reason) is not usable


class TestTheProfile:
    """Its text."""

    def test_what_no_workload_needs_is_forbidden(self, spec: StartSpec) -> None:
        _, text = apparmor.profile(spec)
        for rule in ("mount", "umount", "pivot_root", "network inet raw", "network packet", "/sys/** wklx"):
            assert f"  deny {rule},\n" in text

    def test_capabilities_are_the_agents_own(self, spec: StartSpec) -> None:
        _, text = apparmor.profile(spec)
        granted = {
            line.split()[1].rstrip(",") for line in text.splitlines() if line.startswith("  capability")
        }
        assert granted == {"chown", "dac_override", "fowner", "kill", "setgid", "setuid", "setpcap"}

    def test_what_a_policy_grants_is_another_profile(self, spec: StartSpec) -> None:
        other = replace(spec, identity=replace(spec.identity, capabilities=1 << 10))
        assert apparmor.profile(other)[0] != apparmor.profile(spec)[0]
        assert "capability net_bind_service," in apparmor.profile(other)[1]

    def test_the_name_is_in_the_text_and_stays_for_equal_ones(self, spec: StartSpec) -> None:
        name, text = apparmor.profile(spec)
        assert f"profile {name} flags=" in text
        assert f"peer={name}," in text
        assert apparmor.profile(replace(spec, id="another"))[0] == name

    def test_braces_are_balanced(self, spec: StartSpec) -> None:
        text = apparmor.profile(spec)[1]
        assert text.count("{") == text.count("}")
        assert "@{PROC}/sys/**" in text


class TestLoading:
    """With a stand-in for apparmor_parser; proving is what this kernel can't do."""

    @pytest.fixture
    def root(self, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(apparmor, "prove", lambda name: None)
        return host(tmp_path, "apparmor", **{f"{apparmor.SECURITYFS}/profiles": ""})

    def test_it_is_loaded_once(self, root: str, programs: Path, spec: StartSpec) -> None:
        profiles = Path(root, apparmor.SECURITYFS, "policy/profiles")
        program(programs, f'echo "$@" >> {programs}/calls; cat > {programs}/text; mkdir -p {profiles}/NAME.7')
        name, text = apparmor.profile(spec)
        assert apparmor.ready(spec, root=root) == name
        (profiles / "NAME.7").rename(profiles / f"{name}.7")
        assert apparmor.ready(spec, root=root) == name
        assert (programs / "calls").read_text() == "--replace --quiet\n"
        assert (programs / "text").read_text() == text

    def test_it_is_loaded_again_if_somebody_took_it_out(
        self, root: str, programs: Path, spec: StartSpec
    ) -> None:
        program(programs, f"echo x >> {programs}/calls")
        apparmor.ready(spec, root=root)
        apparmor.ready(spec, root=root)
        assert (programs / "calls").read_text() == "x\nx\n"

    def test_a_refusal_is_told_in_the_parsers_words(self, root: str, programs: Path, spec: StartSpec) -> None:
        program(programs, "echo 'syntax error, unexpected TOK_DENY in line 3' >&2; exit 1")
        with pytest.raises(HostLimit, match="unexpected TOK_DENY"):
            apparmor.ready(spec, root=root)
        assert not os.path.exists(os.path.join(root, apparmor.MARKS))

    def test_removing(self, programs: Path, spec: StartSpec) -> None:
        program(programs, f'echo "$@" > {programs}/calls')
        apparmor.unload(apparmor.profile(spec)[1])
        assert (programs / "calls").read_text() == "--remove --quiet\n"

    @pytest.mark.skipif(os.path.isdir("/sys/kernel/security/apparmor"), reason="AppArmor is here")
    def test_entering_is_not_believed_where_there_is_no_apparmor(self) -> None:
        with pytest.raises(HostLimit, match="can't be entered"):
            apparmor.prove("ringfence-0")


class TestApplying:
    """What the drivers ask for."""

    def test_nothing_to_do_where_there_is_none(self, spec: StartSpec, tmp_path: Path) -> None:
        confining = Confining(root=host(tmp_path, "landlock"), privileged=True)
        assert confining.steps(spec) == []
        assert confining.engine(3, spec) == []

    def test_the_step_is_the_kernels_words(
        self, spec: StartSpec, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(apparmor, "prove", lambda name: None)
        program(programs, "exit 0")
        root = host(tmp_path, "apparmor", **{f"{apparmor.SECURITYFS}/profiles": ""})
        confining = Confining(root=root, privileged=True)
        name = apparmor.profile(spec)[0]
        assert confining.steps(spec) == [("WRITE", "/proc/self/attr/apparmor/exec", f"exec {name}")]
        assert confining.engine(3, spec) == [f"apparmor={name}"]

    def test_what_can_not_be_loaded_is_not_applied_and_said(
        self, spec: StartSpec, tmp_path: Path, programs: Path
    ) -> None:
        program(programs, "echo no >&2; exit 1")
        root = host(tmp_path, "apparmor", **{f"{apparmor.SECURITYFS}/profiles": ""})
        confining = Confining(root=root, privileged=True)
        assert confining.steps(spec) == []
        assert "can't be loaded: no" in confining.trouble

    def test_an_engine_under_selinux(self, spec: StartSpec, tmp_path: Path) -> None:
        root = host(tmp_path, "selinux", **{"sys/fs/selinux/enforce": "1"})
        assert Confining(root=root, privileged=True).engine(0, spec) == [
            "label=type:container_t",
            "label=level:s0:c0,c1",
        ]


class TestSelinux:
    """Labels."""

    def test_pairs_are_distinct_and_in_order(self) -> None:
        pairs = [selinux.categories(number) for number in range(3000)]
        assert len(set(pairs)) == len(pairs)
        for pair in pairs:
            low, high = (int(each[1:]) for each in pair.split(","))
            assert 0 <= low < high < selinux.CATEGORIES

    def test_the_last_pair_and_the_one_after(self) -> None:
        assert selinux.categories(selinux.CATEGORIES * (selinux.CATEGORIES - 1) // 2 - 1) == "c1022,c1023"
        assert selinux.categories(selinux.CATEGORIES * (selinux.CATEGORIES - 1) // 2) == "c0,c1"

    def test_types_of_the_hosts_policy(self, tmp_path: Path) -> None:
        root = host(
            tmp_path,
            "selinux",
            **{
                "etc/selinux/config": "SELINUX=enforcing\nSELINUXTYPE=strict\n",
                "etc/selinux/strict/contexts/lxc_contexts": (
                    'process = "system_u:system_r:svirt_lxc_net_t:s0"\n'
                    'file = "system_u:object_r:svirt_file_t:s0"\n'
                ),
            },
        )
        assert selinux.types(root=root) == ("svirt_lxc_net_t", "svirt_file_t")
        assert selinux.label(1, root=root) == "system_u:system_r:svirt_lxc_net_t:s0:c0,c2"

    @pytest.mark.parametrize("line", ["process = x", 'process = "a:b:$(evil):s0"', ""])
    def test_nonsense_gives_the_usual_types(self, tmp_path: Path, line: str) -> None:
        root = host(tmp_path, "selinux", **{"etc/selinux/targeted/contexts/lxc_contexts": line})
        assert selinux.types(root=root) == ("container_t", "container_file_t")
