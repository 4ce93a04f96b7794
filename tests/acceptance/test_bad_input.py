"""Bad input: one message that names cause and remedy, exit 125, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess

import pytest


def refused(done, *texts, code=125):
    """One message with a remedy, no traceback, nothing on stdout."""
    err = done.stderr.decode()
    assert done.returncode == code, err
    assert done.stdout == b""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert lines[0].startswith("ringfence: ")
    assert sum(line.startswith("ringfence: ") for line in lines) == 1, err
    assert len(lines) > 1, f"no remedy: {err}"
    assert lines[1].startswith("  ")
    for text in texts:
        assert text in err
    return err


CASES = {
    "unknown runtime": (["--runtime", "jial"], ["'jial'", "jail"]),
    "impossible memory": (["--memory", "100T"], ["100TiB", "ask for less"]),
    "impossible cpus": (["--cpus", "1000"], ["1000 CPUs"]),
    "impossible size": (["--size", "huge"], ["'huge'", "small, medium, large"]),
    "bad unit": (["--memory", "12Q"], ["--memory", "12Q"]),
    "bad timeout": (["--timeout", "soon"], ["--timeout", "'soon'"]),
    "no mount source": (["--mount", "/nosuch:/x"], ["/nosuch", "does not exist"]),
    "root mounted": (["--mount", "/:/x"], ["the whole host", "--allow-dangerous-mount"]),
    "home mounted": (["--mount", "/root:/x"], ["home folder", "--allow-dangerous-mount"]),
    "proc mounted": (["--mount", "/proc:/x:rw"], ["/proc", "--allow-dangerous-mount"]),
    "dev mounted": (["--mount", "/dev:/x"], ["/dev", "--allow-dangerous-mount"]),
    "no file": (["--file", "/nosuch:x"], ["there is no /nosuch here"]),
    "no place for out": (["--out", "x:/nosuch/x"], ["/nosuch"]),
    "no policy": (["--policy", "/nosuch.yaml"], ["/nosuch.yaml"]),
    "no preset": (["--preset", "trustd"], ["trustd", "trusted"]),
    "no wall so strong": (["--isolation", "L4"], ["L4", "ringfence doctor"]),
    "no such workdir": (["--workdir", "/nosuch"], ["--workdir /nosuch"]),
    "unknown option": (["--memry", "64M"], ["--memry", "--memory"]),
    "bad variable": (["--env", "=x"], ["--env"]),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name, ringfence):
    arguments, texts = CASES[name]
    refused(ringfence("run", *arguments, "--", "true"), *texts)


@pytest.mark.parametrize("name", ["unknown runtime", "impossible memory", "root mounted", "no file"])
def test_as_json(name, ringfence):
    arguments, _ = CASES[name]
    done = ringfence("run", "--json", *arguments, "--", "true")
    assert (done.returncode, done.stderr) == (125, b"")
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"code", "message", "hint", "details"}
    assert error["hint"]


def test_no_command(ringfence):
    refused(ringfence("run"), "no command to run")
    refused(ringfence("run", "--"), "no command to run")


def test_missing_and_not_executable_commands_are_as_in_a_shell(ringfence):
    refused(ringfence("run", "--", "nosuch"), "nosuch: not found", code=127)
    refused(ringfence("run", "--", "/nosuch/x"), "/nosuch/x: not found", code=127)
    refused(ringfence("run", "--", "/etc/passwd"), "can't be executed", code=126)
    refused(ringfence("run", "--", "/usr"), "can't be executed", code=126)


def test_a_script_without_an_interpreter(ringfence, tmp_path):
    (tmp_path / "s").write_text("echo x\n")
    (tmp_path / "s").chmod(0o755)
    refused(ringfence("run", "--file", f"{tmp_path}/s", "--", "./s"), "#!", code=126)


def test_a_bad_policy_value_names_line_and_field(ringfence, tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text(
        "apiVersion: ringfence/v1\nkind: Policy\nmetadata: {name: p}\nlimits:\n  timeout: 30 parsecs\n"
    )
    refused(ringfence("run", "--policy", str(file), "--", "true"), f"{file}:5", "limits.timeout", "parsecs")


def test_a_mount_that_this_user_can_not_read(ringfence, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root can read everything; covered by the run as a normal user")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    refused(ringfence("run", "--mount", f"{folder}:/x", "--", "true"), "can't be read")


@pytest.mark.parametrize("name", [".ssh", ".aws", ".kube"])
def test_folders_of_credentials(ringfence, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    refused(ringfence("run", "--mount", f"{folder}:/x", "--", "true"), "--allow-dangerous-mount")


def test_a_docker_socket(ringfence, tmp_path):
    import socket

    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        refused(ringfence("run", "--mount", f"{path}:/x", "--", "true"), "socket")


def test_a_dangerous_mount_that_is_named_is_done(ringfence, tmp_path):
    folder = tmp_path / ".kube"
    folder.mkdir(mode=0o755)
    (folder / "config").write_text("x")
    (folder / "config").chmod(0o644)
    for place in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        if not place.stat().st_mode & 0o1000:  # with --basetemp the last one is /tmp itself
            place.chmod(0o755)
    done = ringfence(
        "run", "--mount", f"{folder}:/x", "--allow-dangerous-mount", str(folder), "--", "cat", "/x/config"
    )
    assert (done.returncode, done.stdout) == (0, b"x"), done.stderr


def test_a_state_folder_that_can_not_be_used(ringfence, tmp_path):
    (tmp_path / "file").touch()
    ringfence.env["RINGFENCE_HOME"] = str(tmp_path / "file" / "home")
    refused(ringfence("run", "--", "true"), str(tmp_path / "file"))


def test_output_to_a_full_disk(ringfence):
    with open("/dev/full", "wb") as full:
        done = ringfence("run", "--", "yes", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 125
    assert b"No space left on device" in done.stderr


def test_unknown_commands(ringfence):
    refused(ringfence("rnu"), "did you mean run?")
    refused(ringfence("stop"), "ringfence list")
    refused(ringfence("probe", "--runtime", "jial"), "jial")
    refused(ringfence("bench", "--runtime", "jial", "--against", ""), "jial")
