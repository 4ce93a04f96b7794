"""``ringfence setup``: says what it does, does only what is missing, and proves what is there."""

from __future__ import annotations

import os
import shutil

import pytest

from support.rootless import normal_user

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed by root")


@pytest.fixture
def bare(ringfence, tmp_path):
    """A machine with next to nothing on its PATH but a stand-in for apt-get, which writes ``calls``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    ringfence.env["PATH"] = str(folder)

    def program(name, script):
        path = folder / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(0o755)

    program("apt-get", f'echo "$@" >> {tmp_path}/calls')
    ringfence.program, ringfence.calls = program, tmp_path / "calls"
    return ringfence


def test_there_is_nothing_to_do_where_all_is_there(ringfence):
    if shutil.which("crun") is None:
        pytest.skip("crun is not installed")
    first = ringfence.json("setup", "jail", "crun", "--json")
    assert first["steps"] == []
    assert [(found["runtime"], found["works"]) for found in first["runtimes"]] == [
        ("jail", True),
        ("crun", True),
    ]
    again = ringfence("setup", "jail", "crun")
    assert again.returncode == 0
    assert again.stdout.decode().startswith("Nothing is missing.\n")


def test_a_dry_run_does_nothing(bare):
    shown = bare("setup", "podman", "--dry-run")
    text = shown.stdout.decode()
    assert shown.returncode == 0, shown.stderr
    assert "apt-get install -y -q --no-install-recommends podman" in text
    assert text.endswith("Nothing was changed (--dry-run).\n")
    assert not bare.calls.exists()
    found = bare.json("setup", "podman", "--dry-run", "--json")
    assert (found["dry_run"], found["runtimes"]) == (True, [])
    assert [step["state"] for step in found["steps"]] == ["needed"]
    assert not bare.calls.exists()


@root_only
def test_what_is_missing_is_installed_and_proved(bare):
    found = bare.json_any("setup", "podman", "--json")
    assert [step["state"] for step in found["steps"]] == ["done"]
    assert bare.calls.read_text().splitlines()[-1].startswith("install ")
    assert "podman" in bare.calls.read_text()


@root_only
def test_a_failing_apt_is_told_and_the_exit_code_says_so(bare):
    bare.program("apt-get", "echo 'E: Unable to locate package crun'; exit 100")
    done = bare("setup", "crun")
    text = done.stdout.decode()
    assert done.returncode == 1
    assert "failed: install the Debian packages" in text
    assert "Unable to locate package crun" in text
    assert "Traceback" not in done.stderr.decode()


def test_a_system_without_apt_names_the_packages(bare):
    os.unlink(os.path.join(bare.env["PATH"], "apt-get"))
    done = bare("setup", "crun")
    text = done.stdout.decode()
    assert done.returncode == 1
    assert "not a Debian system" in text
    assert "crun" in text


def test_firecracker_is_left_to_people(ringfence):
    if shutil.which("firecracker"):
        pytest.skip("firecracker is installed")
    found = ringfence.json("setup", "firecracker", "--dry-run", "--json")
    assert [step["state"] for step in found["steps"] if step["kind"] == "advice"] == ["left to you"]


def test_an_unknown_name(ringfence):
    done = ringfence("setup", "vmware")
    assert done.returncode == 125
    assert b"vmware" in done.stderr
    assert b"gvisor" in done.stderr


@root_only
def test_a_normal_user_is_told_the_command(tmp_path):
    with normal_user(ids=False) as user:
        folder = user.folder / "bin"
        folder.mkdir()
        (folder / "apt-get").write_text(f"#!/bin/sh\necho called > {user.home}/calls\n")
        (folder / "apt-get").chmod(0o755)
        setup = f"PATH={folder} exec /media/bin/python -m ringfence setup podman"
        shown = user.run(["sh", "-c", f"{setup} --dry-run"])
        assert shown.returncode == 0, shown.stderr
        assert "sudo apt-get install -y -q --no-install-recommends podman" in shown.stdout
        tried = user.run(["sh", "-c", setup])
        assert tried.returncode == 1
        assert "left to you: install the Debian packages podman" in tried.stdout
        assert not (user.home / "calls").exists()
